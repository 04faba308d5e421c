"""Loads of data-parallel replicas from a slow storage that they share: each byte read once, or once per rank.

In: a size, a number of ranks, the bandwidth and latency of the storage, a number of rounds. Out: a table of
seconds, of bytes read from the storage, and the ratio of `read_once` off to on, which is close to the number
of ranks where the storage is the bottleneck; the same without a limit, where the sockets are the price;
everything in benchmarks/results/read_once.json with the hardware. Fair: both load the same checkpoint into
the same memory in the same processes, in turn; a ratio is the median of each round's own. The storage is a
directory behind `shardkeep.testing.slow`: one link for all ranks.

python benchmarks/read_once.py --mib 64 --ranks 4 --mib-per-s 50
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import shardkeep as sk
from shardkeep import checkpointer
from shardkeep.bench.machine import hardware
from shardkeep.loading import Loading
from shardkeep.restore import template
from shardkeep.storage import storage_for
from shardkeep.testing.cluster import run_ranks
from shardkeep.testing.slow import Link, SlowStorage

MIB = 1 << 20
RESULTS = Path(__file__).resolve().parent / "results"
sys.path.insert(0, str(Path(__file__).resolve().parent))  # ranks import this file by its name


def state_of(num_bytes: int, fill: float | None) -> dict[str, torch.Tensor]:
    """32 tensors of equal size, a quarter of them into transposed memory."""
    rows = num_bytes // 32 // 4 // 256
    state = {}
    for n in range(32):
        tensor = torch.zeros(256, rows).t() if n % 4 == 0 else torch.zeros(rows, 256)
        state[f"layer{n}"] = tensor if fill is None else tensor.fill_(fill + n)
    return state


def load(storage: SlowStorage, num_bytes: int, read_once: str) -> dict[str, Any]:
    """One load of this rank into new memory."""
    state = state_of(num_bytes, None)
    config = sk.Config(read_once=read_once)
    before = storage.read_bytes
    loading = Loading(storage, config, lambda: template(state), checkpointer.strict_rule(True))
    dist.barrier()
    began = time.perf_counter()
    report = checkpointer.load_one(loading)
    seconds = time.perf_counter() - began
    assert all(bool((t == 1.0 + n).all()) for n, t in enumerate(state.values()))
    return {
        "seconds": seconds,
        "storage_bytes": storage.read_bytes - before,
        "read_bytes": report.read_bytes,
        "received_bytes": report.received_bytes,
    }


def rank(directory: str, num_bytes: int, links: dict[str, Link], rounds: int) -> dict[str, Any]:
    """Every round of this rank: link -> setting -> what each load took."""
    found: dict[str, Any] = {name: {"on": [], "off": []} for name in links}
    for _ in range(rounds):
        for name, link in links.items():
            for read_once in ("on", "off"):
                storage = SlowStorage(storage_for(directory), link)
                found[name][read_once].append(load(storage, num_bytes, read_once))
    return found


def summary(ranks: list[dict[str, Any]], link: str, num_bytes: int) -> dict[str, Any]:
    """A load is as long as its slowest rank, and has read what all ranks have."""
    took: dict[str, list[float]] = {}
    result: dict[str, Any] = {}
    for setting in ("on", "off"):
        rounds = list(zip(*(r[link][setting] for r in ranks), strict=True))
        took[setting] = [max(r["seconds"] for r in each) for each in rounds]
        result[setting] = {
            "seconds": took[setting],
            "storage_bytes_per_state_byte": sum(r["storage_bytes"] for r in rounds[0]) / num_bytes,
            "largest_share_of_a_rank": max(r["read_bytes"] for r in rounds[0]) / num_bytes,
        }
    result["off_over_on"] = statistics.median(b / a for a, b in zip(took["on"], took["off"], strict=True))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib-per-s", type=float, default=50.0)
    parser.add_argument("--latency-ms", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--name", default="read_once")
    options = parser.parse_args()
    machine = hardware(Path(options.dir), "cpu")  # before the run adds to the load
    work = Path(tempfile.mkdtemp(prefix="shardkeep-read-once-", dir=options.dir))
    num_bytes = options.mib * MIB
    try:
        sk.save(state_of(num_bytes, 1.0), work / "ckpt", config=sk.Config(durable=False))
        slow, latency_s = options.mib_per_s * MIB, options.latency_ms / 1e3
        links = {
            "slow": Link(path=str(work / "slow"), bytes_per_s=slow, latency_s=latency_s),
            "no limit": Link(path=str(work / "free"), bytes_per_s=1e15),
        }
        module = f"{Path(__file__).stem}:rank"
        arguments = (str(work / "ckpt"), num_bytes, links, options.rounds)
        found = run_ranks(options.ranks, module, *arguments, timeout_s=300)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report(options, machine, {name: summary(found, name, num_bytes) for name in links})


def report(options: argparse.Namespace, machine: dict[str, Any], results: dict[str, Any]) -> None:
    title = f"{options.mib} MiB on each of {options.ranks} ranks, {machine['cores']} cores"
    table = Table("storage", "read_once", "s (median)", "bytes read / state", "largest rank's", title=title)
    for name, result in results.items():
        for setting in ("off", "on"):
            row = result[setting]
            table.add_row(
                name,
                setting,
                f"{statistics.median(row['seconds']):.3f}",
                f"{row['storage_bytes_per_state_byte']:.3f}",
                f"{row['largest_share_of_a_rank']:.3f}",
            )
        table.add_row(name, "off / on", f"{result['off_over_on']:.2f}", end_section=True)
    Console(width=100).print(table)
    RESULTS.mkdir(exist_ok=True)
    content = {"options": vars(options), "hardware": machine, "results": results}
    (RESULTS / f"{options.name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
