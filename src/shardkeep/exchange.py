"""One collective read: each byte comes from storage once per group of ranks, and from its reader to the
others.

In: the units of every rank. Out: the same memory filled as by `fetch`, bytes read and received. Threads of
three kinds, as many of each as `fetch` would have: readers read and check what this rank reads for all, put
their own share of it in place and queue the rest; senders empty the queue; receivers take messages, check
them again (the checksum costs less than the socket, and a bad link or memory is found where it is) and put
them in place.

Nothing can wait in a circle: a message that has begun to be sent needs only its receiver to go on, which is
held by that message alone and by nothing else; a reader waits for a slot of scratch that a sender gives back.
Scratch is at most `staging_bytes`; what goes straight into a tensor is sent from there.

The caller's thread watches. When any rank fails, or a connection ends, or no byte moves for `deadline_s`, it
closes the connections, which ends the threads, and raises: the error that the failed rank has shared, if
there is one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardkeep.config import Config
from shardkeep.connect import Inbox, Outbox, PeerGone
from shardkeep.coordinate import Coordinator
from shardkeep.errors import DeadlineExceeded, LoadFailed
from shardkeep.fetch import (
    Checker,
    FirstError,
    Placer,
    Readers,
    Ready,
    Scratch,
    as_load_error,
    load_archive,
    part_for,
    read_checked,
    wait_for,
)
from shardkeep.memory import bytes_at
from shardkeep.once import OWN, Share
from shardkeep.ranges import Unit
from shardkeep.stage import current_device, use_device
from shardkeep.storage import Storage

_WATCH_S = 0.05
_GRACE_S = 3.0  # for the error of a rank whose connections have ended to arrive


class Message(NamedTuple):
    """Part of a read that another rank needs: its rank, the number of its read, and the bytes in the file."""

    rank: int
    number: int
    start: int
    end: int


class Task(NamedTuple):
    """A read of this rank: what it needs of it itself, and what others do."""

    file: str
    start: int
    end: int
    own: list[Unit]
    others: list[Message]

    @property
    def address(self) -> int:
        """Where the whole read may go at once: the memory of a tensor, or 0."""
        one = self.own[0] if len(self.own) == 1 else None
        return one.address if one and one.address and (one.start, one.end) == (self.start, self.end) else 0


def tasks_of(share: Share, units: Sequence[Unit], files: Sequence[str], rank: int) -> list[Task]:
    """This rank's reads, those that others wait for first. `share.sources` speaks of the first units; the
    ones after them are this rank's alone.
    """
    tasks = []
    parts = iter(share.parts.tolist())
    for file, start, end, count in share.reads.tolist():
        mine = [Message(*next(parts)) for _ in range(count)]
        own = [units[m.number] for m in mine if m.rank == rank]
        others = [m for m in mine if m.rank != rank]
        others.sort(key=lambda m: (m.rank < rank, m.rank))  # so that not all send to the same rank first
        tasks.append(Task(files[file], start, end, own, others))
    sources = share.sources.tolist()
    for number, unit in enumerate(units):
        if number >= len(sources) or sources[number] == OWN:
            tasks.append(Task(unit.file, unit.start, unit.end, [unit], []))
    return tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's part of a collective read. `owed`: number of a unit -> the rank that sends it."""

    storage: Storage
    url: str
    checker: Checker
    config: Config
    ready: Ready
    units: Sequence[Unit]
    tasks: list[Task]
    owed: dict[int, int]


def exchange(job: Job, ranks: Coordinator, inbox: Inbox, outbox: Outbox) -> tuple[int, int]:
    """Do the job together with the other ranks; returns bytes read and received. Raises the first error of
    this rank; the shared error of the session (RemoteError) if another rank failed; LoadFailed or
    DeadlineExceeded if one has gone or is silent. No thread is left, and nothing writes to the tensors
    afterwards, in any case.
    """
    inbox.reset()
    work = _Exchange(job, ranks, inbox, outbox)
    with ExitStack() as held:
        threads = work.threads(held)
        try:
            for thread in threads:
                thread.start()
            work.watch()
        except BaseException:
            inbox.shut()
            outbox.shut()
            raise
        finally:
            work.stop(len(threads))
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            work.forget()
    return sum(t.end - t.start for t in job.tasks), sum(
        job.units[n].end - job.units[n].start for n in job.owed
    )


