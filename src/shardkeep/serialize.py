"""Plain values <-> bytes, through `torch.save` and `torch.load(weights_only=True)` with the active safe
globals.

A value that `weights_only` would refuse is found when it is saved, not when the run is to resume.
"""

from __future__ import annotations

import io
import logging
from typing import Any

import torch

from shardkeep.errors import InvalidState

log = logging.getLogger("shardkeep")


def dumps(value: Any, key: str, *, lenient: bool) -> bytes:
    """The `torch.save` archive of a value. InvalidState (a warning if `lenient`) if it could not be loaded
    again safely.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as e:  # whatever a foreign __reduce__ raises
        raise InvalidState(
            f"the value cannot be serialised: {type(e).__name__}: {e}", key=key, got=type(value).__name__
        ) from e
    buffer.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        _complain(key, unsafe, lenient=lenient)
    return buffer.getvalue()


def _complain(key: str, unsafe: list[str], *, lenient: bool) -> None:
    what = f"the value holds {', '.join(sorted(unsafe))}, which torch.load(weights_only=True) refuses"
    if not lenient:
        raise InvalidState(
            what,
            key=key,
            remedy="Store plain values, or register the class with torch.serialization.add_safe_globals.",
        )
    log.warning("%s (key '%s')", what, key)
