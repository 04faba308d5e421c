"""Section `speed`: every contestant saves and loads the same state, in this process or on several ranks."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardkeep as sk
from shardkeep.bench import bare, ours, peers
from shardkeep.bench.config import BenchOptions
from shardkeep.bench.contestant import Contestant, Field, Samples, State, measure, over_ranks

_TIMEOUT_S = 1800.0
_HALF = torch.bfloat16


@dataclass(kw_only=True, slots=True)
class Measured:
    """What the section found; `num_bytes` and `num_tensors` are of the whole state."""

    num_bytes: int
    num_tensors: int
    num_threads: int
    samples: list[Samples]


def run(options: BenchOptions, only: tuple[str, ...] = ()) -> Measured:
    """Measure in this process, or start rank processes that do. `only`: names of contestants; then of loads
    shardkeep's alone runs.
    """
    if options.ranks == 1:
        with process_group(options.path):
            return on_rank(options, only)
    from shardkeep.testing.cluster import run_ranks

    found: list[Measured] = run_ranks(options.ranks, on_rank, options, only, timeout_s=_TIMEOUT_S)
    return Measured(
        num_bytes=sum(each.num_bytes for each in found),
        num_tensors=sum(each.num_tensors for each in found),
        num_threads=found[0].num_threads,
        samples=over_ranks(each.samples for each in found),
    )


@contextmanager
def process_group(path: Path) -> Iterator[None]:
    """A default group of one, which the peers need."""
    with tempfile.TemporaryDirectory(dir=path, prefix="shardkeep-bench-") as scratch:
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def on_rank(options: BenchOptions, only: tuple[str, ...]) -> Measured:
    """This rank's part of the section. Collective over the default group."""
    warnings.filterwarnings("ignore")  # the peers'
    rank, size = dist.get_rank(), dist.get_world_size()
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    state = make_state(options, rank, size)
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    config = sk.Config(io_threads=options.threads)
    with scratch_of(options.path, rank) as scratch:
        field = Field(
            state=state,
            target=target,
            directory=scratch / "checkpoint",
            device=options.device,
            rank=rank,
            meet=dist.barrier,
            agree=_first_failure,
        )
        host = bare.Host(state, target)
        contestants = _contestants(options, field, host, config)
        if only:
            chosen = [each for each in contestants if each.name in only]
            contestants = [each if each.name == ours.SYNC else replace(each, load=None) for each in chosen]
        samples = measure(contestants, field, options.rounds)
        host.close()
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    return Measured(
        num_bytes=num_bytes, num_tensors=len(state), num_threads=config.num_threads, samples=samples
    )


def _contestants(options: BenchOptions, field: Field, host: bare.Host, config: sk.Config) -> list[Contestant]:
    found = [bare.files(host, config.num_threads, field.rank)]
    if options.device == "cuda":
        found.append(bare.to_host(host))
    found += peers.contestants(options.chosen_peers, field.state, field.target, config.num_threads)
    return found + ours.contestants(field.state, field.target, config)


def make_state(options: BenchOptions, rank: int, size: int) -> State:
    """This rank's share: bf16 on a GPU, fp32 on the CPU, names that no other rank has."""
    dtype = _HALF if options.device == "cuda" else torch.float32
    numels = _numels(options, dtype.itemsize)[rank::size]
    build = torch.Generator(options.device).manual_seed(rank)
    return {
        f"rank{rank}.layer{i}.weight": torch.randn(n, dtype=dtype, device=options.device, generator=build)
        for i, n in enumerate(numels)
    }


def _numels(options: BenchOptions, item_bytes: int) -> list[int]:
    if options.min_kib is None or options.max_kib is None:
        return [max(2, 2 * math.ceil(options.gib * 2**29 / item_bytes / options.tensors))] * options.tensors
    draw = torch.rand(options.tensors, generator=torch.Generator().manual_seed(0)).tolist()
    span = options.max_kib - options.min_kib
    return [max(1, int((options.min_kib + part * span) * 1024 / item_bytes)) for part in draw]


@contextmanager
def scratch_of(path: Path, rank: int) -> Iterator[Path]:
    """A new directory that all ranks share, removed at the end."""
    chosen: list[Any] = [tempfile.mkdtemp(dir=path, prefix="shardkeep-bench-") if rank == 0 else None]
    try:
        dist.broadcast_object_list(chosen)
        yield Path(os.fspath(chosen[0]))
    finally:
        if rank == 0:
            shutil.rmtree(chosen[0], ignore_errors=True)


def _first_failure(failure: str | None) -> str | None:
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, failure)
    return next((each for each in every if each), None)
