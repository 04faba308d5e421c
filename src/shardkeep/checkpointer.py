"""The table of contents: save and load, stage by stage.

    capture   state -> shards with boxes, plain values
    plan      headers of all ranks -> who writes which bytes where
    stage     tensors -> host memory (ring while writing, arena for snapshots)
    write     host memory -> files, checksummed
    commit    results of all ranks -> index, fixed-name files, manifest
    load      manifest -> byte ranges -> tensors

Collective over the default process group, or for one process alone. `begin` holds the training thread;
`finish` may run in the background.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar, cast

from shardkeep import commit, stage, write
from shardkeep.agree import agree, plan_together
from shardkeep.begun import Begun
from shardkeep.capture import capture as take_apart
from shardkeep.catalog import is_committed as committed
from shardkeep.config import Config, beside_training, resolve
from shardkeep.coordinate import Coordinator, open_session, session
from shardkeep.errors import LoadFailed, SaveFailed
from shardkeep.freeze import Room, freeze, make_room
from shardkeep.handle import SaveHandle, background
from shardkeep.hold import hold
from shardkeep.loading import Judge, Loading, load_together
from shardkeep.nogc import no_gc
from shardkeep.phases import Phases
from shardkeep.restore import Template, require_equal, template
from shardkeep.shared_error import sharing
from shardkeep.storage import storage_for
from shardkeep.types import Captured, CaptureMode, LoadReport, SaveReport, Target

T = TypeVar("T", bound=Template)
Pathlike = str | os.PathLike[str]


def save(
    state: Mapping[str, Any], path: Pathlike, *, overwrite: bool = False, config: Config | None = None
) -> SaveReport:
    """Save `state` as the checkpoint `path`; returns when it is committed and durable. Extra host memory: the
    staging ring.

    `state` is a nested dict of tensors, DTensors, Megatron sharded objects and plain values. Raises
    InvalidState, StorageReleased, AlreadyCommitted or NoSpace before anything is written; SaveFailed
    afterwards, on every rank, with the previous checkpoint untouched.
    """
    return save_to(state, Target(storage=storage_for(path), overwrite=overwrite), config)


def save_async(
    state: Mapping[str, Any],
    path: Pathlike,
    *,
    capture: str = "snapshot",
    overwrite: bool = False,
    config: Config | None = None,
) -> SaveHandle[SaveReport]:
    """As `save`, but a thread does the most of it. The handle carries its errors.

    `capture="snapshot"` returns once the state is copied to host memory. `capture="lazy"` returns at once:
    parameters and state of optimizers given to `register_optimizer` are read while training goes on, until
    their next step, which waits; everything else is copied. Where there is no memory for a copy, the call
    warns and returns when the state has been read.
    """
    return save_to_async(
        state, Target(storage=storage_for(path), overwrite=overwrite), config, mode=background_mode(capture)
    )


def prepare(state: Mapping[str, Any], config: Config | None = None, *, capture: str = "snapshot") -> None:
    """Do ahead of the first save what only a first save has to: plan, and allocate and pin its memory (for a
    GPU's state about half a second a GiB). Collective; nothing is written, and `state` is only looked at.
    """
    config, mode = resolve(config), background_mode(capture)
    phases = Phases("prepare", "")
    with session("prepare", config.deadline_s, SaveFailed) as ranks:
        with phases("plan"), no_gc():
            captured = take_apart(state)
            planned, _, limit = plan_together(ranks, captured, lenient=True)
        with phases("pin"):
            make_room(captured, planned.chosen, mode, limit).release()
            stage.ring(config).reserve(write.slot_bytes(beside_training(config), quiet=True))
        ranks.settle("prepared")


def save_to(state: Mapping[str, Any], target: Target, config: Config | None = None) -> SaveReport:
    """`save` with the rules of a `Target`."""
    begun = begin(state, target, resolve(config), mode="sync")
    with begun.or_abandoned():
        background.wait_all()  # saves commit in the order in which they were begun
    report = finish(begun)
    return replace(report, stall_s=begun.phases.total_s())


def save_to_async(
    state: Mapping[str, Any], target: Target, config: Config | None = None, *, mode: CaptureMode = "snapshot"
) -> SaveHandle[SaveReport]:
    """`save_async` with the rules of a `Target`."""
    begun = begin(state, target, resolve(config), mode=mode)
    with begun.or_abandoned():
        handle = background.submit(lambda: finish(begun), cancel=begun.cancel, captured=begun.captured)
    begun.wait_unguarded()
    return handle


def background_mode(capture: str) -> CaptureMode:
    """The mode that a caller of a save in the background names; ValueError for another word."""
    if capture not in ("snapshot", "lazy"):
        raise ValueError(f"capture must be 'snapshot' or 'lazy', got {capture!r}")
    return cast(CaptureMode, capture)


def begin(
    state: Mapping[str, Any],
    target: Target,
    config: Config,
    *,
    mode: CaptureMode,
    take_apart: Callable[[Mapping[str, Any]], Captured] = take_apart,
) -> Begun:
    """Capture, agree with the other ranks, freeze what may change: the part that holds the training
    thread.
    """
    phases = Phases("save", target.storage.url)
    ranks = open_session(f"save {target.storage.url}", config.deadline_s, SaveFailed)
    agreement, room = None, Room()
    try:
        with sharing(ranks, SaveFailed):
            background.raise_unseen()
            with phases("capture"), no_gc():
                captured = take_apart(state)
            with phases("plan"):
                agreement = agree(ranks, captured, target, config)
            if mode != "sync":
                with phases("pin"):
                    room = make_room(captured, agreement.chosen, mode, agreement.limit)
            with phases("stage"):
                frozen = freeze(
                    captured, agreement.chosen, ranks.rank, mode=mode, room=room, lenient=target.lenient
                )
                if mode != "sync":
                    ranks.settle("frozen")  # so that a save has begun, and has a handle, on all ranks or none
    except BaseException:
        room.release()
        if agreement and ranks.rank == 0:
            commit.abandon(target.storage, agreement.attempt)
        raise
    begun = Begun(
        ranks=ranks,
        target=target,
        config=config if mode == "sync" else beside_training(config),
        mode=mode,
        agreement=agreement,
        frozen=frozen,
        phases=phases,
        stall_s=phases.total_s(),
        hold=hold(target.storage.url, config.deadline_s) if mode != "sync" and frozen.by_reference else None,
    )
    if config.check_capture and begun.hold:
        with begun.or_abandoned():
            begun.digests.extend(write.payload_digests(begun.job()))
    return begun


def finish(begun: Begun) -> SaveReport:
    """Write and commit. Runs on any thread; coordinates over our own store alone."""
    ranks, phases = begun.ranks, begun.phases
    try:
        with sharing(ranks, SaveFailed):
            with phases("write"):
                result = begun.write_share()
            with phases("commit"):
                manifest = begun.commit_together(result)
        ranks.finish()
    except BaseException as e:
        begun.let_go(e)
        raise
    begun.let_go(None)
    return SaveReport(
        path=begun.target.storage.url,
        attempt=manifest.attempt,
        num_bytes=manifest.totals["num_bytes"],
        num_items=manifest.totals["num_items"],
        num_files=manifest.totals["num_files"],
        seconds=dict(phases.seconds),
        stall_s=begun.held_s(),
        manifest_digest=manifest.digest,
    )


def load(
    state: Mapping[str, Any], path: Pathlike, *, strict: bool = True, config: Config | None = None
) -> LoadReport:
    """Load the checkpoint `path` into `state`, in place: tensors are filled, plain values replaced. Any
    layout loads into any.

    Raises NotCommitted, MissingKey, UnexpectedKey (unless not `strict`), Mismatch before anything in `state`
    has changed; Corrupt or LoadFailed if stored bytes turn out to be wrong or unreadable, on every rank.
    """
    loading = Loading(
        storage_for(path), resolve(config), lambda: template(state), strict_rule(strict), exact_common=True
    )
    return load_one(loading)


def load_one(loading: Loading[T]) -> LoadReport:
    """A session with one loading."""
    with shared_load(f"load {loading.url}", loading.config) as ranks:
        return load_together(ranks, [loading])[0]


def is_committed(path: Pathlike) -> bool:
    """Whether `path` holds a committed checkpoint, ours or another tool's. Not collective."""
    return committed(storage_for(path))


def strict_rule(strict: bool) -> Judge:
    """The rule of `load`: raise at any difference, or at none."""
    return require_equal if strict else lambda difference, path: None


def shared_load(purpose: str, config: Config) -> AbstractContextManager[Coordinator]:
    """A session whose errors are a load's."""
    return session(purpose, config.deadline_s, LoadFailed)
