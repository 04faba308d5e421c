"""Megatron's strictness of loads, in Megatron's words: *missing* is stored but not asked for, *unexpected*
asked for but not stored.

Every mode of `megatron.core.dist_checkpointing.validation.StrictHandling` by its value.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from shardkeep.restore import Difference, lacking, unasked

log = logging.getLogger("shardkeep")

_MODES = {  # value: (looks at unexpected, looks at missing, action)
    "assume_ok_unexpected": (True, False, "raise"),
    "log_unexpected": (True, False, "log"),
    "log_all": (True, True, "log"),
    "raise_unexpected": (True, False, "raise"),
    "raise_all": (True, True, "raise"),
    "return_unexpected": (True, False, "return"),
    "return_all": (True, True, "return"),
    "ignore_all": (False, False, "ignore"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strictness:
    """One mode. `judge` raises or logs; keys it does not raise for are left out of the load."""

    sees_unexpected: bool
    sees_missing: bool
    action: str

    @classmethod
    def of(cls, strict: Any) -> Strictness:
        value = getattr(strict, "value", strict)
        if value not in _MODES:
            raise ValueError(f"Invalid strict flag: {strict!r}; one of {', '.join(_MODES)}")
        unexpected, missing, action = _MODES[value]
        return cls(sees_unexpected=unexpected, sees_missing=missing, action=action)

    @property
    def returns_keys(self) -> bool:
        return self.action == "return"

    def judge(self, difference: Difference, path: str) -> tuple[set[str], set[str]]:
        """(missing, unexpected) as `load` returns them: names without shard suffixes."""
        unexpected = {_base(k) for k in difference.missing} if self.sees_unexpected else set()
        missing = {_base(k) for k in difference.unexpected} if self.sees_missing else set()
        if self.action == "raise" and unexpected:
            raise lacking(difference, path, "Choose another strict mode to go on.")
        if self.action == "raise" and missing:
            raise unasked(missing, path, "Choose another strict mode to go on.")
        if self.action == "log" and (missing or unexpected):
            log.warning(
                "%s: not in the checkpoint: %s; not asked for: %s", path, sorted(unexpected), sorted(missing)
            )
        return missing, unexpected


def _base(key: str) -> str:
    """`key` of a ShardedObject's unique key `key/shard_<offset>_<shape>`."""
    head, mark, _ = key.rpartition("/shard_")
    return head if mark else key
