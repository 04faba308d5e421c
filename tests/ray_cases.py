"""Actors for the Ray tests: ranks of a real Megatron GPT, and of a small plain state, in the no-fork jail."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from shardkeep import ray as skray
from shardkeep.testing import jail


class Joined(skray.CheckpointActor):
    """A rank of a gloo group. The process is in the jail before torch does anything."""

    def __init__(self, rank: int, world_size: int, rendezvous: str) -> None:
        jail.enter()
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        self.rank = rank

    def pid(self) -> int:
        return os.getpid()


class MegatronRank(Joined):
    def build(self, tp: int, seed: int) -> None:
        import megatron_cases as cases

        self.job = cases.job_on(tp, seed)

    def train(self, first: int, num_steps: int) -> list[float]:
        import megatron_cases as cases

        return cases.train(self.job, first, num_steps)

    def digests(self) -> dict[str, str]:
        import megatron_cases as cases

        return cases.digests(self.job)

    def checkpoint_state(self) -> dict[str, Any]:
        import megatron_cases as cases

        return cases.state_of(self.job)

    def restore_checkpoint(self, state: dict[str, Any]) -> None:
        from shardkeep.demo import model

        self.restored = {"rng": state["rng"], "iteration": state["iteration"]}
        model.load_state_dict(self.job, state)

    def what_was_restored(self) -> dict[str, Any]:
        return self.restored


class PlainRank(Joined):
    """Holds one tensor per rank; `slow_s` delays the capture, so that a test can kill it meanwhile."""

    def __init__(self, rank: int, world_size: int, rendezvous: str, value: float) -> None:
        super().__init__(rank, world_size, rendezvous)
        self.state = {f"w{rank}": torch.full((1000,), value + rank), "note": f"value {value}"}
        self.slow_s = 0.0

    def set_slow(self, slow_s: float) -> None:
        self.slow_s = slow_s

    def set_value(self, value: float) -> None:
        self.state[f"w{self.rank}"].fill_(value + self.rank)
        self.state["note"] = f"value {value}"

    def get(self) -> tuple[float, str]:
        tensor = self.state[f"w{self.rank}"]
        assert bool((tensor == tensor[0]).all())
        return tensor[0].item(), self.state["note"]

    def checkpoint_state(self) -> dict[str, Any]:
        time.sleep(self.slow_s)
        return self.state

    def restore_checkpoint(self, state: dict[str, Any]) -> None:
        assert state is self.state


class FailingRank(PlainRank):
    def checkpoint_state(self) -> dict[str, Any]:
        if self.rank == 1 and self.slow_s:
            raise FloatingPointError("moments are not finite")
        return self.state


class ElsewhereRank(PlainRank):
    def shardkeep_start(self, token: str, target: Any, config: Any) -> float:
        from dataclasses import replace

        from shardkeep.storage.local import LocalStorage

        moved = replace(target, storage=LocalStorage(f"{target.storage.url}-elsewhere"))
        return super().shardkeep_start(token, moved, config)
