"""One rank's part of `benchmarks/multi_gpu.py`: what it measures under a layout, restores under another, and
sees of a death.

In:  `ScaleOptions` and a layout; the environment says which rank of how many. Each function is one call, with
     a process group of its own.
Out: plain dicts of this rank's figures, which the driver compares over ranks.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardkeep as sk
from shardkeep.bench import bare, gpt
from shardkeep.bench.machine import PeakMemory, synchronize
from shardkeep.bench.memory import STAGING_BYTES
from shardkeep.bench.peers import cuda_or_nothing, dcp

_JOIN_S = 600.0
_WARM_STEPS = 2
_TIMED = ("save", "load", "stall", "snapshot", "copy", "write", "read")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """What the driver passes to every rank. `paths`: a tmpfs directory first, then others."""

    device: str
    params_b: float
    paths: tuple[str, ...]
    rounds: int
    steps: int
    threads: int
    deadline_s: float
    peers: bool

    @property
    def config(self) -> sk.Config:
        """The ring's size is given, so that the memory of a save can be judged by it."""
        return sk.Config(io_threads=self.threads, staging_bytes=STAGING_BYTES)


@contextmanager
def group(options: ScaleOptions, call: str) -> Iterator[int]:
    """This process's device and the default group of one call; gives its rank."""
    from shardkeep.demo import megatron_cpu

    megatron_cpu.enable()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    backend = "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    store = f"file://{options.paths[0]}/store-{call}"
    wait = timedelta(seconds=_JOIN_S)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=wait)
    yield rank  # the group ends with the process, or with the next call: after a death, ending it could hang


def measure(options: ScaleOptions, layout: gpt.Layout, call: str) -> dict[str, Any]:
    """Step times, saves, loads, ceilings and peers under one layout."""
    with group(options, call):
        return Measuring(options, layout).run()


