"""Agreement between ranks over a TCPStore of our own: gather, broadcast, and one shared error, each with a
deadline.

Never the training job's communicators, and its default store only to learn where ours listens. A TCPStore
whose host stops answering blocks every call past its own time-out, so each call runs on a daemon thread and
the caller waits its own deadline. A *session* is one save or load: all ranks enter their sessions in the same
order; its keys are `<number>/<name>`. The first rank that fails puts its error under `<number>/error`;
whoever waits in that session sees it within milliseconds.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from shardkeep.errors import DeadlineExceeded, InvalidState, ShardkeepError, from_wire, to_wire

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

log = logging.getLogger("shardkeep")

_POLL_S = (0.0005, 0.02)  # first and longest pause between looks at the store
_GRACE_S = 5.0
_ANY = "any"  # purpose of an error that is for whoever comes to its session
_ANSWER_S = 30.0  # a store that does not answer one small call for this long is gone


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


class RemoteError(Exception):
    """Another rank failed; carries the session's shared error. Internal: `session` turns it into that
    error.
    """

    def __init__(self, error: ShardkeepError) -> None:
        super().__init__(str(error))
        self.error = error


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


@contextmanager
def sharing(coordinator: Coordinator, failure: type[ShardkeepError]) -> Iterator[None]:
    """Turn an error inside into the session's shared error (see `session`)."""
    try:
        yield
    except RemoteError as e:
        coordinator.finish()
        raise _marked(e.error) from None
    except Exception as e:
        # No name for it here: the error's traceback has this frame, and the two would keep each other, and
        # with them the state, until cycles are collected.
        raise _told(e, coordinator, failure)  # noqa: B904
    except BaseException as e:  # an interrupt goes on as itself, but the others must not wait for us
        coordinator.fail(as_shared(e, coordinator, failure))
        coordinator.finish()
        _marked(e)
        raise


def _told(error: Exception, coordinator: Coordinator, failure: type[ShardkeepError]) -> ShardkeepError:
    """What all ranks raise for an error of this one, or of one that was first."""
    own = as_shared(error, coordinator, failure)
    shared = coordinator.fail(own)
    coordinator.finish()
    shared.__cause__ = error if shared is own and error is not own else None
    return _marked(shared)


def _marked(error: E) -> E:
    error.__dict__["shardkeep_is_shared"] = True
    return error


def is_shared(error: BaseException) -> bool:
    """Whether a session has raised this error, so that every rank knows of it."""
    return "shardkeep_is_shared" in error.__dict__


def as_shared(
    error: BaseException, coordinator: Coordinator, failure: type[ShardkeepError]
) -> ShardkeepError:
    """An error as all ranks will raise it."""
    where = {} if coordinator.world_size == 1 else {"rank": coordinator.rank, "host": socket.gethostname()}
    if isinstance(error, DeadlineExceeded):
        return failure(error.what, **{**where, **error.fields})
    if isinstance(error, ShardkeepError):
        return type(error)(error.what, **{**where, **error.fields})
    return failure(f"{type(error).__name__}: {error}", **where)


def open_session(purpose: str, deadline_s: float, failure: type[ShardkeepError]) -> Coordinator:
    """The next session of this process. Called on the training thread, in the same order on all ranks.
    Raises `failure` if rank 0, which hosts the store, does not answer.
    """
    if _is_alone():
        return Alone()
    try:
        opened = _meeting(deadline_s).open_session(purpose, deadline_s)
        with sharing(opened, failure):
            opened.check_call()
        return opened
    except DeadlineExceeded as e:
        raise failure(e.what, **e.fields) from e


def tell(purpose: str, deadline_s: float, error: BaseException, failure: type[ShardkeepError]) -> None:
    """Fail the next session with an error of this rank, for the ranks that are in it or will come to it."""
    if _is_alone():
        return
    try:
        opened = _meeting(deadline_s).open_session(purpose, deadline_s)
        opened.fail(as_shared(error, opened, failure))
        opened.finish()
    except DeadlineExceeded as e:  # rank 0 is gone: nobody to tell, and the error at hand says more
        log.debug("%s", e)


