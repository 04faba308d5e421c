"""Saves and restores of Ray actors: `Dispatch` on the driver, `CheckpointActor` in the actors.

    class Worker(sk.ray.CheckpointActor):
        def checkpoint_state(self): return {...}             # this rank's (sharded) state
        def restore_checkpoint(self, state): ...             # put a loaded state to use

    dispatch = sk.ray.Dispatch(root, {"policy": policy_actors, "critic": critic_actors}, keep=3)
    saving = dispatch.save(step, trainer_state={"epoch": 1})
    await saving.captured()                                  # actors may train on
    report = await saving                                    # all groups and the trainer's state are one
    committed step

Each group is a torch.distributed world of its own, given in rank order. The driver never touches tensors: it
starts the saves, asks until all ranks are through, and writes the step manifest. A dead actor is noticed
through Ray, not by waiting for it.
"""

from __future__ import annotations

import copy
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ray

from shardkeep import checkpointer
from shardkeep import manifest as names
from shardkeep.config import Config, overridden, resolve
from shardkeep.errors import Cancelled, InvalidState, LoadFailed, NotCommitted, SaveFailed, ShardkeepError
from shardkeep.handle import Handle, SaveHandle, background
from shardkeep.loading import Loading
from shardkeep.restore import read_nested, template
from shardkeep.run import Run
from shardkeep.storage import storage_for
from shardkeep.types import SaveReport, StepReport, Target

TRAINER = "trainer"

_POLL_S = 0.05
_GRACE_S = 30.0  # actors report a missed deadline themselves; only an actor that cannot is overdue by more


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `Dispatch.restore` found: the step, and the trainer's own state as it was saved."""

    step: int
    trainer_state: dict[str, Any]


class CheckpointActor:
    """Mixin for an actor class. Override `checkpoint_state` and `restore_checkpoint`; `Dispatch` calls the
    rest.
    """

    checkpoint_strict = True
    """Whether a restore wants exactly the keys that the state asks for."""

    def checkpoint_state(self) -> Mapping[str, Any]:
        """This rank's state: what to save, and the template of a restore. Called on all ranks of the group;
        may be collective.
        """
        raise NotImplementedError

    def restore_checkpoint(self, state: Any) -> None:
        """Put a restored state to use; it has the shape that `dist_checkpointing.load` (or `sk.load`) gives
        it.
        """
        raise NotImplementedError

    def shardkeep_who(self) -> str:
        return f"node {socket.gethostname()}, pid {os.getpid()}"

    def shardkeep_start(self, token: str, target: Target, config: Config) -> float:
        """Capture and copy the state, go on in the background; the seconds that this actor was held."""
        start = time.perf_counter()
        begun = checkpointer.begin(self.checkpoint_state(), target, resolve(config), mode="snapshot")

        def cancel() -> None:
            begun.cancel()
            begun.ranks.fail(Cancelled("the save was given up", path=target.storage.url))

        self._saves()[token] = background.submit(
            lambda: checkpointer.finish(begun), cancel=cancel, captured=begun.captured
        )
        begun.wait_unguarded()
        return time.perf_counter() - start

    def shardkeep_poll(self, token: str) -> SaveReport | None:
        """The report once the save is through on this rank, None before; raises its error."""
        handle = self._saves()[token]
        if not handle.ended():
            return None
        del self._saves()[token]
        report: SaveReport = handle.wait()
        return report

    def shardkeep_abort(self, token: str) -> None:
        """Give up a save that failed elsewhere."""
        handle = self._saves().pop(token, None)
        if handle is not None:
            handle.forget()
            handle.cancel()

    def shardkeep_load(self, url: str, attempt: str, config: Config) -> None:
        """Restore this rank from an attempt of a component."""
        loading = Loading(
            storage_for(url),
            resolve(config),
            lambda: template(self.checkpoint_state()),
            checkpointer.strict_rule(self.checkpoint_strict),
            manifest_name=names.attempt_manifest_name(attempt),
        )
        checkpointer.load_one(loading)
        self.restore_checkpoint(loading.template.loaded)

    def _saves(self) -> dict[str, SaveHandle[SaveReport]]:
        saves: dict[str, SaveHandle[SaveReport]] = self.__dict__.setdefault("_shardkeep_saves", {})
        return saves


