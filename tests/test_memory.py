"""Memory, measured: what saves and loads take is bounded and comes back, and nothing of the state is held.

What is measured is anonymous memory, sampled in processes of their own, so that neither other tests nor the
page cache count. Bounds are far from what is seen, except the promised one of ring + 64 MiB.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef

import shardkeep as sk
from shardkeep import checkpointer
from shardkeep.config import resolve
from shardkeep.errors import Corrupt, LoadFailed, SaveFailed
from shardkeep.loading import Loading
from shardkeep.memory import host_bytes
from shardkeep.restore import template
from shardkeep.storage import Writer
from shardkeep.storage.local import LocalStorage
from shardkeep.testing.cluster import ClusterPool
from shardkeep.types import Target

MIB = 1 << 20
TESTS = Path(__file__).resolve().parent
SOURCES = Path(sk.__file__).parents[1]


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most anonymous memory that the block takes beyond what there was, in MiB, as the list's item."""
    before, most, end = anonymous_bytes(), [0], threading.Event()

    def sample() -> None:
        while not end.wait(0.001):
            most[0] = max(most[0], anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield most
    finally:
        end.set()
        thread.join()
        most[0] = (max(most[0], anonymous_bytes()) - before) // MIB


def measured(name: str, *args: str) -> Any:
    """What a function of this module returns in a fresh process."""
    code = f"import json, sys, test_memory; print(json.dumps(test_memory.{name}(*sys.argv[1:])))"
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{SOURCES}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# -- bounds

RING = sk.Config(staging_bytes=32 * MIB, io_threads=2, durable=False)


def out_of_order(num_bytes: int) -> dict[str, Any]:
    """Tensors of 32 MiB of which no element lies where it is written: every byte goes through the ring."""
    return {f"w{n}": torch.rand(2048, 4096).t() for n in range(num_bytes // (32 * MIB))}


def peaks_of(directory: str) -> dict[str, int]:
    small = {"w": torch.rand(64, 64).t()}
    sk.save(small, f"{directory}/small", config=RING)  # imports and threads
    sk.load(small, f"{directory}/small", config=RING)
    found = {}
    state = out_of_order(320 * MIB)
    with peak() as most:
        sk.save(state, f"{directory}/a", config=RING)
    found["save"] = most[0]
    kept = {key: tensor.sum().item() for key, tensor in state.items()}
    for tensor in state.values():
        tensor.zero_()
    with peak() as most:
        sk.load(state, f"{directory}/a", config=RING)
    found["load"] = most[0]
    assert {key: tensor.sum().item() for key, tensor in state.items()} == kept
    in_order = {key: tensor.t() for key, tensor in state.items()}
    with peak() as most:
        sk.save(in_order, f"{directory}/b", config=RING)
    found["save in order"] = most[0]
    return found


def test_a_save_and_a_load_take_their_ring_and_little_more(tmp_path: Path) -> None:
    """Of a state ten times as large as the ring. Tensors that lie in order do not even take the ring."""
    found = measured("peaks_of", str(tmp_path))
    assert found["save"] <= 32 + 64
    assert found["load"] <= 32 + 64
    assert found["save in order"] <= 16
    assert found["save"] >= 16  # the ring was in use, so the measuring works


def growth(directory: str) -> dict[str, list[int]]:
    """Anonymous memory in MiB after each of 50 saves of the same state, then of 50 snapshots and 50 lazy
    saves, which read the matrices where they are.
    """
    config = sk.Config(staging_bytes=4 * MIB, io_threads=2, durable=False)
    state = {f"layer{n}": {"w": torch.rand(64, 257).t(), "b": torch.rand(257), "n": n} for n in range(100)}
    optimizer = torch.optim.SGD([layer["w"] for layer in state.values()])
    sk.register_optimizer(optimizer)
    after: dict[str, list[int]] = {"save": [], "snapshot": [], "lazy": []}
    for _ in range(50):
        sk.save(state, directory, overwrite=True, config=config)
        after["save"].append(anonymous_bytes() // MIB)
    for capture in ("snapshot", "lazy"):
        for _ in range(50):
            sk.save_async(state, directory, capture=capture, overwrite=True, config=config).wait()
            after[capture].append(anonymous_bytes() // MIB)
    return after


def test_memory_is_flat_over_50_saves(tmp_path: Path) -> None:
    """7 MiB of state: a copy left behind by each save would be 340."""
    for after in measured("growth", str(tmp_path)).values():
        assert after[-1] - after[1] <= 6, after


def sizes_of_snapshots(directory: str) -> list[int]:
    """Anonymous memory in MiB after snapshots of 1, 100 and 130 MiB, the states gone."""
    found = []
    for num_mib in (1, 100, 130):
        sk.save_async({"w": torch.ones(num_mib * MIB // 4)}, directory, overwrite=True, config=RING).wait()
        found.append(anonymous_bytes() // MIB)
    return found


def test_a_shadow_that_has_become_too_small_goes_back_to_the_system(tmp_path: Path) -> None:
    """After the snapshot of 130 MiB the arena holds that and not the 100 of the one before."""
    first, middle, last = measured("sizes_of_snapshots", str(tmp_path))
    assert 100 - 16 <= middle - first <= 100 + 16
    assert 30 - 16 <= last - middle <= 30 + 16


def rank_s_peak(directory: str) -> int:
    """The most that a save takes on this rank, in MiB; its part of the state is 48 MiB."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.full((4096, 3072), float(dist.get_rank())).t()
    state = {"w": DTensor.from_local(local, mesh, [Shard(0)]), "step": 1}
    config = sk.Config(staging_bytes=8 * MIB, io_threads=1, durable=False)
    sk.save({"step": 0}, directory, overwrite=True, config=config)
    with peak() as most:
        sk.save(state, directory, overwrite=True, config=config)
    return most[0]


def test_no_rank_holds_what_others_write(ranks: ClusterPool, tmp_path: Path) -> None:
    """Four ranks, 192 MiB in all: rank 0, which commits, takes no more than the others."""
    most = ranks.run(4, rank_s_peak, str(tmp_path))
    assert max(most) <= 8 + 32, most
    assert most[0] <= max(most[1:]) + 16, most


# -- references


class Watched:
    """A state whose tensors and memory can be seen to be gone, without the help of the garbage collector."""

    def __init__(self) -> None:
        base = torch.rand(400, 300)
        self.state: dict[str, Any] = {
            "order": torch.rand(1000),
            "view": base.t()[5:],
            "nested": [{"p": torch.nn.Parameter(torch.rand(30, 20))}, torch.rand(50).bfloat16()],
            "scalar": torch.tensor(2.0),
            "step": 3,
        }
        tensors = [self.state["order"], self.state["view"], base, self.state["scalar"]]
        tensors += [self.state["nested"][0]["p"], self.state["nested"][1]]
        self._tensors = [weakref.ref(t) for t in tensors]
        self._storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]

    def alive(self) -> int:
        """How many tensors and storages are left once the state itself is gone."""
        self.state.clear()
        alive = sum(r() is not None for r in self._tensors)
        return alive + sum(not s.expired() for s in self._storages)


class Gated(LocalStorage):
    """Files that can be created once the gate is open, or then not."""

    def __init__(self, url: str, *, full: bool = False) -> None:
        super().__init__(url)
        self.gate, self.full = threading.Event(), full

    def create(self, name: str) -> Writer:
        assert self.gate.wait(60)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(name)


def saved(directory: Path) -> int:
    watched = Watched()
    report = sk.save(watched.state, directory)
    assert report.num_items == 6
    return watched.alive()


def snapshot(directory: Path) -> int:
    watched = Watched()
    handle = sk.save_async(watched.state, directory)
    handle.wait()
    alive = watched.alive()
    assert handle.done()  # the handle is still held
    return alive


def captured(directory: Path) -> int:
    """The write has not begun when the state goes."""
    watched, storage = Watched(), Gated(str(directory))
    expected = watched.state["order"].clone()
    handle = checkpointer.save_to_async(watched.state, Target(storage=storage))
    handle.wait_captured()
    alive = watched.alive()
    storage.gate.set()
    handle.wait(60)
    stored = sk.inspect(directory).read("order")
    assert isinstance(stored, torch.Tensor) and torch.equal(stored, expected)
    return alive


def failed(directory: Path) -> int:
    watched, storage = Watched(), Gated(str(directory), full=True)
    storage.gate.set()
    try:
        checkpointer.save_to(watched.state, Target(storage=storage))
    except SaveFailed:
        pass  # and with it, what its traceback holds is gone
    else:
        raise AssertionError("the save did not fail")
    return watched.alive()


def failed_in_the_background(directory: Path) -> int:
    """The handle, and with it the error, is still held."""
    watched, storage = Watched(), Gated(str(directory), full=True)
    handle = checkpointer.save_to_async(watched.state, Target(storage=storage))
    storage.gate.set()
    with pytest.raises(SaveFailed):
        handle.wait(60)
    alive = watched.alive()
    assert handle.ended()
    return alive


def refused(directory: Path) -> int:
    watched = Watched()
    watched.state["sparse"] = torch.eye(2).to_sparse()
    try:
        sk.save(watched.state, directory)
    except ValueError:
        pass  # and with it, what its traceback holds is gone
    else:
        raise AssertionError("the state was not refused")
    return watched.alive()


def loaded(directory: Path) -> int:
    sk.save(Watched().state, directory)
    watched = Watched()
    report = sk.load(watched.state, directory)
    assert report.num_bytes > 400 * 295 * 4
    return watched.alive()


def load_failed(directory: Path) -> int:
    """In the middle of the largest tensor, when others may be filled already."""
    state = Watched().state
    sk.save(state, directory)
    tensor = state["view"].contiguous()
    data = max(directory.glob("*.distcp"), key=lambda f: f.stat().st_size)
    content = bytearray(data.read_bytes())
    content[content.index(bytes(host_bytes(tensor))) + tensor.nbytes // 2] ^= 1
    data.write_bytes(content)
    watched = Watched()
    try:
        sk.load(watched.state, directory, config=sk.Config(chunk_bytes=4096))
    except Corrupt:
        pass  # and with it, what its traceback holds is gone
    else:
        raise AssertionError("the load did not fail")
    return watched.alive()


class Losing(LocalStorage):
    """The data cannot be read."""

    def open(self, name: str) -> Any:
        if name.endswith(".distcp"):
            raise OSError(errno.EIO, "Input/output error")
        return super().open(name)


def unreadable(directory: Path) -> int:
    sk.save(Watched().state, directory)
    watched = Watched()
    del watched.state["step"]  # it would be read before any tensor
    try:
        checkpointer.load_one(
            Loading(
                Losing(str(directory)),
                resolve(None),
                lambda: template(watched.state),
                checkpointer.strict_rule(False),
            )
        )
    except LoadFailed:
        pass
    else:
        raise AssertionError("the load did not fail")
    return watched.alive()


CASES = [
    *(saved, snapshot, captured, failed, failed_in_the_background, refused),
    *(loaded, load_failed, unreadable),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_nothing_of_the_state_is_held(tmp_path: Path, case: Callable[[Path], int]) -> None:
    """After a save or load has ended, well or badly, and of a snapshot once it is taken."""
    assert case(tmp_path / "a") == 0


@pytest.mark.megatron
def test_nothing_of_a_sharded_state_dict_is_held(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    for use in (sk.megatron.save, sk.megatron.load):
        data = torch.rand(40, 30).t()
        gone = weakref.ref(data), StorageWeakRef(data.untyped_storage())
        result = use({"w": ShardedTensor.from_rank_offsets("w", data)}, str(tmp_path / "a"))
        assert use is sk.megatron.save or result["w"] is data
        del data, result
        assert gone[0]() is None and gone[1].expired()
