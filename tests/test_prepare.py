"""What a first save has to do once is done ahead, within the memory that there is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkeep as sk
from shardkeep import budget, freeze
from shardkeep.arena import Arena
from shardkeep.budget import Free
from shardkeep.testing.cluster import ClusterPool


def state() -> dict[str, Any]:
    return {"w": torch.rand(500, 1000), "b": torch.rand(1000), "step": 3}


def test_the_first_snapshot_allocates_nothing_after_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocations: list[int]
) -> None:
    monkeypatch.setattr("shardkeep.freeze.arena", Arena())
    monkeypatch.setattr("shardkeep.stage._rings", {})
    what = state()
    sk.prepare(what)
    assert sum(n for n in allocations if n == 2_004_480) == 2_004_480  # 2,000,000 + 4,000, padded to 512 each
    before = len(allocations)
    report = sk.save_async(what, tmp_path / "a").wait()
    assert len(allocations) == before
    assert report.seconds["pin"] < report.stall_s  # told apart from the copy, since the first one is slow
    assert sk.is_committed(tmp_path / "a")


def test_prepare_for_lazy_saves_takes_memory_only_for_what_is_copied(
    monkeypatch: pytest.MonkeyPatch, allocations: list[int]
) -> None:
    monkeypatch.setattr("shardkeep.freeze.arena", Arena())
    what = state()
    optimizer = torch.optim.SGD([what["w"].requires_grad_()])
    registration = sk.register_optimizer(optimizer)
    sk.prepare(what, capture="lazy")
    registration.remove()
    assert 4096 in allocations and all(n < 2_000_000 for n in allocations if n != 64 << 20)


def test_a_snapshot_beyond_the_share_of_the_node_streams_and_names_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shardkeep.freeze.arena", Arena())
    limit = Free(num_bytes=2_400_000, limited_by="the container's memory.max of 2 MiB")
    monkeypatch.setattr(budget, "free_bytes", lambda: limit)
    what = state()
    with caplog.at_level(logging.WARNING, "shardkeep"):
        handle = sk.save_async(what, tmp_path / "a")
    handle.wait_captured(0)
    kept = what["w"].clone()
    what["w"].zero_()
    handle.wait(60)
    found = {"w": torch.zeros(500, 1000), "b": torch.zeros(1000), "step": 0}
    sk.load(found, tmp_path / "a")
    assert torch.equal(found["w"], kept)
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "needs 2 MiB, this rank's share of what is free is 2 MiB (the container's memory.max" in warning


def shared_out(directory: str, free_mib: int) -> dict[str, Any]:
    """On each of the ranks of one node: how the save was taken, and what it may take."""
    budget.free_bytes = lambda: Free(num_bytes=free_mib << 20, limited_by="a test")  # type: ignore[assignment]
    seen = []
    make_room = freeze.make_room

    def observed(captured: Any, chosen: Any, mode: Any, limit: Free) -> Any:
        seen.append(limit.num_bytes)
        return make_room(captured, chosen, mode, limit)

    from shardkeep import checkpointer

    checkpointer.make_room = observed  # type: ignore[attr-defined]
    try:
        rank = torch.distributed.get_rank()
        what = {f"w{rank}": torch.rand(1 << 20)}  # 4 MiB that no other rank holds
        handle = sk.save_async({**what, "shared": torch.zeros(4)}, directory)
        report = handle.wait(60)
        return {"limit": seen[0], "bytes": report.num_bytes}
    finally:
        checkpointer.make_room = make_room  # type: ignore[attr-defined]


@pytest.mark.parametrize("free_mib", [1000, 8])
def test_ranks_of_one_node_share_its_memory(ranks: ClusterPool, tmp_path: Path, free_mib: int) -> None:
    results = ranks.run(2, shared_out, str(tmp_path / "a"), free_mib)
    assert [r["limit"] for r in results] == [int((free_mib << 20) * budget.SHARE_OF_FREE) // 2] * 2
    assert sk.verify(tmp_path / "a").ok
    assert results[0]["bytes"] == 2 * (4 << 20) + 16
