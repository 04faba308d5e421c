"""What the Megatron tests run on each rank: a real GPT with DDP and DistributedOptimizer, on the CPU with
gloo.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shardkeep as sk

TRAINED_STEPS = 3


def job_on(tp: int, seed: int = 1234) -> Any:
    from shardkeep.demo import megatron_cpu, model

    megatron_cpu.enable()
    torch.set_num_threads(1)
    return model.build(model.ModelConfig(tp=tp, seed=seed))


def train(job: Any, first: int, num_steps: int) -> list[float]:
    """Train on batches that depend on the step alone; the losses, averaged over data-parallel ranks."""
    from megatron.core import parallel_state

    from shardkeep.demo import model

    losses = []
    for step in range(first, first + num_steps):
        tokens = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(step))
        dp_rank, dp_size = model.data_parallel()
        share = tokens.chunk(dp_size)[dp_rank]
        job.model.zero_grad_buffer()
        job.optimizer.zero_grad()
        logits = model.forward(job, share[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), share[:, 1:].flatten())
        loss.backward()
        job.model.finish_grad_sync()
        job.optimizer.step()
        job.scheduler.step(1)
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        losses.append(mean.item() / dp_size)
    return losses


def state_of(job: Any) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject

    from shardkeep.demo import model

    rank, size = dist.get_rank(), dist.get_world_size()
    state = model.sharded_state_dict(job)
    state["rng"] = ShardedObject("rng", {"seed": 100 + rank, "draws": [rank, rank + 1]}, (size,), (rank,))
    state["local"] = LocalNonpersistentObject({"rank": rank})
    state["iteration"] = 7
    return state


def digests(job: Any) -> dict[str, str]:
    from shardkeep.demo import fingerprint

    return fingerprint.of_full_tensors(job)


def our_save(directory: str, tp: int) -> dict[str, Any]:
    job = job_on(tp)
    train(job, 0, TRAINED_STEPS)
    sk.megatron.save(state_of(job), directory)
    return {"digests": digests(job), "next": train(job, TRAINED_STEPS, 2)}


def our_load(directory: str, tp: int) -> dict[str, Any]:
    return _load(directory, tp, sk.megatron.load)


def their_save(directory: str, tp: int) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    job = job_on(tp)
    train(job, 0, TRAINED_STEPS)
    if dist.get_rank() == 0:
        os.makedirs(directory, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state_of(job), directory)
    return {"digests": digests(job), "next": train(job, TRAINED_STEPS, 2)}


def their_load(directory: str, tp: int) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    return _load(directory, tp, dist_checkpointing.load)


def _load(directory: str, tp: int, load: Callable[..., Any]) -> dict[str, Any]:
    from shardkeep.demo import model

    job = job_on(tp, seed=99)  # other weights than those saved
    loaded = load(state_of(job), directory)
    assert loaded["local"] == {"rank": dist.get_rank()}
    model.load_state_dict(job, loaded)
    restored = digests(job)
    return {
        "digests": restored,
        "next": train(job, TRAINED_STEPS, 2),
        "rng": loaded["rng"],
        "iteration": loaded["iteration"],
    }


def in_place_load(directory: str, tp: int) -> dict[str, Any]:
    """`sk.load` fills the state itself."""
    from shardkeep.demo import model

    job = job_on(tp, seed=99)
    state = state_of(job)
    state["iteration"] = 0
    report = sk.load(state, directory)
    assert report.missing == report.unexpected == ()
    return {
        "rng": state["rng"].data,
        "iteration": state["iteration"],
        "num_bytes": report.num_bytes,
        "read_bytes": report.read_bytes,
        "received_bytes": report.received_bytes,
        "scheduler": state["scheduler"],
        "model": model is not None,
    }


def framework_save(directory: str, asynchronous: bool) -> dict[str, Any]:
    """As SkyRL and verl save: under install(), with the fully parallel wrapper, and Megatron's own queue for
    async.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    job = job_on(1)
    train(job, 0, TRAINED_STEPS)
    original = dist_checkpointing.save
    sk.megatron.install()
    try:
        assert dist_checkpointing.save is not original
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy("torch_dist"),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        finalized: list[str] = []
        state, expected = state_of(job), digests(job)
        request = dist_checkpointing.save(
            state, directory, sharded_strategy=strategy, async_sharded_save=asynchronous
        )
        if asynchronous:
            request.add_finalize_fn(lambda: finalized.append(str(sk.is_committed(directory))))
            calls = AsyncCallsQueue(persistent=True)
            calls.schedule_async_request(request)
            train(job, TRAINED_STEPS, 1)  # weights move on while the copy is written
            calls.maybe_finalize_async_calls(blocking=True)
            calls.close()
        job = job_on(1, seed=5)
        from shardkeep.demo import model

        model.load_state_dict(job, dist_checkpointing.load(state_of(job), directory))
        return {"saved": expected, "loaded": digests(job), "finalized": finalized}
    finally:
        sk.megatron.uninstall()
        assert dist_checkpointing.save is original


def lazy_save(directory: str, tp: int) -> dict[str, Any]:
    """Training steps on while a slow storage takes the weights; the checkpoint holds those from before."""
    from shardkeep import hold
    from shardkeep.storage.local import LocalWriter

    job = job_on(tp)
    train(job, 0, TRAINED_STEPS)
    expected = digests(job)
    registration = sk.register_optimizer(job.optimizer)
    append = LocalWriter.append
    writing = threading.Event()

    def slow_append(writer: LocalWriter, parts: Any) -> None:
        writing.set()
        time.sleep(0.2)
        append(writer, parts)

    LocalWriter.append = slow_append  # type: ignore[method-assign]
    try:
        held = hold.held_memory()
        handle = sk.save_async(state_of(job), directory, capture="lazy")
        writing.wait(30)
        following = train(job, TRAINED_STEPS, 2)
        handle.wait()
    finally:
        LocalWriter.append = append  # type: ignore[method-assign]
        registration.remove()
    return {
        "digests": expected,
        "next": following,
        "held": len(held),
        "model_held": all(hold.memory_of(p) in held for p in job.model.parameters()),
        "changed": digests(job) != expected,
    }


def save_async_with_memory_on_rank_0_alone(directory: str) -> dict[str, Any]:
    """Ranks meet between a save and the run of its request, as frameworks do that write other files there."""
    from shardkeep import freeze

    job = job_on(1)
    train(job, 0, 1)
    state, expected = state_of(job), digests(job)
    take = freeze.arena.take
    if dist.get_rank() == 1:
        freeze.arena.take = lambda *_: None  # type: ignore[method-assign]
    try:
        request = sk.megatron.save(state, directory, async_sharded_save=True)
    finally:
        freeze.arena.take = take  # type: ignore[method-assign]
    dist.barrier()
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.zero_()
    dist.barrier()
    request.async_fn(*request.async_fn_args)
    for finalize in request.finalize_fns:
        finalize()
    return {"saved": expected}
