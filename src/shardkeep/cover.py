"""Whether the shards of all ranks are an exact cover of every tensor. Pure.

In: columns and their groups (see `plan.grouped`). `check` raises InvalidState naming key, ranks and boxes.
All keys are looked at with arrays first, which finds every key that is wrong and perhaps some that are not;
only those are looked at again one by one, by `check_headers`, whose word counts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkeep import reshard
from shardkeep.columns import Columns, Flags, Ints
from shardkeep.errors import InvalidState
from shardkeep.types import Box, Dialect, ShardHeader, whole

_AT_A_TIME = 64  # suspects looked at one by one before the next are: the first that is wrong is enough


def check(columns: Columns, rows: Ints, starts: Ints, dialect: Dialect) -> None:
    """InvalidState unless ranks agree on each tensor and its main replicas cover it exactly once. Group g of
    replicas is `rows[starts[g]:starts[g + 1]]`.
    """
    keys = suspects(columns, rows, starts, dialect)
    for start in range(0, len(keys), _AT_A_TIME):
        wrong = np.zeros(len(columns.keys), np.bool_)
        wrong[keys[start : start + _AT_A_TIME]] = True
        headers: list[list[ShardHeader]] = [[] for _ in range(columns.num_ranks)]
        for row in np.sort(rows[wrong[columns.key[rows]]]).tolist():
            headers[columns.rank[row]].append(columns.header(row))
        check_headers(headers, dialect)


def suspects(columns: Columns, rows: Ints, starts: Ints, dialect: Dialect) -> Ints:
    """Keys that may be wrong, in the order in which they first appear."""
    num_keys = len(columns.keys)
    ascending = np.sort(rows)
    first = first_rows(columns, ascending)
    bad = np.zeros(num_keys, np.bool_)
    bad[columns.key[ascending[_differs(columns, ascending, first)]]] = True
    is_main = columns.is_main[rows].astype(np.int64)
    num_mains = np.add.reduceat(is_main, starts[:-1]) if len(rows) else starts[:0]
    of_group = rows[starts[:-1]]  # a row for each group: all its rows have the same key and box
    if dialect == "megatron":
        bad[columns.key[of_group[num_mains > 1]]] = True
    of_group = of_group[(num_mains > 0) & ~columns.is_object[of_group]]
    key = columns.key[of_group]
    bad[key[_is_outside(columns, of_group)]] = True
    seen = np.flatnonzero(first >= 0)
    tensors = seen[~columns.is_object[first[seen]]]
    # as float64, whose sums are exact below 2**53 elements; above, a sum that is off is a suspect at worst
    volume = np.bincount(key, weights=columns.extent[:, of_group].prod(axis=0), minlength=num_keys)
    bad[tensors[volume[tensors] != columns.shape[:, first[tensors]].prod(axis=0)]] = True
    bad[_overlapping(columns, of_group[~bad[key]])] = True
    wrong = np.flatnonzero(bad)
    return wrong[np.argsort(first[wrong])]


def first_rows(columns: Columns, rows: Ints) -> Ints:
    """Of each key the first of the ascending `rows`, or -1."""
    first = np.full(len(columns.keys), -1, np.int64)
    first[columns.key[rows[::-1]]] = rows[::-1]  # of repeated indices, numpy keeps the last value
    return first


def _differs(columns: Columns, rows: Ints, first: Ints) -> Flags:
    """Which rows disagree with the first of their key on what the key holds."""
    model = first[columns.key[rows]]
    differs = np.zeros(len(rows), np.bool_)
    for values in (columns.is_object, columns.dtype, columns.ndim, *columns.shape):
        differs |= values[rows] != values[model]
    return differs


def _is_outside(columns: Columns, rows: Ints) -> Flags:
    outside = np.zeros(len(rows), np.bool_)
    for offset, extent, shape in zip(columns.offset, columns.extent, columns.shape, strict=True):
        outside |= (offset[rows] < 0) | (offset[rows] + extent[rows] > shape[rows])
    return outside


def _overlapping(columns: Columns, rows: Ints) -> Ints:
    """Keys of boxes (one a row, inside their tensors) that no sorting tells apart: all that overlap, and such
    rarities as a pinwheel of boxes.

    As `reshard.overlap`, for all keys at once: a *run* is a set of boxes that may touch. At first each key is
    one; sorted by their starts along one dimension, a run falls apart wherever no box reaches the next one's
    start. Boxes that are alone are done. It ends when no dimension splits any run further.
    """
    rows = rows[columns.extent[:, rows].all(axis=0)]  # without an element a box overlaps nothing
    run, rows, num_runs = _without_single(columns.key[rows], rows)
    num_dims, dim, in_vain = len(columns.shape), 0, 0
    while num_runs and in_vain < num_dims:
        # each run gets a stretch of one axis for itself: one sort does, and no box reaches the next run
        size = np.zeros(num_runs, np.int64)
        size[run] = columns.shape[dim, rows]
        low = columns.offset[dim, rows] + (np.cumsum(size) - size)[run]
        order = np.argsort(low)
        low, rows = low[order], rows[order]
        reached = np.maximum.accumulate(low + columns.extent[dim, rows])
        splits = low[1:] >= reached[:-1]
        in_vain = in_vain + 1 if splits.sum() + 1 == num_runs else 0
        run, rows, num_runs = _without_single(np.cumsum(np.append(False, splits)), rows)
        dim = (dim + 1) % num_dims
    return np.unique(columns.key[rows]).astype(np.int64)


def _without_single(run: NDArray[Any], rows: Ints) -> tuple[Ints, Ints, int]:
    """Leave out runs of one row; number the others from 0."""
    several = np.bincount(run, minlength=1) > 1
    number = np.cumsum(several) - 1
    keep = several[run]
    return number[run[keep]], rows[keep], int(several.sum())


def check_headers(headers: Sequence[Sequence[ShardHeader]], dialect: Dialect) -> None:
    """`check` of a few keys, one by one: says what is wrong, where and on whom. Shards that hold nothing (an
    empty box of a tensor with elements) are not given.
    """
    boxes: dict[str, dict[Box, int]] = defaultdict(dict)  # of each key, with the rank of the main replica
    first: dict[str, tuple[int, ShardHeader]] = {}
    for key, box, owners in _replicas(headers):
        for rank, header in owners:
            _check_agrees(key, first.setdefault(key, (rank, header)), rank, header)
        mains = [rank for rank, header in owners if header.is_main]
        if dialect == "megatron" and len(mains) > 1:
            raise InvalidState(
                f"several ranks hold the main replica: ranks {mains[0]} and {mains[1]}",
                key=key,
                box=str(box),
                expected="one replica_id of 0",
                got=len(mains),
            )
        if mains:
            boxes[key][box] = mains[0]
    for key, (_, header) in first.items():
        if header.kind == "tensor":
            _check_tiling(key, header.shape, boxes[key])


def _replicas(
    headers: Sequence[Sequence[ShardHeader]],
) -> Iterator[tuple[str, Box, list[tuple[int, ShardHeader]]]]:
    owners: dict[tuple[str, Box], list[tuple[int, ShardHeader]]] = defaultdict(list)
    for rank, rank_headers in enumerate(headers):
        for header in rank_headers:
            owners[header.key, header.box].append((rank, header))
    for (key, box), found in owners.items():
        yield key, box, found


def _check_agrees(key: str, first: tuple[int, ShardHeader], rank: int, header: ShardHeader) -> None:
    rank_a, a = first
    if (a.kind, a.dtype, a.shape) != (header.kind, header.dtype, header.shape):
        raise InvalidState(
            f"ranks {rank_a} and {rank} hold different tensors under one key",
            key=key,
            expected=f"{a.kind} {a.dtype} {a.shape}",
            got=f"{header.kind} {header.dtype} {header.shape}",
        )


def _check_tiling(key: str, shape: tuple[int, ...], holders: dict[Box, int]) -> None:
    boxes = list(holders)
    for box, rank in holders.items():
        if any(o < 0 or o + n > s for o, n, s in zip(box.offset, box.shape, shape, strict=True)):
            raise InvalidState(
                f"a shard of rank {rank} lies outside its tensor",
                key=key,
                expected=f"inside {reshard.show(whole(shape))}",
                got=reshard.show(box),
            )
    overlap = reshard.overlap(boxes)
    if overlap:
        a, b = (boxes[i] for i in overlap)
        who = f"ranks {holders[a]} and {holders[b]}" if holders[a] != holders[b] else f"rank {holders[a]}"
        raise InvalidState(
            f"shards of {who} overlap",
            key=key,
            expected="disjoint boxes",
            got=f"{reshard.show(a)} and {reshard.show(b)}",
        )
    covered, wanted = sum(b.numel for b in boxes), math.prod(shape)
    if covered != wanted:
        gap = reshard.show(reshard.first_gap(whole(shape), boxes))
        raise InvalidState(
            f"no rank holds the main replica of a region: the shards leave a gap at {gap}",
            key=key,
            expected=f"{wanted} elements",
            got=covered,
        )
