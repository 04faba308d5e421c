"""Agreement between ranks over a TCPStore of our own: gather, broadcast, and one shared error, each with a
deadline.

Never the training job's communicators. A *session* is one save or load: all ranks enter their sessions in
the same order; its keys are `<number>/<name>`. The first rank that fails puts its error under
`<number>/error`; whoever waits in that session sees it when it looks next. Each call of the store hops to a
thread and back (see `rendezvous.py`), so what belongs together is asked in one call.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
import torch.distributed as dist

from shardkeep.alone import Alone
from shardkeep.errors import DeadlineExceeded, InvalidState, ShardkeepError, from_wire, to_wire
from shardkeep.rendezvous import (
    ANSWER_S,
    GRACE_S,
    Caller,
    connect,
    delete,
    end,
    linger,
    me,
    own_addresses,
    peek,
    route_to,
)
from shardkeep.shared_error import RemoteError, as_shared, sharing

T = TypeVar("T")

log = logging.getLogger("shardkeep")

_POLL_S = (0.0005, 0.02)  # first and longest pause between looks at the store
_PATIENT_RANKS = 128  # the longest pause is for so many ranks; more look less often, as one store serves all
_AT_ONCE = 256  # keys asked for, or removed, in one call
_ANY = "any"  # purpose of an error that is for whoever comes to its session


class Coordinator(Protocol):
    """One session on one rank. Values are what msgpack carries."""

    rank: int
    world_size: int

    def gather(self, name: str, value: Any) -> list[Any] | None:
        """Every rank's value, on rank 0; None elsewhere. RemoteError: this rank's value was not handed in."""

    def broadcast(self, name: str, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""

    def scatter(self, name: str, values: list[Any] | None = None) -> Any:
        """`values[rank]` of rank 0's list, on each rank."""

    def settle(self, name: str) -> None:
        """Every rank has come this far without an error; raises the shared error otherwise."""

    def check(self) -> None:
        """Raise the shared error if some rank has failed; for waits that are not in our store."""

    def who(self, rank: int) -> str:
        """A rank with its host and pid, for messages."""

    def addresses(self) -> list[str]:
        """Where other ranks may reach this process, the likeliest first."""

    def fail(self, error: BaseException) -> ShardkeepError:
        """Tell the others; returns the session's error, which is the first that any rank reported."""

    def finish(self) -> None:
        """This rank is through with the session, well or badly; when all are, its keys go."""


@contextmanager
def session(purpose: str, deadline_s: float, failure: type[ShardkeepError]) -> Iterator[Coordinator]:
    """Enter a session with all ranks of the default process group (or alone). Whatever is raised inside on
    any rank is raised on every rank: errors of shardkeep as themselves, everything else (and a silent rank)
    as `failure` with rank, host and cause.
    """
    coordinator = open_session(purpose, deadline_s, failure)
    with sharing(coordinator, failure):
        yield coordinator
    coordinator.finish()


def open_session(purpose: str, deadline_s: float, failure: type[ShardkeepError]) -> Coordinator:
    """The next session of this process. Called on the training thread, in the same order on all ranks.
    Raises `failure` if rank 0, which hosts the store, does not answer.
    """
    if _is_alone():
        return Alone()
    try:
        opened = _meeting(deadline_s).open_session(purpose, deadline_s)
        with sharing(opened, failure):
            opened.check_purpose()
        return opened
    except DeadlineExceeded as e:
        raise failure(e.what, **e.fields) from e


def tell(purpose: str, deadline_s: float, error: BaseException, failure: type[ShardkeepError]) -> None:
    """Fail the next session with an error of this rank, for the ranks that are in it or will come to it."""
    if _is_alone():
        return
    try:
        opened = _meeting(deadline_s).open_session(purpose, deadline_s, declare=False)
        opened.fail(as_shared(error, opened, failure))
        opened.finish()
    except DeadlineExceeded as e:  # rank 0 is gone: nobody to tell, and the error at hand says more
        log.debug("%s", e)


