"""Headers of every rank -> who writes which shard. Pure, deterministic, and with arrays throughout: thousands
of ranks with thousands of shards each are planned in seconds on one core.

`assign` removes replicas and balances bytes over ranks. Invariant: the boxes chosen for a tensor cover it
exactly once (checked; `InvalidState` names the key).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkeep import cover
from shardkeep.columns import Columns, Ints
from shardkeep.types import Dialect, TensorInfo

_Hashes = NDArray[np.uint64]

_BLOCK_ROWS = 1 << 14  # hashed at a time: they stay in the core's cache from column to column


def assign(
    columns: Columns, dialect: Dialect, *, check: bool = True, hosts: Sequence[str] = ()
) -> list[Ints]:
    """For each rank the indices of its shards that it writes, ascending. With `check`, refuses what is not an
    exact cover. `hosts` (one a rank, where known): among equally loaded ranks, those of other hosts go first.
    """
    rows, starts = grouped(columns)
    if check:
        cover.check(columns, rows, starts, dialect)
    rows, starts = _candidates(columns, rows, starts, dialect)
    num_bytes = np.where(columns.tied < 0, columns.num_bytes, 0)  # written with what it is tied to
    sizes = np.diff(starts)
    without_choice = rows[starts[:-1][sizes == 1]]
    load = np.bincount(
        columns.rank[without_choice],
        weights=num_bytes[without_choice],  # float64: exact below 8 PiB a rank
        minlength=columns.num_ranks,
    )
    chosen = np.zeros(len(columns.rank), np.bool_)
    chosen[without_choice] = True
    chosen[_choose(columns, num_bytes, rows, starts, load.astype(np.int64).tolist(), hosts)] = True
    _follow_ties(columns, rows, chosen)
    return [np.flatnonzero(chosen[a:b]) for a, b in pairwise(columns.starts.tolist())]


def check_cover(columns: Columns, dialect: Dialect) -> None:
    """InvalidState unless ranks agree on each tensor and its main replicas cover it exactly once."""
    cover.check(columns, *grouped(columns), dialect)


def tensors(columns: Columns) -> dict[str, TensorInfo]:
    """Global dtype and shape of every tensor, in order of first appearance."""
    first = cover.first_rows(columns, np.flatnonzero(~columns.is_object))
    found: dict[str, TensorInfo] = {}
    for row in np.sort(first[first >= 0]).tolist():
        shape = tuple(columns.shape[: columns.ndim[row], row].tolist())
        found[columns.keys[columns.key[row]]] = TensorInfo(
            dtype=columns.dtypes[columns.dtype[row]], shape=shape
        )
    return found


def grouped(columns: Columns) -> tuple[Ints, Ints]:
    """(rows, starts): rows with the same key and box are a group, `rows[starts[g]:starts[g + 1]]`, ascending;
    groups are in the order of their first rows. Empty boxes of tensors with elements hold nothing and are in
    no group.
    """
    has_elements = columns.extent.all(axis=0)
    rows = np.flatnonzero(columns.is_object | has_elements | ~columns.shape.all(axis=0))
    identity: list[NDArray[Any]] = [columns.key, columns.ndim, *columns.offset, *columns.extent]
    for seed in count():
        hashes = _mixed(identity, rows, seed)
        order = np.argsort(hashes, kind="stable")
        is_first = np.diff(hashes[order], prepend=~hashes[order[:1]]) != 0
        ordered = rows[order]
        if _is_exact(identity, ordered, is_first):
            starts = np.flatnonzero(is_first)
            sizes = np.diff(starts, append=len(rows))
            first_of = np.full(
                len(columns.rank), -1
            )  # group of which a row is the first: cheaper than a sort
            first_of[ordered[starts]] = np.arange(len(starts))
            appearance = first_of[first_of >= 0]
            return _gathered(ordered, starts[appearance], sizes[appearance])
    raise AssertionError("unreachable")


def _gathered(rows: Ints, starts: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Groups in another order, or some of them: rows and starts of those that begin at `starts`."""
    ends = np.cumsum(sizes)
    shift = np.repeat(starts - (ends - sizes), sizes)
    return rows[np.arange(len(shift)) + shift], np.append(0, ends)


