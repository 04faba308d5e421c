"""Save and load of CPU tensors: bare I/O, torch DCP, megatron-core and shardkeep, in one process and one run.

In:  a size, a directory (tmpfs by default), a number of rounds and of cores.
Out: a table of GB/s and of ratios with the hardware; every sample in benchmarks/results/<name>.json.
Fair: all write the same bytes to a directory that is new each time; removing it is not
     timed. The first call of each is reported alone, as cold, and what it loads is compared with what it
     saved. Then every round runs all contestants, in an order that rotates, so that noise hits all alike; a
     ratio is the median of each round's own ratio. All call fsync on their files, as they come.

    python benchmarks/save_load.py --gib 2 --rounds 5
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

State = dict[str, torch.Tensor]
RESULTS = Path(__file__).resolve().parent / "results"
# What DESIGN asks of shardkeep: (operation, peer, at least this many times the peer's speed).
TARGETS = (
    ("save", "bare", 0.75),
    ("save", "torch DCP", 2.5),
    ("save", "megatron-core", 3.0),
    ("load", "bare", 0.7),
    ("load", "torch DCP", 3.0),
)


@dataclass(kw_only=True)
class Contestant:
    """A way to save and load. Seconds of the first call are `cold`, of the others `warm`, by operation."""

    name: str
    save: Callable[[Path], None]
    load: Callable[[Path], None]
    note: str
    cold: dict[str, float] = field(default_factory=dict)
    warm: dict[str, list[float]] = field(default_factory=lambda: {"save": [], "load": []})

    def median_s(self, operation: str) -> float:
        return statistics.median(self.warm[operation])


def bare(state: State, target: State, num_threads: int) -> Contestant:
    """The ceiling: a file per thread, a `pwrite` per tensor, an fsync per file; `preadv` into the target."""

    def each_part(work: Callable[[int, Sequence[torch.Tensor]], None], tensors: State) -> None:
        parts = [list(tensors.values())[part::num_threads] for part in range(num_threads)]
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(work, range(num_threads), parts))

    def save(path: Path) -> None:
        def write(part: int, tensors: Sequence[torch.Tensor]) -> None:
            fd = os.open(path / f"{part}.bin", os.O_WRONLY | os.O_CREAT)
            offset = 0
            for tensor in tensors:
                offset += _all_of(os.pwrite, fd, tensor, offset)
            os.fsync(fd)
            os.close(fd)

        path.mkdir()
        each_part(write, state)

    def load(path: Path) -> None:
        def read(part: int, tensors: Sequence[torch.Tensor]) -> None:
            fd = os.open(path / f"{part}.bin", os.O_RDONLY)
            offset = 0
            for tensor in tensors:
                offset += _all_of(lambda f, view, at: os.preadv(f, [view], at), fd, tensor, offset)
            os.close(fd)

        each_part(read, target)

    return Contestant(name="bare", save=save, load=load, note=f"pwrite, preadv; {num_threads} threads; fsync")


def torch_dcp(state: State, target: State, num_threads: int) -> Contestant:
    def save(path: Path) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=num_threads), no_dist=True)

    def load(path: Path) -> None:
        dcp.load(target, storage_reader=dcp.FileSystemReader(path), no_dist=True)

    name = "torch DCP" if num_threads == 1 else f"torch DCP, {num_threads} threads"
    return Contestant(name=name, save=save, load=load, note="FileSystemWriter; fsync")


def megatron(state: State, target: State) -> Contestant:
    """dist_checkpointing as it comes, in one gloo process; without a GPU its CUDA calls do nothing."""
    from megatron.core import dist_checkpointing

    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda device=None: None

    def sharded(tensors: State) -> dict[str, Any]:
        build = dist_checkpointing.ShardedTensor.from_rank_offsets
        return {key: build(key, tensor) for key, tensor in tensors.items()}

    def save(path: Path) -> None:
        path.mkdir()
        dist_checkpointing.save(sharded(state), str(path))

    def load(path: Path) -> None:
        loaded = dist_checkpointing.load(sharded(target), str(path))
        target.update(loaded)

    version = importlib.metadata.version("megatron-core")
    return Contestant(name="megatron-core", save=save, load=load, note=f"{version}, torch_dist; fsync")


def shardkeep(state: State, target: State) -> Contestant | None:
    """None while the package, or its save, is not there yet."""
    if importlib.util.find_spec("shardkeep") is None:
        return None
    import shardkeep as sk

    if not hasattr(sk, "save"):
        return None

    def save(path: Path) -> None:
        sk.save(state, path, overwrite=True)

    def load(path: Path) -> None:
        sk.load(target, path)

    return Contestant(
        name="shardkeep", save=save, load=load, note="checksums on; fsync of files and directory"
    )


def run_once(contestant: Contestant, path: Path) -> dict[str, float]:
    """Seconds of one save and one load, in a directory that is removed before and after."""
    shutil.rmtree(path, ignore_errors=True)
    seconds = {}
    for operation, action in (("save", contestant.save), ("load", contestant.load)):
        start = time.perf_counter()
        action(path)
        seconds[operation] = time.perf_counter() - start
    shutil.rmtree(path)
    return seconds


def measure(contestants: list[Contestant], state: State, target: State, path: Path, num_rounds: int) -> None:
    for contestant in contestants:
        for tensor in target.values():
            tensor.zero_()
        contestant.cold = run_once(contestant, path)
        wrong = [key for key in state if not torch.equal(state[key], target[key])]
        if wrong:
            raise SystemExit(f"{contestant.name} did not load what it saved: {wrong[:3]}")
    for turn in range(num_rounds):
        first = turn % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            for operation, seconds in run_once(contestant, path).items():
                contestant.warm[operation].append(seconds)


def ratio(ours: Contestant, peer: Contestant, operation: str) -> float:
    """How many times the peer's speed ours is: the median over rounds of each round's ratio."""
    pairs = zip(peer.warm[operation], ours.warm[operation], strict=True)
    return statistics.median(theirs_s / ours_s for theirs_s, ours_s in pairs)


def table(operation: str, contestants: list[Contestant], num_bytes: int) -> Table:
    ours = contestants[-1] if contestants[-1].name == "shardkeep" else None
    result = Table("contestant", title=operation, title_justify="left")
    for heading in ("cold s", "warm s", "GB/s", "min..max", "of bare", "shardkeep is"):
        result.add_column(heading, justify="right")
    result.add_column("how")
    for each in contestants:
        median_s, samples = each.median_s(operation), each.warm[operation]
        result.add_row(
            each.name,
            f"{each.cold[operation]:.2f}",
            f"{median_s:.3f}",
            f"{num_bytes / median_s / 1e9:.2f}",
            f"{num_bytes / max(samples) / 1e9:.2f}..{num_bytes / min(samples) / 1e9:.2f}",
            f"{ratio(each, contestants[0], operation):.2f}",
            f"{ratio(ours, each, operation):.2f}x" if ours else "absent",
            each.note,
        )
    return result


def targets(contestants: list[Contestant]) -> list[dict[str, Any]]:
    """Each target with what was reached; empty without shardkeep."""
    by_name = {each.name: each for each in contestants}
    if "shardkeep" not in by_name:
        return []
    rows = []
    for operation, peer, at_least in TARGETS:
        if peer in by_name:
            reached = ratio(by_name["shardkeep"], by_name[peer], operation)
            rows.append({"operation": operation, "peer": peer, "target": at_least, "reached": reached})
    return rows


def hardware(directory: Path, num_cores: int) -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")]
    find = ["findmnt", "-n", "-o", "FSTYPE", "-T", str(directory)]
    filesystem = subprocess.run(find, capture_output=True, text=True, check=False).stdout.strip()
    packages = ("torch", "megatron-core", "shardkeep", "numpy")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores_used": num_cores,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "filesystem": filesystem.splitlines()[-1] if filesystem else "unknown",  # mounts may be stacked
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
    }


def report(
    args: argparse.Namespace, machine: dict[str, Any], contestants: list[Contestant], num_bytes: int
) -> None:
    console = Console(width=None if os.isatty(1) else 150)
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    console.print(
        f"{machine['cpu']}, {machine['cores_used']} of {machine['cores']} cores, Linux {machine['kernel']},"
        f" load average {machine['load_average']:.1f} at the start (ratios want it near 0)"
    )
    console.print(
        f"{num_bytes / 2**30:.2f} GiB in {args.tensors} tensors on {machine['filesystem']}; {versions}"
    )
    for operation in ("save", "load"):
        console.print(table(operation, contestants, num_bytes))
    goals = targets(contestants)
    for goal in goals:
        verdict = "reached" if goal["reached"] >= goal["target"] else "MISSED"
        console.print(
            f"{goal['operation']} against {goal['peer']}: {goal['reached']:.2f}x,"
            f" target {goal['target']}x: {verdict}"
        )
    RESULTS.mkdir(exist_ok=True)
    measured = {
        each.name: {"note": each.note, "cold_s": each.cold, "warm_s": each.warm} for each in contestants
    }
    content = {"num_bytes": num_bytes, "hardware": machine, "contestants": measured, "targets": goals}
    out = RESULTS / f"{args.name}.json"
    out.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written: benchmarks/results/{out.name}")


def _all_of(call: Callable[[int, memoryview, int], int], fd: int, tensor: torch.Tensor, offset: int) -> int:
    """Call until the whole tensor has moved (Linux moves 2 GiB at most at a time); returns the bytes."""
    view = memoryview(tensor.view(torch.uint8).numpy())
    done = 0
    while done < len(view):
        done += call(fd, view[done:], offset + done)
    return done


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare save and load speeds in one run.")
    parser.add_argument("--gib", type=float, default=2.0, help="size of the state (default 2)")
    parser.add_argument("--tensors", type=int, default=64, help="number of tensors (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="warm rounds (default 5)")
    parser.add_argument("--cores", type=int, default=2, help="cores to run on (default 2)")
    parser.add_argument(
        "--dir", type=Path, default=Path("/dev/shm"), help="where to write (default /dev/shm)"
    )
    parser.add_argument("--name", default="save_load", help="name of the result file (default save_load)")
    args = parser.parse_args()
    if min(args.gib, args.tensors, args.rounds, args.cores) <= 0:
        parser.error("--gib, --tensors, --rounds and --cores must be positive")
    if not args.dir.is_dir():
        parser.error(f"--dir {args.dir} is not a directory")
    return args


def main() -> None:
    warnings.filterwarnings("ignore")
    args = _arguments()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    machine = hardware(args.dir, len(cores))  # before the run adds to the load
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    num_elements = max(1, int(args.gib * 2**30) // 4 // args.tensors)
    state = {f"tensor_{i}": torch.randn(num_elements) for i in range(args.tensors)}
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="shardkeep-bench-") as scratch:
        store = f"file://{scratch}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        contestants = [
            bare(state, target, len(cores)),
            torch_dcp(state, target, 1),
            torch_dcp(state, target, len(cores)),
            megatron(state, target),
        ]
        ours = shardkeep(state, target)
        contestants += [ours] if ours else []
        measure(contestants, state, target, Path(scratch) / "checkpoint", args.rounds)
        dist.destroy_process_group()
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    report(args, machine, contestants, num_bytes)


if __name__ == "__main__":  # megatron-core's save spawns a manager, which imports this file again
    main()