Who = tuple[str, int]  # group, rank


class Dispatch:
    """Saves and restores groups of actors and the trainer's state as steps of one run. Calls return handles
    at once.

    `groups`: name -> actor handles in rank order. `keep`, `keep_every`, `step_name`: see `sk.Run`. Steps are
    saved in the order of the calls; a step that exists is replaced.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        groups: Mapping[str, Sequence[Any]],
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        step_name: str = "step_{}",
        config: Config | None = None,
    ) -> None:
        self._config = overridden(config)  # what is automatic, each actor chooses on its own node
        self._run = Run(root, keep=keep, keep_every=keep_every, step_name=step_name, config=config)
        self._groups: dict[str, list[Any]] = {}
        self._who: dict[Who, Any] = {}
        self._last: SaveHandle[StepReport] | None = None
        self._capturing = ThreadPoolExecutor(1, "shardkeep-capture")
        self._pool = ThreadPoolExecutor(1, "shardkeep-dispatch")  # steps commit in the order of their calls
        for name, actors in groups.items():
            self.set_group(name, actors)

    def set_group(self, name: str, actors: Sequence[Any]) -> None:
        """Set or replace the actors of a group, as after a restart; any number of ranks."""
        if name == TRAINER:
            raise ValueError(f"'{TRAINER}' is the name of the trainer's own state; name the group otherwise")
        self._groups[name] = list(actors)
        for rank, actor in enumerate(actors):
            self._who[name, rank] = actor.shardkeep_who.remote()

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return self._run.steps()

    def latest(self) -> int | None:
        """The newest committed step, or None."""
        return self._run.latest()

    def save(
        self,
        step: int,
        *,
        trainer_state: Mapping[str, Any] | None = None,
        files: Mapping[str, Mapping[str, bytes]] | None = None,
    ) -> SaveHandle[StepReport]:
        """Save all groups, the trainer's state and `files` (component -> file name -> bytes) as one step.

        The trainer's state is copied before this returns. The handle raises SaveFailed, which names group,
        rank, node, pid and cause; the previous step stands then.
        """
        if self._last is not None and (error := self._last.unseen_error()):
            self._last = None
            raise error
        own = copy.deepcopy(dict(trainer_state or {}))  # as it is now: the trainer goes on
        extra = {name: dict(contents) for name, contents in (files or {}).items()}
        targets = self._targets(step, extra)
        token = uuid.uuid4().hex
        actors = {(g, r): a for g, group in self._groups.items() for r, a in enumerate(group)}
        starts = {
            who: actor.shardkeep_start.remote(token, targets[who[0]], self._config)
            for who, actor in actors.items()
        }
        handle: SaveHandle[StepReport] = SaveHandle(cancel=lambda: self._abort(actors, token))
        stalls = self._capturing.submit(self._capture, handle, starts)

        def work() -> StepReport:
            try:
                held_s = stalls.result()
                reports = self._poll(actors, token)
            except BaseException:
                self._abort(actors, token)
                raise
            components = {g: reports[g, 0] for g in self._groups if (g, 0) in reports}
            for name, contents in {TRAINER: own, **extra}.items():
                components[name] = checkpointer.save_to(contents, targets[name], self._config)
            return replace(self._run.commit(step, components), stall_s=held_s)

        self._pool.submit(handle.run, work)
        self._last = handle
        return handle

    def _targets(self, step: int, files: Mapping[str, dict[str, bytes]]) -> dict[str, Target]:
        """Where every component goes. InvalidState for a name that cannot be used, before anything begins."""
        taken = [name for name in files if name in self._groups or name == TRAINER]
        if taken:
            raise InvalidState(
                "files need a component of their own", expected="a name that no group has", got=taken[0]
            )
        return {
            name: self._run.target(step, name, attached=files.get(name))
            for name in (*self._groups, TRAINER, *files)
        }

    def _capture(self, handle: SaveHandle[StepReport], starts: Mapping[Who, Any]) -> float:
        """Wait until all actors have copied their state; the longest that one was held, in seconds."""
        stalls = self._collect(starts, SaveFailed)
        handle.set_captured()
        return float(max(stalls.values(), default=0.0))

    def restore(self, step: int | None = None) -> Handle[Restored | None]:
        """Restore all groups from a committed step (None: the latest; the result is None if there is
        none).
        """
        handle: Handle[Restored | None] = Handle()
        self._pool.submit(handle.run, lambda: self._restore(step))
        return handle

    def _restore(self, step: int | None) -> Restored | None:
        if step is None and self._run.latest() is None:
            return None
        manifest = self._run.step_manifest(step)
        storage = self._run.storage_of(manifest.step)
        absent = [g for g in self._groups if g not in manifest.components]
        if absent:
            raise NotCommitted(
                f"step {manifest.step} has no component '{absent[0]}'",
                path=storage.url,
                expected=absent[0],
                got=", ".join(sorted(manifest.components)),
            )
        calls = {
            (g, r): actor.shardkeep_load.remote(
                storage.child(g).url, manifest.components[g].attempt, self._config
            )
            for g, group in self._groups.items()
            for r, actor in enumerate(group)
        }
        self._collect(calls, LoadFailed)
        own = manifest.components.get(TRAINER)
        state = (
            {}
            if own is None
            else read_nested(storage.child(TRAINER), names.attempt_manifest_name(own.attempt), self._config)
        )
        return Restored(step=manifest.step, trainer_state=state)

    def _poll(self, actors: Mapping[Who, Any], token: str) -> dict[Who, SaveReport]:
        """Ask until every rank is through. Actors may be busy training: an answer may take as long as a step
        does.
        """
        reports: dict[Who, SaveReport] = {}
        while len(reports) < len(actors):
            asked = {who: a.shardkeep_poll.remote(token) for who, a in actors.items() if who not in reports}
            answers = self._collect(asked, SaveFailed)
            reports |= {who: report for who, report in answers.items() if report is not None}
            if len(reports) < len(actors):
                time.sleep(_POLL_S)
        return reports

    def _collect(self, calls: Mapping[Who, Any], failure: type[ShardkeepError]) -> dict[Who, Any]:
        """All results, or the first error; a dead actor counts before the errors of those who waited for
        it.
        """
        waiting = {ref: who for who, ref in calls.items()}
        results: dict[Who, Any] = {}
        end = time.monotonic() + self._config.deadline_s + _GRACE_S
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                missing = [self._name(who) for who in waiting.values()]
                raise failure(
                    f"no answer within {self._config.deadline_s:g} s from {'; '.join(missing)}",
                    remedy="Look at their logs; they are alive but stuck.",
                )
            who = waiting.pop(ready[0])
            try:
                results[who] = ray.get(ready[0])
            except ray.exceptions.RayError as e:
                raise self._explain(who, e, waiting, failure) from e
        return results

    def _explain(
        self, who: Who, error: Exception, waiting: Mapping[Any, Who], failure: type[ShardkeepError]
    ) -> ShardkeepError:
        ended, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0.5) if waiting else ([], [])
        suspects = [(who, error), *((waiting[ref], e) for ref in ended if (e := _error_of(ref)))]
        for culprit, cause in suspects:
            if isinstance(cause, ray.exceptions.RayActorError):
                return failure(
                    f"an actor died: {self._name(culprit)}",
                    group=culprit[0],
                    rank=culprit[1],
                    cause=str(cause).strip().splitlines()[0],
                    remedy="The previous step stands. Restart the group, set_group() and restore().",
                )
        cause = getattr(error, "cause", error)
        return failure(f"{self._name(who)}: {cause}", group=who[0], rank=who[1])

    def _name(self, who: Who) -> str:
        try:
            place = ray.get(self._who[who], timeout=1.0)
        except (ray.exceptions.RayError, TimeoutError):
            place = "never answered"
        return f"group '{who[0]}' rank {who[1]} ({place})"

    def _abort(self, actors: Mapping[Who, Any], token: str) -> None:
        for actor in actors.values():
            actor.shardkeep_abort.remote(token)


def _error_of(ref: Any) -> Exception | None:
    try:
        ray.get(ref)
    except ray.exceptions.RayError as e:
        error: Exception = e
        return error
    return None
