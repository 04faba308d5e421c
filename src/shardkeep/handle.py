"""A save in the background: `SaveHandle`, and the one thread that runs such saves in the order they were
begun.

An error is logged when it happens, raised by the next call on the handle, and, if nobody asked, by the next
save. The thread is not a daemon: a process that exits waits for its saves (until their deadlines), and says
so.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from shardkeep.errors import Cancelled

log = logging.getLogger("shardkeep")

T = TypeVar("T")


class Handle(Generic[T]):
    """Work in a thread: `handle.wait()` or `await handle` gives its result or raises its error."""

    def __init__(self) -> None:
        self._result: Future[T] = _started()
        self._asked = False

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the work has ended; its result, its error, or TimeoutError."""
        self._result.exception(timeout_s)  # a wait that times out has not seen the outcome
        self._asked = True
        return self._result.result()

    def done(self) -> bool:
        """Whether the work has ended; raises its error if it failed."""
        if self._result.done():
            self.wait()
        return self._result.done()

    def ended(self) -> bool:
        """Whether the work has ended, well or badly."""
        return self._result.done()

    def join(self) -> None:
        """Block until the work has ended, without a look at the outcome."""
        self._result.exception()

    def forget(self) -> None:
        """Nobody will ask: how the work ends is known already, or does not matter."""
        self._asked = True

    def unseen_error(self) -> BaseException | None:
        """The error of work that has failed and whose handle nobody asked."""
        return self._result.exception() if self.ended() and not self._asked else None

    def __await__(self) -> Generator[object, None, T]:
        waiting = asyncio.wrap_future(self._result)
        try:
            return (yield from waiting.__await__())
        finally:
            self._asked = self._asked or not waiting.cancelled()

    def run(self, work: Callable[[], T]) -> None:
        """Do the work on the calling thread and settle the handle."""
        try:
            self._result.set_result(work())
        except BaseException as e:
            self._result.set_exception(e)


class SaveHandle(Handle[T]):
    """A save in the background: two moments to wait for, captured and committed."""

    def __init__(
        self, cancel: Callable[[], object] | None = None, captured: Sequence[Future[None]] | None = None
    ) -> None:
        super().__init__()
        self._own: Future[None] = _started()
        self._captured = [self._own] if captured is None else list(captured)
        self._cancel = cancel

    def wait_captured(self, timeout_s: float | None = None) -> None:
        """Block until the state is copied or read, and may change. Raises the save's error, or
        TimeoutError.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for future in self._captured:
            failed = future.exception(None if end is None else max(0.0, end - time.monotonic()))
            self._asked = self._asked or failed is not None
            future.result()

    async def captured(self) -> None:
        """As `wait_captured`, for asyncio."""
        for future in self._captured:
            waiting = asyncio.wrap_future(future)
            try:
                await waiting
            except Exception:
                self._asked = True
                raise

    def cancel(self) -> None:
        """Ask the save to stop. `wait` then raises Cancelled, unless the commit was already under way."""
        if self._cancel:
            self._cancel()

    def set_captured(self) -> None:
        """Said by whoever runs the save: the state is copied."""
        self._own.set_result(None)

    def run(self, work: Callable[[], T]) -> None:
        def logged() -> T:
            try:
                return work()
            except BaseException as e:
                log.error("save failed: %s", e)
                raise

        super().run(logged)
        error = self._result.exception()
        if not self._own.done():
            self._own.set_exception(error) if error else self._own.set_result(None)


def _started() -> Future[Any]:
    """A future that those who wait for it cannot cancel, as `asyncio.wait_for` would."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


class Background:
    """Runs saves one after the other, so that they commit in the order they were begun."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "shardkeep-save")
        self._handles: list[SaveHandle[object]] = []
        self._lock = threading.Lock()
        # Before the interpreter waits for the pool; `atexit` would call it afterwards.
        threading._register_atexit(self._say_waiting)  # type: ignore[attr-defined]

    def submit(
        self,
        work: Callable[[], T],
        cancel: Callable[[], object] | None = None,
        captured: Sequence[Future[None]] = (),
    ) -> SaveHandle[T]:
        """Queue the rest of a save. `captured`: what has to end before the state may change; nothing if it is
        copied already.
        """
        handle: SaveHandle[T] = SaveHandle(cancel, captured)
        with self._lock:
            self._pool.submit(handle.run, work)  # may raise: then nobody is to wait for the handle
            self._handles.append(handle)  # type: ignore[arg-type]
        return handle

    def raise_unseen(self) -> None:
        """Raise the error of a save that ended badly and whose handle nobody asked. Called by the next
        save.
        """
        with self._lock:
            while self._handles and self._handles[0].ended():
                error = self._handles.pop(0).unseen_error()
                if error and not isinstance(error, Cancelled):
                    raise error

    def wait_all(self) -> None:
        """Block until the saves begun so far have ended, well or badly."""
        with self._lock:
            handles = list(self._handles)
        for handle in handles:
            handle.join()

    def in_flight(self) -> int:
        with self._lock:
            return sum(not h.ended() for h in self._handles)

    def _say_waiting(self) -> None:
        if self.in_flight():
            log.warning("the process exits with %d saves in flight; waiting for them", self.in_flight())


background = Background()
