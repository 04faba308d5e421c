"""MegatronStrategy: the model side of a policy worker. Trains, samples, says what a checkpoint holds.

One object per rank; every method is called on all ranks of the group with this rank's data.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject

from shardkeep.demo import grpo, model, rng, task
from shardkeep.demo.config import GrpoConfig, Layout


class MegatronStrategy:
    """A Megatron policy on this rank of `layout`, in an initialised default process group."""

    def __init__(self, recipe: GrpoConfig, layout: Layout, seed: int) -> None:
        self.recipe, self.layout = recipe, layout
        self.job = model.build(
            model.ModelConfig(
                tp=layout.tp,
                vocab_size=len(task.VOCABULARY),
                learning_rate=recipe.learning_rate,
                adam_beta2=recipe.adam_beta2,
                decay_steps=recipe.decay_updates,
                seed=seed,
            )
        )
        self.dp_rank, _ = model.data_parallel()
        self.device = model.device()
        rng.seed_everything(seed, self.dp_rank)

    # ---- training

    def rollout(self, prompts: list[list[int]]) -> dict[str, torch.Tensor]:
        """Sample a group of answers to each of this data-parallel rank's prompts; CPU tensors."""
        repeated = torch.tensor(prompts, device=self.device).repeat_interleave(self.recipe.group_size, 0)
        tokens, old = grpo.sample(self._forward, repeated, self.recipe.num_digits, self._agree)
        return {"tokens": tokens.cpu(), "log_probs": old.cpu()}

    def update(self, batch: dict[str, torch.Tensor]) -> float:
        """Optimizer steps on this data-parallel rank's share of the batch; the first one's loss."""
        losses = []
        for _ in range(self.recipe.updates_per_step):
            order = torch.from_numpy(np.random.permutation(len(batch["tokens"])))
            losses.append(self._optimizer_step({name: value[order] for name, value in batch.items()}))
        return losses[0]

    def loss_on(self, batch: dict[str, torch.Tensor]) -> float:
        """The loss on a batch that all ranks hold whole, without a step."""
        with torch.no_grad():
            return float(self._loss(batch))

    def _optimizer_step(self, batch: dict[str, torch.Tensor]) -> float:
        self.job.model.zero_grad_buffer()
        self.job.optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.job.model.finish_grad_sync()
        self.job.optimizer.step()
        self.job.scheduler.step(1)
        return loss.item()

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens, old, advantage = (
            batch[name].to(self.device) for name in ("tokens", "log_probs", "advantages")
        )
        new = grpo.log_probs(self._forward, tokens, self.recipe.num_digits)
        return grpo.loss(new, old, advantage)

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return model.forward(self.job, tokens)

    def _agree(self, drawn: torch.Tensor) -> None:
        """Take the draw of the tensor-parallel group's first rank: one that differs would split the model."""
        group = parallel_state.get_tensor_model_parallel_group()
        dist.broadcast(drawn, parallel_state.get_tensor_model_parallel_src_rank(), group=group)

    # ---- checkpoints

    def checkpoint_state(self) -> dict[str, Any]:
        """What to save, and the template to load into: shards, generators of every rank, the layout."""
        every_rng: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every_rng, rng.state_dict())
        return {
            **model.sharded_state_dict(self.job),
            "rng": ShardedObject("rng", every_rng, (1,), (0,), replica_id=dist.get_rank()),
            "layout": {"tp": self.layout.tp, "dp": self.layout.dp},
        }

    def restore_checkpoint(self, state: dict[str, Any]) -> None:
        """Take over a loaded state. Generators continue under the layout they were saved under.

        Under another layout a rank's generator has another job: the ranks are seeded afresh, as all
        would otherwise draw the same samples.
        """
        model.load_state_dict(self.job, state)
        if state["layout"] == {"tp": self.layout.tp, "dp": self.layout.dp}:
            rng.load_state_dict(state["rng"][dist.get_rank()])
        else:
            rng.seed_everything(self.job.config.seed + self.job.scheduler.num_steps, self.dp_rank)