def _is_alone() -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


class _Meeting:
    """The ranks of one default process group, with a store of our own between them."""

    def __init__(self, group: Any, deadline_s: float) -> None:
        self.group = weakref.ref(group)  # a group that the job has destroyed must be able to go
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._number = 0
        self._was_behind = False
        self._lock = threading.Lock()
        self.call = Caller()
        self.store = connect(self.call, self.rank, deadline_s)
        self.finished: list[str] = []  # the key that counts who is through with the last session
        finalizer = weakref.finalize(self, end, self.call, self.store, self.rank == 0, self.finished)
        finalizer.atexit = False  # see `_linger_at_exit`
        self.call(lambda: self.store.set(f"who/{self.rank}", me()), ANSWER_S)

    def open_session(self, purpose: str, deadline_s: float, *, declare: bool = True) -> _Session:
        with self._lock:
            while True:
                self._number += 1
                opened = _Session(self, self._number, purpose, deadline_s)
                stale = opened.enter(declare)
                if stale is None or self._is_mine(stale, purpose):
                    return opened

    def _is_mine(self, stale: dict[str, Any], purpose: str) -> bool:
        """Whether the error of a session that has failed before this rank came belongs to this rank's call.

        A rank that skipped a call is behind the others, and the session that it would enter has failed for
        want of it. With another purpose that is plain. With the same, the rank may also be late for this very
        call: it takes the error once; if the next session was given up for want of it too, it moves on.
        """
        if stale["purpose"] == _ANY:
            return True
        if stale["purpose"] != purpose and not _is_part(purpose, stale["purpose"]):
            return False
        was_behind, self._was_behind = self._was_behind, self.rank in stale["missing"]
        return not (was_behind and self._was_behind)

    def who(self, rank: int) -> str:
        key = f"who/{rank}"
        known = self.call(lambda: self.store.get(key) if self.store.check([key]) else None, ANSWER_S)
        return f"rank {rank} ({known.decode()})" if known else f"rank {rank} (never connected)"


def _is_part(purpose: str, of: str) -> bool:
    """Whether a save is one of a step that has failed."""
    kind, _, url = of.partition(" ")
    return kind == "step" and purpose.partition(" ")[2].startswith(f"{url}/")


@atexit.register
def _linger_at_exit() -> None:
    if _current is not None and _current.rank == 0:
        linger(_current.store, _current.finished)


