"""What memory this process may still take on its node, and which limit says so.

In: /proc, the cgroups of this process, its own limits, and the Ray node that it belongs to. Out: bytes with
their reason in words, and a split of them among the ranks that share the memory. Invariants: an answer is at
most what each limit leaves at that moment; nothing is allocated, nobody is asked who might not answer.

Files in /dev/shm are memory: the kernel has them in `Shmem`, so neither MemAvailable nor a cgroup's inactive
file cache counts them as free. Functions that read files take the root under which to look for them.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch.distributed as dist

SHARE_OF_FREE = 0.8
"""What all ranks of a node together may take of its free memory; the rest is for what they do meanwhile."""

ROOT = Path("/")
_MIB = 1 << 20
_GIB = 1 << 30

# Launchers' counts of ranks on this node: torchrun, verl's Ray workers, Open MPI, MPICH and Intel MPI, Slurm.
_LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE",
    "RAY_LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_NTASKS_PER_NODE",
)
_USUAL_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """Bytes that the process may still take; `limited_by` names the limit that is met first."""

    num_bytes: int
    limited_by: str


def free_bytes(root: Path = ROOT) -> Free:
    """The least that any limit leaves now: the machine's memory, each cgroup above this process, its own
    limits, Ray.
    """
    meminfo = _meminfo(root)
    shared = [*_machine(root, meminfo), *_cgroup_limits(root, meminfo["MemTotal"])]
    if joined_ray():
        raylet = _raylet(root)
        shared += _ray_monitor(root, meminfo, _raylet_settings(root, raylet))
        unused = _object_store_unused(root, raylet, meminfo["MemTotal"])
        shared = [_less(free, unused) for free in shared]
    least = min([*shared, *_own_limits(root)], key=lambda free: free.num_bytes)
    return Free(num_bytes=max(0, least.num_bytes), limited_by=least.limited_by)


def share_bytes(everyone: Sequence[tuple[str, int]]) -> dict[str, int]:
    """For each rank its node and free bytes there -> per node what one of its ranks may take: SHARE_OF_FREE
    of the least that any of them sees, divided evenly.
    """
    seen: dict[str, list[int]] = {}
    for name, num_bytes in everyone:
        seen.setdefault(name, []).append(num_bytes)
    return {name: int(min(free) * SHARE_OF_FREE) // len(free) for name, free in seen.items()}


@lru_cache
def node(root: Path = ROOT) -> str:
    """Which memory this process shares: equal for ranks under one limit. The booted system, and the innermost
    cgroup with a limit of its own, by its inode, since containers may all see theirs as `/`.
    """
    boot = _text(root / "proc/sys/kernel/random/boot_id").strip() or socket.gethostname()
    total = _meminfo(root)["MemTotal"]
    limited = (level for level in _cgroups(root) if any(_limits(level, total)))
    return next((f"{boot}/{level.directory.stat().st_ino}" for level in limited), boot)


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of this job on this node, as its launcher has said. Where it has not, as in plain Ray actors, all
    ranks of the job, but at most as many as a node usually has.
    """
    counts = (environ.get(name, "") for name in _LOCAL_RANKS)
    job = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return next((int(count) for count in counts if count.isdecimal() and int(count)), min(job, _USUAL_RANKS))


def in_words(num_bytes: float) -> str:
    """A size for a message: '512 MiB', '8.0 GiB'."""
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.0f} MiB"


# -- the machine and the process


def _machine(root: Path, meminfo: Mapping[str, int]) -> Iterator[Free]:
    total = in_words(meminfo["MemTotal"])
    yield Free(num_bytes=meminfo["MemAvailable"], limited_by=f"the machine's memory of {total}")
    if _text(root / "proc/sys/vm/overcommit_memory").strip() == "2":  # then even untouched memory counts
        yield Free(
            num_bytes=meminfo["CommitLimit"] - meminfo["Committed_AS"],
            limited_by=f"the machine's commit limit of {in_words(meminfo['CommitLimit'])}",
        )


