"""Saves and loads of a GPU's state beside what the hardware and torch DCP do with the same bytes, in one run.

Prints seconds, GB/s and the ratios that the design asks for: the stall of a snapshot against a pinned copy of
the same bytes, saves and loads against bare `pwrite` and `preadv` with as many threads, and against torch
DCP. Medians over rounds in which the contestants take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import shardkeep as sk
from shardkeep import stage
from shardkeep.memory import host_bytes

GIB = 1 << 30


def make_state(gib: float, num_tensors: int) -> dict[str, torch.Tensor]:
    numel = int(gib * GIB / num_tensors / 2)
    return {
        f"layer.{i}.weight": torch.randn(numel, device="cuda", dtype=torch.bfloat16)
        for i in range(num_tensors)
    }


def pinned_copy(state: dict[str, torch.Tensor], buffers: list[torch.Tensor]) -> None:
    for tensor, buffer in zip(state.values(), buffers, strict=True):
        buffer.view(tensor.dtype).copy_(tensor, non_blocking=True)
    torch.cuda.synchronize()


def in_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def bare_write(directory: Path, buffers: list[torch.Tensor], num_threads: int, part: int) -> None:
    directory.mkdir()

    def work(n: int) -> None:
        fd = os.open(directory / str(n), os.O_CREAT | os.O_WRONLY)
        end = 0
        for view in map(host_bytes, buffers[n::num_threads]):
            for start in range(0, len(view), part):
                end += os.pwrite(fd, view[start : start + part], end)
        os.fsync(fd)
        os.close(fd)

    in_threads(num_threads, work)


def bare_read(directory: Path, buffers: list[torch.Tensor], num_threads: int, part: int) -> None:
    def work(n: int) -> None:
        fd = os.open(directory / str(n), os.O_RDONLY)
        at = 0
        for view in map(host_bytes, buffers[n::num_threads]):
            for start in range(0, len(view), part):
                at += os.preadv(fd, [view[start : start + part]], at)
        os.close(fd)

    in_threads(num_threads, work)


def main() -> None:  # noqa: PLR0915 - a script, read top to bottom
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8)
    parser.add_argument("--tensors", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--dir", default="/dev/shm/shardkeep-gpu")
    parser.add_argument("--no-dcp", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    root = Path(args.dir)
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    state = make_state(args.gib, args.tensors)
    buffers = [stage.allocate(t.nbytes) for t in state.values()]
    config = sk.Config(io_threads=args.threads)
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, work: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds[name].append(time.perf_counter() - start)

    def snapshot(directory: Path) -> None:
        start = time.perf_counter()
        handle = sk.save_async(state, directory, config=config)
        seconds["snapshot stall"].append(time.perf_counter() - start)
        handle.wait()

    def dcp_save() -> None:
        writer = dcp.FileSystemWriter(root / "dcp", thread_count=args.threads)
        dcp.save(state, storage_writer=writer, no_dist=True)

    target = {k: torch.zeros_like(t) for k, t in state.items()}
    for number in range(args.rounds):
        timed("pinned copy", lambda: pinned_copy(state, buffers))
        timed("bare pwrite", lambda: bare_write(root / "bare", buffers, args.threads, 1 << 20))
        timed("bare preadv", lambda: bare_read(root / "bare", buffers, args.threads, 1 << 20))
        shutil.rmtree(root / "bare")
        timed("save", lambda: sk.save(state, root / "sync", config=config))
        timed("load", lambda: sk.load(target, root / "sync", config=config))
        if number == 0:
            assert all(torch.equal(target[k], t) for k, t in state.items())
        shutil.rmtree(root / "sync")
        timed("snapshot, committed", lambda: snapshot(root / "async"))
        shutil.rmtree(root / "async")
        if not args.no_dcp:
            timed("DCP save", dcp_save)
            timed("DCP load", lambda: dcp.load(target, checkpoint_id=root / "dcp", no_dist=True))
            shutil.rmtree(root / "dcp")
    num_bytes = sum(t.nbytes for t in state.values())
    medians = {name: statistics.median(s[1:] if len(s) > 1 else s) for name, s in seconds.items()}
    for name, median in medians.items():
        print(
            f"{name:20} {median:8.3f} s {num_bytes / median / 1e9:7.2f} GB/s  first {seconds[name][0]:.3f} s"
        )
    pairs = [
        ("snapshot stall", "pinned copy"),
        ("bare pwrite", "save"),
        ("bare preadv", "load"),
        ("DCP save", "save"),
        ("DCP load", "load"),
    ]
    ratios = {f"{a} / {b}": medians[a] / medians[b] for a, b in pairs if a in medians}
    for name, ratio in ratios.items():
        print(f"{name:32} {ratio:.2f}")
    hardware = {
        "gpu": torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "torch": torch.__version__,
    }
    print(hardware)
    if args.out:
        args.out.write_text(
            json.dumps(
                {"hardware": hardware, "bytes": num_bytes, "seconds": seconds, "ratios": ratios}, indent=1
            )
        )
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
