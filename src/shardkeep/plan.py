"""Headers of every rank -> who writes which shard, and where its bytes go. Pure and deterministic.

`assign` removes replicas and balances bytes over ranks. `layout` cuts one rank's share into files that
balance over its threads. Invariant: the boxes chosen for a tensor cover it exactly once (checked;
`InvalidState` names the key).
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from shardkeep import reshard
from shardkeep.config import MIB, Config
from shardkeep.errors import InvalidState
from shardkeep.frame import frame
from shardkeep.manifest import data_name
from shardkeep.types import Box, Dialect, FileLayout, Piece, ShardHeader, TensorInfo, whole

_SMALL_FILE_BYTES = 4 * MIB  # below this a further file costs more than it gains
_CUTS_PER_FILE = 4  # a shard larger than a quarter of a file is cut

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


def layout(
    headers: Sequence[ShardHeader],
    chosen: Sequence[int],
    payloads: dict[int, bytes],
    *,
    rank: int,
    attempt: str,
    config: Config,
) -> list[FileLayout]:
    """Files of one rank. `payloads` holds the serialised objects by shard index. Every file gets about the
    same bytes.
    """
    total = sum(len(payloads[i]) if i in payloads else headers[i].num_bytes for i in chosen)
    num_files = max(1, min(config.num_threads, math.ceil(total / _SMALL_FILE_BYTES)))
    cut_bytes = max(config.split_bytes, total // (num_files * _CUTS_PER_FILE))
    pieces = [p for i in chosen for p in _pieces(i, headers[i], payloads.get(i), cut_bytes)]
    bins = _balance(pieces, num_files)
    return [
        _place(data_name(rank, attempt, n), [pieces[i] for i in bin_]) for n, bin_ in enumerate(bins) if bin_
    ]


def _pieces(shard: int, header: ShardHeader, payload: bytes | None, cut_bytes: int) -> Iterator[Piece]:
    if payload is not None:
        yield Piece(shard=shard, box=header.box, offset=0, head=b"", tail=b"", num_bytes=len(payload))
        return
    itemsize = header.num_bytes // header.box.numel if header.box.numel else 1
    for box in split(header.box, max(1, cut_bytes // itemsize)):
        head, tail = frame(header.dtype, box.shape)
        yield Piece(shard=shard, box=box, offset=0, head=head, tail=tail, num_bytes=box.numel * itemsize)


def split(box: Box, max_numel: int) -> Iterator[Box]:
    """Cut a box into parts of at most `max_numel` elements, each contiguous in row-major order."""
    if box.numel <= max_numel:
        yield box
        return
    axis = next(d for d, n in enumerate(box.shape) if n > 1)
    num_parts = min(box.shape[axis], math.ceil(box.numel / max_numel))
    edges = [box.shape[axis] * i // num_parts for i in range(num_parts + 1)]
    for low, high in itertools.pairwise(edges):
        offset = (*box.offset[:axis], box.offset[axis] + low, *box.offset[axis + 1 :])
        yield from split(
            Box(offset=offset, shape=(*box.shape[:axis], high - low, *box.shape[axis + 1 :])), max_numel
        )


def _balance(pieces: Sequence[Piece], num_bins: int) -> list[list[int]]:
    """Largest first into the emptiest bin; within a bin the original order, which is the order in memory."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [0] * num_bins
    for i in sorted(range(len(pieces)), key=lambda i: -pieces[i].length):
        target = load.index(min(load))
        bins[target].append(i)
        load[target] += pieces[i].length
    return [sorted(b) for b in bins]


def _place(name: str, pieces: list[Piece]) -> FileLayout:
    placed, offset = [], 0
    for p in pieces:
        placed.append(
            Piece(shard=p.shard, box=p.box, offset=offset, head=p.head, tail=p.tail, num_bytes=p.num_bytes)
        )
        offset += p.length
    return FileLayout(name=name, pieces=placed, size=offset)
