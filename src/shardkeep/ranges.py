"""The segments wanted of a file -> the reads that get them. Pure: no I/O.

Reads are whole checksum chunks where there are checksums. Each chunk is in one read, except for chunks at
the ends of strided segments, which cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch

from shardkeep.catalog import Catalog
from shardkeep.config import MIB

DIRECT_BYTES = 4 * MIB
"""Read and checked at a time: still in the cache when the checksum follows the read."""
_SKIP_BYTES = 64 << 10  # without checksums, bytes between two segments that are cheaper to read than to skip


@dataclass(frozen=True, slots=True)
class Flat:
    """Memory of a device, as a flat tensor of bytes: takes a segment's bytes as they are."""

    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class Strided:
    """A destination that plain bytes cannot fill: `out` (a view of the caller's tensor) takes a box whose
    elements lie `strides` (in elements, one per dimension of `out`) apart in the segment."""

    out: torch.Tensor
    dtype: torch.dtype
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Archive:
    """A whole foreign item whose tensor is not stored row-major: torch loads it, `place` copies from it."""

    key: str
    place: Callable[[torch.Tensor], None]


class Segment(NamedTuple):
    """Bytes [start, end) of a file and where they go: host memory at `address`, or `special`."""

    start: int
    end: int
    address: int
    special: Flat | Strided | None = None


class Unit(NamedTuple):
    """One read: [start, end) of a file, either straight to `address` or to the `segments` inside it."""

    file: str
    start: int
    end: int
    address: int
    segments: Sequence[Segment]
    archive: Archive | None = None


def granule(catalog: Catalog) -> int:
    """What reads are rounded to: a chunk where there are checksums, else nothing."""
    return catalog.chunk_bytes if catalog.checksum != "none" else 1


def scratch_bytes(room: int, catalog: Catalog) -> int:
    """The most scratch that a unit may need: what there is room for in a slot, but at least enough for a
    segment that touches three chunks.
    """
    return max(room, 3 * catalog.chunk_bytes if granule(catalog) > 1 else 0)


def units_of(file: str, size: int, segments: list[Segment], chunk: int, scratch: int) -> Iterator[Unit]:
    """Cut a file's segments into reads: direct ones of whole chunks, and packed ones of at most `scratch`
    bytes."""
    pieces = []
    direct = max(chunk, min(DIRECT_BYTES, scratch) // chunk * chunk)
    least = chunk if chunk > 1 else min(256 << 10, scratch // 2)
    for segment in segments:
        start, end, address, special = segment
        low = -(-start // chunk) * chunk
        high = end if end == size else end // chunk * chunk
        if special is not None or high - low < least:
            pieces.append(segment)
            continue
        for at in range(low, high, direct):
            yield Unit(file, at, min(at + direct, high), address + at - start, ())
        if low > start:
            pieces.append(Segment(start, low, address))
        if end > high:
            pieces.append(Segment(high, end, address + high - start))
    pieces.sort(key=itemgetter(0))
    yield from _packed(file, size, pieces, chunk, scratch)


def _packed(file: str, size: int, pieces: list[Segment], chunk: int, scratch: int) -> Iterator[Unit]:
    """Neighbours share a read of whole chunks. A piece that reaches past the end of a read is cut there, at
    a chunk's end; strided ones cannot be, so they may have the whole scratch."""
    skip = 0 if chunk > 1 else min(_SKIP_BYTES, scratch)
    most = scratch // chunk * chunk
    usual = max(chunk, min(DIRECT_BYTES, most) // chunk * chunk)
    group: list[Segment] = []
    start = end = 0
    for piece in pieces:
        rest: Segment | None = piece
        while rest is not None:
            if not group:
                start = end = rest[0] // chunk * chunk
            fixed = isinstance(rest[3], Strided)
            limit = start + (most if fixed else usual)
            near = rest[0] // chunk * chunk <= end + skip
            if near and (rest[1] <= limit or (fixed and not group)):
                group.append(rest)
                end = max(end, min(size, -(-rest[1] // chunk) * chunk))
                rest = None
            elif near and not fixed and rest[0] < limit:
                part, rest = _cut(rest, limit)
                group.append(part)
                end = max(end, limit)
            else:
                yield Unit(file, start, end, 0, group)
                group = []
    if group:
        yield Unit(file, start, end, 0, group)


def _cut(segment: Segment, at: int) -> tuple[Segment, Segment]:
    start, end, address, special = segment
    first = at - start
    if isinstance(special, Flat):
        return (
            Segment(start, at, 0, Flat(special.out[:first])),
            Segment(at, end, 0, Flat(special.out[first:])),
        )
    return Segment(start, at, address), Segment(at, end, address + first)
