"""Saving as a whole: what comes back, what the report says, what failures leave, the caller's state.

Top-level functions without a `test_` prefix run in the ranks.
"""

from __future__ import annotations

import errno
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardkeep as sk
from fault_cases import Unsynced, small_files, state, strays, whole
from shardkeep import checkpointer
from shardkeep.errors import AlreadyCommitted, SaveFailed, ShardkeepError
from shardkeep.testing.cluster import ClusterPool
from shardkeep.testing.faults import Faults, FaultyStorage, fail_with, kill
from shardkeep.types import Target

__all__ = ["small_files"]

HOST = socket.gethostname()


def nested() -> dict[str, Any]:
    torch.manual_seed(3)
    tied = torch.rand(6, 2)
    return {
        "model": {
            "layers": [{"w": torch.rand(3, 4).bfloat16()}, {"w": torch.rand(4, 3).t()}],
            "tied": [tied, tied.view(3, 4)],
            "p": torch.nn.Parameter(torch.rand(5)),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.rand(2, 2)}}},
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(True),
        "values": {
            "int": 1 << 40,
            "float": 0.1,
            "none": None,
            "text": "\u00fc",
            "bytes": b"\0\xff",
            "flag": True,
        },
        "list": [1, [2, "three"], {"four": 4}],
        "tuple": (1, 2),
    }


