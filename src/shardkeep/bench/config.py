"""The options of `shardkeep bench`, with the checks that tell a wrong one in one line."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardkeep.demo.config import WrongOption

GIB = 1 << 30

Section = Literal["speed", "memory", "plan", "small", "beside"]
Peer = Literal["dcp", "dcp-threads", "dcp-async", "megatron"]

PEERS: tuple[Peer, ...] = ("dcp", "dcp-threads", "dcp-async", "megatron")
CPU_SECTIONS: tuple[Section, ...] = ("memory", "speed", "plan")
CUDA_SECTIONS: tuple[Section, ...] = ("memory", "speed", "beside")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Settings of `shardkeep bench`; each is an option of the command line."""

    gib: float = 2.0
    """Size of the whole state in GiB, over all ranks."""
    tensors: int = 64
    """Number of tensors, over all ranks."""
    min_kib: float | None = None
    """With --max-kib: tensors of sizes drawn between the two, in KiB; --gib is not used then."""
    max_kib: float | None = None
    """See --min-kib."""
    ranks: int = 1
    """Rank processes on this machine that save together; 1 measures in this process."""
    path: Path = Path("/dev/shm")
    """Directory to write below; what is written is removed again."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the state lies. With several ranks each takes a GPU of its own, as far as they go."""
    threads: int = 0
    """Threads per rank, of ours, of the ceilings and of peers that take a number; 0: what shardkeep takes."""
    rounds: int = 3
    """Warm rounds; a ratio is the median of each round's own."""
    peers: tuple[Peer, ...] = PEERS
    """Whom to measure beside; repeat the option for several."""
    no_peers: bool = False
    """Measure beside the hardware alone."""
    sections: tuple[Section, ...] = ()
    """What to measure; default: memory, speed and plan, on cuda memory, speed and beside. `small` is the
    state of many small tensors.
    """
    small_tensors: int = 50_000
    """Number of tensors of section `small`, of 1 to 64 KiB each."""
    json: bool = False
    """Print JSON instead of tables."""
    out: Path | None = None
    """Also write the JSON to this file."""

    def __post_init__(self) -> None:
        for name in ("gib", "tensors", "ranks", "rounds", "small_tensors"):
            if getattr(self, name) <= 0:
                raise WrongOption(f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}")
        if self.threads < 0:
            raise WrongOption(f"--threads must not be negative, got {self.threads}")
        if (self.min_kib is None) != (self.max_kib is None):
            raise WrongOption("--min-kib and --max-kib go together")
        if self.min_kib is not None and self.max_kib is not None and not 0 < self.min_kib <= self.max_kib:
            raise WrongOption(f"--min-kib must be above 0 and at most --max-kib ({self.max_kib})")
        if not self.path.is_dir():
            raise WrongOption(f"--path must be a directory, got {self.path}")
        if self.tensors < self.ranks:
            raise WrongOption(f"--tensors must be at least --ranks ({self.ranks}), got {self.tensors}")

    @property
    def chosen_sections(self) -> tuple[Section, ...]:
        return self.sections or (CPU_SECTIONS if self.device == "cpu" else CUDA_SECTIONS)

    @property
    def chosen_peers(self) -> tuple[Peer, ...]:
        return () if self.no_peers else self.peers

    @property
    def num_bytes(self) -> int:
        """About the size of the whole state."""
        if self.min_kib is not None and self.max_kib is not None:
            return int(self.tensors * (self.min_kib + self.max_kib) / 2 * 1024)
        return int(self.gib * GIB)

    def check_room(self) -> None:
        """WrongOption if the run would not fit: better now than by the OOM killer in the middle."""
        copies = 2 if self.device == "cpu" else 0  # the state, and what loads fill
        stage_all = {"dcp-async"} if self.device == "cpu" else {"dcp-async", "megatron"}
        copies += 1 + bool(stage_all & set(self.chosen_peers))  # a snapshot, and a peer's
        copies += _is_tmpfs(self.path)
        _require("memory", copies * self.num_bytes, available_bytes(), "--gib")
        _require(
            f"space at {self.path}", int(1.1 * self.num_bytes), shutil.disk_usage(self.path).free, "--gib"
        )


def available_bytes() -> int:
    """Host memory that this machine can still give, by the kernel's estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _require(what: str, needed: int, available: int, option: str) -> None:
    if needed > available:
        raise WrongOption(
            f"this run needs about {needed / GIB:.1f} GiB of {what}, {available / GIB:.1f} GiB are there: "
            f"lower {option}"
        )


def _is_tmpfs(path: Path) -> bool:
    from shardkeep.bench.machine import filesystem_of

    return filesystem_of(path) == "tmpfs"
