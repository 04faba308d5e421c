"""Megatron in and out: a real GPT with its DistributedOptimizer, over layouts and between shardkeep and
megatron-core 0.16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megatron_cases as cases
import shardkeep as sk
from shardkeep.testing.cluster import ClusterPool

pytestmark = [pytest.mark.megatron, pytest.mark.xdist_group("megatron"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ours(ranks: ClusterPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    """A checkpoint of a TP=2 job, saved by shardkeep in the no-fork jail."""
    directory = str(tmp_path_factory.mktemp("ours") / "step")
    return directory, ranks.run(2, cases.our_save, directory, 2, jailed=True)


@pytest.mark.parametrize("tp", [2, 1])
def test_load_in_the_jail_gives_the_state_and_the_next_losses(
    ranks: ClusterPool, ours: tuple[str, list[Any]], tp: int
) -> None:
    directory, saved = ours
    loaded = ranks.run(2, cases.our_load, directory, tp, jailed=True)
    for rank in range(2):
        assert loaded[rank]["digests"] == saved[0]["digests"]
        assert loaded[rank]["rng"] == {"seed": 100 + rank, "draws": [rank, rank + 1]}
        assert loaded[rank]["iteration"] == 7
        if tp == 2:
            assert loaded[rank]["next"] == saved[rank]["next"]
        else:
            assert loaded[rank]["next"] == pytest.approx(saved[rank]["next"], abs=1e-5)


@pytest.mark.parametrize("tp", [2, 1])
def test_a_load_that_reads_once_gives_the_same_bits(
    ranks: ClusterPool, ours: tuple[str, list[Any]], tp: int
) -> None:
    """TP=2 onto TP=2, and onto TP=1 x DP=2 whose ranks are replicas."""
    directory, _ = ours
    off = ranks.run(2, cases.our_load, directory, tp)
    on = ranks.run(2, cases.our_load, directory, tp, env={"SHARDKEEP_READ_ONCE": "on"}, jailed=True)
    assert on == off


def test_replicas_of_a_megatron_job_read_the_state_once(
    ranks: ClusterPool, ours: tuple[str, list[Any]]
) -> None:
    directory, _ = ours
    off, on = (
        ranks.run(2, cases.in_place_load, directory, 1, env={"SHARDKEEP_READ_ONCE": setting})
        for setting in ("off", "on")
    )
    read = [sum(r["read_bytes"] for r in got) for got in (off, on)]
    assert read[1] <= 0.75 * read[0]  # the optimizer's state is sharded, and read by one rank in either case
    assert [r["received_bytes"] > 0 for r in on] == [True, True]
    assert [r["num_bytes"] for r in on] == [r["num_bytes"] for r in off]


@pytest.mark.parametrize("tp", [2, 1])
def test_unmodified_megatron_loads_ours(ranks: ClusterPool, ours: tuple[str, list[Any]], tp: int) -> None:
    directory, saved = ours
    loaded = ranks.run(2, cases.their_load, directory, tp)
    assert [r["digests"] for r in loaded] == [saved[0]["digests"]] * 2
    assert [r["rng"]["seed"] for r in loaded] == [100, 101]


@pytest.mark.parametrize("tp", [2, 1])
def test_we_load_what_unmodified_megatron_saved(ranks: ClusterPool, tmp_path: Path, tp: int) -> None:
    saved = ranks.run(2, cases.their_save, str(tmp_path / "theirs"), 2)
    loaded = ranks.run(2, cases.our_load, str(tmp_path / "theirs"), tp, jailed=True)
    assert [r["digests"] for r in loaded] == [saved[0]["digests"]] * 2
    assert [r["rng"]["seed"] for r in loaded] == [100, 101]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_unmodified_dcp_reads_every_tensor_bit_exact(ours: tuple[str, list[Any]]) -> None:
    directory, _ = ours
    checkpoint = sk.inspect(directory)
    state = {k: torch.zeros(i.shape, dtype=getattr(torch, i.dtype)) for k, i in checkpoint.tensors.items()}
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    assert len(state) > 20
    for key, tensor in state.items():
        assert torch.equal(tensor, checkpoint.read(key)), key


def test_load_fills_a_sharded_state_in_place(ranks: ClusterPool, ours: tuple[str, list[Any]]) -> None:
    directory, _ = ours
    for rank, got in enumerate(ranks.run(2, cases.in_place_load, directory, 1)):
        assert got["rng"] == {"seed": 100 + rank, "draws": [rank, rank + 1]}
        assert got["iteration"] == 7
        assert got["scheduler"]["num_steps"] == cases.TRAINED_STEPS


@pytest.mark.parametrize("asynchronous", [False, True])
def test_framework_code_runs_unchanged_in_the_jail(
    ranks: ClusterPool, tmp_path: Path, asynchronous: bool
) -> None:
    for result in ranks.run(2, cases.framework_save, str(tmp_path / "iter"), asynchronous, jailed=True):
        assert result["loaded"] == result["saved"]
        assert result["finalized"] == (["True"] if asynchronous else [])


def test_replicas_are_stored_once_and_bytes_balance(ranks: ClusterPool, tmp_path: Path) -> None:
    """TP=1 x DP=2: both ranks hold all weights; each is written once, about half by each rank."""
    ranks.run(2, cases.our_save, str(tmp_path / "dp"), 1)
    checkpoint = sk.inspect(tmp_path / "dp")
    by_rank = {0: 0, 1: 0}
    for name, file in checkpoint.files.items():
        if name.endswith(".distcp"):
            by_rank[int(name.split("_")[2])] += file
    assert max(by_rank.values()) <= 1.1 * min(by_rank.values())
    stored = sum(
        torch.Size(b.shape).numel() * getattr(torch, t.dtype).itemsize
        for k, t in checkpoint.tensors.items()
        for b in checkpoint.boxes(k)
    )
    expected = sum(
        torch.Size(t.shape).numel() * getattr(torch, t.dtype).itemsize for t in checkpoint.tensors.values()
    )
    assert stored == expected


def test_a_rank_without_memory_for_a_copy_waits_for_no_other_rank(ranks: ClusterPool, tmp_path: Path) -> None:
    directory = str(tmp_path / "a")
    saved = ranks.run(
        2, cases.save_async_with_memory_on_rank_0_alone, directory, env={"SHARDKEEP_DEADLINE_S": "10"}
    )
    loaded = ranks.run(2, cases.our_load, directory, 1)
    assert [r["digests"] for r in loaded] == [r["saved"] for r in saved]