class Measuring:
    """A job in training, and this rank's figures so far."""

    def __init__(self, options: ScaleOptions, layout: gpt.Layout) -> None:
        self.options, self.rank, self.size = options, dist.get_rank(), dist.get_world_size()
        self.job = gpt.Job(gpt.Size.of_params(options.params_b), layout, options.device)
        self.found: dict[str, Any] = {"rank": self.rank}
        self._seed = 0

    def run(self) -> dict[str, Any]:
        for _ in range(_WARM_STEPS):
            self._train_step()
        self.found["step_s"] = [self._timed(self._train_step)[0] for _ in range(self.options.steps)]
        self.state = self.job.state(gpt.FAST)
        self.found["sharded_state_dict_s"] = self._timed(lambda: self.job.state(gpt.FAST))[0]
        self.found["prepare_s"] = self._timed(lambda: sk.prepare(self.state, self.options.config))[0]
        self.found["paths"] = [self._on(path) for path in self.options.paths]
        self.found["lazy"] = self._lazy(self._new(self.options.paths[0]))
        self.found["peers"] = self._peers(self.options.paths[0]) if self.options.peers else {}
        return self.found

    # ---- ours, and the ceilings

    def _on(self, root: str) -> dict[str, Any]:
        """Saves, loads and ceilings at one place. The first of each kind is kept apart."""
        on: dict[str, Any] = {"path": root, **{f"{name}_s": [] for name in _TIMED}}
        host = None
        for number in range(self.options.rounds + 1):
            path = self._new(root)
            with PeakMemory() if number == 0 else nullcontext() as peak:
                seconds, report = self._timed(partial(sk.save, self.state, path, config=self.options.config))
            on["save_s"].append(seconds)
            on["load_s"].append(self._load(path, check=number == 0))
            if peak:
                on |= {"extra_bytes": peak.extra_bytes, "file_bytes": self._file_bytes(path)}
                on |= {"num_bytes": report.num_bytes, "phases": report.seconds}
            on["stall_s"].append(self._snapshot(self._new(root), on["snapshot_s"]))
            host = host or self._host(on["file_bytes"])
            self._ceilings(host, self._new(root), on)
        if host:
            host.close()
        return on

    def _host(self, num_bytes: int) -> bare.Host:
        """As many bytes as this rank writes, out of its own tensors."""
        parts = {str(number): part for number, part in enumerate(_cut_to(self.tensors(), num_bytes))}
        return bare.Host(parts, {key: torch.empty_like(part) for key, part in parts.items()})

    def _load(self, path: Path, check: bool) -> float:
        """Load into the job's own tensors, emptied before where what they get is to be checked."""
        before = gpt.digests(self.state) if check else None
        if check:
            for shard in gpt.shards(self.state):
                shard.data.detach().zero_()
        seconds, _ = self._timed(lambda: sk.load(self.state, path, config=self.options.config))
        if check and gpt.digests(self.state) != before:
            raise RuntimeError(f"rank {self.rank}: a load from {path} gave other values than were saved")
        return seconds

    def _snapshot(self, path: Path, committed_s: list[float]) -> float:
        def begin() -> Any:
            return sk.save_async(self.state, path, config=self.options.config)

        start = time.perf_counter()
        stall_s, handle = self._timed(begin)
        handle.wait()
        committed_s.append(time.perf_counter() - start)
        return stall_s

    def _ceilings(self, host: bare.Host, path: Path, on: dict[str, Any]) -> None:
        """At the same time on all ranks."""
        if self.options.device == "cuda":
            on["copy_s"].append(self._timed(partial(bare.to_host(host).save, path))[0])
        files = bare.files(host, self.options.config.num_threads, self.rank)
        assert files.load
        on["write_s"].append(self._timed(partial(files.save, path))[0])
        on["read_s"].append(self._timed(partial(files.load, path))[0])

    def _lazy(self, path: Path) -> dict[str, Any]:
        """Forward and backward beside a lazy save; the optimizer steps when it is captured."""
        sk.register_optimizer(self.job.optimizer)
        before = gpt.digests(self.state)
        alone = self._micro_steps(lambda: False, self.options.steps)
        stall_s, handle = self._timed(
            lambda: sk.save_async(self.state, path, capture="lazy")  # with as many threads as it finds right
        )
        with ThreadPoolExecutor(1) as waiting:
            captured = waiting.submit(handle.wait_captured)
            beside = self._micro_steps(captured.done, 10_000)
        wait_s, _ = self._timed(self.job.optimizer_step)
        handle.wait()
        alone += self._micro_steps(lambda: False, self.options.steps)
        sk.load(self.state, path, config=self.options.config)
        if gpt.digests(self.state) != before:
            raise RuntimeError(f"rank {self.rank}: a lazy save did not keep the state as it was at the call")
        return {"stall_s": stall_s, "alone_s": alone, "beside_s": beside, "optimizer_step_s": wait_s}

    def _micro_steps(self, is_over: Callable[[], bool], most: int) -> list[float]:
        """Forward and backward until it is over on all ranks, which step together; the last is left out."""
        seconds: list[float] = []
        left = torch.tensor(1)
        while left.item() and len(seconds) < most:
            seconds.append(self._timed(self._forward_backward, meet=False)[0])
            left = torch.tensor(0 if is_over() else 1)
            dist.all_reduce(left, dist.ReduceOp.MAX)
        return seconds[:-1] if is_over() else seconds

    # ---- peers

    def _peers(self, root: str) -> dict[str, Any]:
        from megatron.core import dist_checkpointing

        def megatron(path: Path) -> None:
            dist_checkpointing.save(self.state, str(path))

        local = {f"rank{self.rank}.{number}": tensor for number, tensor in enumerate(self.tensors())}

        def torch_dcp(path: Path) -> None:
            writer = dcp.FileSystemWriter(path, thread_count=self.options.config.num_threads)
            dcp.save(local, storage_writer=writer)

        found: dict[str, Any] = {}
        for name, save in (("megatron-core", megatron), ("torch DCP", torch_dcp)):
            seconds = []
            for _ in range(self.options.rounds + 1):
                path = self._new(root)
                if self.rank == 0:
                    path.mkdir()
                with cuda_or_nothing():
                    seconds.append(self._timed(partial(save, path))[0])
            found[name] = {"save_s": seconds}
        self._new(root)
        return found

    # ---- helpers

    def tensors(self) -> list[torch.Tensor]:
        """This rank's main replicas."""
        return [shard.data.detach() for shard in gpt.shards(self.state, main_only=True)]

    def _new(self, root: str) -> Path:
        """A checkpoint's path; the one before is removed."""
        path = Path(root) / "checkpoint"
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        return path

    def _file_bytes(self, path: Path) -> int:
        """Size of the files that this rank wrote."""
        mine = f"__{self.rank}_"
        return sum(size for name, size in sk.inspect(path).files.items() if name.startswith(mine))

    def _train_step(self) -> None:
        self._forward_backward()
        self.job.optimizer_step()

    def _forward_backward(self) -> None:
        self._seed += 1
        self.job.forward_backward(self._seed)

    def _timed(self, work: Callable[[], Any], meet: bool = True) -> tuple[float, Any]:
        synchronize(self.options.device)
        if meet:
            dist.barrier()
        start = time.perf_counter()
        result = work()
        synchronize(self.options.device)
        return time.perf_counter() - start, result


