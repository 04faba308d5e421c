"""Budgets: each limit is seen, the smallest counts and is named, ranks of a node share what there is.

Most tests read made-up trees of /proc and /sys/fs/cgroup; at the end real limits and a real Ray node.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardkeep import budget, config

GIB = 1 << 30
V2_MOUNT = "25 20 0:22 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


class Tree:
    """A machine of 64 GiB, 48 of them free, on which nothing else is limited."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.put("proc/meminfo", "MemTotal: 67108864 kB\nMemFree: 1024 kB\nMemAvailable: 50331648 kB\n")
        self.put("proc/sys/kernel/random/boot_id", "0d3c\n")
        self.put("proc/sys/vm/overcommit_memory", "0\n")
        self.put("proc/self/statm", "1000 100 10 1 0 500 0\n")
        (root / "dev/shm").mkdir(parents=True)

    def put(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def v2(self, own: str, mount: str = V2_MOUNT) -> None:
        self.put("proc/self/cgroup", f"0::{own}\n")
        self.put("proc/self/mountinfo", mount)

    def v2_level(self, name: str, current: float, **limits: float) -> None:
        self.put(f"sys/fs/cgroup/{name}/memory.current", f"{int(current * GIB)}\n")
        self.put(
            f"sys/fs/cgroup/{name}/memory.stat", f"anon 1\ninactive_file {GIB}\nactive_file {GIB // 2}\n"
        )
        for limit in ("max", "high"):
            text = str(int(limits[limit] * GIB)) if limit in limits else "max"
            self.put(f"sys/fs/cgroup/{name}/memory.{limit}", f"{text}\n")

    def free(self) -> tuple[float, str]:
        free = budget.free_bytes(self.root)
        return free.num_bytes / GIB, free.limited_by

    def raylet(self, capacity: float, used: float, environ: str = "") -> int:
        """This process's raylet, its object store with `used` GiB of pages; returns its id."""
        pid = os.getppid()
        self.put(f"proc/{pid}/comm", "raylet\n")
        self.put(f"proc/{pid}/environ", environ)
        store = self.root / "dev/shm/plasmaA1b2C3"
        with store.open("wb") as file:
            file.write(b"x" * int(used * GIB))
            file.truncate(int(capacity * GIB))
        os.sync()
        (self.root / f"proc/{pid}/fd").mkdir()
        os.symlink(store, self.root / f"proc/{pid}/fd/17")
        os.symlink("socket:[1]", self.root / f"proc/{pid}/fd/3")
        return pid


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Ray that other tests have joined does not count here."""
    monkeypatch.setattr(budget, "joined_ray", lambda: False)
    return Tree(tmp_path)


def test_without_limits_the_machine_s_available_memory_counts(tree: Tree) -> None:
    assert tree.free() == (48, "the machine's memory of 64.0 GiB")


def test_a_container_s_limit_counts_without_its_inactive_page_cache(tree: Tree) -> None:
    """Docker with cgroup v2: the container sees its own cgroup as the root."""
    tree.v2("/")
    tree.v2_level("", current=5, max=8)
    assert tree.free() == (4, "the container's memory.max of 8.0 GiB")
    tree.v2_level("", current=5, max=8, high=7)
    assert tree.free() == (3, "the container's memory.high of 7.0 GiB")
    tree.v2_level("", current=10, max=8)
    assert tree.free()[0] == 0


def test_a_limit_that_is_changed_is_seen_by_the_next_call(tree: Tree) -> None:
    tree.v2("/job")
    tree.v2_level("job", current=3, max=20)
    assert tree.free()[0] == 18
    tree.v2_level("job", current=3, max=10)
    assert tree.free()[0] == 8


@pytest.mark.parametrize("limited", ["kubepods", "kubepods/pod7", "kubepods/pod7/main"])
def test_every_level_of_cgroups_counts(tree: Tree, limited: str) -> None:
    tree.v2("/kubepods/pod7/main")
    for name in ("kubepods", "kubepods/pod7", "kubepods/pod7/main"):
        tree.v2_level(name, current=6, **({"max": 16} if name == limited else {}))
    tree.v2_level("kubepods/other", current=1, max=1)
    assert tree.free() == (11, "the container's memory.max of 16.0 GiB")


@pytest.mark.parametrize(
    ("own", "top"),
    [("/docker/a1/worker", "/docker/a1"), ("/worker", "/"), ("/docker/a1/worker", "/docker/a1/worker")],
    ids=["host's path, container's mount", "own namespace", "mounted itself"],
)
def test_a_mount_may_show_a_part_of_the_hierarchy(tree: Tree, own: str, top: str) -> None:
    tree.v2(own, V2_MOUNT.replace("0:22 /", f"0:22 {top}", 1))
    tree.v2_level("" if own == top else "worker", current=2, max=10)
    assert tree.free()[0] == 9


@pytest.mark.parametrize("own", ["/../..", "/elsewhere/b", "/docker/a12"])
def test_a_cgroup_outside_of_the_mount_is_judged_by_the_mount_s_top(tree: Tree, own: str) -> None:
    tree.v2(own, V2_MOUNT.replace("0:22 /", "0:22 /docker/a1", 1))
    tree.v2_level("", current=2, max=10)
    assert tree.free()[0] == 9


def test_cgroups_of_version_1(tree: Tree) -> None:
    tree.put("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/a/b\n1:name=systemd:/a\n0::/\n")
    tree.put("proc/self/mountinfo", V1_MOUNTS)
    for level, limit in (("", 9223372036854771712), ("a", 12 * GIB), ("a/b", 9223372036854771712)):
        tree.put(f"sys/fs/cgroup/memory/{level}/memory.limit_in_bytes", f"{limit}\n")
        tree.put(f"sys/fs/cgroup/memory/{level}/memory.usage_in_bytes", f"{4 * GIB}\n")
        tree.put(
            f"sys/fs/cgroup/memory/{level}/memory.stat",
            f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n",
        )
    assert tree.free() == (9, "the container's memory.limit_in_bytes of 12.0 GiB")


def test_limits_of_the_process_count(tree: Tree) -> None:
    tree.put(
        "proc/self/limits",
        "Limit  Soft Limit  Hard Limit  Units\n"
        "Max data size             unlimited            unlimited            bytes\n"
        f"Max address space         {2 * GIB}            unlimited            bytes\n",
    )
    free, why = tree.free()
    assert free == pytest.approx(2 - 1000 * resource.getpagesize() / GIB)
    assert why == "the process's RLIMIT_AS of 2.0 GiB"


def test_a_machine_that_does_not_overcommit_counts_what_is_promised(tree: Tree) -> None:
    tree.put(
        "proc/meminfo",
        "MemTotal: 67108864 kB\nMemAvailable: 50331648 kB\n"
        f"CommitLimit: {40 << 20} kB\nCommitted_AS: {30 << 20} kB\n",
    )
    assert tree.free()[0] == 48
    tree.put("proc/sys/vm/overcommit_memory", "2\n")
    assert tree.free() == (10, "the machine's commit limit of 40.0 GiB")


# -- Ray


@pytest.fixture
def joined(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has joined Ray, whose own settings are the defaults."""
    for name in list(os.environ):
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(budget, "joined_ray", lambda: True)


@pytest.mark.usefixtures("joined")
def test_ray_s_monitor_and_object_store_count(tree: Tree) -> None:
    """The monitor kills at 60.8 GiB, 16 are in use; the store may take 10 GiB and has taken next to none."""
    tree.raylet(capacity=10, used=1 / 256)
    free, why = tree.free()
    assert free == pytest.approx(0.95 * 64 - 16 - 10 + 1 / 256, abs=1e-3)
    assert why == "Ray's memory monitor at 95% of 64.0 GiB, 10.0 GiB of it kept for Ray's object store"


@pytest.mark.usefixtures("joined")
def test_a_full_object_store_is_counted_as_used_memory_alone(tree: Tree) -> None:
    tree.raylet(capacity=1 / 64, used=1 / 64)
    assert tree.free() == (pytest.approx(0.95 * 64 - 16), "Ray's memory monitor at 95% of 64.0 GiB")


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize(
    ("environ", "free", "why"),
    [
        ("RAY_memory_usage_threshold=0.5\0A=b\0", 16, "Ray's memory monitor at 50%"),
        ("RAY_memory_monitor_refresh_ms=0\0", 48, "the machine's memory"),
        (f"RAY_min_memory_free_bytes={GIB}\0", 47, "Ray's memory monitor at 98%"),
        (f"RAY_min_memory_free_bytes={9 * GIB}\0", 0.95 * 64 - 16, "Ray's memory monitor at 95%"),
    ],
)
def test_the_raylet_s_settings_hold(tree: Tree, environ: str, free: float, why: str) -> None:
    tree.raylet(capacity=0, used=0, environ=environ)
    got, reason = tree.free()
    assert got == pytest.approx(free)
    assert reason.startswith(why)


@pytest.mark.usefixtures("joined")
def test_ray_s_monitor_goes_by_the_container_s_limit(tree: Tree) -> None:
    """Without its whole page cache, as Ray counts it."""
    tree.raylet(capacity=0, used=0)
    tree.v2("/")
    tree.v2_level("", current=9, max=20)
    assert tree.free() == (
        pytest.approx(0.95 * 20 - (9 - 1.5)),
        "Ray's memory monitor at 95% of 20.0 GiB",
    )


@pytest.mark.usefixtures("joined")
def test_an_object_store_of_an_unknown_raylet_counts_with_ray_s_default(tree: Tree) -> None:
    """A driver, or a raylet of another user: 30 % of the memory, or what /dev/shm holds if that is less."""
    shm = os.statvfs(tree.root / "dev/shm")
    reserved = min(0.3 * 64, 0.95 * shm.f_bavail * shm.f_bsize / GIB)
    assert tree.free()[0] == pytest.approx(0.95 * 64 - 16 - reserved, abs=0.5)


@pytest.mark.usefixtures("joined")
def test_an_object_store_on_disk_takes_no_memory(tree: Tree) -> None:
    pid = tree.raylet(capacity=10, used=0)
    (tree.root / f"proc/{pid}/fd/17").unlink()
    assert tree.free()[0] == pytest.approx(0.95 * 64 - 16)


# -- nodes and shares


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("proc/self/cgroup", "no colons\n"),
        ("proc/self/cgroup", "\xff\xfe\n"),
        ("proc/self/mountinfo", "neither\n\n"),
        ("sys/fs/cgroup/job/memory.stat", "alone\n\ninactive_file much\n"),
        ("sys/fs/cgroup/job/memory.current", "much\n"),
        ("proc/self/statm", ""),
    ],
)
def test_a_file_that_says_nothing_fails_no_save(tree: Tree, name: str, text: str) -> None:
    tree.v2("/job")
    tree.v2_level("job", current=2.5, max=8)
    tree.put(
        "proc/self/limits", "Max address space         1099511627776        unlimited            bytes\n"
    )
    (tree.root / name).write_text(text, encoding="latin-1")
    assert tree.free()[0] in (
        48.0,
        8.0,
        6.5,
        5.5,
    )  # the machine's, or what the limit leaves as far as is known
    assert budget.node(tree.root).startswith("0d3c")


