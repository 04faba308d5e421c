"""A storage that fails or dies at a chosen operation, to show what a crash or an error leaves behind.

In:  a storage, and a `Faults` that says which of its operations goes wrong, how, and how far it gets.
Out: the same storage for everything else. `Faults.operations` lists what was asked for, so that a test
     first counts, then strikes at every number:

    counted = Faults()
    save_to(state, Target(storage=FaultyStorage(storage, counted)))
    for at in range(len(counted.operations)):
        save_to(state, Target(storage=FaultyStorage(storage, Faults(at=at, strike=die))))  # raises Died

Invariant: after `die` nothing reaches the storage any more, as from a process that is gone; code that
cleans up on its way out cannot make the test easier than a SIGKILL.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NoReturn, TypeVar

from shardkeep.storage import TEMPORARY, Buffer, Reader, Storage, Writer

__all__ = ["Died", "Faults", "FaultyStorage", "die", "fail_with", "kill"]

T = TypeVar("T")


class Died(BaseException):
    """The process is dead, in a test that goes on. No `Exception`, so that no error handling takes it for
    its own.
    """


def die(operation: str) -> NoReturn:
    """A strike: the process ends here, in all its threads."""
    raise Died(operation)


def kill(operation: str) -> NoReturn:
    """A strike: the process ends here, truly. For a process that the test has started."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(operation)


def fail_with(code: int) -> Callable[[str], NoReturn]:
    """A strike: the operation raises OSError with this errno."""

    def fail(operation: str) -> NoReturn:
        raise OSError(code, os.strerror(code), operation)

    return fail


@dataclass(slots=True)
class Faults:
    """When operations of a storage, its children and its files go wrong. Safe to use from many threads.

    `at`: the number of the operation, from 0, among those whose kind is in `kinds` (None: all); None: never.
    `strike`: what happens; it must raise. `lasting`: from then on to all of them, as on a disk that stays
    full. `when`: before the operation takes effect, after it, or half-way: half of the bytes are written,
    and of a `put` the temporary file alone.
    """

    at: int | None = None
    strike: Callable[[str], NoReturn] = die
    when: Literal["before", "half", "after"] = "before"
    lasting: bool = False
    kinds: frozenset[str] | None = None
    operations: list[str] = field(default_factory=list)
    is_dead: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def perform(
        self, kind: str, name: str, work: Callable[[], T], half: Callable[[], object] = lambda: None
    ) -> T:
        """Do an operation, unless it is the one to go wrong."""
        operation = f"{kind} {name}"
        if not self._is_struck(kind, operation):
            return work()
        if self.when == "after":
            work()
        elif self.when == "half":
            half()
        try:
            self.strike(operation)
        except Died:
            self.is_dead = True
            raise

    def _is_struck(self, kind: str, operation: str) -> bool:
        with self._lock:
            if self.is_dead:
                raise Died(operation)
            if self.kinds is not None and kind not in self.kinds:
                return False
            number = len(self.operations)
            self.operations.append(operation)
            return self.at is not None and (number >= self.at if self.lasting else number == self.at)


class FaultyStorage:
    """See `shardkeep.storage.Storage`; the module says what it adds."""

    def __init__(self, inner: Storage, faults: Faults) -> None:
        self.url = inner.url
        self._inner = inner
        self._faults = faults

    @property
    def is_shared(self) -> bool:
        return self._inner.is_shared

    def create(self, name: str) -> Writer:
        writer = self._faults.perform("create", name, lambda: self._inner.create(name))
        return _FaultyWriter(writer, name, self._faults)

    def open(self, name: str) -> Reader:
        return self._faults.perform("open", name, lambda: self._inner.open(name))

    def put(self, name: str, data: Buffer, *, durable: bool) -> None:
        def half() -> None:
            temporary = self._inner.create(f"{name}{TEMPORARY}")
            temporary.append([memoryview(data)[: len(data) // 2]])
            temporary.close(durable=False)

        self._faults.perform("put", name, lambda: self._inner.put(name, data, durable=durable), half)

    def get(self, name: str) -> bytes:
        return self._faults.perform("get", name, lambda: self._inner.get(name))

    def sizes(self) -> dict[str, int]:
        return self._faults.perform("sizes", self.url, self._inner.sizes)

    def delete(self, name: str) -> None:
        self._faults.perform("delete", name, lambda: self._inner.delete(name))

    def child(self, name: str) -> FaultyStorage:
        return FaultyStorage(self._inner.child(name), self._faults)

    def directories(self) -> list[str]:
        return self._faults.perform("directories", self.url, self._inner.directories)

    def remove_tree(self) -> None:
        def half() -> None:
            for storage in (self._inner, *map(self._inner.child, self._inner.directories())):
                names = sorted(storage.sizes())
                for name in names[len(names) // 2 :]:
                    storage.delete(name)

        self._faults.perform("remove_tree", self.url, self._inner.remove_tree, half)

    def sync(self) -> None:
        self._faults.perform("sync", self.url, self._inner.sync)

    def make(self) -> None:
        self._faults.perform("make", self.url, self._inner.make)

    def remove_if_empty(self) -> None:
        self._faults.perform("remove_if_empty", self.url, self._inner.remove_if_empty)

    def free_bytes(self) -> int:
        return self._faults.perform("free_bytes", self.url, self._inner.free_bytes)


class _FaultyWriter:
    """See `shardkeep.storage.Writer`. An `abort` is never struck: it is the answer to an error."""

    def __init__(self, inner: Writer, name: str, faults: Faults) -> None:
        self._inner = inner
        self._name = name
        self._faults = faults

    def append(self, parts: Sequence[Buffer]) -> None:
        def half() -> None:
            data = b"".join(bytes(p) for p in parts)
            self._inner.append([data[: len(data) // 2]])

        self._faults.perform("append", self._name, lambda: self._inner.append(parts), half)

    def close(self, *, durable: bool) -> None:
        try:
            self._faults.perform("close", self._name, lambda: None)
        except BaseException:
            self._inner.close(durable=False)  # a descriptor is gone, whatever its close answers
            raise
        self._inner.close(durable=durable)

    def abort(self) -> None:
        if self._faults.is_dead:
            self._inner.close(durable=False)  # the file stays, the descriptor of the test does not
            raise Died(f"abort {self._name}")
        self._inner.abort()
