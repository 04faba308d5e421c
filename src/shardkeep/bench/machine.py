"""What figures depend on: the hardware, versions and load of this machine; and its memory while work runs.

Memory that counts is what a process holds for itself: anonymous pages (`RssAnon`) and shared anonymous ones,
which is how page-locked memory of the CUDA driver shows (`RssShmem`). Pages of a tmpfs file that is written
belong to the file and are not among them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import os
import platform
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

_PERIOD_S = 0.002
_PACKAGES = ("torch", "megatron-core", "shardkeep", "numpy", "msgspec", "ray")


def hardware(path: Path, device: str) -> dict[str, Any]:
    """The machine as a result file names it. Call before the run adds to the load average."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    memory = Path("/proc/meminfo").read_text().split()
    found = {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory[1]) * 1024,
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "filesystem": filesystem_of(path),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
    }
    if device == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "num_gpus": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
        }
    return found


def version(package: str) -> str:
    """The installed version, or "absent"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def filesystem_of(path: Path) -> str:
    """Type of the file system that holds `path`."""
    resolved, best, found = path.resolve(), -1, "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        mount = Path(before.split()[4].replace("\\040", " "))
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:  # mounts may be stacked: the last
            best, found = len(mount.parts), after.split()[0]
    return found


def synchronize(device: str) -> None:
    """Wait for the device, so that a clock that is read next counts whole work."""
    if device == "cuda":
        torch.cuda.synchronize()


def own_bytes() -> int:
    """Memory that this process holds for itself, in bytes."""
    total = 0
    for line in Path("/proc/self/status").read_bytes().splitlines():
        if line.startswith((b"RssAnon:", b"RssShmem:")):
            total += int(line.split()[1]) * 1024
    return total


class PeakMemory:
    """`with PeakMemory() as peak: work()`; then `peak.extra_bytes` is what the work held at most, on top of
    what there was before. Freed memory that malloc keeps is given back first, or the work would hide in it.
    """

    def __init__(self) -> None:
        self.extra_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="bench-memory", daemon=True)

    def __enter__(self) -> Self:
        trim()
        self._before = own_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            is_last = self._done.wait(_PERIOD_S)
            self.extra_bytes = max(self.extra_bytes, own_bytes() - self._before)
            if is_last:
                return


def trim() -> None:
    """Give memory that is free, but still held, back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
