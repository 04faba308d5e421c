"""One rank's share -> files: which bytes go where. Pure and deterministic.

Large shards are cut, so that files balance over the threads that write them; each piece is framed as a
`torch.save` archive of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from shardkeep.config import MIB, Config
from shardkeep.frame import frame
from shardkeep.manifest import data_name
from shardkeep.types import Box, FileLayout, Piece, ShardHeader

_SMALL_FILE_BYTES = 4 * MIB  # below this a further file costs more than it gains
_CUTS_PER_FILE = 4  # a shard larger than a quarter of a file is cut


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
