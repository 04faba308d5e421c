"""Loads that read each byte once for several ranks: who reads what, what arrives, what a failure does to all.

Top-level functions without a `test_` prefix run in the ranks.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardkeep as sk
from craft import CHUNK, craft, flip
from shardkeep import checkpointer, stage
from shardkeep.connect import Inbox, Outbox, PeerGone
from shardkeep.errors import LoadFailed, ShardkeepError
from shardkeep.loading import Loading
from shardkeep.once import OWN, Numbers, assign, pack, unpack
from shardkeep.restore import template
from shardkeep.storage import Reader, Storage, mount, storage_for
from shardkeep.testing.cluster import ClusterPool
from shardkeep.testing.slow import Link, SlowStorage

HOST = socket.gethostname()
SLACK_S = 20.0  # this machine may be busy; a wait without an end takes minutes
ON = {"io_threads": 2, "chunk_bytes": 4096, "staging_bytes": 1 << 18, "read_once": "on"}


# --- who reads what ---


def table(*rows: tuple[int, int, int]) -> Numbers:
    return np.array(rows, np.int64).reshape(len(rows), 3)


@st.composite
def needs(draw: st.DrawFn) -> list[Numbers]:
    """Up to 9 ranks in a few layouts; the reads of a rank may overlap, as strided ones do at their ends."""
    read = st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 6))
    layouts = draw(st.lists(st.lists(read, max_size=12), min_size=1, max_size=4))
    chosen = draw(st.lists(st.integers(0, len(layouts) - 1), min_size=1, max_size=9))
    return [table(*((f, at, at + n) for f, at, n in layouts[c])) for c in chosen]


@given(needs(), st.integers(1, 12), st.integers(2, 9))
@settings(max_examples=300)
def test_every_read_comes_from_one_reader_that_needs_it(
    needs: list[Numbers], room: int, group_ranks: int
) -> None:
    shares = assign(needs, room, group_ranks)
    given_to: dict[tuple[int, int], int] = {}
    for reader, share in enumerate(shares):
        parts = iter(share.parts.tolist())
        for file, start, end, count in share.reads.tolist():
            mine = [next(parts) for _ in range(count)]
            ranks = {p[0] for p in mine}
            assert 2 <= len(ranks) <= group_ranks and reader in ranks
            longest = max(p[3] - p[2] for p in mine)
            assert end - start <= max(room, longest)
            for rank, number, low, high in mine:
                assert needs[rank][number].tolist() == [file, low, high]
                assert start <= low < high <= end
                assert (rank, number) not in given_to
                given_to[rank, number] = reader
        assert next(parts, None) is None
    for rank, share in enumerate(shares):
        expected = [given_to.get((rank, n), OWN) for n in range(len(needs[rank]))]
        assert share.sources.tolist() == expected


def test_replicas_read_equal_parts_and_each_byte_once() -> None:
    need = table(*((0, n * 4, n * 4 + 4) for n in range(64)))
    shares = assign([need] * 8, 4)
    read = [int((s.reads[:, 2] - s.reads[:, 1]).sum()) for s in shares]
    assert read == [32] * 8
    assert all((s.sources != OWN).all() for s in shares)


def test_ranks_that_read_much_alone_read_less_for_others() -> None:
    common = [(0, n, n + 1) for n in range(30)]
    alone = [(1, 0, 20)]
    shares = assign([table(*common, *alone), table(*common), table(*common)], 4)
    assert [len(s.reads) for s in shares] == [0, 15, 15]
    assert shares[0].sources[-1] == OWN


def test_a_byte_is_read_once_per_run_of_ranks_when_there_are_very_many() -> None:
    shares = assign([table((0, 0, 8))] * 1000, 8)
    readers = [r for r, s in enumerate(shares) if len(s.reads)]
    assert len(readers) == 16
    assert max(len(s.parts) for s in shares) <= 64
    for rank, share in enumerate(shares):
        assert abs(int(share.sources[0]) - rank) < 64


def test_overlapping_reads_of_different_layouts_become_one_where_they_fit() -> None:
    first, second = table((0, 0, 6)), table((0, 2, 9))
    (read,) = [s.reads.tolist() for s in assign([first, second], 9) if len(s.reads)]
    assert read == [[0, 0, 9, 2]]
    assert not any(len(s.reads) for s in assign([first, second], 8))


def test_many_ranks_are_planned_quickly() -> None:
    """1,024 ranks, 8 layouts of 4,000 reads: replicas cost nothing, and the messages are small."""
    size = 4 << 20
    layouts = [table(*((c, n * size, (n + 1) * size) for n in range(4000))) for c in range(8)]
    began = time.process_time()
    shares = assign([layouts[r % 8] for r in range(1024)], size)
    assert time.process_time() - began < 20
    loads = [int((s.reads[:, 2] - s.reads[:, 1]).sum()) for s in shares]
    assert max(loads) - min(loads) <= size
    assert sum(loads) == 8 * 4000 * size * 2  # 128 replicas of each layout are two runs of 64
    assert len(pack(layouts[0])[-1]) < 2000


@given(st.lists(st.tuples(*[st.integers(-(1 << 60), 1 << 60)] * 3), max_size=20))
def test_numbers_survive_the_wire(rows: list[tuple[int, int, int]]) -> None:
    assert unpack(pack(table(*rows))).tolist() == [list(r) for r in rows]
    flat = np.array([r[0] for r in rows], np.int64)
    assert unpack(pack(flat)).tolist() == flat.tolist()


# --- where it is on by itself ---


@pytest.mark.parametrize(
    ("mounted", "shared"),
    [
        ("nfs4 server:/x rw", True),
        ("lustre mgs@tcp:/fs rw", True),
        ("fuse.s3fs s3fs rw", True),
        ("fuseblk /dev/sdb1 rw", False),
        ("ext4 /dev/vda rw", False),
        ("tmpfs tmpfs rw", False),
    ],
)
def test_the_mount_table_tells_network_file_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mounted: str, shared: bool
) -> None:
    table = f"22 27 0:21 / /proc rw - proc proc rw\n36 35 98:0 /a /my\\040x rw,noatime master:1 - {mounted}\n"
    found = mount.type_in(table, "98:0")
    assert found == mounted.split(maxsplit=1)[0]
    monkeypatch.setattr(mount, "file_system", lambda path: found)
    assert storage_for(tmp_path).is_shared == shared


def test_a_path_that_does_not_exist_yet_is_where_its_parent_is(tmp_path: Path) -> None:
    assert mount.file_system(str(tmp_path / "a" / "b")) == mount.file_system(str(tmp_path)) != ""
    assert mount.file_system("/proc/self") == "proc"


def test_a_wrong_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="read_once must be 'auto', 'on' or 'off', got 'yes'"):
        sk.Config(read_once="yes")


# --- what arrives ---


def load_from(storage: Storage, state: Any, **settings: Any) -> sk.LoadReport:
    config = sk.Config(**(ON | settings))
    return checkpointer.load_one(
        Loading(storage, config, lambda: template(state), checkpointer.strict_rule(True), exact_common=True)
    )


def free_link(directory: str) -> Link:
    return Link(path=f"{directory}.link", bytes_per_s=1e15)


def counted_load(directory: str, state: Any, **settings: Any) -> tuple[sk.LoadReport, int]:
    """The report, and all bytes that this rank has read."""
    storage = SlowStorage(storage_for(directory), free_link(directory))
    return load_from(storage, state, **settings), storage.read_bytes


def plain_state(fill: bool) -> dict[str, Any]:
    """1 MB in tensors of all kinds of places: direct, strided, sliced, small, and plain values."""
    generator = torch.Generator().manual_seed(5)
    made: dict[str, Any] = {"w": torch.randn(300, 500, generator=generator)}
    made["turned"] = torch.randn(200, 300, generator=generator).t()
    made["sliced"] = torch.randn(100, 100, generator=generator)[:, ::2]
    made["small"] = [torch.randn(7, generator=generator) for _ in range(40)]
    made["values"] = {"step": 7, "text": "x" * 9000, "tensor": [1, 2.5, None]}
    if not fill:
        for tensor in (made["w"], made["turned"], made["sliced"], *made["small"]):
            tensor.zero_()
        made["values"] = {"step": 0, "text": "", "tensor": None}
    return made


def same(got: dict[str, Any], expected: dict[str, Any]) -> bool:
    return (
        all(torch.equal(got[k], expected[k]) for k in ("w", "turned", "sliced"))
        and all(torch.equal(a, b) for a, b in zip(got["small"], expected["small"], strict=True))
        and got["values"] == expected["values"]
    )


def load_plain(directory: str, read_once: str) -> tuple[bool, int, int, int]:
    got = plain_state(False)
    report, read_bytes = counted_load(directory, got, read_once=read_once)
    return same(got, plain_state(True)), read_bytes, report.read_bytes, report.received_bytes


@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_get_everything_and_the_storage_gives_it_once(
    ranks: ClusterPool, tmp_path: Path, world_size: int
) -> None:
    directory = str(tmp_path / "a")
    sk.save(plain_state(True), directory, config=sk.Config(chunk_bytes=4096, io_threads=2))
    stored = sum(p.stat().st_size for p in Path(directory).iterdir())
    data = sum(p.stat().st_size for p in Path(directory).glob("*.distcp"))
    got = ranks.run(world_size, load_plain, directory, "auto")  # the storage counts as shared
    assert all(g[0] for g in got)
    assert sum(g[1] for g in got) <= 1.1 * stored  # index, metadata and values included
    read = [g[2] for g in got]
    assert 0.9 * data <= sum(read) <= 1.02 * data
    assert max(read) <= 1.3 * data / world_size
    assert all(0.98 * data <= r + g[3] <= 1.02 * data for r, g in zip(read, got, strict=True))
    off = ranks.run(world_size, load_plain, directory, "off")
    assert all(g[0] and g[3] == 0 for g in off)
    assert sum(g[1] for g in off) >= 0.95 * world_size * stored


def load_local(directory: str) -> int:
    got = plain_state(False)
    report = sk.load(got, directory)
    assert same(got, plain_state(True))
    return report.received_bytes


def test_a_local_directory_is_read_by_each_rank_unless_the_environment_says_so(
    ranks: ClusterPool, tmp_path: Path
) -> None:
    sk.save(plain_state(True), tmp_path / "a")
    assert ranks.run(2, load_local, str(tmp_path / "a")) == [0, 0]
    on = ranks.run(2, load_local, str(tmp_path / "a"), env={"SHARDKEEP_READ_ONCE": "on"}, jailed=True)
    assert sum(on) > 0  # one chunk, so one of them reads it


def load_mixed_settings(directory: str) -> int:
    """Rank 0 decides, and slots are as small as the smallest."""
    first = dist.get_rank() == 0
    got = plain_state(False)
    report, _ = counted_load(
        directory, got, read_once="on" if first else "off", staging_bytes=(1 << 22) if first else (1 << 18)
    )
    assert same(got, plain_state(True))
    return report.received_bytes


def test_ranks_with_different_settings_agree(ranks: ClusterPool, tmp_path: Path) -> None:
    sk.save(plain_state(True), tmp_path / "a", config=sk.Config(chunk_bytes=4096))
    assert all(n > 0 for n in ranks.run(3, load_mixed_settings, str(tmp_path / "a")))


def dtensors(placements: Sequence[Any], mesh_shape: tuple[int, ...], fill: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(256 * 384, dtype=torch.float32).reshape(256, 384)
    state = distribute_tensor(whole if fill else torch.zeros_like(whole), mesh, placements)
    return {"w": state, "b": torch.full((5000,), 3.0 if fill else 0.0)}


def save_dtensors(directory: str) -> None:
    sk.save(dtensors([Shard(0)], (4,), True), directory, config=sk.Config(chunk_bytes=4096, io_threads=2))


def load_dtensors(directory: str, layout: str, read_once: str) -> tuple[bool, int]:
    placements, shape = {
        "rows": ([Shard(0)], (4,)),
        "columns": ([Shard(1)], (4,)),
        "replicas of columns": ([Replicate(), Shard(1)], (2, 2)),
        "replicas": ([Replicate()], (4,)),
    }[layout]
    got, expected = dtensors(placements, shape, False), dtensors(placements, shape, True)
    _, read_bytes = counted_load(directory, got, read_once=read_once)
    same = torch.equal(got["w"].to_local(), expected["w"].to_local()) and torch.equal(got["b"], expected["b"])
    return same, read_bytes


@pytest.mark.parametrize("layout", ["rows", "columns", "replicas of columns", "replicas"])
def test_any_layout_of_dtensors_loads_and_is_read_once(
    ranks: ClusterPool, tmp_path: Path, layout: str
) -> None:
    """Stored by rows; columns are strided reads that overlap between the ranks."""
    directory = str(tmp_path / "a")
    ranks.run(4, save_dtensors, directory)
    stored = sum(p.stat().st_size for p in Path(directory).iterdir())
    got = ranks.run(4, load_dtensors, directory, layout, "on")
    assert all(same for same, _ in got)
    assert sum(read for _, read in got) <= 1.15 * stored
    off = ranks.run(4, load_dtensors, directory, layout, "off")
    assert all(same for same, _ in off)
    assert sum(read for _, read in off) > sum(read for _, read in got)


def load_components(root: str) -> dict[str, Any]:
    states = {"policy": plain_state(False), "critic": {"v": torch.zeros(1000)}}
    run = sk.Run(root, config=sk.Config(**ON))
    step = run.load(components=states)
    return {"step": step, "policy": same(states["policy"], plain_state(True)), "v": states["critic"]["v"][0]}


def test_components_of_a_step(ranks: ClusterPool, tmp_path: Path) -> None:
    run = sk.Run(tmp_path)
    with run.step(3) as step:
        step.save("policy", plain_state(True))
        step.save("critic", {"v": torch.ones(1000)})
    got = ranks.run(2, load_components, str(tmp_path))
    assert got == [{"step": 3, "policy": True, "v": 1.0}] * 2


def load_foreign(directory: str) -> tuple[bool, int]:
    got = {"w": torch.zeros(400, 300), "t": torch.zeros(300, 400).t(), "step": 0}
    _, read_bytes = counted_load(directory, got)
    expected = torch.arange(120_000.0).reshape(400, 300)
    return torch.equal(got["w"], expected) and torch.equal(got["t"], expected) and got[
        "step"
    ] == 9, read_bytes


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_another_tool(ranks: ClusterPool, tmp_path: Path) -> None:
    expected = torch.arange(120_000.0).reshape(400, 300)
    dcp.save({"w": expected, "t": expected.clone(), "step": 9}, checkpoint_id=tmp_path / "a", no_dist=True)
    stored = sum(p.stat().st_size for p in (tmp_path / "a").iterdir())
    got = ranks.run(3, load_foreign, str(tmp_path / "a"))
    assert all(same for same, _ in got)
    assert sum(read for _, read in got) <= 1.1 * stored


def load_objects(directory: str) -> tuple[Any, int]:
    got = {"w": torch.zeros(3), "big": None, "mine": None}
    _, read_bytes = counted_load(directory, got)
    return (got["big"], got["mine"], got["w"].tolist()), read_bytes


def test_values_are_read_once_too(ranks: ClusterPool, tmp_path: Path) -> None:
    big = [float(n) for n in range(30_000)]
    craft(tmp_path / "a", {"w": torch.ones(3)}, objects={"big": big, "mine": {"x": 1}}, num_files=1)
    stored = sum(p.stat().st_size for p in (tmp_path / "a").iterdir())
    got = ranks.run(3, load_objects, str(tmp_path / "a"))
    assert [g[0] for g in got] == [(big, {"x": 1}, [1.0] * 3)] * 3
    assert sum(g[1] for g in got) <= 1.1 * stored + 3 * CHUNK


def loads_in_a_row(directory: str) -> tuple[int, int, int]:
    """Threads and descriptors before, after, and whether a save and a load work after it."""
    counted_load(directory, plain_state(False))
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        got = plain_state(False)
        counted_load(directory, got)
        assert same(got, plain_state(True))
    dist.barrier()
    return before[0], threading.active_count(), len(os.listdir("/proc/self/fd")) - before[1]


def test_nothing_is_left_after_a_load(ranks: ClusterPool, tmp_path: Path) -> None:
    sk.save(plain_state(True), tmp_path / "a")
    for before, after, descriptors in ranks.run(2, loads_in_a_row, str(tmp_path / "a")):
        assert after == before
        assert descriptors == 0


# --- device ---


def load_on_device(directory: str, read_once: str) -> tuple[bool, int]:
    state = {"w": torch.zeros(700, 600, device="cuda").t(), "v": torch.zeros(1000, 100, device="cuda")}
    report = load_from(storage_for(directory), state, read_once=read_once)
    expected = turned_state()
    return all(torch.equal(state[k].cpu(), expected[k]) for k in state), report.received_bytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("read_once", ["on", "off"])
def test_device_tensors(ranks: ClusterPool, tmp_path: Path, read_once: str) -> None:
    """Two ranks on one device: contiguous and strided targets, read or received."""
    sk.save(turned_state(), tmp_path / "a", config=sk.Config(chunk_bytes=4096))
    for same, received_bytes in ranks.run(2, load_on_device, str(tmp_path / "a"), read_once):
        assert same
        assert (received_bytes > 0) == (read_once == "on")


# --- memory ---


def watch_scratch(directory: str, chunk_bytes: int, read_once: str, staging_bytes: int) -> tuple[bool, int]:
    """The scratch that a load allocates."""
    allocated = []
    allocate = stage.allocate

    def watched(num_bytes: int) -> torch.Tensor:
        allocated.append(num_bytes)
        return allocate(num_bytes)

    patch = pytest.MonkeyPatch()
    patch.setattr(stage, "allocate", watched)
    stage._rings.clear()
    try:
        state = {"w": torch.zeros(700, 600).t(), "v": torch.zeros(1000, 300)[:, ::3]}
        load_from(storage_for(directory), state, staging_bytes=staging_bytes, read_once=read_once)
    finally:
        patch.undo()
    expected = turned_state()
    same = torch.equal(state["w"], expected["w"]) and torch.equal(state["v"], expected["v"])
    return same, sum(allocated)


def turned_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    return {
        "w": torch.randn(600, 700, generator=generator),
        "v": torch.randn(1000, 100, generator=generator),
    }


@pytest.mark.parametrize("read_once", ["on", "off"])
@pytest.mark.parametrize("chunk_bytes", [4096, 16 << 10, 40 << 10])
def test_scratch_of_a_load_stays_within_staging_bytes(
    ranks: ClusterPool, tmp_path: Path, chunk_bytes: int, read_once: str
) -> None:
    """Slots of 64 KiB; with chunks of 40 KiB, reads at the ends of strided segments need more than one."""
    sk.save(turned_state(), tmp_path / "a", config=sk.Config(chunk_bytes=chunk_bytes))
    got = ranks.run(2, watch_scratch, str(tmp_path / "a"), chunk_bytes, read_once, 256 << 10)
    for same, allocated in got:
        assert same
        assert 0 < allocated <= 256 << 10


# --- failures ---


class Failing:
    """A storage whose files fail, or worse, after some reads of data files."""

    def __init__(self, inner: Storage, after: int, strike: Callable[[], None]) -> None:
        self._inner = inner
        self._left = after
        self._strike = strike
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, name: str) -> Reader:
        reader, failing = self._inner.open(name), self

        class Struck:
            size = reader.size
            close = reader.close

            def read_into(self, offset: int, parts: Sequence[memoryview]) -> None:
                if name.endswith(".distcp"):
                    with failing._lock:
                        failing._left -= 1
                    if failing._left < 0:
                        failing._strike()
                reader.read_into(offset, parts)

        return Struck()


def eio() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "disk")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    time.sleep(6)  # longer than the deadline of the others
    eio()


STRIKES = {"eio": eio, "kill": kill, "stop": stop}


def big_state() -> dict[str, Any]:
    return {f"t{n}": torch.full((40_000,), float(n)) for n in range(24)}


def fail_on(directory: str, culprit: int, strike: str, deadline_s: float) -> tuple[str, str, float, int]:
    """Class and text of the error of a load of which one rank's storage fails, and what it took."""
    storage: Any = storage_for(directory)
    if dist.get_rank() == culprit:
        storage = Failing(storage, 8, STRIKES[strike])
    before = threading.active_count()
    state = {k: torch.zeros_like(t) for k, t in big_state().items()}
    began = time.monotonic()
    try:
        load_from(storage, state, deadline_s=deadline_s)
        return "", "", 0.0, 0
    except ShardkeepError as e:
        took = time.monotonic() - began
        return type(e).__name__, str(e), took, threading.active_count() - before


