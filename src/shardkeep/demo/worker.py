"""MegatronPolicyWorker: the Ray actor that is one rank of the policy."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
import torch.distributed as dist

from shardkeep.demo.config import GrpoConfig, Layout
from shardkeep.demo.events import EventLog, HoldSave, log_library_to
from shardkeep.ray import CheckpointActor

if TYPE_CHECKING:
    from shardkeep.demo.strategy import MegatronStrategy

WORLD_SIZE = 2


class MegatronPolicyWorker(CheckpointActor):
    """One rank. `CheckpointActor` adds what `Dispatch` calls; two overrides say what a checkpoint holds."""

    strategy: MegatronStrategy

    def __init__(self, rank: int, events_path: Path) -> None:
        torch.set_num_threads(1)  # two ranks share two cores, and sums must not depend on a thread count
        self.rank = rank
        log_library_to(EventLog(events_path), source=f"policy rank {rank}")

    def hold_save(self, step: int) -> None:
        """Stop this rank's save of a step between write and commit, so that a kill surely hits the middle of
        it.
        """
        logging.getLogger("shardkeep").addHandler(HoldSave(step))

    def whereabouts(self) -> dict[str, Any]:
        """This process, and a free port where the group could meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return {"pid": os.getpid(), "host": ray.util.get_node_ip_address(), "port": port}

    def join(self, host: str, port: int) -> None:
        """Form the default process group with the other ranks."""
        from shardkeep.demo import megatron_cpu

        megatron_cpu.enable()
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        address = f"tcp://{host}:{port}"
        dist.init_process_group(backend, init_method=address, rank=self.rank, world_size=WORLD_SIZE)
        importlib.import_module("shardkeep.demo.strategy")
        gc.freeze()  # Megatron collects garbage for every checkpoint: spare it the modules

    def build(self, recipe: GrpoConfig, layout: Layout, seed: int) -> None:
        """Build the policy under `layout`; one from before is dropped."""
        from shardkeep.demo.strategy import MegatronStrategy

        self.strategy = MegatronStrategy(recipe, layout, seed)

    def checkpoint_state(self) -> dict[str, Any]:
        """What `Dispatch.save` saves of this rank, and what `Dispatch.restore` loads into."""
        return self.strategy.checkpoint_state()

    def restore_checkpoint(self, state: dict[str, Any]) -> None:
        """Called by `Dispatch.restore` with the loaded state."""
        self.strategy.restore_checkpoint(state)

    def rollout(self, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
        """Sample a group of answers to each of this data-parallel rank's prompts."""
        return self.strategy.rollout(prompts)

    def update(self, batch: dict[str, torch.Tensor]) -> float:
        """Train on this data-parallel rank's share of the batch; its loss."""
        return self.strategy.update(batch)

    def loss_on(self, batch: dict[str, torch.Tensor]) -> float:
        """The loss on a recorded batch, without a step."""
        return self.strategy.loss_on(batch)

    def digest(self) -> str:
        """Digest of this rank's weights, moments, schedule and generators."""
        from shardkeep.demo import fingerprint

        return fingerprint.of_rank(self.strategy.job)

    def full_digests(self) -> dict[str, str]:
        """Digests of all weights and moments as full tensors, which no layout changes."""
        from shardkeep.demo import fingerprint

        return fingerprint.of_full_tensors(self.strategy.job)
