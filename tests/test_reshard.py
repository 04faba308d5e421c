"""reshard.py against numpy slicing."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from craft import grid
from shardkeep.errors import Corrupt
from shardkeep.reshard import Finder, blocks, contiguous_in, copies, first_gap, overlap, start_of, strides
from shardkeep.types import Box, whole


@dataclass(frozen=True)
class Stored:
    box: Box
    key: str = "k"


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


@st.composite
def box_in(draw: st.DrawFn, outer: Box) -> Box:
    offset, shape = [], []
    for o, n in zip(outer.offset, outer.shape, strict=True):
        size = draw(st.integers(0, n))
        offset.append(o + draw(st.integers(0, n - size)))
        shape.append(size)
    return Box(offset=tuple(offset), shape=tuple(shape))


@st.composite
def cut(draw: st.DrawFn, outer: Box, depth: int) -> list[Box]:
    """`outer` cut by guillotine cuts: disjoint boxes that cover it, not a grid."""
    wide = [d for d, n in enumerate(outer.shape) if n > 1]
    if not depth or not wide or not draw(st.booleans()):
        return [outer]
    dim = draw(st.sampled_from(wide))
    at = draw(st.integers(1, outer.shape[dim] - 1))
    low = Box(offset=outer.offset, shape=(*outer.shape[:dim], at, *outer.shape[dim + 1 :]))
    high = Box(
        offset=(*outer.offset[:dim], outer.offset[dim] + at, *outer.offset[dim + 1 :]),
        shape=(*outer.shape[:dim], outer.shape[dim] - at, *outer.shape[dim + 1 :]),
    )
    return [*draw(cut(low, depth - 1)), *draw(cut(high, depth - 1))]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Box, list[Box], Box]:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=4)))
    boxes = draw(cut(whole(shape), 5))
    return whole(shape), boxes, draw(box_in(whole(shape)))


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_copies_fill_the_target_as_slicing_does(layout: tuple[Box, list[Box], Box]) -> None:
    full, boxes, target = layout
    data = np.arange(full.numel).reshape(full.shape)
    got = np.full(target.shape, -1)
    for item, part in copies("k", target, Finder([Stored(b) for b in boxes])):
        got[part.slices_in(target)] = data[slices(item.box)][part.slices_in(item.box)]
    np.testing.assert_array_equal(got, data[slices(target)])


@given(layouts(), st.randoms())
@settings(max_examples=200, deadline=None)
def test_a_missing_box_is_reported_with_a_region_that_is_really_missing(
    layout: tuple[Box, list[Box], Box], random: object
) -> None:
    full, boxes, _ = layout
    if full.numel == 0:
        return
    gone = boxes.pop(random.randrange(len(boxes)))  # type: ignore[attr-defined]
    with pytest.raises(Corrupt, match="no stored box holds") as error:
        copies("layer.w", full, Finder([Stored(b) for b in boxes]))
    assert error.value.fields["key"] == "layer.w"
    gap = first_gap(full, boxes)
    assert gap.numel > 0
    assert (
        gone.intersect(gap) == gap
    )  # inside the box that was taken out: no stored element is called missing
    partial = copies("k", full, Finder([Stored(b) for b in boxes]), partial=True)
    assert sum(part.numel for _, part in partial) == full.numel - gone.numel


@given(layouts(), st.integers(1, 64), st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 8, 64, 1 << 40]))
@settings(max_examples=400, deadline=None)
def test_blocks_hold_each_element_once_within_their_bounds(
    layout: tuple[Box, list[Box], Box], max_elements: int, itemsize: int, hole_bytes: int
) -> None:
    stored, _, part = layout
    data = np.arange(stored.numel, dtype=np.int64).reshape(stored.shape)
    flat = data.reshape(-1)
    got = np.full(part.shape, -1, dtype=np.int64)
    steps = strides(stored.shape)
    for start, span, sub in blocks(stored, part, itemsize, max_elements * itemsize, hole_bytes):
        assert 0 < span <= max_elements * itemsize
        assert start % itemsize == span % itemsize == 0
        assert start >= 0 and start + span <= stored.numel * itemsize
        window = flat[start // itemsize : (start + span) // itemsize]
        values = np.lib.stride_tricks.as_strided(window, sub.shape, [s * 8 for s in steps])
        index = sub.slices_in(part)
        assert (got[index] == -1).all()
        got[index] = values
        assert values.reshape(-1)[0] == window[0] and values.reshape(-1)[-1] == window[-1]
    np.testing.assert_array_equal(got, data[slices(part)])


def test_blocks_of_a_contiguous_part_are_one_span_or_splits_of_it() -> None:
    stored = whole((100, 64))
    rows = Box(offset=(10, 0), shape=(50, 64))
    assert list(blocks(stored, rows, 4, 1 << 20)) == [(10 * 256, 50 * 256, rows)]
    split = [(start, span) for start, span, _ in blocks(stored, rows, 4, 1024)]
    assert split[0] == (2560, 1024) and split[-1] == (10 * 256 + 12 * 1024, 512)
    assert sum(span for _, span in split) == 50 * 256


def test_a_row_larger_than_the_bound_is_cut_along_its_inner_dimensions() -> None:
    got = list(blocks(whole((2, 4, 8)), whole((2, 4, 8)), 4, 64))
    assert [span for _, span, _ in got] == [64] * 4
    assert got[1][2] == Box(offset=(0, 2, 0), shape=(1, 2, 8))


def test_large_holes_are_skipped_and_small_ones_read_over() -> None:
    stored, column = whole((8, 1000)), Box(offset=(0, 0), shape=(8, 10))
    assert len(list(blocks(stored, column, 4, 1 << 20, hole_bytes=8000))) == 1
    got = list(blocks(stored, column, 4, 1 << 20, hole_bytes=2000))
    assert [(start, span) for start, span, _ in got] == [(4000 * n, 40) for n in range(8)]


@given(layouts())
@settings(max_examples=300, deadline=None)
def test_contiguous_in_and_start_of_agree_with_numpy(layout: tuple[Box, list[Box], Box]) -> None:
    stored, _, part = layout
    if not part.numel:
        return
    positions = np.arange(stored.numel).reshape(stored.shape)[slices(part)].reshape(-1)
    assert start_of(stored, part) == positions[0]
    is_range = bool((positions == positions[0] + np.arange(len(positions))).all())
    assert contiguous_in(stored, part) == is_range


@given(layouts(), st.randoms())
@settings(max_examples=200, deadline=None)
def test_overlap_finds_a_pair_exactly_when_there_is_one(
    layout: tuple[Box, list[Box], Box], random: object
) -> None:
    _, boxes, extra = layout
    random.shuffle(boxes)  # type: ignore[attr-defined]
    assert overlap(boxes) is None
    if extra.numel:
        pair = overlap([*boxes, extra])
        assert pair is not None
        both = [*boxes, extra]
        assert both[pair[0]].intersect(both[pair[1]]) is not None


def test_overlap_of_a_pinwheel_that_no_cut_separates() -> None:
    pinwheel = [
        Box(offset=(0, 0), shape=(1, 2)),
        Box(offset=(0, 2), shape=(2, 1)),
        Box(offset=(2, 1), shape=(1, 2)),
        Box(offset=(1, 0), shape=(2, 1)),
        Box(offset=(1, 1), shape=(1, 1)),
    ]
    assert overlap(pinwheel) is None
    assert overlap([*pinwheel, Box(offset=(1, 1), shape=(1, 1))]) == (4, 5)


def test_overlapping_boxes_are_an_error_and_not_a_race() -> None:
    boxes = [Stored(Box(offset=(0,), shape=(6,))), Stored(Box(offset=(4,), shape=(4,)))]
    with pytest.raises(Corrupt, match=r"overlap.*'k'.*expected 8 elements, got 10"):
        copies("k", whole((8,)), Finder(boxes))


def test_thousands_of_boxes_are_matched_in_seconds() -> None:
    shape = (4096, 4096)
    finder = Finder([Stored(b) for b in grid(shape, (64, 64))])
    targets = grid(shape, (63, 63))
    began = time.process_time()
    found = [copies("k", t, finder) for t in targets]
    assert sum(part.numel for parts in found for _, part in parts) == 4096 * 4096
    boxes = [b for t in (grid(shape, (128, 128)),) for b in t]
    assert overlap(boxes) is None
    assert time.process_time() - began < 10