def _is_alone() -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


class Alone:
    """The coordinator of a single process."""

    rank = 0
    world_size = 1

    def gather(self, name: str, value: Any) -> list[Any] | None:
        return [_through_wire(value)]

    def broadcast(self, name: str, value: Any = None) -> Any:
        return _through_wire(value)

    def scatter(self, name: str, values: list[Any] | None = None) -> Any:
        assert values is not None
        return _through_wire(values[0])

    def settle(self, name: str) -> None:
        pass

    def check(self) -> None:
        pass

    def who(self, rank: int) -> str:
        return f"rank {rank} ({_me()})"

    def addresses(self) -> list[str]:
        return _own_addresses()

    def fail(self, error: BaseException) -> ShardkeepError:
        return error if isinstance(error, ShardkeepError) else ShardkeepError(str(error))

    def finish(self) -> None:
        pass


def _through_wire(value: Any) -> Any:
    """What the value looks like after msgpack (tuples become lists), so that one process behaves like
    many.
    """
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


class _Caller:
    """Runs store calls on a daemon thread. A call that hangs is abandoned together with its thread."""

    def __init__(self) -> None:
        self.host = "rank 0"  # who runs the store, once that is known
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="shardkeep-store", daemon=True).start()

    def __call__(self, call: Callable[[], T], timeout_s: float) -> T:
        future: Future[T] = Future()
        self._calls.put((future, call))
        try:
            return future.result(timeout_s)
        except DeadlineExceeded:  # the call's own
            raise
        except TimeoutError:
            cause = f"nothing for {timeout_s:.3g} s"
        except RuntimeError as e:  # torch's: the connection is gone
            cause = str(e).partition("\n")[0]
        raise DeadlineExceeded(
            f"the store of {self.host} does not answer",
            cause=cause,
            remedy="That process has died or is stopped; look at its log.",
        )

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as e:
                future.set_exception(e)
            del item, future, call  # they may hold the store of a group that is gone

    def close(self) -> None:
        """End the thread, unless a call holds it."""
        self._calls.put(None)


class _Meeting:
    """The ranks of one default process group, with a store of our own between them."""

    def __init__(self, group: Any, deadline_s: float) -> None:
        self.group = weakref.ref(group)  # a group that the job has destroyed must be able to go
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._number = 0
        self._was_behind = False
        self._lock = threading.Lock()
        self.call = _Caller()
        self.store = _connect(self.call, self.rank, deadline_s)
        self.finished: list[str] = []  # the key that counts who is through with the last session
        end = weakref.finalize(self, _end, self.call, self.store, self.rank == 0, self.finished)
        end.atexit = False  # see `_linger_at_exit`
        self.call(lambda: self.store.set(f"who/{self.rank}", _me()), _ANSWER_S)

    def open_session(self, purpose: str, deadline_s: float) -> _Session:
        with self._lock:
            while True:
                self._number += 1
                opened = _Session(self, self._number, purpose, deadline_s)
                stale = opened.peek_error()
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
        known = self.call(lambda: self.store.get(key) if self.store.check([key]) else None, _ANSWER_S)
        return f"rank {rank} ({known.decode()})" if known else f"rank {rank} (never connected)"


def _is_part(purpose: str, of: str) -> bool:
    """Whether a save is one of a step that has failed."""
    kind, _, url = of.partition(" ")
    return kind == "step" and purpose.partition(" ")[2].startswith(f"{url}/")


def _end(call: _Caller, store: Any, is_host: bool, finished: list[str]) -> None:
    """A meeting goes, with its process group: end its thread, and on rank 0 its store, though not at once."""
    call.close()
    if is_host:
        threading.Thread(target=_linger, args=(store, finished), name="shardkeep-end", daemon=True).start()


