"""The peers, as they come: torch DCP (synchronous, and asynchronous on a thread) and megatron-core's
dist_checkpointing.

All need the default process group, with gloo. Keys differ by rank, as a sharded state's boxes do.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkeep.bench.config import Peer
from shardkeep.bench.contestant import Contestant, State
from shardkeep.bench.machine import version

dcp: Any = importlib.import_module(
    "torch.distributed.checkpoint"
)  # exports less to type checkers than it has

DCP, DCP_THREADS, DCP_ASYNC, MEGATRON = "torch DCP", "torch DCP, threads", "torch DCP, async", "megatron-core"


def contestants(names: tuple[Peer, ...], state: State, target: State, num_threads: int) -> list[Contestant]:
    """Those of the peers named that are installed."""
    alone = dist.get_world_size() == 1
    found = []
    if "dcp" in names:
        found.append(torch_dcp(state, target, 1, alone))
    if "dcp-threads" in names and num_threads > 1:
        found.append(torch_dcp(state, target, num_threads, alone))
    if "dcp-async" in names:
        found.append(torch_dcp_async(state, target))
    if "megatron" in names and importlib.util.find_spec("megatron"):
        found.append(megatron(state, target))
    return found


def torch_dcp(state: State, target: State, num_threads: int, alone: bool) -> Contestant:
    def save(path: Path) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=num_threads), no_dist=alone)

    def load(path: Path) -> None:
        dcp.load(target, storage_reader=dcp.FileSystemReader(path), no_dist=alone)

    name, threads = (DCP, "1 thread") if num_threads == 1 else (DCP_THREADS, f"{num_threads} threads")
    return Contestant(name=name, note=f"FileSystemWriter; {threads}; fsync", save=save, load=load)


def torch_dcp_async(state: State, target: State) -> Contestant:
    def save(path: Path) -> float:
        start = time.perf_counter()
        future = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path))
        stall_s = time.perf_counter() - start
        getattr(future, "upload_completion", future).result()
        return stall_s

    def load(path: Path) -> None:
        dcp.load(target, storage_reader=dcp.FileSystemReader(path))

    return Contestant(
        name=DCP_ASYNC, note="async_save on a thread; fsync", save=save, load=load, times_load=False
    )


def megatron(state: State, target: State) -> Contestant:
    """Needs megatron-core to be installed; without a GPU its CUDA calls do nothing."""
    from megatron.core import dist_checkpointing

    def sharded(tensors: State) -> dict[str, Any]:
        build = dist_checkpointing.ShardedTensor.from_rank_offsets
        return {key: build(key, tensor) for key, tensor in tensors.items()}

    def save(path: Path) -> None:
        path.mkdir(exist_ok=True)
        with cuda_or_nothing():
            dist_checkpointing.save(sharded(state), str(path))

    def load(path: Path) -> None:
        with cuda_or_nothing():
            loaded = dist_checkpointing.load(sharded(target), str(path))
        target.update({key: loaded[key] for key in target})

    note = f"{version('megatron-core')}, torch_dist; fsync"
    return Contestant(name=MEGATRON, note=note, save=save, load=load)


@contextmanager
def cuda_or_nothing() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    before = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = before
