"""Shares of one rank as files: cut, framed, balanced."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from plan_cases import ATTEMPT, header, object_header, rows
from shardkeep import layout
from shardkeep.config import Config
from shardkeep.frame import frame
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
            end += piece.length
            boxes[piece.shard].append(piece.box)
            if piece.shard in payloads:
                assert (piece.head_bytes, piece.num_bytes, piece.tail_bytes) == (
                    0,
                    len(payloads[piece.shard]),
                    0,
                )
            else:
                assert piece.num_bytes == piece.box.numel * 4
                head, tail = frame("float32", piece.box.shape)
                assert (piece.head_bytes, piece.tail_bytes) == (len(head), len(tail))
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


def test_tied_shards_are_one_piece_cut_or_not() -> None:
    config = Config(io_threads=2, split_bytes=1 << 20)
    first = rows("a", 0, 1 << 17, 1 << 17)  # 4 MiB: cut
    other = rows("c", 0, 64, 64)
    headers = [first, replace(first, key="b", tied_to="a"), other, replace(first, key="d", tied_to="a")]
    files = layout.layout(headers, [0, 1, 2, 3], {}, rank=0, attempt=ATTEMPT, config=config)
    pieces = [p for f in files for p in f.pieces]
    assert {(p.shard, p.also) for p in pieces} == {(0, (1, 3)), (2, ())}
    assert sum(p.num_bytes for p in pieces) == first.num_bytes + other.num_bytes
    assert len([p for p in pieces if p.shard == 0]) > 1


def test_tied_shards_are_one_piece_without_the_first_one() -> None:
    """The plan gave it, or none of the others, to another rank that holds a replica."""
    first = rows("a", 0, 64, 64)
    headers = [first, replace(first, key="b", tied_to="a"), replace(first, key="c", tied_to="a")]
    for chosen, expected in (([1, 2], [(1, (2,))]), ([2], [(2, ())]), ([0], [(0, ())])):
        (file,) = layout.layout(headers, chosen, {}, rank=0, attempt=ATTEMPT, config=Config())
        assert [(p.shard, p.also) for p in file.pieces] == expected


def test_boxes_of_a_tied_tensor_stay_apart() -> None:
    low, high = rows("a", 0, 64, 128), rows("a", 64, 128, 128)
    headers = [low, high, replace(low, key="b", tied_to="a"), replace(high, key="b", tied_to="a")]
    (file,) = layout.layout(headers, [0, 1, 2, 3], {}, rank=0, attempt=ATTEMPT, config=Config())
    assert [(p.shard, p.box, p.also) for p in file.pieces] == [(0, low.box, (2,)), (1, high.box, (3,))]


def test_no_thread_has_much_more_to_write_than_the_others() -> None:
    """One huge tensor among many small ones and a few large values: it is cut, and the rest fills up."""
    config = Config(io_threads=8)
    huge = rows("huge", 0, 1 << 26, 1 << 26)  # 2 GiB
    headers = [huge, *(rows(f"w{n}", 0, 32 * (n % 40 + 1), 1280) for n in range(5000))]
    headers += [object_header(f"o{n}") for n in range(3)]
    payloads = {i: bytes(1 << 20) for i in range(len(headers) - 3, len(headers))}
    files = layout.layout(
        headers, list(range(len(headers))), payloads, rank=0, attempt=ATTEMPT, config=config
    )
    assert len(files) == 8
    assert max(f.size for f in files) < 1.01 * min(f.size for f in files)
