"""Plans at scale, in small: the simulator of benchmarks/plan_scale.py, and worlds against a naive planner."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan_cases import assign, header, joined, object_header, rows
from shardkeep import columns, cover, plan
from shardkeep.types import Box, Dialect, ShardHeader

TP, PP, DP, LAYERS = 2, 4, 8, 10  # 64 ranks with 200 shards each


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "plan_scale.py"
    spec = importlib.util.spec_from_file_location("plan_scale", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_scale"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_a_3d_layout_is_covered_exactly_and_evenly(bench: ModuleType) -> None:
    """Every layer's parameters and optimizer states once, though most ranks hold copies of them."""
    ranks = bench.simulate(bench.World(tp=TP, pp=PP, dp=DP, layers=LAYERS))
    bench.agree.plan_together(ranks, bench.captured(ranks))
    everyone, chosen = bench.written(ranks)
    assert np.diff(everyone.starts).tolist() == [200] * 64
    stored = defaultdict(int)
    for row in chosen.tolist():
        h = everyone.header(row)
        stored[h.key] += h.box.numel
    tensors = plan.tensors(everyone)
    assert len(tensors) == 4 * (2 + 3 * PP * LAYERS)
    assert stored == {key: int(np.prod(info.shape)) for key, info in tensors.items()}
    weights = sum(np.prod(i.shape) * 2 for i in tensors.values() if i.dtype == "bfloat16")
    assert everyone.num_bytes[chosen].sum() == weights * 7  # bf16, and three times fp32
    spread = bench.balance(ranks)
    assert spread["ranks"] <= 1.05 and spread["hosts"] <= 1.05


def test_the_same_world_gets_the_same_plan_and_remembers_it(bench: ModuleType) -> None:
    world = bench.World(tp=TP, pp=PP, dp=DP, layers=2)
    bench.agree._plans.clear()
    first, second = bench.simulate(world), bench.simulate(world)
    bench.agree.plan_together(first, bench.captured(first))
    shares = first.shares
    first.shares = []
    bench.agree.plan_together(first, bench.captured(first))
    assert first.shares == []  # nothing was planned again
    bench.agree.plan_together(second, bench.captured(second))
    assert second.shares == shares