def then_load(directory: str, culprit: int) -> tuple[tuple[str, str, float, int], bool]:
    failed = fail_on(directory, culprit, "eio", 60.0)
    state = {k: torch.zeros_like(t) for k, t in big_state().items()}
    load_from(storage_for(directory), state)
    return failed, all(torch.equal(state[k], t) for k, t in big_state().items())


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("big") / "a")
    sk.save(big_state(), directory, config=sk.Config(chunk_bytes=4096, io_threads=2))
    return directory


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_storage_error_of_one_rank_is_raised_on_all_and_the_next_load_works(
    ranks: ClusterPool, big: str, culprit: int
) -> None:
    got = ranks.run(3, then_load, big, culprit)
    failed = [g[0] for g in got]
    assert [f[0] for f in failed] == ["LoadFailed"] * 3
    assert len({f[1] for f in failed}) == 1
    assert "Input/output error: 'disk'" in failed[0][1] and f"rank {culprit}, host '{HOST}'" in failed[0][1]
    assert max(f[2] for f in failed) < SLACK_S
    assert all(f[3] <= 1 for f in failed)  # the thread that talks to the store may be new
    assert all(g[1] for g in got)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_killed_in_a_load_fails_it_on_the_others(ranks: ClusterPool, big: str, culprit: int) -> None:
    outcomes = ranks.outcomes(3, fail_on, big, culprit, "kill", 60.0, timeout_s=90)
    assert outcomes[culprit].exit_code == -signal.SIGKILL
    others = [o.value for o in outcomes if o.rank != culprit]
    for name, text, took, _ in others:
        assert name == "LoadFailed"
        assert took < SLACK_S
        if culprit:  # rank 0 takes the store with it
            assert f"rank {culprit} ({HOST}, pid {outcomes[culprit].pid})" in text
        else:
            assert "rank 0" in text
    if culprit:
        assert others[0][1] == others[1][1]


