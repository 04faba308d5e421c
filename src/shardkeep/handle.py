"""A save in the background: `SaveHandle`, and the one thread that runs such saves in the order they were begun.

An error is logged when it happens, raised by the next call on the handle, and, if nobody asked, by the next save. The thread
is not a daemon: a process that exits waits for its saves (until their deadlines), and says so.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from shardkeep.errors import Cancelled

log = logging.getLogger("shardkeep")

T = TypeVar("T")


class SaveHandle(Generic[T]):
    """Returned by everything that saves in the background. `await handle` or `handle.wait()` gives the report."""

    def __init__(self, cancel: Callable[[], None] | None = None) -> None:
        self._captured: Future[None] = Future()
        self._result: Future[T] = Future()
        self._cancel = cancel
        self._asked = False

    def wait_captured(self, timeout_s: float | None = None) -> None:
        """Block until the state has been copied and may change. Raises the save's error, or TimeoutError."""
        self._captured.result(timeout_s)

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until the checkpoint is committed and return the report. Raises the save's error, or TimeoutError."""
        self._asked = True
        return self._result.result(timeout_s)

    def done(self) -> bool:
        """Whether the save has ended, one way or the other; raises its error if it failed."""
        if self._result.done():
            self.wait()
        return self._result.done()

    def cancel(self) -> None:
        """Ask the save to stop. `wait` then raises Cancelled, unless the commit was already under way."""
        if self._cancel:
            self._cancel()

    async def captured(self) -> None:
        """As `wait_captured`, for asyncio."""
        await asyncio.wrap_future(self._captured)

    def __await__(self) -> Generator[object, None, T]:
        self._asked = True
        return asyncio.wrap_future(self._result).__await__()

    # -- for those who run the save

    def set_captured(self) -> None:
        """The state is copied and may change."""
        self._captured.set_result(None)

    def run(self, work: Callable[[], T]) -> None:
        """Do the work and settle the handle with its result or error."""
        try:
            result = work()
        except BaseException as e:
            log.error("save failed: %s", e)
            if not self._captured.done():
                self._captured.set_exception(e)
            self._result.set_exception(e)
            return
        if not self._captured.done():
            self._captured.set_result(None)
        self._result.set_result(result)


class Background:
    """Runs saves one after the other, so that they commit in the order they were begun."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "shardkeep-save")
        self._handles: list[SaveHandle[object]] = []
        self._lock = threading.Lock()
        atexit.register(self._say_waiting)

    def submit(self, work: Callable[[], T], cancel: Callable[[], None]) -> SaveHandle[T]:
        """Queue the rest of a save whose state is already copied."""
        handle: SaveHandle[T] = SaveHandle(cancel)
        handle.set_captured()
        with self._lock:
            self._handles.append(handle)  # type: ignore[arg-type]
        self._pool.submit(handle.run, work)
        return handle

    def raise_unseen(self) -> None:
        """Raise the error of a save that ended badly and whose handle nobody asked. Called by the next save."""
        with self._lock:
            ended = [h for h in self._handles if h._result.done()]
            self._handles = [h for h in self._handles if not h._result.done()]
        for handle in ended:
            error = handle._result.exception()
            if error and not handle._asked and not isinstance(error, Cancelled):
                raise error

    def in_flight(self) -> int:
        with self._lock:
            return sum(not h._result.done() for h in self._handles)

    def _say_waiting(self) -> None:
        if self.in_flight():
            log.warning("the process exits with %d saves in flight; waiting for them", self.in_flight())


background = Background()
