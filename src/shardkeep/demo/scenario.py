"""The whole story: train, lose an actor in the middle of a save, resume, and check that nothing was lost.

1. reference    TP=2, never interrupted, never saved: what training should give
2. training     TP=2, saves every few steps, until an actor is killed while a save is written
3. same layout  new actors, TP=2, resumed from the last committed step: must equal the reference to the bit
4. new layout   the same processes as TP=1 x DP=2, resumed from that step: must hold the same state; finishes
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ray.exceptions

import shardkeep as sk
from shardkeep.demo.config import DemoConfig, GrpoConfig, Layout
from shardkeep.demo.events import EventLog
from shardkeep.demo.group import PolicyGroup
from shardkeep.demo.trainer import GrpoTrainer
from shardkeep.ray import Dispatch

SPLIT = Layout(tp=2, dp=1)
REPLICATED = Layout(tp=1, dp=2)
SAME_LOSS = 1e-5
OTHER_SEED = 1000
"""Added to the seed of jobs that will be restored: the weights they start with cannot pass for restored."""


class Scenario:
    """Plays the four phases; `checks` collects what held and what did not."""

    def __init__(self, config: DemoConfig, root: Path, gpus_per_actor: int) -> None:
        self.config, self.root, self.gpus_per_actor = config, root, gpus_per_actor
        self.recipe = GrpoConfig()
        self.events = EventLog(root / "events.jsonl")
        self.checks: list[bool] = []

    async def play(self) -> bool:
        """Run to the end; whether every check held."""
        policy = await self._start()
        try:
            expected = await self._reference(policy)
            failure, dispatch = await self._train_until_killed(policy)
        finally:
            policy.kill()
        self._check_failure(failure, dispatch)

        policy = await self._start()
        try:
            dispatch.set_group("policy", policy.actors)
            await self._resume_same_layout(policy, dispatch, expected)
            await self._resume_new_layout(policy, dispatch, expected)
        finally:
            policy.kill()
        return all(self.checks)

    async def _reference(self, policy: PolicyGroup) -> dict[str, Any]:
        """Train without interruption; what the resumed runs are held against."""
        trainer = await self._trainer("reference", policy, SPLIT, seed=self.config.seed)
        await trainer.train(until=self.config.resume_step)
        batch = trainer.last_batch
        expected = {
            "batch": batch,
            "loss": (await policy.on_all("loss_on", batch))[0],
            "full_digests": (await policy.on_all("full_digests"))[0],
        }
        await trainer.train(until=self.config.steps)
        return expected | {"digests": await policy.on_all("digest"), "trainer": trainer.state_dict()}

    async def _train_until_killed(self, policy: PolicyGroup) -> tuple[BaseException | None, Dispatch]:
        """Train and save; rank 1 is killed once the state of step `kill_step` is copied and being written."""

        def kill_one(step: int) -> None:
            if step == self.config.kill_step:
                os.kill(policy.pids[1], signal.SIGKILL)
                self.events.emit("killed", run="training", step=step, rank=1, pid=policy.pids[1])

        dispatch = Dispatch(
            self.root / "checkpoints",
            {"policy": policy.actors},
            keep=self.config.keep,
            config=sk.Config(deadline_s=60),
        )
        trainer = await self._trainer(
            "training", policy, SPLIT, seed=self.config.seed, dispatch=dispatch, on_saving=kill_one
        )
        await policy.actors[1].hold_save.remote(self.config.kill_step)
        try:
            await trainer.train(until=self.config.steps, save_every=self.config.save_every)
        except (sk.errors.ShardkeepError, ray.exceptions.RayError) as error:
            self.events.emit("failed", run="training", error=str(error).splitlines()[0])
            return error, dispatch
        return None, dispatch

    def _check_failure(self, failure: BaseException | None, dispatch: Dispatch) -> None:
        self._check(
            "the save with the killed actor failed, with an error that says so",
            isinstance(failure, sk.errors.SaveFailed),
            f"{type(failure).__name__}",
        )
        latest = dispatch.latest()
        self._check(
            "the step before it is the last committed one",
            latest == self.config.resume_step,
            f"step {latest}",
        )

    async def _resume_same_layout(
        self, policy: PolicyGroup, dispatch: Dispatch, expected: dict[str, Any]
    ) -> None:
        seed = self.config.seed + OTHER_SEED
        trainer = await self._trainer("same layout", policy, SPLIT, seed=seed, dispatch=dispatch)
        await trainer.resume()
        await self._check_restored(policy, expected)
        await trainer.train(until=self.config.steps)
        digests = await policy.on_all("digest")
        self._check(
            f"{SPLIT}, resumed: weights, moments and generators bit-equal to the reference at the end",
            digests == expected["digests"],
            f"step {trainer.step}, sha256 {digests[0][:8]}, {digests[1][:8]}",
        )
        self._check(
            f"{SPLIT}, resumed: same rewards at every step, same place in the data",
            trainer.state_dict() == expected["trainer"],
            f"reward {trainer.rewards[-1]:.4f}, prompt {trainer.loader.position}",
        )

    async def _resume_new_layout(
        self, policy: PolicyGroup, dispatch: Dispatch, expected: dict[str, Any]
    ) -> None:
        seed = self.config.seed + OTHER_SEED
        trainer = await self._trainer("new layout", policy, REPLICATED, seed=seed, dispatch=dispatch)
        await trainer.resume()
        await self._check_restored(policy, expected)
        losses = await policy.on_all("loss_on", expected["batch"])
        difference = max(abs(loss - expected["loss"]) for loss in losses)
        self._check(
            f"{REPLICATED}, restored: loss on a recorded batch within {SAME_LOSS:g}",
            difference < SAME_LOSS,
            f"{losses[0]:.7f} and {expected['loss']:.7f}",
        )
        await trainer.train(until=self.config.steps, save_every=self.config.save_every)
        self._check(
            "training finished and its last save is committed",
            dispatch.latest() == self.config.steps,
            f"step {dispatch.latest()}",
        )

    async def _check_restored(self, policy: PolicyGroup, expected: dict[str, Any]) -> None:
        digests = (await policy.on_all("full_digests"))[0]
        equal = [key for key, digest in expected["full_digests"].items() if digests.get(key) == digest]
        self._check(
            f"{policy.layout}, restored: gathered weights and moments bit-equal to the reference",
            digests == expected["full_digests"],
            f"step {self.config.resume_step}, {len(equal)} of {len(digests)} tensors",
        )

    async def _start(self) -> PolicyGroup:
        self.events.emit("starting")
        return await PolicyGroup.start(self.events.path, self.gpus_per_actor)

    async def _trainer(
        self,
        run: str,
        policy: PolicyGroup,
        layout: Layout,
        *,
        seed: int,
        **more: Any,
    ) -> GrpoTrainer:
        """A trainer over a freshly built policy."""
        self.events.emit("run", run=run, layout=str(layout))
        await policy.build(self.recipe, layout, seed)
        return GrpoTrainer(
            run=run,
            policy=policy,
            recipe=self.recipe,
            events=self.events,
            seed=self.config.seed,
            **more,
        )

    def _check(self, what: str, held: bool, seen: str) -> None:
        self.checks.append(held)
        self.events.emit("check", what=what, held=held, seen=seen)