def test_a_rank_that_stops_sending_is_named_at_the_deadline(ranks: ClusterPool, big: str) -> None:
    got = ranks.run(2, fail_on, big, 1, "stop", 2.0)
    assert [g[0] for g in got] == ["LoadFailed"] * 2
    assert "no byte" in got[0][1] and "rank 1 (" in got[0][1] and "within 2 s" in got[0][1]
    assert got[0][1] == got[1][1]


def load_damaged(directory: str) -> tuple[str, str]:
    state = {k: torch.zeros_like(t) for k, t in big_state().items()}
    try:
        load_from(storage_for(directory), state)
    except ShardkeepError as e:
        return type(e).__name__, str(e)
    return "", ""


def test_a_flipped_bit_is_found_by_its_reader_and_named_on_all(ranks: ClusterPool, tmp_path: Path) -> None:
    sk.save(big_state(), tmp_path / "a", config=sk.Config(chunk_bytes=4096, io_threads=2))
    name = max((tmp_path / "a").glob("*.distcp"), key=lambda p: p.stat().st_size)
    flip(name, 1_000_000)
    got = ranks.run(3, load_damaged, str(tmp_path / "a"))
    assert [g[0] for g in got] == ["Corrupt"] * 3
    assert len({g[1] for g in got}) == 1
    assert "a chunk's checksum is wrong" in got[0][1] and f"chunk {1_000_000 // 4096}" in got[0][1]