def _linger(store: Any, finished: list[str]) -> None:
    """Leave the other ranks a moment to read how the last session has ended, before the store goes."""
    end = time.monotonic() + _GRACE_S
    while finished and store.check(finished) and time.monotonic() < end:
        time.sleep(_POLL_S[1])


@atexit.register
def _linger_at_exit() -> None:
    if _current is not None and _current.rank == 0:
        _linger(_current.store, _current.finished)


def _me() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


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

    def check_call(self) -> None:
        """All ranks must make the same kind of call; paths are compared where that is wanted (see
        `agree`).
        """
        key = self._key("purpose")
        first = self._call(lambda store: store.compare_set(key, "", self._purpose)).decode()
        mine = self._purpose
        if first.partition(" ")[0] != mine.partition(" ")[0]:
            self._purpose = _ANY
            raise InvalidState(
                "ranks make different calls at a time",
                expected=f"'{first}', as another rank does",
                got=f"'{mine}'",
                remedy="Saves and loads are collective: every rank makes the same calls in the same order.",
            )

    def gather(self, name: str, value: Any) -> list[Any] | None:
        self._raise_shared_error()  # before the value is set: a rank that raises here has not been counted
        self._gathered = name
        mine = self._key(f"{name}/{self.rank}")
        self._call(lambda store: store.set(mine, msgspec.msgpack.encode(value)))
        if self.rank != 0:
            return None
        keys = [self._key(f"{name}/{rank}") for rank in range(self.world_size)]
        self._await(keys, name, self._deadline_s)
        return [msgspec.msgpack.decode(v) for v in self._call(lambda store: store.multi_get(keys))]

    def broadcast(self, name: str, value: Any = None) -> Any:
        key = self._key(name)
        if self.rank == 0:
            self._call(lambda store: store.set(key, msgspec.msgpack.encode(value)))
        return self._receive(key, name)

    def scatter(self, name: str, values: list[Any] | None = None) -> Any:
        if values is not None:
            keys = [self._key(f"{name}/{rank}", remember=False) for rank in range(self.world_size)]
            encoded = [msgspec.msgpack.encode(v) for v in values]
            self._call(lambda store: store.multi_set(keys, encoded))
        return self._receive(self._key(f"{name}/{self.rank}"), name)

    def settle(self, name: str) -> None:
        self.gather(name, None)
        self.broadcast(f"{name}-all")

    def check(self) -> None:
        self._raise_shared_error()

    def who(self, rank: int) -> str:
        return self._meeting.who(rank)

    def addresses(self) -> list[str]:
        """First the one that the route to rank 0 starts from: whoever reaches rank 0 is on that network."""
        own = _own_addresses()
        return own if self.rank == 0 else [*route_to(self._meeting.store.host), *own]

    def _receive(self, key: str, name: str) -> Any:
        """A value that rank 0 sets. Rank 0 knows who is missing and says so at its deadline, so the others
        wait a little longer, and begin anew if it came to the session after them.
        """
        if self.rank != 0:
            patience_s = self._deadline_s + min(_GRACE_S, self._deadline_s / 4)
            try:
                self._await([key], name, patience_s)
            except DeadlineExceeded:
                if not self._has(self._key(f"{self._gathered}/0", remember=False)):
                    raise
                self._await([key], name, patience_s)
        return msgspec.msgpack.decode(self._call(lambda store: store.get(key)))

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
        self._key("error")
        done = self._key("done")
        self._meeting.finished[:] = [done]
        try:
            if self._call(lambda store: store.add(done, 1)) == self.world_size:
                for key in dict.fromkeys(self._all_ranks_keys()):
                    self._delete(key)
        except DeadlineExceeded as e:  # the keys are gone with it; what the session was for is done
            log.debug("%s", e)

    def peek_error(self) -> dict[str, Any] | None:
        key = self._key("error", remember=False)
        found = self._call(lambda store: store.get(key) if store.check([key]) else None)
        return msgspec.json.decode(found) if found else None

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
        return self._meeting.call(lambda: call(self._meeting.store), min(_ANSWER_S, self._deadline_s))

    def _has(self, key: str) -> bool:
        return bool(self._call(lambda store: store.check([key])))

    def _delete(self, key: str) -> None:
        self._call(lambda store: store.delete_key(key))

    def _raise_shared_error(self) -> None:
        record = self.peek_error()
        if record:
            raise RemoteError(from_wire(record["error"]))

    def _await(self, keys: list[str], name: str, timeout_s: float) -> None:
        """Wait until all keys are set, somebody failed, or the time is up."""
        end = time.monotonic() + timeout_s
        missing, pause = list(keys), _POLL_S[0]
        while True:
            missing = [k for k in missing if not self._has(k)]
            if not missing:
                return
            self._raise_shared_error()
            if time.monotonic() > end:
                self._missing = [int(k.rpartition("/")[2]) for k in missing] if self.rank == 0 else [0]
                raise DeadlineExceeded(
                    f"no answer for '{name}' within {timeout_s:g} s from {self._who(self._missing)}",
                    purpose=self._purpose,
                    remedy="Look at their logs; Config.deadline_s helps if they are slow, not stuck.",
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL_S[1])

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