def _own_limits(root: Path) -> Iterator[Free]:
    """RLIMIT_AS and RLIMIT_DATA."""
    pages = _text(root / "proc/self/statm").split()
    for line in _text(root / "proc/self/limits").splitlines():
        for title, field, name in (
            ("Max address space", 0, "RLIMIT_AS"),
            ("Max data size", 5, "RLIMIT_DATA"),
        ):
            soft = line.removeprefix(title).split()[0] if line.startswith(title) else ""
            if soft.isdecimal() and field < len(pages):
                used = int(pages[field]) * os.sysconf("SC_PAGE_SIZE")
                yield Free(
                    num_bytes=int(soft) - used, limited_by=f"the process's {name} of {in_words(int(soft))}"
                )


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes; what the C library says where there is none."""
    page = os.sysconf("SC_PAGE_SIZE")
    known = {
        "MemTotal": os.sysconf("SC_PHYS_PAGES") * page,
        "MemAvailable": os.sysconf("SC_AVPHYS_PAGES") * page,
    }
    fields = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    return known | {f[0].rstrip(":"): int(f[1]) * 1024 for f in fields if len(f) == 3 and f[1].isdecimal()}


# -- cgroups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Version:
    """How a version of cgroups calls its files and the fields of `memory.stat` (both include children)."""

    limits: tuple[str, ...]
    usage: str
    inactive_file: str
    active_file: str


_V1 = _Version(
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    inactive_file="total_inactive_file",
    active_file="total_active_file",
)
_V2 = _Version(
    limits=("memory.max", "memory.high"),  # above `high` the kernel slows a process down until it is below
    usage="memory.current",
    inactive_file="inactive_file",
    active_file="active_file",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    directory: Path
    version: _Version


@lru_cache
def _cgroups(root: Path) -> tuple[_Level, ...]:
    """The cgroups whose memory limits hold for this process, innermost first. Read once: processes stay in
    theirs.
    """
    levels: list[_Level] = []
    lines = (line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines())
    for hierarchy, controllers, path in (parts for parts in lines if len(parts) == 3):
        version = _V2 if hierarchy == "0" else _V1 if "memory" in controllers.split(",") else None
        mounted = _mounted(root, version) if version else None
        if version and mounted:
            levels += [_Level(directory=d, version=version) for d in _upwards(*mounted, path)]
    return tuple(levels)


def _mounted(root: Path, version: _Version) -> tuple[Path, str] | None:
    """Where a hierarchy is mounted, and which of its directories is at the mount point."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        filesystem, options = kind.partition(" ")[0], kind.rpartition(" ")[2]
        is_ours = filesystem == "cgroup2" if version is _V2 else "memory" in options.split(",")
        if filesystem.startswith("cgroup") and is_ours:
            _, _, _, top, point, *_ = mount.split()
            return root / point.lstrip("/"), top
    return None


def _upwards(point: Path, top: str, path: str) -> list[Path]:
    """The directories from a cgroup's up to the mount point, as far as they are mounted."""
    above = top.rstrip("/") + "/"
    directory = point / (path.removeprefix(above).strip("/") if path.startswith(above) else "")
    if ".." in directory.parts or not directory.is_dir():  # outside of what this container may see
        directory = point
    return [d for d in (directory, *directory.parents) if d == point or point in d.parents]


def _limits(level: _Level, total: int) -> Iterator[tuple[str, int]]:
    """Name and bytes of a cgroup's limits, those left out that are no less than the machine's memory."""
    for name in level.version.limits:
        text = _text(level.directory / name).strip()
        if text.isdecimal() and int(text) < total:  # unlimited: 'max', or in version 1 a huge number
            yield name, int(text)


def _cgroup_limits(root: Path, total: int) -> Iterator[Free]:
    for level in _cgroups(root):
        limits = list(_limits(level, total))
        used = _used(level, level.version.inactive_file) if limits else 0
        for name, limit in limits:
            yield Free(num_bytes=limit - used, limited_by=f"the container's {name} of {in_words(limit)}")