def test_a_damaged_index_is_named_on_all(ranks: ClusterPool, tmp_path: Path) -> None:
    sk.save(big_state(), tmp_path / "a")
    (index,) = (tmp_path / "a").glob("*.index")
    flip(index, 100)
    got = ranks.run(2, load_damaged, str(tmp_path / "a"))
    assert [g[0] for g in got] == ["Corrupt"] * 2
    assert "index's digest is wrong" in got[0][1]


def damage_on_the_way(directory: str) -> tuple[str, str]:
    """Rank 1's connections flip a bit of each message, after the reader has checked it."""
    send = Outbox.send

    def wrong(self: Outbox, rank: int, number: int, data: memoryview, moved: Any) -> None:
        bad = bytearray(data)
        bad[len(bad) // 2] ^= 4
        send(self, rank, number, memoryview(bad), moved)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Outbox, "send", wrong)
        return load_damaged(directory)


def test_bytes_are_checked_where_they_arrive(ranks: ClusterPool, big: str) -> None:
    got = ranks.run(2, damage_on_the_way, big)
    assert [g[0] for g in got] == ["Corrupt"] * 2
    assert got[0][1] == got[1][1]


# --- connections ---


def test_strangers_are_hung_up_on() -> None:
    inbox = Inbox()
    _, port, _ = inbox.card(["127.0.0.1"])
    thread = threading.Thread(target=inbox.next)
    thread.start()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=SLACK_S) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        outbox = Outbox(3)
        outbox.know({0: [["127.0.0.1"], port, b"\0" * 16]})
        with pytest.raises(PeerGone, match="rank 0: it cannot be reached on port"):
            outbox.send(0, 1, memoryview(b"x"), lambda n: None)
    finally:
        inbox.wake()
        thread.join()
        inbox.close()