def blank(value: Any) -> Any:
    """The same structure with zeros, and None for plain values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {k: blank(v) for k, v in value.items()}
    if isinstance(value, list) and any(isinstance(v, torch.Tensor | dict) for v in value):
        return [blank(v) for v in value]
    return None


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def test_everything_comes_back_as_it_was(tmp_path: Path) -> None:
    what = nested()
    sk.save(what, tmp_path / "a")
    got = blank(what)
    sk.load(got, tmp_path / "a")
    for key in what:
        assert same(got[key], what[key]), key


@pytest.mark.parametrize(
    "config",
    [
        sk.Config(io_threads=1, staging_bytes=8192, chunk_bytes=100),
        sk.Config(io_threads=5, split_bytes=64, durable=False),
        sk.Config(checksum="none"),
    ],
    ids=["small chunks", "many files", "no checksums"],
)
def test_settings_change_how_and_not_what(
    tmp_path: Path, config: sk.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardkeep.layout._SMALL_FILE_BYTES", 200)
    monkeypatch.setattr("shardkeep.layout._CUTS_PER_FILE", 50)
    what = nested()
    report = sk.save(what, tmp_path / "a", config=config)
    got = blank(what)
    sk.load(got, tmp_path / "a")
    assert same(got, what)
    assert sk.verify(tmp_path / "a").ok
    files = len(list((tmp_path / "a").glob("*.distcp")))
    assert files == config.num_threads if config.io_threads else files >= 1
    assert report.num_items >= len(list(checkpointer.take_apart(what).shards))


def test_the_report_is_what_the_manifest_says(tmp_path: Path) -> None:
    report = sk.save(state(1), tmp_path / "a")
    manifest = json.loads((tmp_path / "a" / "shardkeep.json").read_bytes())
    assert report.attempt == manifest["attempt"]
    assert report.manifest_digest == manifest["digest"]
    assert report.path == str(tmp_path / "a")
    assert (report.num_bytes, report.num_items, report.num_files) == (
        *(manifest["totals"][k] for k in ("num_bytes", "num_items", "num_files")),
    )
    tensor_bytes = 600 * 4 + 300 * 8
    assert tensor_bytes < report.num_bytes < tensor_bytes + 4000  # and two small values
    assert set(report.seconds) == {"capture", "plan", "stage", "write", "commit"}
    assert report.stall_s == pytest.approx(sum(report.seconds.values()))
    assert manifest["layout"] == {"world_size": 1}
    assert manifest["versions"]["torch"] == torch.__version__


def test_the_directory_holds_nothing_but_the_checkpoint(tmp_path: Path) -> None:
    sk.save(state(1), tmp_path / "new" / "deep" / "a")
    assert strays(tmp_path / "new" / "deep" / "a") == set()
    sk.save(state(2), tmp_path / "new" / "deep" / "a", overwrite=True)
    assert strays(tmp_path / "new" / "deep" / "a") == set()
    assert whole(tmp_path / "new" / "deep" / "a") == 2


def test_paths_may_be_text_and_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sk.save(state(4), "a/b")
    monkeypatch.chdir(tmp_path / "a")
    assert sk.is_committed("b") and sk.is_committed(str(tmp_path / "a" / "b"))
    assert whole(tmp_path / "a" / "b") == 4


def test_an_empty_state_is_a_checkpoint_too(tmp_path: Path) -> None:
    report = sk.save({}, tmp_path / "a")
    assert (report.num_items, report.num_bytes) == (0, 0)
    assert sk.is_committed(tmp_path / "a") and sk.verify(tmp_path / "a").ok
    sk.load({}, tmp_path / "a")


def test_the_caller_s_state_is_left_as_it_was(tmp_path: Path) -> None:
    """Also its storages can be released afterwards, as offloading does."""
    what = nested()
    tensors = [what["model"]["layers"][1]["w"], what["model"]["p"], what["model"]["tied"][0], what["empty"]]
    before = [(t.data_ptr(), t.stride(), t.requires_grad, t.detach().clone()) for t in tensors]
    sk.save(what, tmp_path / "a")
    sk.save_async(what, tmp_path / "b").wait(60)
    for tensor, (pointer, stride, requires_grad, values) in zip(tensors, before, strict=True):
        assert (tensor.data_ptr(), tensor.stride(), tensor.requires_grad) == (pointer, stride, requires_grad)
        assert torch.equal(tensor, values)
        tensor.untyped_storage().resize_(0)


def test_a_save_after_the_memory_has_moved_holds_the_new_values(tmp_path: Path) -> None:
    """Frameworks offload between saves; whatever was cached of the first must not be the second's."""
    what = {"w": torch.full((1000,), 1.0)}
    sk.save(what, tmp_path / "a", overwrite=True)
    for value in (2.0, 3.0):
        storage = what["w"].untyped_storage()
        storage.resize_(0)
        other = torch.rand(1000)  # where the tensor was
        storage.resize_(4000)
        what["w"].fill_(value)
        sk.save(what, tmp_path / "a", overwrite=True)
        got = {"w": torch.zeros(1000)}
        sk.load(got, tmp_path / "a")
        assert torch.equal(got["w"], torch.full((1000,), value)), other[0]


def test_no_thread_of_a_save_stays(tmp_path: Path) -> None:
    sk.save(nested(), tmp_path / "a")
    assert not [t.name for t in threading.enumerate() if t.name == "shardkeep-write"]


MEMORY = """
import resource, sys, torch
import shardkeep as sk

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

config = sk.Config(staging_bytes=16 << 20, io_threads=2, durable=False)
what = {f"w{n}": torch.rand(2048, 4096).t() for n in range(8)}  # 256 MiB, none of which is in order
sk.save({"w": torch.rand(100)}, sys.argv[1] + "/small", config=config)
before = peak()
sk.save(what, sys.argv[1] + "/a", config=config)
print(peak() - before)
"""


def test_a_save_takes_no_more_memory_than_its_staging(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True, timeout=100
    )
    assert float(done.stdout) <= 16 + 64


# -- several ranks


def placed(value: float, placements: list[Any]) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(900.0).view(90, 10) + value, mesh, placements)


def sharded_state(value: float) -> dict[str, Any]:
    """Sharded unevenly, replicated as DTensor and as plain tensor, and a value; 3,600 bytes a tensor."""
    return {
        "sharded": placed(value, [Shard(0)]),
        "replicated": [placed(value + n, [Replicate()]) for n in range(4)],
        "plain": torch.full((30, 30), value),
        "step": int(value),
    }