def test_without_proc_the_c_library_s_numbers_count(tmp_path: Path) -> None:
    free = budget.free_bytes(tmp_path)
    assert 0 < free.num_bytes < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_without_a_raylet_and_dev_shm_ray_s_share_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "joined_ray", lambda: False)
    before = budget.free_bytes(tmp_path)
    monkeypatch.setattr(budget, "joined_ray", lambda: True)
    free = budget.free_bytes(tmp_path)
    assert free.num_bytes < before.num_bytes
    assert "kept for Ray's object store" in free.limited_by


def test_processes_under_one_limit_are_of_one_node(tree: Tree) -> None:
    """Slurm gives each task a cgroup; the limit is the job's."""
    for task in range(2):
        tree.v2_level(f"job/task{task}", current=1)
    tree.v2_level("job", current=1, max=10)
    names = []
    for task in range(2):
        tree.v2(f"/job/task{task}")
        budget._cgroups.cache_clear()
        budget.node.cache_clear()
        names.append(budget.node(tree.root))
    assert names[0] == names[1] == f"0d3c/{(tree.root / 'sys/fs/cgroup/job').stat().st_ino}"


def test_containers_with_limits_of_their_own_are_nodes_of_their_own(tmp_path: Path) -> None:
    names = set()
    for name in "ab":
        tree = Tree(tmp_path / name)
        tree.v2("/")
        tree.v2_level("", current=1, max=10)
        names.add(budget.node(tree.root))
    assert len(names) == 2