def test_the_index_holds_what_the_plan_chose(bench: ModuleType) -> None:
    ranks = bench.simulate(bench.World(tp=2, pp=2, dp=2, layers=2))
    bench.agree.plan_together(ranks, bench.captured(ranks))
    index = bench.index_of(ranks)
    assert len(index.items) == sum(len(share) // 4 for share in ranks.shares)
    metadata = bench.pickle.loads(bench.vanilla.dcp_metadata(index))
    assert len(metadata.storage_data) == len(index.items)
    for key, info in index.tensors.items():
        entry = metadata.state_dict_metadata[key]
        assert tuple(entry.size) == info.shape
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel()


@st.composite
def worlds(draw: st.DrawFn) -> list[list[ShardHeader]]:
    """Rows of some tensors, held by any ranks; sometimes cut wrongly, sometimes with two main replicas."""
    num_ranks = draw(st.integers(1, 5))
    ranks: list[list[ShardHeader]] = [[] for _ in range(num_ranks)]
    for number in range(draw(st.integers(1, 5))):
        total = draw(st.integers(1, 9))
        edges = [0, *sorted(draw(st.sets(st.integers(1, total), max_size=3))), total]
        for low, edge in pairwise(edges):
            high = edge + draw(st.sampled_from([0] * 30 + [1]))
            owners = draw(st.lists(st.integers(0, num_ranks - 1), max_size=4, unique=True))
            for rank in owners:
                is_main = draw(st.sampled_from([rank == owners[0]] * 20 + [True]))
                ranks[rank].append(rows(f"w{number}", low, high, total, is_main=is_main))
    for rank in draw(st.lists(st.integers(0, num_ranks - 1), unique=True)):
        ranks[rank].append(object_header("o", is_main=draw(st.booleans())))
    return ranks


def naive(ranks: list[list[ShardHeader]], dialect: Dialect) -> dict[tuple[str, Box], set[int]]:
    """Of everything that is stored, who may write it."""
    holders: dict[tuple[str, Box], list[tuple[int, ShardHeader]]] = defaultdict(list)
    for rank, headers in enumerate(ranks):
        for h in headers:
            if h.kind == "object" or h.box.numel:
                holders[h.key, h.box].append((rank, h))
    allowed = {}
    for what, owners in holders.items():
        mains = [rank for rank, h in owners if h.is_main]
        if owners[0][1].kind == "object":
            allowed[what] = set(mains if dialect == "megatron" else mains[:1])
        elif mains:
            allowed[what] = {rank for rank, _ in owners}
    return {what: who for what, who in allowed.items() if who}


@given(worlds(), st.sampled_from(["dcp", "megatron"]))
def test_what_is_written_is_what_a_naive_planner_allows(
    ranks: list[list[ShardHeader]], dialect: Dialect
) -> None:
    allowed = naive(ranks, dialect)
    written: dict[tuple[str, Box], int] = {}
    for rank, share in enumerate(assign(ranks, dialect, check=False)):
        for index in share:
            what = ranks[rank][index].key, ranks[rank][index].box
            assert what not in written and rank in allowed[what]
            written[what] = rank
    assert set(written) == set(allowed)


@given(worlds(), st.sampled_from(["dcp", "megatron"]))
def test_arrays_find_wrong_what_a_look_at_each_key_finds_wrong(
    ranks: list[list[ShardHeader]], dialect: Dialect
) -> None:
    """The quick look may suspect more; it must not miss anything, and the same words are said."""
    held = [[h for h in headers if h.kind == "object" or h.box.numel] for headers in ranks]

    def said(check: object) -> str:
        try:
            check()  # type: ignore[operator]
        except ValueError as e:
            return str(e)
        return ""

    exact = said(lambda: cover.check_headers(held, dialect))
    assert said(lambda: plan.check_cover(joined(ranks), dialect)) == exact


@given(worlds())
def test_headers_come_out_of_columns_as_they_went_in(ranks: list[list[ShardHeader]]) -> None:
    everyone = joined(ranks)
    flat = [h for headers in ranks for h in headers]
    assert [everyone.header(row) for row in range(len(flat))] == flat
    assert everyone.rank.tolist() == [r for r, headers in enumerate(ranks) for _ in headers]


def test_columns_of_different_dimensions_are_told_apart() -> None:
    """A vector and a matrix of one column look alike once both are padded."""
    flat = header("v", Box(offset=(0,), shape=(4,)), (4,))
    tall = header("w", Box(offset=(0, 0), shape=(4, 1)), (4, 1))
    deep = header("x", Box(offset=(1, 0, 0), shape=(1, 4, 1)), (2, 4, 1))
    everyone = columns.unpack([columns.pack([flat]), columns.pack([]), columns.pack([tall, deep])])
    assert [everyone.header(row) for row in range(3)] == [flat, tall, deep]
    assert assign([[flat], [header("v", tall.box, (4, 1))]], "dcp", check=False) == [[0], [0]]


def test_a_pinwheel_is_no_overlap() -> None:
    """No line cuts it apart, so sorting cannot tell: the slow look has the last word."""
    boxes = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    wheel = [header("w", Box(offset=o, shape=s), (3, 3)) for o, s in boxes]
    everyone = joined([wheel])
    assert cover.suspects(everyone, *plan.grouped(everyone), "dcp").tolist() == [0]
    assert assign([wheel], "dcp") == [[0, 1, 2, 3, 4]]


def test_equal_hashes_of_different_boxes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first every row has the same hash."""
    mixed = plan._mixed
    seeds = []

    def weak(values: list[np.ndarray], which: np.ndarray, seed: int) -> np.ndarray:
        seeds.append(seed)
        return mixed(values, which, seed) * np.uint64(seed > 0)

    ranks = [[rows("w", 0, 2, 4), rows("w", 2, 4, 4)], [rows("w", 2, 4, 4)]]
    expected = assign(ranks, "dcp")
    monkeypatch.setattr(plan, "_mixed", weak)
    assert assign(ranks, "dcp") == expected
    assert 1 in seeds


def test_ranks_of_other_hosts_come_first_among_equals() -> None:
    """Four equal tensors that four ranks on two hosts hold in pairs: a disk each gets the same."""
    whole = [rows(f"w{n}", 0, 4, 4) for n in range(2)]
    shares = assign([whole] * 4, "dcp", hosts=["a", "a", "b", "b"])
    assert [len(share) for share in shares] == [1, 0, 1, 0]
    pairs = [[rows("x", 0, 4, 4)], [rows("y", 0, 4, 4)]] * 2
    shares = assign(pairs, "dcp", hosts=["a", "a", "b", "b"])
    assert [len(share) for share in shares] == [1, 0, 0, 1]
