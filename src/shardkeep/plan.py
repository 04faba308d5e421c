"""Headers of every rank -> who writes which shard. Pure and deterministic.

`assign` removes replicas and balances bytes over ranks. Invariant: the boxes chosen for a tensor cover it
exactly once (checked; `InvalidState` names the key).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from shardkeep import reshard
from shardkeep.errors import InvalidState
from shardkeep.types import Box, Dialect, ShardHeader, TensorInfo, whole

Holder = tuple[int, int]  # rank, index of the shard on that rank


def assign(
    headers: Sequence[Sequence[ShardHeader]], dialect: Dialect, *, check: bool = True
) -> list[list[int]]:
    """For each rank the indices of its shards that it writes, ascending. With `check`, refuses what is not an
    exact cover.
    """
    holders = _group(headers)
    if check:
        check_cover(headers, dialect)
    chosen: list[list[int]] = [[] for _ in headers]
    load = [0] * len(headers)
    for _, num_bytes, candidates in sorted(
        _candidates(headers, holders, dialect), key=lambda c: (c[0], -c[1])
    ):
        rank, index = min(candidates, key=lambda holder: (load[holder[0]], holder))
        load[rank] += num_bytes
        chosen[rank].append(index)
    return [sorted(indices) for indices in chosen]


def tensors(headers: Iterable[Iterable[ShardHeader]]) -> dict[str, TensorInfo]:
    """Global dtype and shape of every tensor, in order of first appearance."""
    found: dict[str, TensorInfo] = {}
    for rank_headers in headers:
        for h in rank_headers:
            if h.kind == "tensor":
                found.setdefault(h.key, TensorInfo(dtype=h.dtype, shape=h.shape))
    return found


def _group(headers: Sequence[Sequence[ShardHeader]]) -> dict[tuple[str, Box], list[Holder]]:
    holders: dict[tuple[str, Box], list[Holder]] = defaultdict(list)
    for rank, rank_headers in enumerate(headers):
        for index, h in enumerate(rank_headers):
            if (
                h.kind == "object" or h.box.numel or not math.prod(h.shape)
            ):  # empty boxes of non-empty tensors hold nothing
                holders[h.key, h.box].append((rank, index))
    return holders


def _candidates(
    headers: Sequence[Sequence[ShardHeader]], holders: dict[tuple[str, Box], list[Holder]], dialect: Dialect
) -> Iterator[tuple[bool, int, list[Holder]]]:
    """(has a choice, bytes, who may write it). Objects are written by the main replica alone, as Megatron
    does.
    """
    for owners in holders.values():
        first = headers[owners[0][0]][owners[0][1]]
        mains = [(r, i) for r, i in owners if headers[r][i].is_main]
        if not mains:
            continue
        # `dcp` knows no replica ids: an object that many ranks hold is written by the lowest
        may_write = (mains if dialect == "megatron" else mains[:1]) if first.kind == "object" else owners
        yield len(may_write) > 1, first.num_bytes, may_write


def check_cover(headers: Sequence[Sequence[ShardHeader]], dialect: Dialect) -> None:
    """InvalidState unless ranks agree on each tensor and its main replicas cover it exactly once."""
    boxes: dict[str, dict[Box, int]] = defaultdict(dict)  # of each key, with the rank of the main replica
    first: dict[str, tuple[int, ShardHeader]] = {}
    for (key, box), owners in _group(headers).items():
        for rank, index in owners:
            _check_agrees(
                key, first.setdefault(key, (rank, headers[rank][index])), rank, headers[rank][index]
            )
        mains = [rank for rank, index in owners if headers[rank][index].is_main]
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
