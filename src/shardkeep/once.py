"""The reads that each rank needs -> which rank does them for all. Pure: no I/O, the same on any machine.

In: for each rank an array of its reads (file, start, end), whole chunks. Out: for each rank a `Share`. Every
read of every rank comes from exactly one reader, which needs it itself. Reads of different ranks that overlap
are done as one where that fits the readers' scratch, so that a byte is read once per group: all ranks that
need it, or runs of `GROUP_RANKS` of them, so that no rank holds more connections than that. Readers are
chosen to even out the bytes that ranks read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.int64]

GROUP_RANKS = 64
OWN = -1
"""In `Share.sources`: this rank alone needs the read, and does it by itself."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of the work.

    `sources[i]` is the rank that reads what this rank's read `i` needs, or OWN. `reads` are the reads that
    this rank does for several, as rows (file, start, end, number of parts); `parts` are their parts one after
    the other: rows (rank, number of that rank's read, start, end).
    """

    sources: Numbers
    reads: Numbers
    parts: Numbers


def assign(needs: Sequence[Numbers], room: int, group_ranks: int = GROUP_RANKS) -> list[Share]:
    """`needs[rank]`: rows (file, start, end), the same for ranks with the same layout. `room`: the longest
    read that may be put together from several, in bytes.
    """
    ranks_of: dict[bytes, list[int]] = {}
    for rank, need in enumerate(needs):
        ranks_of.setdefault(need.tobytes(), []).append(rank)
    members = list(ranks_of.values())
    rows = _sorted_rows([needs[ranks[0]] for ranks in members])
    sources = [np.full(len(need), OWN, np.int64) for need in needs]
    load = np.array([int((need[:, 2] - need[:, 1]).sum()) for need in needs], np.int64)
    shared = []
    for cluster in _clusters(rows, np.array([len(ranks) for ranks in members]), room):
        everyone = sorted({r for row in cluster for r in members[row[3]]})
        if len(everyone) > 1:
            shared.append((everyone, cluster))
            for row in cluster:
                load[members[row[3]]] -= row[2] - row[1]
    shared.sort(key=lambda s: len(s[0]))  # the fewer can read it, the less choice is left
    found = _Found(len(needs))
    for everyone, cluster in shared:
        for group in np.array_split(everyone, -(-len(everyone) // group_ranks)):
            inside = set(group.tolist())
            parts = [(r, row[4], row[1], row[2]) for row in cluster for r in members[row[3]] if r in inside]
            reader = int(group[load[group].argmin()])
            load[reader] += max(p[3] for p in parts) - min(p[2] for p in parts)
            if len(group) > 1:
                found.add(reader, cluster[0][0], parts)
                for rank, number, _, _ in parts:
                    sources[rank][number] = reader
    return [Share(s, *found.of(rank)) for rank, s in enumerate(sources)]


def _sorted_rows(needs: list[Numbers]) -> Numbers:
    """Rows (file, start, end, class, number) of all classes of ranks, in the order of files and offsets."""
    parts = [
        np.column_stack([need.reshape(-1, 3), np.full(len(need), c, np.int64), np.arange(len(need))])
        for c, need in enumerate(needs)
    ]
    rows = np.concatenate(parts)
    return rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]


def _clusters(rows: Numbers, num_ranks: Numbers, room: int) -> Iterator[list[tuple[int, ...]]]:
    """Runs of rows that overlap, cut where they would exceed `room`. Rows that one rank alone needs, which
    may be most of millions, are left out without being looked at one by one.
    """
    if not len(rows):
        return
    width = int(rows[:, 2].max()) + 1
    start, end = rows[:, 0] * width + rows[:, 1], rows[:, 0] * width + rows[:, 2]
    reach = np.maximum.accumulate(end)
    joins = np.concatenate([[False], start[1:] < reach[:-1]])
    alone = ~joins & ~np.concatenate([joins[1:], [False]]) & (num_ranks[rows[:, 3]] == 1)
    cluster: list[tuple[int, ...]] = []
    high = 0
    for row in rows[~alone].tolist():
        same = cluster and row[0] == cluster[0][0] and row[1] < high
        if not same or (row[2] > high and row[2] - cluster[0][1] > room):
            if cluster:
                yield cluster
            cluster, high = [], 0
        cluster.append(tuple(row))
        high = max(high, row[2])
    yield from [cluster] if cluster else []


class _Found:
    """Reads and parts of each rank, as they are found."""

    def __init__(self, world_size: int) -> None:
        self._reads: list[list[tuple[int, ...]]] = [[] for _ in range(world_size)]
        self._parts: list[list[tuple[int, ...]]] = [[] for _ in range(world_size)]

    def add(self, reader: int, file: int, parts: list[tuple[int, int, int, int]]) -> None:
        start, end = min(p[2] for p in parts), max(p[3] for p in parts)
        self._reads[reader].append((file, start, end, len(parts)))
        self._parts[reader] += parts

    def of(self, rank: int) -> tuple[Numbers, Numbers]:
        return _table(self._reads[rank]), _table(self._parts[rank])


def _table(rows: list[tuple[int, ...]]) -> Numbers:
    return np.array(rows, np.int64).reshape(len(rows), 4)


def pack(numbers: Numbers) -> Any:
    """Numbers for the wire. Reads follow one another, so the differences of rows repeat and compress to
    little.
    """
    steps = np.diff(numbers, axis=0, prepend=np.zeros_like(numbers[:1])) if len(numbers) else numbers
    return [*numbers.shape, zlib.compress(np.ascontiguousarray(steps.T).tobytes(), 1)]


def unpack(packed: Any) -> Numbers:
    """The inverse of `pack`."""
    *shape, data = packed
    steps = np.frombuffer(zlib.decompress(data), np.int64).reshape(shape[::-1]).T
    return np.cumsum(steps, axis=0)