def _cut_to(tensors: list[torch.Tensor], num_bytes: int) -> list[torch.Tensor]:
    """Flat tensors of `num_bytes` in all, from the first on, and again from the first if they are too few."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    cut: list[torch.Tensor] = []
    left = num_bytes
    while flat and left > 0:
        for tensor in flat:
            part = tensor[:left]
            left -= len(part)
            cut += [part] if len(part) else []
    return cut


def restore(options: ScaleOptions, saved: gpt.Layout, restored: gpt.Layout, call: str) -> dict[str, Any]:
    """Save under one layout, build and load under another. What is there afterwards, as digests by key."""
    with group(options, call) as rank:
        size = gpt.Size.of_params(options.params_b)
        path = Path(options.paths[0]) / f"restore-{call}"
        job = gpt.Job(size, saved, options.device)
        for seed in range(_WARM_STEPS):
            job.forward_backward(seed)
            job.optimizer_step()
        state = job.state(gpt.ANY_LAYOUT)
        before = gpt.digests(state)
        report = sk.save(state, path, config=options.config)
        del job, state
        job = gpt.Job(size, restored, options.device, seed=2)
        template = job.state(gpt.ANY_LAYOUT, is_loading=True)
        start = time.perf_counter()
        job.take_over(sk.megatron.load(template, path))
        load_s = time.perf_counter() - start
        after = gpt.digests(job.state(gpt.ANY_LAYOUT))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(path)
        different = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        return {
            "num_keys": len(before),
            "different": different,
            "load_s": load_s,
            "num_bytes": report.num_bytes,
        }


class _DieAfterWriting(logging.Handler):
    """Kills this process when a save of it has written and not yet committed."""

    def handle(self, record: logging.LogRecord) -> bool:
        if ": write" in record.getMessage():
            os.kill(os.getpid(), signal.SIGKILL)
        return True


def death(options: ScaleOptions, layout: gpt.Layout, call: str) -> dict[str, Any]:
    """Save; then save again while the last rank dies in the middle. What the others met, and how soon."""
    with group(options, call) as rank:
        job = gpt.Job(gpt.Size.of_params(options.params_b), layout, options.device)
        job.forward_backward(0)
        job.optimizer_step()
        state = job.state(gpt.FAST)
        path = Path(options.paths[0]) / "death"
        report = sk.save(state, path, config=options.config)
        dist.barrier()
        if rank == dist.get_world_size() - 1:
            logger = logging.getLogger("shardkeep")
            logger.setLevel(logging.INFO)
            logger.addHandler(_DieAfterWriting())
        config = sk.Config(io_threads=options.threads, deadline_s=options.deadline_s)
        start = time.perf_counter()
        error = None
        try:
            sk.save(state, path, overwrite=True, config=config)
        except sk.errors.ShardkeepError as e:
            error = e
        seconds = time.perf_counter() - start
        now = sk.inspect(path).manifest
        return {
            "error": type(error).__name__,
            "message": str(error),
            "seconds": seconds,
            "old_checkpoint_stands": bool(now and now.digest == report.manifest_digest),
        }


def new_call() -> str:
    """A name for a call's store, which no other call has."""
    return uuid.uuid4().hex[:12]


def median_of_warm(seconds: list[float]) -> float:
    """The first is cold."""
    return statistics.median(seconds[1:] or seconds)
