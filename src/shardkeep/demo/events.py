"""The run's record: one JSON object a line, appended by the trainer and the actors, followed by the display.

A file rather than a queue: it needs no further process, and it is still there after a crash.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    """Appends events to a file; any process of the machine may hold one on the same file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event, stamped with the time; a line is one write, so that writers do not mix."""
        line = json.dumps({"kind": kind, "time": time.time(), **fields})
        with self.path.open("a", encoding="ascii") as file:
            file.write(line + "\n")

    def new_events(self, position: int) -> tuple[list[Event], int]:
        """The events from byte `position` on, and the position after them."""
        if not self.path.exists():
            return [], position
        with self.path.open("rb") as file:
            file.seek(position)
            whole_lines, _, _ = file.read().rpartition(b"\n")
        events = [json.loads(line) for line in whole_lines.splitlines()]
        return events, position + len(whole_lines) + bool(whole_lines)

    def __iter__(self) -> Iterator[Event]:
        yield from self.new_events(0)[0]


class EventHandler(logging.Handler):
    """Sends log records, such as shardkeep's line per phase, into the event log."""

    def __init__(self, events: EventLog, source: str) -> None:
        super().__init__(logging.INFO)
        self.events, self.source = events, source

    def emit(self, record: logging.LogRecord) -> None:
        """Append the record as a "log" event."""
        self.events.emit("log", source=self.source, text=record.getMessage())


class HoldSave(logging.Handler):
    """Holds the thread that logs the end of a step's write: that save is under way for as long as anyone
    likes.
    """

    def __init__(self, step: int) -> None:
        super().__init__()
        self._marks = (f"/step_{step}/", ": write")

    def handle(self, record: logging.LogRecord) -> bool:  # not `emit`, which would hold the handler's lock
        if all(mark in record.getMessage() for mark in self._marks):
            time.sleep(3600)
        return True


def log_library_to(events: EventLog, source: str) -> None:
    """Route what the `shardkeep` library logs in this process into `events`."""
    logger = logging.getLogger("shardkeep")
    logger.setLevel(logging.INFO)
    logger.addHandler(EventHandler(events, source))
