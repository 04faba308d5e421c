"""Plans: every byte is written exactly once and evenly; what is no exact cover is refused by name."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan_cases import assign, header, joined, object_header, rows
from shardkeep import plan
from shardkeep.errors import InvalidState
from shardkeep.types import Box, Dialect, ShardHeader, TensorInfo, whole


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and disjoint boxes that cover it: an uneven grid."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    boxes = [whole(shape)]
    for axis, size in enumerate(shape):
        edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))})
        boxes = [
            Box(
                offset=(*b.offset[:axis], low, *b.offset[axis + 1 :]),
                shape=(*b.shape[:axis], high - low, *b.shape[axis + 1 :]),
            )
            for b in boxes
            for low, high in (pairwise(edges) if size else [(0, 0)])
        ]
    return shape, boxes


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Dialect, list[list[ShardHeader]]]:
    """Headers of every rank: each box of each tensor is held by some ranks, one of which is main."""
    dialect: Dialect = draw(st.sampled_from(["dcp", "megatron"]))
    num_ranks = draw(st.integers(1, 5))
    ranks: list[list[ShardHeader]] = [[] for _ in range(num_ranks)]
    for number in range(draw(st.integers(1, 6))):
        shape, boxes = draw(grids())
        for box in boxes:
            owners = draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, unique=True))
            for rank in owners:
                is_main = dialect == "dcp" or rank == owners[0]
                ranks[rank].append(header(f"w{number}", box, shape, is_main=is_main))
    return dialect, ranks


@given(worlds())
def test_every_box_is_written_exactly_once_by_a_rank_that_holds_it(
    world: tuple[Dialect, list[list[ShardHeader]]],
) -> None:
    dialect, ranks = world
    chosen = assign(ranks, dialect)
    written = [(ranks[r][i].key, ranks[r][i].box) for r, mine in enumerate(chosen) for i in mine]
    held = {(h.key, h.box) for headers in ranks for h in headers}
    assert len(written) == len(set(written))
    assert set(written) == held
    assert all(mine == sorted(mine) for mine in chosen)
    assert assign([list(headers) for headers in ranks], dialect) == chosen


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_replicated_shards_balance_over_ranks(sizes: list[int], num_ranks: int) -> None:
    """The bound of largest-first scheduling: nobody has more than the mean plus one shard."""
    ranks = [[rows(f"w{n}", 0, size, size) for n, size in enumerate(sizes)] for _ in range(num_ranks)]
    load = [sum(ranks[r][i].num_bytes for i in mine) for r, mine in enumerate(assign(ranks, "dcp"))]
    assert sum(load) == sum(sizes) * 32
    assert max(load) <= sum(load) / num_ranks + max(sizes) * 32
    assert max(load) <= 4 / 3 * max(sum(load) / num_ranks, max(sizes) * 32) + max(sizes) * 32 / 3


def test_replicas_make_up_for_shards_without_a_choice() -> None:
    """Rank 0 alone holds a large shard: rank 1 writes what both hold, though rank 0 has the main replicas."""
    alone = rows("alone", 0, 100, 100)
    shared = [rows(f"shared{n}", 0, 30, 30) for n in range(3)]
    copies = [replace(h, is_main=False) for h in shared]
    assert assign([[*shared, alone], copies], "megatron") == [[3], [0, 1, 2]]


def test_objects_of_the_dcp_dialect_are_written_by_the_lowest_rank_that_holds_them() -> None:
    ranks = [[], [object_header("step"), object_header("lr")], [object_header("lr"), object_header("step")]]
    assert assign(ranks, "dcp") == [[], [0, 1], []]


def test_objects_of_the_megatron_dialect_are_written_by_their_main_replica() -> None:
    ranks = [[object_header("extra", is_main=False)], [object_header("extra")]]
    assert assign(ranks, "megatron") == [[], [0]]


def test_the_tensors_of_a_checkpoint_are_those_of_all_ranks() -> None:
    ranks = [[rows("a", 0, 2, 4), object_header("o")], [rows("a", 2, 4, 4), header("b", whole(()), ())]]
    assert plan.tensors(joined(ranks)) == {
        "a": TensorInfo(dtype="float32", shape=(4, 8)),
        "b": TensorInfo(dtype="float32", shape=()),
    }


CONFLICTS: dict[str, tuple[Dialect, list[list[ShardHeader]], str, tuple[int, ...]]] = {
    "a gap": ("dcp", [[rows("w", 0, 2, 8)], [rows("w", 3, 8, 8)]], "gap", ()),
    "no main replica": ("megatron", [[rows("w", 0, 8, 8, is_main=False)]], "gap", ()),
    "an overlap": (
        "dcp",
        [[rows("v", 0, 1, 1)], [rows("w", 0, 5, 8)], [rows("w", 4, 8, 8)]],
        "overlap",
        (1, 2),
    ),
    "an overlap on one rank": ("dcp", [[], [rows("w", 0, 5, 8), rows("w", 4, 8, 8)]], "overlap", (1,)),
    "a shard outside": ("dcp", [[rows("w", 0, 4, 8)], [rows("w", 4, 9, 8)]], "outside", (1,)),
    "dtypes": (
        "dcp",
        [[rows("w", 0, 4, 8)], [rows("w", 4, 8, 8, dtype="int32")]],
        "different tensors",
        (0, 1),
    ),
    "shapes": ("dcp", [[], [rows("w", 0, 4, 8)], [rows("w", 4, 8, 9)]], "different tensors", (1, 2)),
    "dimensions": ("dcp", [[rows("w", 0, 4, 4)], [header("w", whole((4,)), (4,))]], "different", (0, 1)),
    "kinds": ("dcp", [[rows("w", 0, 4, 4)], [object_header("w")]], "different", (0, 1)),
    "two main replicas": (
        "megatron",
        [[rows("w", 0, 4, 4)], [], [rows("w", 0, 4, 4)]],
        "main replica",
        (0, 2),
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_what_is_no_exact_cover_is_refused_by_key_and_rank(name: str) -> None:
    dialect, ranks, says, named = CONFLICTS[name]
    with pytest.raises(InvalidState, match=says) as caught:
        assign(ranks, dialect)
    assert caught.value.fields["key"] == "w"
    text = str(caught.value).replace(repr("w"), "")
    assert tuple(map(int, re.findall(r"\d+", re.search(r"ranks? ([\d and]+)|$", text).group()))) == named
    assign(ranks, dialect, check=False)  # as Megatron's validate_access_integrity=False asks


def test_a_gap_is_shown() -> None:
    """Where to look for the missing shard, of a tensor cut along two axes."""
    corner = [
        Box(offset=(0, 0), shape=(4, 4)),
        Box(offset=(0, 4), shape=(4, 4)),
        Box(offset=(4, 0), shape=(4, 4)),
    ]
    with pytest.raises(InvalidState, match=r"a gap at \[4:8, \d:8\]"):
        assign([[header("w", box, (8, 8)) for box in corner]], "dcp")


def test_empty_shards_of_other_ranks_are_no_conflict() -> None:
    """An uneven DTensor leaves some ranks without an element; their empty box may lie anywhere."""
    empty = header("w", Box(offset=(8, 0), shape=(0, 8)), (8, 8))
    assert assign([[rows("w", 0, 8, 8)], [empty], [empty]], "dcp") == [[0], [], []]


@given(st.integers(1, 4), st.integers(0, 3))
def test_what_is_tied_is_written_by_one_rank(num_ranks: int, untied_on: int) -> None:
    """Replicas on every rank; the ranks' shares would otherwise part the two."""
    a, b, other = rows("a", 0, 4, 4), rows("b", 0, 4, 4), rows("c", 0, 4, 4)
    ranks = [[a, other, b if rank == untied_on else replace(b, tied_to="a")] for rank in range(num_ranks)]
    shares = assign(ranks, "dcp")
    assert sorted(i for share in shares for i in share) == [0, 1, 2]
    writer = next(rank for rank, share in enumerate(shares) if 0 in share)
    if writer != untied_on:
        assert 2 in shares[writer]
        if num_ranks > 1:
            assert 1 not in shares[writer]  # the tied one weighs nothing, so the other goes elsewhere


def test_ties_travel_and_only_the_tied_copy_on_the_writing_rank_counts() -> None:
    """A tie to a box that this rank does not write, and one whose owner is nowhere."""
    low, high = rows("a", 0, 4, 8), rows("a", 4, 8, 8)
    tied = [replace(low, key="b", tied_to="a"), replace(high, key="b", tied_to="a")]
    assert assign([[low, tied[0]], [high, tied[1]]], "dcp") == [[0, 1], [0, 1]]
    columns = joined([[low, tied[0]], [high, tied[1]]])
    assert [columns.header(row) for row in range(4)] == [low, tied[0], high, tied[1]]
