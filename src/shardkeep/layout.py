"""One rank's share -> files: which bytes go where. Pure and deterministic.

Large shards are cut, so that files balance over the threads that write them; each piece is framed as a
`torch.save` archive of its own. Shards of the same memory (tied weights) become one piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from shardkeep.config import MIB, Config
from shardkeep.frame import frame_bytes
from shardkeep.manifest import data_name
from shardkeep.types import Box, FileLayout, Piece, ShardHeader

_SMALL_FILE_BYTES = 4 * MIB  # below this a further file costs more than it gains
_CUTS_PER_FILE = 4  # a shard larger than a quarter of a file is cut

_Draft = tuple[
    int, Box, int, int, int
]  # shard, box, bytes of head, payload and tail: a piece without its place


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
    first = first_of_tied(headers, chosen)
    total = sum(len(payloads[i]) if i in payloads else headers[i].num_bytes for i in first)
    num_files = max(1, min(config.num_threads, math.ceil(total / _SMALL_FILE_BYTES)))
    cut_bytes = max(config.split_bytes, total // (num_files * _CUTS_PER_FILE))
    drafts = [d for i in first for d in _drafts(i, headers[i], payloads.get(i), cut_bytes)]
    bins = _balance([head + size + tail for _, _, head, size, tail in drafts], num_files)
    return [
        _place(data_name(rank, attempt, n), [drafts[i] for i in bin_], first)
        for n, bin_ in enumerate(bins)
        if bin_
    ]


def first_of_tied(headers: Sequence[ShardHeader], chosen: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The shards to write, each with the others that have its bytes (see `capture.tied`).

    Only what this rank writes counts: a tied shard that the plan gave to another rank is written there.
    """
    first: dict[int, tuple[int, ...]] = {}
    by_memory: dict[tuple[str, Box], int] = {}
    tied = {headers[i].tied_to for i in chosen} - {None}
    for i in chosen:
        header = headers[i]
        of = header.tied_to or header.key
        if of not in tied or (owner := by_memory.setdefault((of, header.box), i)) == i:
            first[i] = ()
        else:
            first[owner] += (i,)
    return first


def _drafts(shard: int, header: ShardHeader, payload: bytes | None, cut_bytes: int) -> Iterator[_Draft]:
    if payload is not None:
        yield shard, header.box, 0, len(payload), 0
        return
    if header.num_bytes <= cut_bytes:
        head, tail = frame_bytes(header.dtype, header.box.shape)
        yield shard, header.box, head, header.num_bytes, tail
        return
    itemsize = header.num_bytes // header.box.numel
    for box in split(header.box, max(1, cut_bytes // itemsize)):
        head, tail = frame_bytes(header.dtype, box.shape)
        yield shard, box, head, box.numel * itemsize, tail


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


def _balance(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Largest first into the emptiest bin; within a bin the original order, which is the order in memory."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [0] * num_bins
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        target = load.index(min(load))
        bins[target].append(i)
        load[target] += lengths[i]
    return [sorted(b) for b in bins]


def _place(name: str, drafts: list[_Draft], also: dict[int, tuple[int, ...]]) -> FileLayout:
    placed, offset = [], 0
    for shard, box, head, size, tail in drafts:
        placed.append(
            Piece(
                shard=shard,
                box=box,
                offset=offset,
                head_bytes=head,
                tail_bytes=tail,
                num_bytes=size,
                also=also[shard],
            )
        )
        offset += head + size + tail
    return FileLayout(name=name, pieces=placed, size=offset)
