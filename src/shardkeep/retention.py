"""Which steps of a run go, and how. Only committed steps count; nothing goes before a newer step is
committed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shardkeep import manifest as names
from shardkeep.storage import Storage

log = logging.getLogger("shardkeep")


def surplus(steps: Sequence[int], keep: int | None, keep_every: int | None) -> list[int]:
    """Committed steps to remove: all but the newest `keep` and the multiples of `keep_every`. None keeps
    all.
    """
    if keep is None:
        return []
    old = sorted(steps)[:-keep]
    return [s for s in old if not (keep_every and s % keep_every == 0)]


def remove_step(storage: Storage, *, durable: bool) -> None:
    """Remove a step. Its manifest goes first, durably, so that a crash half-way leaves no step that looks
    whole.
    """
    storage.delete(names.STEP_MANIFEST)
    if durable:
        storage.sync()
    storage.remove_tree()
    log.info("removed step %s", storage.url)
