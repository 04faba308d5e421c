"""Rank 0's store: opened there, found by the others, called without ever blocking.

In: a rank of the default process group. Out: a TCPStore of our own and a `Caller` for it. The job's default
store only tells where ours listens, and is looked at, never waited on. A TCPStore whose host stops answering
blocks every call past its own time-out, so each call runs on a daemon thread and the caller waits its own
deadline.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from shardkeep.errors import DeadlineExceeded

T = TypeVar("T")

ANSWER_S = 30.0  # a store that does not answer one small call for this long is gone
GRACE_S = 5.0  # for ranks that are a little behind
_LOOK_S = 0.02


class Caller:
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


def me() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def delete(keys: list[str], store: Any) -> None:
    """Remove keys."""
    for key in keys:
        store.delete_key(key)


def peek(store: Any, key: str) -> bytes | None:
    """A value if it is there; never waits."""
    return bytes(store.get(key)) if store.check([key]) else None


def end(call: Caller, store: Any, is_host: bool, finished: list[str]) -> None:
    """A meeting goes, with its process group: end its thread, and on rank 0 its store, though not at once."""
    call.close()
    if is_host:
        threading.Thread(target=linger, args=(store, finished), name="shardkeep-end", daemon=True).start()


def linger(store: Any, finished: list[str]) -> None:
    """Leave the other ranks a moment to read how the last session has ended, before the store goes."""
    end = time.monotonic() + GRACE_S
    while finished and store.check(finished) and time.monotonic() < end:
        time.sleep(_LOOK_S)


def connect(caller: Caller, rank: int, deadline_s: float) -> Any:
    """Rank 0 opens a TCPStore; the others learn its address through the job's default store, looked at but
    never waited on.
    """
    default = dist.distributed_c10d._get_default_store()
    key = "shardkeep/store"
    if rank == 0:
        server = TCPStore("0.0.0.0", 0, None, is_master=True, wait_for_workers=False)
        record: dict[str, Any] = {
            "port": server.port,
            "hosts": own_addresses(),
            "token": os.urandom(8).hex(),
            "who": me(),
        }
        server.set("token", record["token"])
        caller(lambda: default.set(key, msgspec.json.encode(record).decode()), ANSWER_S)
        return server
    end = time.monotonic() + deadline_s
    while not caller(lambda: default.check([key]), ANSWER_S):
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"rank 0 did not open its store within {deadline_s:g} s",
                remedy="Every rank has to make the same shardkeep call.",
            )
        time.sleep(0.01)
    record = msgspec.json.decode(caller(lambda: default.get(key), ANSWER_S))
    caller.host = f"rank 0 ({record['who']})"
    hosts = _job_hosts(default) + record["hosts"]
    return caller(lambda: _first_reachable(hosts, record["port"], record["token"]), max(ANSWER_S, deadline_s))


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


def own_addresses() -> list[str]:
    name = socket.gethostname()
    try:
        return [socket.gethostbyname(name), name, "127.0.0.1"]
    except OSError:
        return [name, "127.0.0.1"]


def route_to(host: str) -> list[str]:
    """The address of ours from which packets to a host leave. Connecting a datagram socket sends none."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as s:
            s.connect(address)
            return [s.getsockname()[0]]
    except OSError:
        return []