def _mixed(columns: Sequence[NDArray[Any]], rows: Ints, seed: int) -> _Hashes:
    """A 64-bit hash of each row's values."""
    hashes = np.empty(len(rows), np.uint64)
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        hashes[block] = _mixed_block(columns, rows[block], seed)
    return hashes


def _mixed_block(columns: Iterable[NDArray[Any]], rows: Ints, seed: int) -> _Hashes:
    """The steps of splitmix64, once for each column."""
    hashes = np.full(len(rows), seed, np.uint64)
    for values in columns:
        hashes ^= values[rows].astype(np.int64).view(np.uint64)
        hashes += np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(30)
        hashes *= np.uint64(0xBF58476D1CE4E5B9)
        hashes ^= hashes >> np.uint64(27)
        hashes *= np.uint64(0x94D049BB133111EB)
        hashes ^= hashes >> np.uint64(31)
    return hashes


def _is_exact(columns: Iterable[NDArray[Any]], rows: Ints, is_first: NDArray[np.bool_]) -> bool:
    """Whether rows that share a hash are equal. They always are, but 64 bits do not promise it."""
    inside = np.flatnonzero(~is_first)
    return all(np.array_equal(values[rows[inside]], values[rows[inside - 1]]) for values in columns)


def _candidates(columns: Columns, rows: Ints, starts: Ints, dialect: Dialect) -> tuple[Ints, Ints]:
    """The groups again, of those rows alone that may be written, one a rank; groups without any are left out.

    A tensor may be written by any rank that holds it, if somebody holds the main replica. Objects are written
    by their main replica, as Megatron does; `dcp` knows no replica ids: there it is the lowest rank.
    """
    if not len(rows):
        return rows, starts
    group = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    is_main, is_object = columns.is_main[rows], columns.is_object[rows[starts[:-1]]][group]
    has_main = np.logical_or.reduceat(is_main, starts[:-1])[group]
    may_write = np.where(is_object, is_main, has_main)
    rows, group, is_object = rows[may_write], group[may_write], is_object[may_write]
    again = np.diff(group, prepend=-1) == 0  # whether the row before is of the same group
    if dialect == "megatron":
        again[1:] &= columns.rank[rows[1:]] == columns.rank[rows[:-1]]
    else:
        again[1:] &= is_object[1:] | (columns.rank[rows[1:]] == columns.rank[rows[:-1]])
    rows, group = rows[~again], group[~again]
    return rows, np.append(np.flatnonzero(np.diff(group, prepend=-1)), len(rows))


def _follow_ties(columns: Columns, rows: Ints, chosen: NDArray[np.bool_]) -> None:
    """Let the rank that writes a box write what is tied to it there as well, so that the bytes are stored
    once. A box whose copy on that rank is not tied stays where it is. `rows`: (n,) those that may be written.
    """
    tied = rows[columns.tied[rows] >= 0]
    if not len(tied):
        return
    owners = np.flatnonzero(chosen & np.isin(columns.key, columns.tied[tied]))
    writer = {(int(columns.key[r]), *_box(columns, r)): int(columns.rank[r]) for r in owners.tolist()}
    held: dict[tuple[int, ...], list[int]] = {}
    for row in rows[np.isin(columns.key[rows], columns.key[tied])].tolist():
        held.setdefault((int(columns.key[row]), *_box(columns, row)), []).append(row)
    for copies in held.values():
        for row in copies:
            of = int(columns.tied[row])
            if of >= 0 and columns.rank[row] == writer.get((of, *_box(columns, row))):
                chosen[copies] = False
                chosen[row] = True