class _Session:
    """See `Coordinator`."""

    def __init__(self, meeting: _Meeting, number: int, purpose: str, deadline_s: float) -> None:
        self.rank, self.world_size = meeting.rank, meeting.world_size
        self._meeting = meeting
        self._number = number
        self._purpose = purpose
        self._deadline_s = deadline_s
        self._keys: list[str] = []
        self._missing: list[int] = []  # ranks for which this one has waited in vain
        self._gathered = ""  # the last gather in which this rank took part
        self._is_finished = False
        self._declared: bytes | None = None  # the purpose of the rank that came first

    def enter(self, declare: bool) -> dict[str, Any] | None:
        """The error of a session that has failed already; otherwise this rank says what it comes for, with
        `declare`.
        """
        purpose, error = self._key("purpose"), self._key("error")

        def call(store: Any) -> tuple[bytes | None, bytes | None]:
            if found := peek(store, error):
                return found, None
            return None, store.compare_set(purpose, "", self._purpose) if declare else None

        stale, self._declared = self._call(call)
        return msgspec.json.decode(stale) if stale else None

    def check_purpose(self) -> None:
        """All ranks must make the same kind of call; paths are compared where that is wanted (see
        `agree`).
        """
        first, mine = (self._declared or self._purpose.encode()).decode(), self._purpose
        if first.partition(" ")[0] != mine.partition(" ")[0]:
            self._purpose = _ANY
            raise InvalidState(
                "ranks make different calls at a time",
                expected=f"'{first}', as another rank does",
                got=f"'{mine}'",
                remedy="Saves and loads are collective: every rank makes the same calls in the same order.",
            )

    def gather(self, name: str, value: Any) -> list[Any] | None:
        mine, data = self._key(f"{name}/{self.rank}"), msgspec.msgpack.encode(value)
        self._hand_in(name, lambda store: store.set(mine, data))
        if self.rank != 0:
            return None
        keys = [self._key(f"{name}/{rank}") for rank in range(self.world_size)]
        return [msgspec.msgpack.decode(v) for v in self._await(keys, name, self._deadline_s)]

    def broadcast(self, name: str, value: Any = None) -> Any:
        key = self._key(name)
        if self.rank != 0:
            return self._receive(key, name)
        data = msgspec.msgpack.encode(value)
        self._call(lambda store: store.set(key, data))
        return msgspec.msgpack.decode(data)

    def scatter(self, name: str, values: list[Any] | None = None) -> Any:
        if values is None:
            return self._receive(self._key(f"{name}/{self.rank}"), name)
        keys = [self._key(f"{name}/{rank}") for rank in range(self.world_size)]
        data = [msgspec.msgpack.encode(v) for v in values]
        self._call(lambda store: store.multi_set(keys, data))
        return msgspec.msgpack.decode(data[0])

    def settle(self, name: str) -> None:
        """The last to come lets all go on: nobody has to wait until rank 0 looks."""
        mine, num, settled = (
            self._key(f"{name}/{self.rank}"),
            self._key(f"{name}-num"),
            self._key(f"{name}-all"),
        )
        nothing = msgspec.msgpack.encode(None)

        def call(store: Any) -> bool:
            store.set(mine, nothing)
            is_last = bool(store.add(num, 1) == self.world_size)
            if is_last:
                store.set(settled, nothing)
            return is_last

        if self._hand_in(name, call):
            return
        if self.rank == 0:
            self._await([settled], name, self._deadline_s)
        else:
            self._receive(settled, name)

    def _hand_in(self, name: str, call: Callable[[Any], T]) -> T:
        """Give this rank's part of a gather, unless the session has failed: a rank that raises here has not
        been counted.
        """
        self._gathered = name
        error = self._key("error", remember=False)

        def checked(store: Any) -> tuple[bytes | None, T | None]:
            found = peek(store, error)
            return (found, None) if found else (None, call(store))

        found, result = self._call(checked)
        self._raise_shared(found)
        return result  # type: ignore[return-value]

    def check(self) -> None:
        error = self._key("error", remember=False)
        self._raise_shared(self._call(lambda store: peek(store, error)))

    def who(self, rank: int) -> str:
        return self._meeting.who(rank)

    def addresses(self) -> list[str]:
        """First the one that the route to rank 0 starts from: whoever reaches rank 0 is on that network."""
        own = own_addresses()
        return own if self.rank == 0 else [*route_to(self._meeting.store.host), *own]

    def _receive(self, key: str, name: str) -> Any:
        """A value that rank 0 sets. Rank 0 knows who is missing and says so at its deadline, so the others
        wait a little longer, and begin anew if it came to the session after them.
        """
        patience_s = self._deadline_s + min(GRACE_S, self._deadline_s / 4)
        zero = self._key(f"{self._gathered}/0", remember=False)
        try:
            found = self._await([key], name, patience_s)
        except DeadlineExceeded:
            if not self._call(lambda store: store.check([zero])):
                raise
            found = self._await([key], name, patience_s)
        return msgspec.msgpack.decode(found[0])

    def fail(self, error: BaseException) -> ShardkeepError:
        own = error if isinstance(error, ShardkeepError) else ShardkeepError(str(error))
        if self._is_finished:
            return own
        wire = msgspec.json.encode(
            {"purpose": self._purpose, "rank": self.rank, "missing": self._missing, "error": to_wire(own)}
        )
        try:
            key = self._key("error")
            first = self._call(lambda store: store.compare_set(key, "", wire.decode()))
        except Exception:  # the store is gone as well: our own error is the one to raise
            return own
        record = msgspec.json.decode(first)
        return own if record["rank"] == self.rank else from_wire(record["error"])

    def finish(self) -> None:
        """The last rank to finish removes the keys of all (every rank has used the same names)."""
        if self._is_finished:
            return
        self._is_finished = True
        done = self._key("done")
        self._meeting.finished[:] = [done]
        try:
            if self._call(lambda store: store.add(done, 1)) == self.world_size:
                keys = list(dict.fromkeys(self._all_ranks_keys()))
                for start in range(0, len(keys), _AT_ONCE):
                    some = keys[start : start + _AT_ONCE]
                    self._call(functools.partial(delete, some))
        except DeadlineExceeded as e:  # the keys are gone with it; what the session was for is done
            log.debug("%s", e)

    def _key(self, name: str, *, remember: bool = True) -> str:
        key = f"{self._number}/{name}"
        if remember:
            self._keys.append(key)
        return key

    def _all_ranks_keys(self) -> Iterator[str]:
        for key in self._keys:
            head, _, tail = key.rpartition("/")
            if tail == str(self.rank) and head != str(self._number):
                yield from (f"{head}/{rank}" for rank in range(self.world_size))
            else:
                yield key

    def _call(self, call: Callable[[Any], T]) -> T:
        return self._meeting.call(lambda: call(self._meeting.store), min(ANSWER_S, self._deadline_s))

    def _raise_shared(self, found: bytes | None) -> None:
        if found:
            raise RemoteError(from_wire(msgspec.json.decode(found)["error"]))

    def _await(self, keys: list[str], name: str, timeout_s: float) -> list[bytes]:
        """The values of all keys, once they are set. Raises if somebody failed, or when the time is up."""
        end = time.monotonic() + timeout_s
        values: list[bytes] = []
        while len(values) < len(keys):
            values += self._await_some(keys[len(values) :][:_AT_ONCE], name, end)
        return values

    def _await_some(self, keys: list[str], name: str, end: float) -> list[bytes]:
        error = self._key("error", remember=False)

        def look(store: Any) -> tuple[list[bytes] | None, bytes | None]:
            return (store.multi_get(keys), None) if store.check(keys) else (None, peek(store, error))

        pause, longest = _POLL_S[0], _POLL_S[1] * max(1, self.world_size / _PATIENT_RANKS)
        while True:
            values, failed = self._call(look)
            if values is not None:
                return values
            self._raise_shared(failed)
            if time.monotonic() > end:
                self._raise_missing(name)
            time.sleep(pause)
            pause = min(1.5 * pause, longest)

    def _raise_missing(self, name: str) -> NoReturn:
        """Rank 0 misses those who have not handed in their part, the others miss rank 0."""
        if self.rank == 0:
            keys = [self._key(f"{name}/{rank}", remember=False) for rank in range(self.world_size)]
            present = self._call(lambda store: [store.check([key]) for key in keys])
            self._missing = [rank for rank, there in enumerate(present) if not there]
        else:
            self._missing = [0]
        who = self._who(self._missing) or "a rank that came at the last moment"
        raise DeadlineExceeded(
            f"no answer for '{name}' within {self._deadline_s:g} s from {who}",
            purpose=self._purpose,
            remedy="Look at their logs; Config.deadline_s helps if they are slow, not stuck.",
        )

    def _who(self, ranks: list[int]) -> str:
        named = [self._meeting.who(r) for r in ranks[:8]]
        return ", ".join(named) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


_current: _Meeting | None = None


def _meeting(deadline_s: float) -> _Meeting:
    """The meeting of the present default process group; made anew when a job has re-initialised
    torch.distributed.
    """
    global _current  # noqa: PLW0603 - one default process group per process, as torch has it
    group = dist.distributed_c10d._get_default_group()
    if _current is None or _current.group() is not group:
        _current = _Meeting(group, deadline_s)
    return _current