def _used(level: _Level, *reclaimable: str) -> int:
    """What a cgroup uses, without the parts of its page cache that the kernel takes back when asked for
    memory.
    """
    stat = dict(line.partition(" ")[::2] for line in _text(level.directory / "memory.stat").splitlines())
    used = _number(_text(level.directory / level.version.usage))
    return max(0, used - sum(_number(stat.get(name, "")) for name in reclaimable))


def _number(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0


# -- Ray


def joined_ray() -> bool:
    """Whether this process is a Ray worker or driver. Does not import ray."""
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def _raylet(root: Path) -> int | None:
    """The process of this node's raylet: a worker's parent, whose id Ray also sets. Unknown to a driver."""
    for pid in (os.environ.get("RAY_RAYLET_PID", ""), str(os.getppid())):
        if pid and _text(root / "proc" / pid / "comm").strip() == "raylet":
            return int(pid)
    return None


@lru_cache
def _raylet_settings(root: Path, raylet: int | None) -> Mapping[str, str]:
    """The environment that configures the raylet; our own (it is inherited) where that one cannot be read.
    Settings passed as `_system_config` instead are not seen.
    """
    text = _text(root / "proc" / str(raylet) / "environ")
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry) if text else os.environ


def _ray_monitor(root: Path, meminfo: Mapping[str, int], settings: Mapping[str, str]) -> Iterator[Free]:
    """Ray's memory monitor kills workers once their node uses more than its threshold. Its rules, as of Ray
    2.60 (memory_monitor_utils.cc): the top cgroup counts if its limit is below the machine's memory, without
    all of its page cache; `RAY_min_memory_free_bytes` may raise the threshold.
    """
    if settings.get("RAY_memory_monitor_refresh_ms") == "0":
        return
    total, used = meminfo["MemTotal"], meminfo["MemTotal"] - meminfo["MemAvailable"]
    for directory, version in (("sys/fs/cgroup/memory", _V1), ("sys/fs/cgroup", _V2)):
        top = _Level(directory=root / directory, version=version)
        for name, limit in _limits(top, total):
            if name == version.limits[0]:
                total, used = limit, _used(top, version.inactive_file, version.active_file)
    fraction = float(settings.get("RAY_memory_usage_threshold", 0.95))
    threshold = int(total * fraction)
    least_free = int(settings.get("RAY_min_memory_free_bytes", -1))
    if least_free >= 0:
        threshold = max(threshold, total - least_free)
    yield Free(
        num_bytes=threshold - used,
        limited_by=f"Ray's memory monitor at {threshold / total:.0%} of {in_words(total)}",
    )


def _object_store_unused(root: Path, raylet: int | None, total: int) -> int:
    """What Ray's object store may still take of the node's memory. Its file in /dev/shm has the store's
    capacity as its size, and pages only where an object has been; the raylet holds it open.
    """
    try:
        stores = [file.stat() for file in _object_store_files(root, raylet)] if raylet else None
    except OSError:  # of another user
        stores = None
    if stores is not None:
        return sum(max(0, s.st_size - s.st_blocks * 512) for s in stores)
    # Ray's default: 30 % of the memory, at most 200 GB and 95 % of what /dev/shm holds.
    try:
        shm = os.statvfs(root / "dev/shm")
    except OSError:  # then the store lies elsewhere, and how much of it is memory is not known
        return int(min(0.3 * total, 200e9))
    return int(min(0.3 * total, 200e9, 0.95 * shm.f_bavail * shm.f_bsize))


@lru_cache
def _object_store_files(root: Path, raylet: int) -> tuple[Path, ...]:
    """Open once when the raylet starts, so found once. None: the store lies on a disk, which is no memory."""
    files = (root / "proc" / str(raylet) / "fd").iterdir()
    return tuple(f for f in files if f.is_symlink() and "/dev/shm/plasma" in os.readlink(f))


def _less(free: Free, reserved: int) -> Free:
    if reserved < _MIB:
        return free
    return Free(
        num_bytes=free.num_bytes - reserved,
        limited_by=f"{free.limited_by}, {in_words(reserved)} of it kept for Ray's object store",
    )


def _text(path: Path) -> str:
    """A file's content; '' if there is none, or it is not ours to read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
