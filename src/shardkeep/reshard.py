"""A target box + the stored boxes of its key -> what to copy, and which bytes of a stored box hold a part
of it.

Pure arithmetic: no I/O, no tensors. `copies` proves that the stored boxes cover the target, so that no
element of a destination stays unset without an error; `blocks` bounds how much is read at a time and skips
large holes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardkeep.errors import Corrupt
from shardkeep.types import Box

_FEW = 32  # below this many boxes a loop beats numpy


class Stored(Protocol):
    """What has a key and a box; `Item` is one."""

    @property
    def key(self) -> str: ...
    @property
    def box(self) -> Box: ...


class Finder:
    """The stored items of one key, ready to answer which of them a box touches.

    Built once per key and asked once per target; with thousands of items and targets each answer stays
    vectorised.
    """

    __slots__ = ("_high", "_low", "items")

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self._low: NDArray[np.int64] | None = None
        self._high: NDArray[np.int64] | None = None
        if len(items) > _FEW and items[0].box.shape:
            self._low = np.array([i.box.offset for i in items], dtype=np.int64)
            self._high = self._low + np.array([i.box.shape for i in items], dtype=np.int64)

    def near(self, target: Box) -> Sequence[Any]:
        """The items that share an element with `target`; with few items all of them, for the caller to
        intersect."""
        if self._low is None or self._high is None:
            return self.items
        low = np.array(target.offset, dtype=np.int64)
        high = low + np.array(target.shape, dtype=np.int64)
        hit = np.logical_and((self._low < high).all(axis=1), (self._high > low).all(axis=1))
        return [self.items[i] for i in np.flatnonzero(hit).tolist()]


def copies(key: str, target: Box, finder: Finder, *, partial: bool = False) -> list[tuple[Any, Box]]:
    """(item, part of `target` that it holds) for every item that holds some. Parts are disjoint.

    The parts must cover `target`, else `Corrupt` names the key and a region that no item holds; with
    `partial` they need not.
    """
    items = finder.items
    if len(items) == 1 and items[0].box == target:  # the layout has not changed: by far the most common case
        return [(items[0], target)] if target.numel else []
    found = []
    covered = 0
    for item in finder.near(target):
        if item.box == target:  # stored boxes are disjoint, so nothing else can touch it
            return [(item, target)] if target.numel else []
        part = target.intersect(item.box)
        if part is not None:
            found.append((item, part))
            covered += part.numel
    if covered > target.numel:
        raise Corrupt(
            "stored boxes overlap",
            key=key,
            box=show(target),
            expected=f"{target.numel} elements",
            got=covered,
        )
    if covered < target.numel and not partial:
        missing = first_gap(target, [part for _, part in found])
        raise Corrupt(
            "no stored box holds a region of the tensor",
            key=key,
            missing=show(missing),
            expected=f"{target.numel} elements in {show(target)}",
            got=covered,
        )
    return found


def first_gap(target: Box, parts: Sequence[Box], dim: int = 0) -> Box:
    """A region of `target` that none of the disjoint `parts` touches, if their elements do not add up to
    it.
    """
    if not parts or dim == len(target.shape):
        return target
    low, high = target.offset[dim], target.offset[dim] + target.shape[dim]
    cuts = {low, high} | {p.offset[dim] for p in parts} | {p.offset[dim] + p.shape[dim] for p in parts}
    for start, end in pairwise(sorted(c for c in cuts if low <= c <= high)):
        slab = Box(
            offset=(*target.offset[:dim], start, *target.offset[dim + 1 :]),
            shape=(*target.shape[:dim], end - start, *target.shape[dim + 1 :]),
        )
        inside = [q for p in parts if (q := slab.intersect(p)) is not None]
        if sum(q.numel for q in inside) < slab.numel:
            return first_gap(slab, inside, dim + 1)
    return target


def overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Indices of two boxes that share an element, or None. O(n log n) for boxes on a grid of slabs; see
    `_sweep`."""
    live = [i for i, b in enumerate(boxes) if b.numel]
    return _sweep(boxes, live, 0)