def _connect(caller: _Caller, rank: int, deadline_s: float) -> Any:
    """Rank 0 opens a TCPStore; the others learn its address through the job's default store, looked at but
    never waited on.
    """
    default = dist.distributed_c10d._get_default_store()
    key = "shardkeep/store"
    if rank == 0:
        server = TCPStore("0.0.0.0", 0, None, is_master=True, wait_for_workers=False)
        record: dict[str, Any] = {
            "port": server.port,
            "hosts": _own_addresses(),
            "token": os.urandom(8).hex(),
            "who": _me(),
        }
        server.set("token", record["token"])
        caller(lambda: default.set(key, msgspec.json.encode(record).decode()), _ANSWER_S)
        return server
    end = time.monotonic() + deadline_s
    while not caller(lambda: default.check([key]), _ANSWER_S):
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"rank 0 did not open its store within {deadline_s:g} s",
                remedy="Every rank has to make the same shardkeep call.",
            )
        time.sleep(0.01)
    record = msgspec.json.decode(caller(lambda: default.get(key), _ANSWER_S))
    caller.host = f"rank 0 ({record['who']})"
    hosts = _job_hosts(default) + record["hosts"]
    return caller(
        lambda: _first_reachable(hosts, record["port"], record["token"]), max(_ANSWER_S, deadline_s)
    )


def _first_reachable(hosts: list[str], port: int, token: str) -> Any:
    for host in dict.fromkeys(hosts):
        try:
            with socket.create_connection((host, port), timeout=5):
                pass
            store = TCPStore(host, port, None, is_master=False, wait_for_workers=False)
            if store.get("token").decode() == token:
                return store
        except (OSError, RuntimeError):  # not there, or something else listens: the next address
            continue
    raise DeadlineExceeded(
        "rank 0's store cannot be reached",
        tried=", ".join(dict.fromkeys(hosts)),
        port=port,
        remedy="Ranks must be able to open TCP connections to rank 0.",
    )


def _job_hosts(default: Any) -> list[str]:
    """Where the job's own store runs, as this rank reaches it: rank 0's host in every usual launcher."""
    store = default
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return [store.host] if hasattr(store, "host") else []


def route_to(host: str) -> list[str]:
    """The address of ours from which packets to a host leave. Connecting a datagram socket sends none."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as s:
            s.connect(address)
            return [s.getsockname()[0]]
    except OSError:
        return []


def _own_addresses() -> list[str]:
    name = socket.gethostname()
    try:
        return [socket.gethostbyname(name), name, "127.0.0.1"]
    except OSError:
        return [name, "127.0.0.1"]