def save_sharded(directory: str, value: float) -> tuple[dict[str, int], sk.SaveReport]:
    report = sk.save(sharded_state(value), directory, overwrite=True)
    dist.barrier()
    return {p.name: p.stat().st_size for p in Path(directory).glob("*.distcp")}, report


def loaded_sharded(directory: Path) -> float:
    """The value of a whole and consistent checkpoint, read by one process."""
    got = {
        "sharded": torch.zeros(90, 10),
        "replicated": [torch.zeros(90, 10) for _ in range(4)],
        "plain": torch.zeros(30, 30),
        "step": None,
    }
    sk.load(got, directory)
    value = float(got["step"])  # type: ignore[arg-type]
    expected = torch.arange(900.0).view(90, 10) + value
    assert torch.equal(got["sharded"], expected)  # type: ignore[arg-type]
    assert all(torch.equal(t, expected + n) for n, t in enumerate(got["replicated"]))  # type: ignore[arg-type]
    assert torch.equal(got["plain"], torch.full((30, 30), value))  # type: ignore[arg-type]
    return value


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_write_each_byte_once_and_evenly(ranks: ClusterPool, tmp_path: Path, world_size: int) -> None:
    got = ranks.run(world_size, save_sharded, str(tmp_path), 5.0)
    files, report = got[0]
    assert loaded_sharded(tmp_path) == 5.0
    assert 6 * 3600 < report.num_bytes < 6 * 3600 + 2000
    assert len({r.attempt for _, r in got}) == len({r.manifest_digest for _, r in got}) == 1
    written = [sum(s for n, s in files.items() if n.startswith(f"__{r}_")) for r in range(world_size)]
    assert sum(written) < 6 * 3600 + 20_000  # no replica twice; frames take the rest
    assert max(written) - min(written) <= 2 * 3600 + 4000
    manifest = json.loads((tmp_path / "shardkeep.json").read_bytes())
    assert manifest["layout"] == {"world_size": world_size}
    assert strays(tmp_path) == set()


def fail_on(directory: str, culprit: int, kind: str, at: int, code: int | None) -> tuple[str, str, str]:
    """A save in which one rank's storage fails, or without a code kills it, at an operation."""
    storage: Any = Unsynced(directory)
    if dist.get_rank() == culprit:
        strike = kill if code is None else fail_with(code)
        storage = FaultyStorage(storage, Faults(at=at, strike=strike, kinds=frozenset({kind})))
    config = sk.Config(io_threads=2, chunk_bytes=1024, deadline_s=10.0 if code is None else 60.0)
    try:
        checkpointer.save_to(sharded_state(2.0), Target(storage=storage, overwrite=True), config)
        return "", "", ""
    except ShardkeepError as e:
        error = e
    return type(error).__name__, str(error), type(error.__cause__).__name__


@pytest.mark.parametrize(
    ("culprit", "kind", "at"),
    [(0, "create", 0), (1, "append", 0), (1, "close", 0), (2, "sync", 0), (0, "put", 1), (0, "put", 3)],
)
def test_a_storage_error_on_one_rank_fails_the_save_on_all(
    ranks: ClusterPool, tmp_path: Path, culprit: int, kind: str, at: int
) -> None:
    ranks.run(3, save_sharded, str(tmp_path), 1.0)
    before = {p.name for p in tmp_path.iterdir()}
    got = ranks.run(3, fail_on, str(tmp_path), culprit, kind, at, errno.ENOSPC)
    assert [g[0] for g in got] == ["SaveFailed"] * 3
    assert len({g[1] for g in got}) == 1
    assert f"No space left on device: '{kind} " in got[0][1]
    assert f"(rank {culprit}, host '{HOST}')" in got[0][1]
    assert got[culprit][2] == "OSError"
    assert loaded_sharded(tmp_path) == 1.0
    assert {p.name for p in tmp_path.iterdir()} == before
    ranks.run(3, save_sharded, str(tmp_path), 3.0)
    assert loaded_sharded(tmp_path) == 3.0