def _sweep(boxes: Sequence[Box], live: list[int], dim: int) -> tuple[int, int] | None:
    """Sort by the start along `dim`; runs of boxes whose ranges chain together are looked at along the next
    dimension.

    Boxes that are disjoint along `dim` end in different runs, so each level costs a sort. A run that no
    dimension splits any further (a pinwheel of boxes) is compared pairwise.
    """
    if len(live) < 2:
        return None
    num_dims = len(boxes[live[0]].shape)
    for d in [*range(dim, num_dims), *range(dim)]:
        runs = _runs(boxes, live, d)
        if len(runs) > 1:
            for run in runs:
                found = _sweep(boxes, run, (d + 1) % num_dims)
                if found is not None:
                    return found
            return None
    return _pairwise(boxes, live)


def _runs(boxes: Sequence[Box], live: list[int], dim: int) -> list[list[int]]:
    order = sorted(live, key=lambda i: boxes[i].offset[dim])
    runs: list[list[int]] = []
    end = -1
    for i in order:
        start = boxes[i].offset[dim]
        if not runs or start >= end:
            runs.append([])
        runs[-1].append(i)
        end = max(end, start + boxes[i].shape[dim])
    return runs


def _pairwise(boxes: Sequence[Box], live: list[int]) -> tuple[int, int] | None:
    low = np.array([boxes[i].offset for i in live], dtype=np.int64).reshape(len(live), -1)
    high = low + np.array([boxes[i].shape for i in live], dtype=np.int64).reshape(len(live), -1)
    for n in range(1, len(live)):
        hit = np.logical_and((low[:n] < high[n]).all(axis=1), (high[:n] > low[n]).all(axis=1))
        if hit.any():
            return live[int(np.argmax(hit))], live[n]
    return None


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    steps = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        steps[d] = steps[d + 1] * shape[d + 1]
    return tuple(steps)


def contiguous_in(stored: Box, part: Box) -> bool:
    """Whether `part` is one range of bytes of `stored`, laid out in row-major order."""
    seen = False  # a dimension of which more than one entry is taken: all after it must be whole
    for have, want in zip(stored.shape, part.shape, strict=True):
        if seen and want != have:
            return False
        seen = seen or want != 1
    return True


def start_of(stored: Box, part: Box) -> int:
    """Where `part` begins in the row-major payload of `stored`, in elements."""
    return sum((a - b) * s for a, b, s in zip(part.offset, stored.offset, strides(stored.shape), strict=True))


def blocks(
    stored: Box, part: Box, itemsize: int, max_bytes: int, hole_bytes: int = 1 << 62
) -> Iterator[tuple[int, int, Box]]:
    """Cut `part` of `stored` into sub-boxes that can be read one at a time: (start, span, sub-box).

    `start` and `span` are bytes of the payload of `stored`, from the first to the last byte of the sub-box,
    at most `max_bytes` (>= itemsize). Bytes between rows are in the span unless the hole exceeds
    `hole_bytes`; then rows come one by one.
    """
    if not part.numel:
        return
    assert max_bytes >= itemsize
    step = [s * itemsize for s in strides(stored.shape)]
    spans = [
        itemsize
    ]  # spans[d]: from the first to the last byte of the part, one index fixed for each dimension before d
    for d in range(len(step) - 1, -1, -1):
        spans.insert(0, spans[0] + (part.shape[d] - 1) * step[d])
    dim = 0
    while dim < len(step) and (
        part.shape[dim] == 1 or spans[dim + 1] > max_bytes or step[dim] - spans[dim + 1] > hole_bytes
    ):
        dim += 1
    base = start_of(stored, part) * itemsize
    rows = 1 if dim == len(step) else min(part.shape[dim], (max_bytes - spans[dim + 1]) // step[dim] + 1)
    for outer in np.ndindex(*part.shape[:dim]):
        at = base + sum(i * s for i, s in zip(outer, step, strict=False))
        fixed = tuple(o + i for o, i in zip(part.offset, outer, strict=False))
        if dim == len(step):
            yield at, itemsize, Box(offset=fixed, shape=(1,) * dim)
            continue
        for first in range(0, part.shape[dim], rows):
            count = min(rows, part.shape[dim] - first)
            yield (
                at + first * step[dim],
                (count - 1) * step[dim] + spans[dim + 1],
                Box(
                    offset=(*fixed, part.offset[dim] + first, *part.offset[dim + 1 :]),
                    shape=(*(1,) * dim, count, *part.shape[dim + 1 :]),
                ),
            )


def show(box: Box) -> str:
    """A box as slices: `[0:4, 8:16]`."""
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.shape, strict=True)) + "]"
