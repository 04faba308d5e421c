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
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias

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
    members = [np.array(ranks) for ranks in ranks_of.values()]
    layouts = [needs[ranks[0]] for ranks in members]
    sources = [
        np.full((len(ranks), len(need)), OWN, np.int64) for ranks, need in zip(members, layouts, strict=True)
    ]
    load = np.array([int((need[:, 2] - need[:, 1]).sum()) for need in needs], np.int64)
    groups = lru_cache(maxsize=None)(partial(_groups, members, group_ranks))
    shared = []
    for cluster in _clusters(_sorted_rows(layouts), np.array([len(ranks) for ranks in members]), room):
        layout_set = tuple(sorted({row[3] for row in cluster}))
        if sum(len(members[c]) for c in layout_set) > 1:
            shared.append((layout_set, cluster))
            for row in cluster:
                load[members[row[3]]] -= row[2] - row[1]
    shared.sort(
        key=lambda s: sum(len(members[c]) for c in s[0])
    )  # the fewer can read it, the less choice is left
    reads: list[list[_Read]] = [[] for _ in needs]
    for layout_set, cluster in shared:
        for group in groups(layout_set):
            rows = [row for row in cluster if row[3] in group.ranks_of]
            start, end = min(row[1] for row in rows), max(row[2] for row in rows)
            reader = int(group.ranks[load[group.ranks].argmin()])
            load[reader] += end - start
            if len(group.ranks) > 1:
                reads[reader].append(_Read(rows[0][0], start, end, group, rows))
                for row in rows:
                    sources[row[3]][group.places_of[row[3]], row[4]] = reader
    of_rank = {
        int(r): mine
        for ranks, rows in zip(members, sources, strict=True)
        for r, mine in zip(ranks, rows, strict=True)
    }
    return [Share(of_rank[rank], *_tables(found)) for rank, found in enumerate(reads)]


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks that share a read. `ranks_of`: those of them that have a layout; `places_of`: which of all those
    with the layout they are.
    """

    ranks: Numbers
    ranks_of: dict[int, Numbers]
    places_of: dict[int, Numbers]


class _Read(NamedTuple):
    file: int
    start: int
    end: int
    group: _Group
    rows: list[tuple[int, ...]]


def _groups(members: list[Numbers], group_ranks: int, layouts: tuple[int, ...]) -> list[_Group]:
    """The ranks of some layouts, cut into groups of neighbours that are nearly equal."""
    everyone = np.sort(np.concatenate([members[c] for c in layouts]))
    found = []
    for ranks in np.array_split(everyone, -(-len(everyone) // group_ranks)):
        inside = {c: np.flatnonzero(np.isin(members[c], ranks)) for c in layouts}
        places_of = {c: places for c, places in inside.items() if len(places)}
        found.append(_Group(ranks, {c: members[c][places] for c, places in places_of.items()}, places_of))
    return found


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


def _tables(found: list[_Read]) -> tuple[Numbers, Numbers]:
    """`Share.reads` and `Share.parts` of one rank."""
    pieces = [(read.group.ranks_of[row[3]], row) for read in found for row in read.rows]
    counts = np.array([len(ranks) for ranks, _ in pieces], np.int64)
    ranks = np.concatenate([np.zeros(0, np.int64), *(ranks for ranks, _ in pieces)])
    rows = np.array([(row[4], row[1], row[2]) for _, row in pieces], np.int64).reshape(len(pieces), 3)
    parts = np.column_stack([ranks, np.repeat(rows, counts, axis=0)])
    num_parts = [sum(len(read.group.ranks_of[row[3]]) for row in read.rows) for read in found]
    reads = [(read.file, read.start, read.end, n) for read, n in zip(found, num_parts, strict=True)]
    return np.array(reads, np.int64).reshape(len(found), 4), parts


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