@pytest.mark.parametrize(("culprit", "kind", "at"), [(1, "append", 0), (0, "put", 3)])
def test_a_rank_killed_in_a_save_fails_it_on_the_others(
    ranks: ClusterPool, tmp_path: Path, culprit: int, kind: str, at: int
) -> None:
    ranks.run(2, save_sharded, str(tmp_path), 1.0)
    outcomes = ranks.outcomes(2, fail_on, str(tmp_path), culprit, kind, at, None, timeout_s=60)
    assert outcomes[culprit].exit_code == -signal.SIGKILL
    name, text, _ = outcomes[1 - culprit].value
    assert name == "SaveFailed"
    assert f"rank {culprit} ({HOST}, pid {outcomes[culprit].pid})" in text
    assert loaded_sharded(tmp_path) == 1.0
    ranks.run(2, save_sharded, str(tmp_path), 3.0)
    assert loaded_sharded(tmp_path) == 3.0
    assert strays(tmp_path) == set()


def release_on(directory: str, culprit: int) -> tuple[str, str, bool]:
    what = sharded_state(1.0)
    if dist.get_rank() == culprit:
        what["sharded"].to_local().untyped_storage().resize_(0)
    try:
        sk.save(what, directory)
    except ShardkeepError as e:
        dist.barrier()
        return type(e).__name__, str(e), Path(directory).exists()
    return "", "", True


@pytest.mark.parametrize("culprit", [0, 1])
def test_released_memory_on_one_rank_is_raised_on_all_and_nothing_is_written(
    ranks: ClusterPool, tmp_path: Path, culprit: int
) -> None:
    got = ranks.run(2, release_on, str(tmp_path / "a"), culprit)
    assert [g[0] for g in got] == ["StorageReleased"] * 2
    for _, text, exists in got:
        assert f"rank {culprit}" in text and "'sharded'" in text and "got 0 bytes" in text
        assert not exists


def refuse_existing(directory: str) -> str:
    try:
        sk.save(sharded_state(2.0), directory)
    except AlreadyCommitted as e:
        return str(e)
    return ""


def test_an_existing_checkpoint_is_refused_on_all_ranks(ranks: ClusterPool, tmp_path: Path) -> None:
    ranks.run(2, save_sharded, str(tmp_path), 1.0)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    first, second = ranks.run(2, refuse_existing, str(tmp_path))
    assert first == second
    assert "holds a committed checkpoint" in first and "overwrite=True" in first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


def save_async_sharded(directory: str) -> list[Any]:
    what = sharded_state(1.0)
    handle = sk.save_async(what, directory, overwrite=True)
    what["sharded"].to_local().zero_()
    what["plain"].zero_()
    first = handle.wait(60).attempt
    dist.barrier()
    handles = [sk.save_async(sharded_state(v), directory, overwrite=True) for v in (2.0, 3.0, 4.0)]
    reports = [h.wait(60) for h in handles]
    return [first, *(r.attempt for r in reports)]


def test_saves_in_the_background_commit_in_order_on_all_ranks(ranks: ClusterPool, tmp_path: Path) -> None:
    """Even to one directory, begun before the last was through."""
    first, second = ranks.run(2, save_async_sharded, str(tmp_path))
    assert first == second
    assert len(set(first)) == 4
    assert loaded_sharded(tmp_path) == 4.0
    assert strays(tmp_path) == set()


def test_a_save_to_a_file_s_place_fails_and_leaves_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(
            (SaveFailed, sk.errors.InputError), match=r"FileExists|NotADirectory|not a directory"
        ):
            sk.save(state(1), path)
    assert (tmp_path / "a").read_bytes() == b"mine"