def test_without_limits_a_node_is_the_booted_system(tree: Tree) -> None:
    tree.v2("/")
    tree.v2_level("", current=1)
    assert budget.node(tree.root) == "0d3c"


def test_a_node_s_memory_is_split_among_its_ranks() -> None:
    everyone = [("a", 1000), ("b", 4001), ("a", 900), ("a", 1100), ("b", 5000)]
    assert budget.share_bytes(everyone) == {"a": 240, "b": 1600}
    assert budget.share_bytes([]) == {}
    assert budget.share_bytes([("a", 0)]) == {"a": 0}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "SLURM_NTASKS_PER_NODE": "1"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "6"}, 6),
        ({"LOCAL_WORLD_SIZE": "", "MPI_LOCALNRANKS": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"SLURM_NTASKS_PER_NODE": "8(x2)"}, 1),
    ],
)
def test_launchers_tell_the_ranks_of_a_node(environ: dict[str, str], expected: int) -> None:
    assert budget.local_ranks(environ) == expected


# -- the ring's size


@pytest.mark.parametrize(
    ("free", "ranks", "threads", "expected"),
    [
        (64 * GIB, 8, 8, 256 << 20),
        (8 * GIB, 4, 8, 128 << 20),
        (1 * GIB, 8, 2, 8 << 20),
        (10 << 20, 1, 8, 1 << 20),  # two slots of 64 KiB for each thread
    ],
)
def test_the_ring_takes_a_sixteenth_of_a_rank_s_memory_at_most(
    monkeypatch: pytest.MonkeyPatch, free: int, ranks: int, threads: int, expected: int
) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda: budget.Free(num_bytes=free, limited_by="a test"))
    monkeypatch.setattr(budget, "local_ranks", lambda: ranks)
    config._staging_part.cache_clear()
    try:
        chosen = config.resolve(config.Config(io_threads=threads))
    finally:
        config._staging_part.cache_clear()
    assert chosen.staging_bytes == expected
    assert chosen.slot_bytes == min(16 << 20, expected // (2 * threads)) >= 64 << 10


def test_a_ring_that_was_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config.Config(staging_bytes=5 * GIB)
    assert config.resolve(asked) is asked
    monkeypatch.setenv("SHARDKEEP_STAGING_BYTES", str(1 << 20))
    assert config.resolve(asked).staging_bytes == 1 << 20
    monkeypatch.setenv("SHARDKEEP_STAGING_BYTES", "0")
    assert 0 < config.resolve(asked).staging_bytes <= 256 << 20
    assert config.overridden(asked).staging_bytes == 0


def test_the_choice_stays_for_the_process() -> None:
    assert config.resolve(None).staging_bytes == config.resolve(None).staging_bytes > 0


# -- real limits

LIMITED = """
import resource
from shardkeep import budget
before = budget.free_bytes().num_bytes
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), resource.RLIM_INFINITY))
free = budget.free_bytes()
kept = bytearray(100 << 20)
print(before > 400 << 20, free.num_bytes >> 20, budget.free_bytes().num_bytes >> 20, free.limited_by, sep=";")
"""


def test_a_real_limit_of_a_process_is_seen() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True, timeout=100
    )
    roomy, free, after, why = done.stdout.strip().split(";")
    if roomy == "False":
        pytest.skip("this machine's own limit is lower")
    assert 290 <= int(free) <= 300 and 190 <= int(after) <= int(free) - 100
    assert why.startswith("the process's RLIMIT_AS of ")


