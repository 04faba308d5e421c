"""A save between its two halves: what `begin` has made of the state, and what is left to do with it.

In: the agreement of all ranks and this rank's frozen share. Out: files, then the manifest of the commit.
Invariants: whatever fails, the memory of the copies goes back, a hold ends, and no file stays that no
manifest lists; once a rank has handed its result in, only rank 0 may remove files, since it alone knows
whether they count.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from shardkeep import commit, layout, write
from shardkeep.agree import Agreement
from shardkeep.config import Config
from shardkeep.coordinate import Coordinator
from shardkeep.errors import Cancelled, SaveFailed, StateChanged
from shardkeep.freeze import Frozen
from shardkeep.hold import Hold
from shardkeep.nogc import no_gc
from shardkeep.phases import Phases
from shardkeep.shared_error import RemoteError, as_shared
from shardkeep.types import CaptureMode, Manifest, RankResult, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A save whose state is captured and agreed on. `stall_s`: how long that took; `digests`: of tensors that
    are read later, for debugging.
    """

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
    digests: write.Digests = field(default_factory=list)

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

    def job(self) -> write.Job:
        """This rank's share as files."""
        frozen = self.frozen
        with no_gc():
            files = layout.layout(
                frozen.headers,
                self.agreement.chosen,
                frozen.payloads,
                rank=self.ranks.rank,
                attempt=self.agreement.attempt,
                config=self.config,
            )
        return write.Job(
            storage=self.target.storage,
            files=files,
            shards=frozen.shards,
            payloads=frozen.payloads,
            config=self.config,
            ready=frozen.ready,
            device=frozen.device,
            quiet=self.mode != "sync",
            stop=self.stop,
            read=self.state_read,
        )

    def write_share(self) -> RankResult:
        """This rank's files, durable; on an error none of them is left."""
        job = self.job()
        try:
            if self.hold:
                self.hold.start()
            stored = write.write_files(job)
            if self.config.durable:
                self.target.storage.sync()
        except BaseException:
            self._remove([f.name for f in job.files])
            raise
        return write.result(job.files, stored, self.frozen)

    def commit_together(self, result: RankResult) -> Manifest:
        """Rank 0 commits what all have written. Once this rank's result is handed in, only rank 0 may remove
        files: it alone knows whether they count. Its own result does not travel.
        """
        is_first = self.ranks.rank == 0
        try:
            data = self.ranks.gather("written", b"" if is_first else msgspec.msgpack.encode(result))
        except BaseException as e:
            if is_first or isinstance(e, RemoteError):
                self._remove(list(result.files))
            raise
        manifest = None
        if data is not None:
            frozen, agreement = self.frozen, self.agreement
            with no_gc():
                manifest = commit.commit(
                    self.target,
                    agreement.attempt,
                    [result, *(msgspec.msgpack.decode(d, type=RankResult) for d in data[1:])],
                    dialect=frozen.dialect,
                    tensors=agreement.tensors,
                    common=frozen.common,
                    config=self.config,
                )
        return msgspec.convert(self.ranks.broadcast("committed", msgspec.to_builtins(manifest)), Manifest)

    def _remove(self, files: list[str]) -> None:
        commit.remove_files(self.target.storage, files)
        if self.ranks.rank == 0:
            commit.abandon(self.target.storage, self.agreement.attempt)


def _require_unchanged(before: write.Digests, after: write.Digests) -> None:
    for (key, digest), (_, now) in zip(before, after, strict=True):
        if digest != now:
            raise StateChanged(
                "a tensor changed while a lazy save was reading it",
                key=key,
                remedy="Call handle.wait_captured() before anything but a registered optimizer's step changes"
                " it.",
            )