def test_messages_arrive_with_their_numbers_from_the_address_that_answers() -> None:
    inbox, outbox = Inbox(), Outbox(3)
    hosts, port, token = inbox.card(["127.0.0.1"])
    outbox.know({0: [["nowhere.invalid", *hosts], port, token]})
    got = []

    def receive() -> None:
        while (incoming := inbox.next()) is not None:
            data = bytearray(5)
            number = incoming.number()
            incoming.fill(memoryview(data))
            got.append((incoming.rank, number, bytes(data)))
            inbox.again(incoming)
            if len(got) == 2:
                return

    thread = threading.Thread(target=receive)
    thread.start()
    outbox.send(0, 7, memoryview(b"hello"), lambda n: None)
    outbox.send(0, 1 << 40, memoryview(b"again"), lambda n: None)
    thread.join(SLACK_S)
    outbox.close()
    inbox.close()
    assert got == [(3, 7, b"hello"), (3, 1 << 40, b"again")]


# --- the slow storage itself ---


def carry_all(path: str, num: int) -> tuple[float, float]:
    link = Link(path=path, bytes_per_s=1e6)
    dist.barrier()
    began = time.monotonic()
    for _ in range(num):
        link.carry(10_000)
    return began, time.monotonic()


def test_processes_share_the_link(ranks: ClusterPool, tmp_path: Path) -> None:
    got = ranks.run(2, carry_all, str(tmp_path / "link"), 20)
    took = max(end for _, end in got) - min(began for began, _ in got)
    assert took >= 0.38  # 400,000 bytes at a million a second, however many ask


def test_latencies_of_requests_overlap_and_their_bytes_do_not(tmp_path: Path) -> None:
    link = Link(path=str(tmp_path / "link"), bytes_per_s=1e6, latency_s=0.2)
    began = time.monotonic()
    threads = [threading.Thread(target=link.carry, args=(10_000,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began >= 0.3 - 1e-3
    assert LoadFailed is sk.errors.LoadFailed
