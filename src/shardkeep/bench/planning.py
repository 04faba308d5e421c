"""Section `plan`: what a repeated save costs apart from its bytes, at eight ranks.

Each rank saves a tiny state again and again; counted is what holds training: capture, plan, and the agreement
that all have begun. The slowest rank counts, the median over saves. Waiting for ranks that come late is left
out by a barrier before each save.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import shardkeep as sk
from shardkeep.bench.config import BenchOptions
from shardkeep.bench.rows import Row

NUM_RANKS = 8
_NUM_TENSORS = 64
_NUM_SAVES = 12
_PHASES = ("capture", "plan", "stage")


def run(options: BenchOptions) -> list[Row]:
    """The section's row. Starts rank processes."""
    from shardkeep.testing.cluster import run_ranks

    with tempfile.TemporaryDirectory(dir=options.path, prefix="shardkeep-bench-") as scratch:
        of_ranks: list[list[dict[str, float]]] = run_ranks(NUM_RANKS, on_rank, scratch, timeout_s=120.0)
    held_ms = _slowest_ms(of_ranks, *_PHASES)
    phases = (*_PHASES, "write", "commit")
    parts = [f"{phase} {statistics.median(_slowest_ms(of_ranks, phase)[1:]):.1f}" for phase in phases]
    return [
        Row(
            what=f"planning and coordination of a repeated save, {NUM_RANKS} ranks",
            target=20.0,
            sense="<=",
            reached=statistics.median(held_ms[1:]),
            unit="ms",
            note=f"first {held_ms[0]:.0f} ms; {', '.join(parts)} ms",
        )
    ]


def _slowest_ms(of_ranks: list[list[dict[str, float]]], *phases: str) -> list[float]:
    """Of each save: what the phases took together on the slowest rank."""
    return [max(sum(one[p] for p in phases) for one in same) * 1e3 for same in zip(*of_ranks, strict=True)]


def on_rank(directory: str) -> list[dict[str, float]]:
    """Seconds by phase of each save on this rank."""
    rank = dist.get_rank()
    state = {f"rank{rank}.layer{i}.weight": torch.randn(256) for i in range(_NUM_TENSORS)}
    seconds = []
    for number in range(_NUM_SAVES):
        dist.barrier()
        seconds.append(sk.save(state, Path(directory) / f"{number}").seconds)
    return seconds
