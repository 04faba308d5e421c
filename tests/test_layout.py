"""Shares of one rank as files: cut, framed, balanced."""

from __future__ import annotations

import math
import re

import torch
from hypothesis import given
from hypothesis import strategies as st

from plan_cases import ATTEMPT, header, object_header, rows
from shardkeep import layout
from shardkeep.config import Config
from shardkeep.types import Box, ShardHeader, whole


@given(st.lists(st.integers(1, 7), max_size=4), st.integers(1, 50))
def test_split_parts_tile_the_box_in_the_order_of_memory(shape: list[int], max_numel: int) -> None:
    box = Box(offset=tuple(range(3, 3 + len(shape))), shape=tuple(shape))
    parts = list(layout.split(box, max_numel))
    order = torch.arange(box.numel).reshape(box.shape)
    pieces = [order[p.slices_in(box)].reshape(-1) for p in parts]
    assert torch.equal(torch.cat(pieces), order.reshape(-1))  # contiguous, in order, each element once
    assert all(p.numel <= max_numel for p in parts)
    assert len(parts) <= 2 * math.ceil(box.numel / max_numel) * max(shape, default=1)


@st.composite
def shares(draw: st.DrawFn) -> tuple[list[ShardHeader], list[int], dict[int, bytes], Config]:
    headers: list[ShardHeader] = []
    payloads = {}
    for number in range(draw(st.integers(0, 8))):
        if draw(st.booleans()):
            shape = tuple(draw(st.lists(st.integers(0, 2000), max_size=2)))
            headers.append(header(f"w{number}", whole(shape), shape))
        else:
            payloads[number] = bytes(draw(st.integers(1, 3000)))
            headers.append(object_header(f"o{number}"))
    chosen = sorted(draw(st.sets(st.sampled_from(range(len(headers)))))) if headers else []
    payloads = {i: data for i, data in payloads.items() if i in chosen}
    config = Config(io_threads=draw(st.integers(1, 4)), split_bytes=draw(st.integers(1 << 18, 1 << 24)))
    return headers, chosen, payloads, config


@given(shares())
def test_a_layout_holds_the_share_once_back_to_back_and_balanced(
    share: tuple[list[ShardHeader], list[int], dict[int, bytes], Config],
) -> None:
    headers, chosen, payloads, config = share
    files = layout.layout(headers, chosen, payloads, rank=3, attempt=ATTEMPT, config=config)
    assert len({f.name for f in files}) == len(files) <= config.num_threads
    assert all(re.fullmatch(rf"__3_{ATTEMPT}\d{{3}}\.distcp", f.name) for f in files)
    boxes: dict[int, list[Box]] = {i: [] for i in chosen}
    for file in files:
        end = 0
        for piece in file.pieces:
            assert piece.offset == end
            end += len(piece.head) + piece.num_bytes + len(piece.tail)
            boxes[piece.shard].append(piece.box)
            if piece.shard in payloads:
                assert (piece.head, piece.num_bytes, piece.tail) == (b"", len(payloads[piece.shard]), b"")
            else:
                assert piece.num_bytes == piece.box.numel * 4
        assert end == file.size > 0
    for i in chosen:
        assert sum(b.numel for b in boxes[i]) == headers[i].box.numel
        assert len(set(boxes[i])) == len(boxes[i])
    if len(files) > 1:
        largest = max(p.length for f in files for p in f.pieces)
        assert max(f.size for f in files) <= sum(f.size for f in files) / len(files) + largest


def test_small_shares_make_one_file_and_large_ones_as_many_as_threads() -> None:
    config = Config(io_threads=4, split_bytes=1 << 20)
    small, large = rows("w", 0, 4096, 4096), rows("w", 0, 1 << 20, 1 << 20)
    assert len(layout.layout([small], [0], {}, rank=0, attempt=ATTEMPT, config=config)) == 1
    files = layout.layout([large], [0], {}, rank=0, attempt=ATTEMPT, config=config)
    assert len(files) == 4
    assert max(f.size for f in files) < 1.1 * min(f.size for f in files)
