"""PolicyGroup: the actors of the policy in rank order, and how work is spread over them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch

from shardkeep.demo.config import GrpoConfig, Layout
from shardkeep.demo.worker import WORLD_SIZE, MegatronPolicyWorker

T = TypeVar("T")


class PolicyGroup:
    """Two actors, one rank each. Under TP=2 both see the whole batch, under DP=2 each sees a half."""

    layout: Layout

    def __init__(self, actors: list[Any], pids: list[int]) -> None:
        self.actors, self.pids = actors, pids

    @classmethod
    async def start(cls, events_path: Path, gpus_per_actor: int) -> PolicyGroup:
        """Start the actors and form their process group; on GPUs, if there is one for each."""
        worker = ray.remote(MegatronPolicyWorker).options(num_cpus=0.5, num_gpus=gpus_per_actor)
        actors = [worker.remote(rank, events_path) for rank in range(WORLD_SIZE)]
        places = await asyncio.gather(*(actor.whereabouts.remote() for actor in actors))
        group = cls(actors, [place["pid"] for place in places])
        await group.on_all("join", places[0]["host"], places[0]["port"])
        return group

    async def build(self, recipe: GrpoConfig, layout: Layout, seed: int) -> None:
        """Build the policy on every rank under `layout`."""
        self.layout = layout
        await self.on_all("build", recipe, layout, seed)

    async def rollout(self, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
        """Answers to `prompts`, each data-parallel rank's share in turn."""
        share = len(prompts) // self.layout.dp
        shares = [prompts[i * share : (i + 1) * share] for i in range(self.layout.dp)]
        answers = await self._on_shares("rollout", shares)
        first_of_each = answers[:: self.layout.tp]
        return {name: torch.cat([answer[name] for answer in first_of_each]) for name in first_of_each[0]}

    async def update(self, batch: dict[str, torch.Tensor]) -> float:
        """One training step on `batch`; the mean loss over the ranks."""
        split = {name: value.chunk(self.layout.dp) for name, value in batch.items()}
        shares = [{name: parts[i] for name, parts in split.items()} for i in range(self.layout.dp)]
        losses: list[float] = await self._on_shares("update", shares)
        return sum(losses) / len(losses)

    async def on_all(self, method: str, *args: Any) -> list[Any]:
        """Call `method` with the same arguments on every rank; results in rank order."""
        return await asyncio.gather(*(getattr(actor, method).remote(*args) for actor in self.actors))

    async def _on_shares(self, method: str, shares: list[T]) -> list[Any]:
        calls = [
            getattr(actor, method).remote(shares[rank // self.layout.tp])
            for rank, actor in enumerate(self.actors)
        ]
        return await asyncio.gather(*calls)

    def kill(self) -> None:
        """End every actor; those already dead are passed over by Ray."""
        for actor in self.actors:
            ray.kill(actor)
