"""Host memory of snapshots: segments, one per save in flight, reused, and page-locked where CUDA is
used.

In: sizes and a limit. Out: segments, or None where the limit or the system refuses. Invariants: new memory is
taken only within the limit that the caller gives; a segment serves one save at a time; memory that is freed
goes back to the system, page lock and all.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from shardkeep import stage
from shardkeep.memory import resolved

_ALIGN_BYTES = 512
_LOOSE = 2  # an idle segment this many times too large is left for the save that needs it


@dataclass(slots=True)
class Segment:
    """Memory of one snapshot; `buffer` is uint8."""

    buffer: torch.Tensor
    used_bytes: int = 0
    is_taken: bool = True

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of `tensor` in this segment; asynchronous for device tensors."""
        tensor = resolved(tensor)
        num_bytes = tensor.numel() * tensor.element_size()
        start = self.used_bytes
        self.used_bytes += padded_bytes(tensor)
        target = self.buffer[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
        return target.copy_(tensor, non_blocking=True)


def padded_bytes(tensor: torch.Tensor) -> int:
    """Room that `Segment.copy` takes for a tensor."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES


class Arena:
    """All segments of the process. Idle ones stay: pinning gigabytes takes seconds."""

    def __init__(self) -> None:
        self._idle: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int, limit_bytes: int | None = None) -> Segment | None:
        """A segment of at least `num_bytes`: an idle one, or new memory of at most `limit_bytes` (None: no
        limit) beyond what idle segments hold. None if there is neither.
        """
        num_bytes = max(num_bytes, _ALIGN_BYTES)
        with self._lock:
            idle = self._best(num_bytes)
            if idle is None or idle.numel() > _LOOSE * num_bytes:
                new = self._allocate(num_bytes, limit_bytes)
                if new is not None:
                    return Segment(new)
            if idle is None:
                return None
            self._idle = [b for b in self._idle if b is not idle]
            return Segment(idle)

    def give_back(self, segment: Segment) -> None:
        """Let later saves have the segment. A second time does nothing: another save may have it by then."""
        with self._lock:
            if segment.is_taken:
                segment.is_taken = False
                self._idle.append(segment.buffer)

    def _best(self, num_bytes: int) -> torch.Tensor | None:
        return min((b for b in self._idle if b.numel() >= num_bytes), key=torch.Tensor.numel, default=None)

    def _allocate(self, num_bytes: int, limit_bytes: int | None) -> torch.Tensor | None:
        """New memory. Idle segments that a state has outgrown go first, and if room is short all that are
        too small.
        """
        limit = self._free(num_bytes / _LOOSE, num_bytes, limit_bytes)
        if limit is not None and limit < num_bytes:
            limit = self._free(0, num_bytes, limit)
        if limit is not None and limit < num_bytes:
            return None
        try:
            return stage.allocate(num_bytes)
        except (RuntimeError, MemoryError):  # torch's allocator and CUDA's page lock raise RuntimeError
            return None

    def _free(self, least_bytes: float, below_bytes: int, limit_bytes: int | None) -> int | None:
        """Return idle buffers of these sizes to the system; the limit that applies afterwards. No name keeps
        one of them: their memory has to be gone before more is asked for.
        """
        freed_bytes = 0
        for n in reversed(range(len(self._idle))):
            if least_bytes <= self._idle[n].numel() < below_bytes:
                freed_bytes += self._idle[n].numel()
                stage.free(self._idle.pop(n))
        return None if limit_bytes is None else limit_bytes + freed_bytes


arena = Arena()
