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
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import msgspec

from shardkeep import commit, layout, stage, write
from shardkeep.agree import Agreement, agree, plan_together
from shardkeep.capture import capture as take_apart
from shardkeep.catalog import is_committed as committed
from shardkeep.config import Config, beside_training, resolve
from shardkeep.coordinate import Coordinator, RemoteError, as_shared, open_session, session, sharing
from shardkeep.errors import Cancelled, LoadFailed, SaveFailed, StateChanged
from shardkeep.freeze import Frozen, Room, freeze, make_room
from shardkeep.handle import SaveHandle, background
from shardkeep.hold import Hold, hold
from shardkeep.loading import Judge, Loading, load_together
from shardkeep.nogc import no_gc
from shardkeep.phases import Phases
from shardkeep.restore import Template, require_equal, template
from shardkeep.storage import storage_for
from shardkeep.types import Captured, CaptureMode, LoadReport, Manifest, RankResult, SaveReport, Target

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
    GPU's state some 0.7 s a GiB). Collective; nothing is written, and `state` is only looked at.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A save whose state is captured and agreed on: everything that `finish` needs."""

    ranks: Coordinator
    target: Target
    config: Config
    mode: CaptureMode
    agreement: Agreement
    frozen: Frozen
    phases: Phases
    stall_s: float
    hold: Hold | None
    stop: threading.Event = field(default_factory=threading.Event)
    digests: write.Digests = field(default_factory=list)  # of tensors that are read later, for debugging

    @property
    def captured(self) -> list[Future[None]]:
        """What has to end before the state may change."""
        return [self.hold.ended] if self.hold else []

    def wait_unguarded(self) -> None:
        """Block while the state is read, if nothing but the caller keeps it from changing."""
        if not self.hold or not self.frozen.unguarded:
            return
        try:
            self.hold.wait()
        except BaseException as e:  # interrupted: the caller has control again, and may change the state
            self.stop.set()
            self.hold.fail(SaveFailed(f"interrupted while the state was read: {type(e).__name__}"))
            raise

    def cancel(self) -> None:
        """Write no more. A save that waits for its turn lets training go on at once."""
        self.stop.set()
        if self.hold:
            self.hold.cancel(Cancelled("the save was cancelled", path=self.target.storage.url))

    @contextmanager
    def or_abandoned(self) -> Iterator[None]:
        """Give the save up if what lies between `begin` and `finish` fails."""
        try:
            yield
        except BaseException as e:
            self.abandon(e)
            raise

    def held_s(self) -> float:
        """How long the training thread was held."""
        return self.stall_s + (self.hold.seconds if self.hold and self.frozen.unguarded else 0.0)

    def abandon(self, error: BaseException) -> None:
        """Give up a save that will not be finished: its memory, and on rank 0 its files. Nobody waits for
        it.
        """
        self.stop.set()
        self.let_go(error)
        self.ranks.fail(as_shared(error, self.ranks, SaveFailed))
        self.ranks.finish()
        if self.ranks.rank == 0:
            commit.abandon(self.target.storage, self.agreement.attempt)

    def state_read(self, job: write.Job) -> None:
        """Every byte of the state has been read: nothing of it is referred to any more, and it may change."""
        if self.digests:
            _require_unchanged(self.digests, write.payload_digests(job))
        self.frozen.shards.clear()
        if self.hold:
            self.hold.release()

    def let_go(self, error: BaseException | None) -> None:
        """The save has ended: its memory goes, and whoever waits for the hold goes on."""
        self.frozen.room.release()
        if self.hold and error:
            self.hold.fail(error)


def _require_unchanged(before: write.Digests, after: write.Digests) -> None:
    for (key, digest), (_, now) in zip(before, after, strict=True):
        if digest != now:
            raise StateChanged(
                "a tensor changed while a lazy save was reading it",
                key=key,
                remedy="Call handle.wait_captured() before anything but a registered optimizer's step changes"
                " it.",
            )


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
            begun.digests.extend(write.payload_digests(_job(begun)))
    return begun


def finish(begun: Begun) -> SaveReport:
    """Write and commit. Runs on any thread; coordinates over our own store alone."""
    ranks, phases = begun.ranks, begun.phases
    try:
        with sharing(ranks, SaveFailed):
            with phases("write"):
                result = _write(begun)
            with phases("commit"):
                manifest = _commit(begun, result)
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


def _job(begun: Begun) -> write.Job:
    """This rank's share as files."""
    frozen = begun.frozen
    with no_gc():
        files = layout.layout(
            frozen.headers,
            begun.agreement.chosen,
            frozen.payloads,
            rank=begun.ranks.rank,
            attempt=begun.agreement.attempt,
            config=begun.config,
        )
    return write.Job(
        storage=begun.target.storage,
        files=files,
        shards=frozen.shards,
        payloads=frozen.payloads,
        config=begun.config,
        ready=frozen.ready,
        device=frozen.device,
        quiet=begun.mode != "sync",
        stop=begun.stop,
        read=begun.state_read,
    )


def _write(begun: Begun) -> RankResult:
    """This rank's files, durable; on an error none of them is left."""
    job = _job(begun)
    try:
        if begun.hold:
            begun.hold.start()
        stored = write.write_files(job)
        if begun.config.durable:
            begun.target.storage.sync()
    except BaseException:
        _remove(begun, [f.name for f in job.files])
        raise
    return write.result(job.files, stored, begun.frozen)


def _commit(begun: Begun, result: RankResult) -> Manifest:
    """Rank 0 commits what all have written. Once this rank's result is handed in, only rank 0 may remove
    files: it alone knows whether they count. Its own result does not travel.
    """
    is_first = begun.ranks.rank == 0
    try:
        data = begun.ranks.gather("written", b"" if is_first else msgspec.msgpack.encode(result))
    except BaseException as e:
        if is_first or isinstance(e, RemoteError):
            _remove(begun, list(result.files))
        raise
    manifest = None
    if data is not None:
        frozen, agreement = begun.frozen, begun.agreement
        with no_gc():
            manifest = commit.commit(
                begun.target,
                agreement.attempt,
                [result, *(msgspec.msgpack.decode(d, type=RankResult) for d in data[1:])],
                dialect=frozen.dialect,
                tensors=agreement.tensors,
                common=frozen.common,
                config=begun.config,
            )
    return msgspec.convert(begun.ranks.broadcast("committed", msgspec.to_builtins(manifest)), Manifest)


def _remove(begun: Begun, files: list[str]) -> None:
    commit.remove_files(begun.target.storage, files)
    if begun.ranks.rank == 0:
        commit.abandon(begun.target.storage, begun.agreement.attempt)


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