def _box(columns: Columns, row: int) -> list[int]:
    return [*columns.offset[:, row].tolist(), *columns.extent[:, row].tolist()]


def _choose(
    columns: Columns, bytes_of: Ints, rows: Ints, starts: Ints, load: list[int], hosts: Sequence[str]
) -> Ints:
    """One row of each group that has several. Groups that the same ranks hold are dealt out together, largest
    first, each to the rank with the least bytes so far. Sets of few ranks come first: what many ranks hold
    then evens out what the others could not. `bytes_of`: (n,) what a row weighs; `load`: bytes that each rank
    writes in any case, updated.
    """
    several = np.flatnonzero(np.diff(starts) > 1)
    if not len(several):
        return rows[:0]
    rows, starts = _gathered(rows, starts[several], np.diff(starts)[several])
    first = rows[starts[:-1]]
    sets = _same_ranks(columns.rank[rows], starts)
    order = np.lexsort((first, -bytes_of[first], sets))
    num_bytes, begins = bytes_of[first[order]].tolist(), starts[order]
    position = np.empty(len(order), np.int64)
    host_load = _Hosts(hosts, load)
    edges = [*np.flatnonzero(np.diff(sets[order], prepend=-1)).tolist(), len(order)]
    for a, b in pairwise(edges):
        group = order[a]
        ranks = columns.rank[rows[starts[group] : starts[group + 1]]].tolist()
        position[a:b] = _deal(num_bytes[a:b], ranks, load, host_load)
    chosen: Ints = rows[begins + position]
    return chosen


def _same_ranks(rank: NDArray[np.int32], starts: Ints) -> Ints:
    """A number for each group, equal where the same ranks hold it, ascending with how many they are."""
    sizes = np.diff(starts)
    for seed in count():
        each = _mixed([rank], np.arange(len(rank)), seed)
        total = np.add.reduceat(each, starts[:-1])  # ranks ascend in a group, so any order would do
        _, representative, number = np.unique(total, return_index=True, return_inverse=True)
        model = representative[number]
        if np.array_equal(sizes, sizes[model]):
            shift = np.repeat(starts[model] - starts[:-1], sizes)
            if np.array_equal(rank, rank[np.arange(len(rank)) + shift]):
                return _renumbered(number, sizes[representative], representative)
    raise AssertionError("unreachable")


def _renumbered(number: Ints, sizes: Ints, representative: Ints) -> Ints:
    """Numbers by size, then by the first group, instead of by hash."""
    order = np.lexsort((representative, sizes))
    ranked = np.empty(len(order), np.int64)
    ranked[order] = np.arange(len(order))
    return ranked[number]


class _Hosts:
    """Bytes that each host writes so far. Without names, every rank is a host of its own."""

    def __init__(self, hosts: Sequence[str], load: Sequence[int]) -> None:
        self.names: list[str | int] = [*hosts] if hosts else [*range(len(load))]
        self.load: Counter[str | int] = Counter()
        for name, num_bytes in zip(self.names, load, strict=True):
            self.load[name] += num_bytes


def _deal(sizes: Sequence[int], ranks: Sequence[int], load: list[int], hosts: _Hosts) -> list[int]:
    """For each of the `sizes`, descending, the position in `ranks` of who takes it. Among ranks with equal
    bytes the first on its host goes first, then the one whose host has less.
    """
    seen: Counter[str | int] = Counter()
    heap = []
    for position, rank in enumerate(ranks):
        name = hosts.names[rank]
        heap.append((load[rank], seen[name], hosts.load[name], position))
        seen[name] += 1
    heapq.heapify(heap)
    taken = []
    for num_bytes in sizes:
        least, nth, at_first, position = heap[0]
        taken.append(position)
        heapq.heapreplace(heap, (least + num_bytes, nth, at_first, position))
    for new, _, _, position in heap:
        rank = ranks[position]
        hosts.load[hosts.names[rank]] += new - load[rank]
        load[rank] = new
    return taken
