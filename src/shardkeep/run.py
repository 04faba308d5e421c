"""A run: numbered steps under one root, each made of named components that commit together.

    run = sk.Run(root, keep=3)
    with run.step(100) as step:              # on every rank
        step.save("policy", policy_state)
        step.put("trainer", {"epoch": 1})
    run.load(components={"policy": policy_state, "trainer": trainer_state})

Discovery always goes by what is committed; pointer files of other tools are never asked.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from shardkeep import checkpointer
from shardkeep import manifest as names
from shardkeep.begun import Begun
from shardkeep.config import Config, resolve
from shardkeep.coordinate import Coordinator, open_session, tell
from shardkeep.errors import InvalidState, NotCommitted, SaveFailed
from shardkeep.handle import SaveHandle, background
from shardkeep.loading import Loading, load_together
from shardkeep.restore import template
from shardkeep.retention import remove_step, surplus
from shardkeep.shared_error import is_shared, sharing
from shardkeep.step import StepManifest, commit_step, read_step
from shardkeep.storage import TEMPORARY, Storage, storage_for
from shardkeep.types import CaptureMode, SaveReport, StepReport, Target

log = logging.getLogger("shardkeep")

_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Run:
    """See the module. `keep`: how many committed steps stay (None: all); multiples of `keep_every` stay as
    well. `step_name` is a format with one integer field, such as "step_{}" or "iter_{:07d}".
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        step_name: str = "step_{}",
        config: Config | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._root = storage_for(root)
        self._keep, self._keep_every = keep, keep_every
        self._step_name = step_name
        self._config = resolve(config)

    def step(self, step: int) -> Step:
        """A context in which components are saved. Commits on exit; on an exception nothing of it will
        count.
        """
        return Step(self, step)

    def save_async(
        self, step: int, components: Mapping[str, Mapping[str, Any]], *, capture: str = "snapshot"
    ) -> SaveHandle[StepReport]:
        """Save a whole step in the background; returns once all components are copied to host memory (or,
        `lazy`, held: see `shardkeep.save_async`). Collective.
        """
        mode = checkpointer.background_mode(capture)
        begun: dict[str, Begun] = {}
        try:
            for name, state in components.items():
                begun[name] = self._begin(step, name, state, mode)
            ranks = self._session(step)
        except BaseException as e:
            for component in begun.values():
                component.abandon(e)
            raise

        def finish() -> StepReport:
            waiting = dict(begun)
            reports: dict[str, SaveReport] = {}
            try:
                with sharing(ranks, SaveFailed):
                    for name in begun:
                        reports[name] = checkpointer.finish(waiting.pop(name))
                    report = self._commit(ranks, step, reports)
            except BaseException as e:
                for component in waiting.values():
                    component.abandon(e)
                raise
            ranks.finish()
            return report

        def cancel() -> None:
            for component in begun.values():
                component.cancel()

        captured = [future for component in begun.values() for future in component.captured]
        handle = background.submit(finish, cancel=cancel, captured=captured)
        for component in begun.values():
            component.wait_unguarded()
        return handle

    def steps(self) -> list[int]:
        """The committed steps, ascending, as this process sees the root. Not collective."""
        return sorted(s for s in self._numbered() if read_step(self.storage_of(s)))

    def latest(self) -> int | None:
        """The newest committed step, or None. Not collective."""
        for step in sorted(self._numbered(), reverse=True):
            if read_step(self.storage_of(step)):
                return step
        return None

    def load(
        self, step: int | None = None, *, components: Mapping[str, Mapping[str, Any]], strict: bool = True
    ) -> int:
        """Load components of a step (None: the latest) into the given states, in place; returns the step.
        Collective.
        """
        with checkpointer.shared_load(f"load {self._root.url}", self._config) as ranks:
            chosen, attempts = ranks.broadcast("step", self._choose(step) if ranks.rank == 0 else None)
            absent = next((name for name in components if name not in attempts), None)
            if absent is not None:
                raise NotCommitted(
                    f"step {chosen} has no component '{absent}'",
                    path=self.storage_of(chosen).url,
                    expected=absent,
                    got=", ".join(sorted(attempts)),
                )
            load_together(
                ranks,
                [
                    Loading(
                        self.storage_of(chosen).child(name),
                        self._config,
                        partial(template, state),
                        checkpointer.strict_rule(strict),
                        exact_common=True,
                        manifest_name=names.attempt_manifest_name(attempts[name]),
                        label=f"-{name}",
                    )
                    for name, state in components.items()
                ],
            )
        return int(chosen)

    # -- for Step and Dispatch

    def storage_of(self, step: int) -> Storage:
        return self._root.child(self._step_name.format(step))

    def target(self, step: int, component: str, attached: dict[str, bytes] | None = None) -> Target:
        """Where a component of a step is saved, under the rules of a run."""
        if not _COMPONENT.fullmatch(component):
            raise InvalidState("a component's name must be a plain file name", got=component)
        for name in attached or {}:
            if not _COMPONENT.fullmatch(name) or names.is_reserved(name):
                raise InvalidState("an attached file needs a plain name of its own", key=component, got=name)
        return Target(
            storage=self.storage_of(step).child(component),
            overwrite=True,
            step=step,
            keep_previous=True,
            attached=attached or {},
        )

    def commit(self, step: int, reports: dict[str, SaveReport]) -> StepReport:
        """Commit a step whose components are saved, then remove surplus steps. One process calls this."""
        report = commit_step(self.storage_of(step), step, reports, durable=self._config.durable)
        if self._config.durable:
            self._root.sync()
        try:
            self._prune(step)
        except OSError as e:
            log.warning("step %d is committed, but older ones could not be looked through: %s", step, e)
        return report

    def _prune(self, committed: int) -> None:
        """Remove surplus steps (never the one just committed, though a run taken up from an older step has
        newer ones) and older ones that never committed, since they can no longer do so.
        """
        old = surplus(self.steps(), self._keep, self._keep_every)
        dead = [s for s in self._numbered() if s < committed and self._is_dead(self.storage_of(s))]
        for step in [s for s in old if s != committed] + dead:
            try:
                remove_step(self.storage_of(step), durable=self._config.durable)
            except OSError as e:
                log.warning(
                    "could not remove %s, which is no longer needed: %s", self.storage_of(step).url, e
                )

    def step_manifest(self, step: int | None) -> StepManifest:
        """The manifest of a committed step (None: the latest). NotCommitted, with what there is."""
        chosen = self.latest() if step is None else step
        manifest = None if chosen is None else read_step(self.storage_of(chosen))
        if manifest is None:
            what = "no step is committed" if step is None else f"step {step} is not committed"
            raise NotCommitted(
                what, path=self._root.url, expected="a committed step", got=f"committed: {self.steps()}"
            )
        return manifest

    def _begin(self, step: int, name: str, state: Mapping[str, Any], mode: CaptureMode) -> Begun:
        return checkpointer.begin(state, self.target(step, name), self._config, mode=mode)

    def _session(self, step: int) -> Coordinator:
        return open_session(f"step {self.storage_of(step).url}", self._config.deadline_s, SaveFailed)

    def _tell(self, step: int, error: BaseException) -> None:
        tell(f"step {self.storage_of(step).url}", self._config.deadline_s, error, SaveFailed)

    def _commit(self, ranks: Coordinator, step: int, reports: dict[str, SaveReport]) -> StepReport:
        """All ranks report that they are through; rank 0 commits; all learn of it."""
        everyone = ranks.gather("components", sorted(reports))
        wire = None
        if everyone is not None:
            for rank, saved in enumerate(everyone):
                if saved != everyone[0]:
                    raise InvalidState(
                        f"ranks 0 and {rank} saved different components", expected=everyone[0], got=saved
                    )
            wire = msgspec.to_builtins(self.commit(step, reports))
        return msgspec.convert(ranks.broadcast("step", wire), StepReport)

    def _choose(self, step: int | None) -> tuple[int, dict[str, str]]:
        manifest = self.step_manifest(step)
        return manifest.step, {name: c.attempt for name, c in manifest.components.items()}

    def _numbered(self) -> list[int]:
        head, _, tail = self._step_name.partition("{")
        pattern = re.compile(re.escape(head) + r"(\d+)" + re.escape(tail.partition("}")[2]))
        found = (pattern.fullmatch(name) for name in self._root.directories())
        return [int(m[1]) for m in found if m and self._step_name.format(int(m[1])) == m[0]]

    @staticmethod
    def _is_dead(step: Storage) -> bool:
        """Whether a directory holds nothing but what an interrupted save or removal of ours has left."""
        ours = all(_is_ours(step.child(component)) for component in step.directories())
        return ours and set(step.sizes()) <= {f"{names.STEP_MANIFEST}{TEMPORARY}"}


