"""One log line per phase with its seconds, and the same seconds for reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("shardkeep")


class Phases:
    """Times the phases of one save or load: `with phases("write"): ...`. A phase entered twice adds up."""

    def __init__(self, what: str, path: str) -> None:
        self.seconds: dict[str, float] = {}
        self._what = what
        self._path = path

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + took
            log.info("%s %s: %s %.3f s", self._what, self._path, name, took)

    def total_s(self) -> float:
        return sum(self.seconds.values())