class _Exchange:
    def __init__(self, job: Job, ranks: Coordinator, inbox: Inbox, outbox: Outbox) -> None:
        self._job, self._ranks, self._inbox, self._outbox = job, ranks, inbox, outbox
        self._readers = Readers(job.storage, (t.file for t in job.tasks))
        self._tasks = iter(job.tasks)
        self._owed = dict(job.owed)
        self._unsent: dict[int, int] = {}  # rank -> messages
        for task in job.tasks:
            for message in task.others:
                self._unsent[message.rank] = self._unsent.get(message.rank, 0) + 1
        self._left = len(job.tasks) + len(job.owed) + sum(self._unsent.values())
        self._sends: queue.SimpleQueue[tuple[Message, memoryview, _Lent] | None] = queue.SimpleQueue()
        self._slots: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._first = FirstError()
        self._gone: dict[int, str] = {}
        self._stopped = False
        self._moved_bytes = 0
        self._num_reading = 0
        self._device = current_device()

    # -- the caller's thread

    def threads(self, held: ExitStack) -> list[threading.Thread]:
        """Readers, senders and receivers as far as there is work for them; of each pair of slots one is for
        receiving and one for reading."""
        job = self._job
        lengths = [t.end - t.start for t in job.tasks if not t.address and not (t.own and t.own[0].archive)]
        lengths += [job.units[n].end - job.units[n].start for n in job.owed if not job.units[n].address]
        scratch = Scratch(job.config, max(lengths, default=0))
        count = min(scratch.num_pairs, max(len(job.tasks), len(job.owed)))
        pairs = [held.enter_context(scratch.pair()) for _ in range(count if lengths else 0)]
        for _, slot in pairs:
            self._slots.put(slot)
        work: list[Callable[[], None]] = [self._read_all] * min(count, len(job.tasks))
        work += [self._send_all] * min(count, sum(self._unsent.values()))
        for n in range(min(count, len(job.owed))):
            work.append(_Receiver(self, pairs[n][0] if pairs else None))
        return [
            threading.Thread(target=self._run, args=(w,), name=f"shardkeep-load-{n}", daemon=True)
            for n, w in enumerate(work)
        ]

    def watch(self) -> None:
        """Wait for the end of the work, or raise."""
        moved, since, gone_since = -1, time.monotonic(), 0.0
        while True:
            with self._changed:
                if self._left and self._first.error is None:
                    self._changed.wait(_WATCH_S)
                if self._first.error is not None:
                    raise self._first.taken()
                if not self._left:
                    return
            self._ranks.check()
            now = time.monotonic()
            patience_s = self._job.config.deadline_s
            if self._moved_bytes != moved:
                moved, since = self._moved_bytes, now
            if self._gone:
                gone_since = gone_since or now
                if now - gone_since > _GRACE_S:
                    self._raise_gone()
            elif now - since > (2 * patience_s if self._num_reading else patience_s):
                self._raise_silent()  # later if our own storage is silent too: others may wait for us

    def _raise_gone(self) -> None:
        rank, why = next(iter(self._gone.items()))
        raise LoadFailed(
            f"{self._ranks.who(rank)} is gone: {why}",
            path=self._job.url,
            remedy="That process has died or cannot be reached; look at its log.",
        )

    def _raise_silent(self) -> None:
        with self._changed:
            silent = sorted({*self._owed.values(), *(r for r, n in self._unsent.items() if n)})
        if silent:  # else the wait is for our own storage
            raise DeadlineExceeded(
                f"no byte came from or went to {', '.join(self._ranks.who(r) for r in silent[:8])}"
                f" within {self._job.config.deadline_s:g} s",
                path=self._job.url,
                remedy="Look at their logs; Config.deadline_s helps if they are slow, not stuck.",
            )

    def stop(self, num_threads: int) -> None:
        """Let every thread come to its end."""
        self._stopped = True
        self._inbox.wake()
        for _ in range(num_threads):
            self._sends.put(None)
            self._slots.put(None)

    def forget(self) -> None:
        """After the threads: what later errors and the files hold."""
        self._first.error = None
        self._readers.close()

    # -- our threads

    def _run(self, work: Callable[[], None]) -> None:
        try:
            use_device(self._device)
            work()
        except PeerGone as e:
            self.gone(e)
        except BaseException as e:
            with self._changed:
                self._first.fail(as_load_error(e, self._job.url))
                self._changed.notify()

    def gone(self, error: PeerGone) -> None:
        with self._changed:
            self._gone.setdefault(error.rank, error.why)

    def done(self) -> None:
        with self._changed:
            self._left -= 1
            if not self._left:
                self._changed.notify()

    def moved(self, num_bytes: int) -> None:
        self._moved_bytes += num_bytes  # threads may lose an update; it is watched for changes only

    def _count_reading(self, change: int) -> None:
        with self._changed:
            self._num_reading += change

    def _next_task(self) -> Task | None:
        with self._changed:
            return None if self._stopped else next(self._tasks, None)

    def _read_all(self) -> None:
        placer = Placer(self._job.ready)
        try:
            while (task := self._next_task()) is not None:
                if not self._read(task, placer):
                    return
                self._readers.done(task.file)
                self.moved(task.end - task.start)
                self.done()
        finally:
            placer.finish()

    def _read(self, task: Task, placer: Placer) -> bool:
        """False if there is no slot because the exchange is being stopped."""
        job = self._job
        reader = self._readers.get(task.file)
        if task.own and task.own[0].archive is not None:
            load_archive(reader, job.checker, job.url, task.own[0], task.own[0].archive)
            return True
        slot = None
        address = task.address
        if not address:
            slot = self._slots.get()
            if slot is None:
                return False
            data = part_for(slot, task.own[0], task.start, task.end)
            address = data.data_ptr()
        into = bytes_at(address, task.end - task.start)
        self._count_reading(1)
        read_checked(reader, job.checker, task.file, job.url, task.start, into)
        self._count_reading(-1)
        if slot is not None:
            for unit in task.own:
                placer.place(unit, data[unit.start - task.start : unit.end - task.start])
        lent = _Lent(self._slots, slot, placer.mark() if slot is not None else [], 1 + len(task.others))
        for message in task.others:
            self._sends.put((message, into[message.start - task.start : message.end - task.start], lent))
        lent.give_back()
        return True

    def _send_all(self) -> None:
        while (item := self._sends.get()) is not None and not self._stopped:
            message, data, lent = item
            self._outbox.send(message.rank, message.number, data, self.moved)
            lent.give_back()
            with self._changed:
                self._unsent[message.rank] -= 1
            self.done()

    def receive_one(self, slot: torch.Tensor | None, placer: Placer) -> bool:
        """Take a message and put it in place; False when there is nothing more to come."""
        incoming = self._inbox.next()
        if incoming is None or self._stopped:
            return False
        job = self._job
        number = incoming.number()
        with self._changed:
            if self._owed.pop(number, None) != incoming.rank:
                raise AssertionError(f"rank {incoming.rank} sent read {number}, which is not its to send")
        unit = job.units[number]
        data = None
        if not unit.address:
            assert slot is not None
            data = part_for(slot, unit, unit.start, unit.end)
        into = bytes_at(unit.address or data.data_ptr(), unit.end - unit.start)  # type: ignore[union-attr]
        incoming.fill(into, self.moved)
        self._inbox.again(incoming)
        job.checker.check(unit.file, unit.start, into)
        if data is not None:
            placer.place(unit, data)
            wait_for(placer.mark())
        self.done()
        with self._changed:
            if not self._owed:
                self._inbox.wake()
        return True


class _Receiver:
    """The work of one receiving thread, with a slot of its own."""

    def __init__(self, work: _Exchange, slot: torch.Tensor | None) -> None:
        self._work = work
        self._slot = slot

    def __call__(self) -> None:
        placer = Placer(self._work._job.ready)
        try:
            while True:
                try:
                    if not self._work.receive_one(self._slot, placer):
                        return
                except PeerGone as e:  # others may still send; the watching thread decides what it means
                    self._work.gone(e)
        finally:
            placer.finish()


class _Lent:
    """A slot of scratch that goes back when nothing copies from it any more."""

    def __init__(
        self,
        slots: queue.SimpleQueue[torch.Tensor | None],
        slot: torch.Tensor | None,
        events: list[Any],
        uses: int,
    ) -> None:
        self._slots, self._slot, self._events, self._uses = slots, slot, events, uses
        self._lock = threading.Lock()

    def give_back(self) -> None:
        with self._lock:
            self._uses -= 1
            if self._uses or self._slot is None:
                return
        wait_for(self._events)
        self._slots.put(self._slot)