def _is_ours(component: Storage) -> bool:
    files = component.sizes()
    return any(map(names.attempt_of, files)) or not (files or component.directories())


@dataclass(slots=True)
class Step:
    """A step being saved; see `Run.step`. Every method is collective."""

    run: Run
    number: int
    _reports: dict[str, SaveReport] | None = None
    report: StepReport | None = None

    def __enter__(self) -> Step:
        self._reports = {}
        return self

    def save(self, component: str, state: Mapping[str, Any]) -> SaveReport:
        """Save a component; it counts once the step is committed."""
        return self._keep(
            component,
            lambda: checkpointer.save_to(state, self.run.target(self.number, component), self.run._config),
        )

    def put(self, component: str, values: Mapping[str, Any]) -> SaveReport:
        """Save plain values, equal on all ranks, as a component."""
        return self.save(component, values)

    def put_files(self, component: str, files: Mapping[str, bytes]) -> SaveReport:
        """Save files for other tools (tokenizer, config) as a component, readable under their own names in
        its directory.
        """
        target = self.run.target(self.number, component, attached=dict(files))
        return self._keep(component, lambda: checkpointer.save_to(dict(files), target, self.run._config))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            if not is_shared(error):
                self.run._tell(self.number, error)
            return
        ranks = self.run._session(self.number)
        assert self._reports is not None
        with sharing(ranks, SaveFailed):
            self.report = self.run._commit(ranks, self.number, self._reports)
        ranks.finish()

    def _keep(self, component: str, save: Callable[[], SaveReport]) -> SaveReport:
        if self._reports is None:
            raise InvalidState("a step's components are saved inside its `with` block", key=component)
        if component in self._reports:
            raise InvalidState("the component is already saved in this step", key=component)
        self._reports[component] = save()
        return self._reports[component]