def test_this_machine_has_an_answer() -> None:
    assert 0 < budget.free_bytes().num_bytes <= budget._meminfo(budget.ROOT)["MemTotal"]


class Witness:
    """An actor."""

    def seen(self) -> dict[str, Any]:
        free = budget.free_bytes()
        raylet = budget._raylet(budget.ROOT)
        assert raylet is not None
        return {
            "why": free.limited_by,
            "free": free.num_bytes,
            "unused": budget._object_store_unused(budget.ROOT, raylet, 0),
            "node": budget.node(),
            "raylet": raylet,
        }


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(300)
def test_an_actor_sees_ray_s_monitor_and_its_node_s_object_store(ray_local: ModuleType) -> None:
    """The store has 128 MiB (see conftest); 40 of them are put into it meanwhile."""

    actor = ray_local.remote(num_cpus=0.1)(Witness).remote()
    try:
        before = ray_local.get(actor.seen.remote(), timeout=100)
        # As much as nothing has taken yet: pages that objects of other tests have left are taken again.
        kept = ray_local.put(os.urandom(min(40 << 20, before["unused"] // 2)))
        after = ray_local.get(actor.seen.remote(), timeout=100)
        del kept
    finally:
        ray_local.kill(actor)
    assert before["why"].startswith("Ray's memory monitor at 95% of ")
    assert "kept for Ray's object store" in before["why"] or before["unused"] < 1 << 20
    assert 0 <= after["unused"] <= before["unused"] <= 129 << 20
    assert before["free"] < budget._meminfo(budget.ROOT)["MemAvailable"] + (1 << 30)
    assert before["node"] == after["node"] == budget.node()
    assert before["raylet"] == after["raylet"]
