"""GrpoTrainer: the training loop on the driver's side, with its saves and its resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import shardkeep as sk
from shardkeep.demo import grpo, task
from shardkeep.demo.config import GrpoConfig
from shardkeep.demo.events import EventLog
from shardkeep.demo.group import PolicyGroup
from shardkeep.ray import Dispatch


class GrpoTrainer:
    """Trains one policy group. Without a `dispatch` it does not save.

    Saves are asynchronous: `save_checkpoints` returns once the actors' state is copied, and training
    goes on while it is written. A save's outcome is known, and its failure raised, when the next
    one starts or training ends.
    """

    def __init__(
        self,
        *,
        run: str,
        policy: PolicyGroup,
        events: EventLog,
        seed: int,
        dispatch: Dispatch | None = None,
        recipe: GrpoConfig | None = None,
        on_saving: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.run, self.policy, self.events, self.dispatch = run, policy, events, dispatch
        self.recipe = recipe or GrpoConfig()
        self.on_saving = on_saving
        self.loader = task.PromptLoader(
            num_digits=self.recipe.num_digits, batch_size=self.recipe.prompts_per_step, seed=seed
        )
        self.step = 0
        self.rewards: list[float] = []
        self.last_batch: dict[str, torch.Tensor] = {}
        self._saving: Any = None

    async def train(self, until: int, save_every: int = 0) -> None:
        """Train up to step `until`, saving after each `save_every` steps and at the end (0: not at all).

        Raises SaveFailed when a save failed, also when training failed with it: it knows who died.
        """
        try:
            while self.step < until:
                await self.train_step()
                if save_every and (self.step % save_every == 0 or self.step == until):
                    await self.save_checkpoints()
        finally:
            await self.finish_saving()

    async def train_step(self) -> None:
        """Sample answers, reward them, update the policy."""
        prompts = self.loader.next_batch()
        batch = await self.policy.rollout(prompts)
        rewards = self._rewards(batch["tokens"])
        advantages = grpo.advantages(rewards.view(len(prompts), self.recipe.group_size)).flatten()
        self.last_batch = {**batch, "advantages": advantages}
        loss = await self.policy.update(self.last_batch)
        self.step += 1
        self.rewards.append(rewards.mean().item())
        self.events.emit("step", run=self.run, step=self.step, reward=self.rewards[-1], loss=loss)

    async def save_checkpoints(self) -> None:
        """Start saving policy, trainer state and tokenizer as one step; returns once the state is copied."""
        assert self.dispatch is not None
        await self.finish_saving()
        self._saving = self.dispatch.save(
            self.step, trainer_state=self.state_dict(), files={"huggingface": task.huggingface_files()}
        )
        self.events.emit("saving", run=self.run, step=self.step)
        await self._saving.captured()
        self.on_saving(self.step)

    async def finish_saving(self) -> None:
        """Wait for the save in flight, if any, and record what it did."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        report: sk.StepReport = await saving
        self.events.emit(
            "saved",
            run=self.run,
            step=report.step,
            num_bytes=report.num_bytes,
            stall_s=report.stall_s,
            seconds=report.seconds,
        )

    async def resume(self) -> int:
        """Restore the last committed step into the actors and this trainer; the step, 0 if there is none."""
        assert self.dispatch is not None
        restored = await self.dispatch.restore()
        if restored is None:
            return 0
        self.load_state_dict(restored.trainer_state)
        self.events.emit("resumed", run=self.run, step=self.step)
        return self.step

    def state_dict(self) -> dict[str, Any]:
        """The trainer's own state: plain values."""
        return {"step": self.step, "rewards": list(self.rewards), "dataloader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.step, self.rewards = state["step"], list(state["rewards"])
        self.loader.load_state_dict(state["dataloader"])

    def _rewards(self, tokens: torch.Tensor) -> torch.Tensor:
        length = self.recipe.num_digits + 1
        return torch.tensor([task.reward(row[:length], row[length:]) for row in tokens.tolist()])
