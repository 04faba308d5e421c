"""What the demo checks itself by: digests of a job's state, as it stands in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from shardkeep.demo import rng
from shardkeep.demo.model import MegatronJob, sharded_state_dict


def of_rank(job: MegatronJob) -> str:
    """Digest of all that this rank holds: weights, moments, schedule and generators."""
    digest = hashlib.sha256(repr(job.scheduler.state_dict()).encode())
    digest.update(rng.as_bytes())
    for shard in sorted(_shards(sharded_state_dict(job)), key=lambda s: (s.key, s.global_offset)):
        digest.update(f"{shard.key} {shard.global_offset}".encode() + _bytes(shard.data))
    return digest.hexdigest()


def of_full_tensors(job: MegatronJob) -> dict[str, str]:
    """Digest of every weight and moment, put together from all ranks: the same on any layout."""
    mine = [
        (shard.key, shard.global_shape, shard.global_slice(), shard.data.detach().cpu())
        for shard in _shards(sharded_state_dict(job))
    ]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    full: dict[str, torch.Tensor] = {}
    for key, shape, place, part in (entry for entries in every for entry in entries):
        full.setdefault(key, torch.full(shape, torch.nan))[place] = part
    return {key: hashlib.sha256(_bytes(tensor)).hexdigest() for key, tensor in sorted(full.items())}


def _shards(state: Any) -> Iterator[ShardedTensor]:
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _shards(value)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
