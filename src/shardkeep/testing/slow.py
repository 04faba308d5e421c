"""A storage with a limited bandwidth that all who use it share, as the ranks of a job share a file server.

In:  a storage, and a `Link`: bytes per second, seconds per request, and the file through which processes of
     one machine share them.
Out: the same storage, each request as late as the link makes it; `SlowStorage.read_bytes` counts bytes.
Invariant: requests go through the link one after the other, so in any t seconds all processes together move
     at most t times its bandwidth; the latencies of requests overlap.

    link = Link(path=str(directory / "link"), bytes_per_s=200e6, latency_s=0.002)
    storage = SlowStorage(storage_for(directory), link)
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shardkeep.storage import Buffer, Reader, Storage, Writer

__all__ = ["Link", "SlowStorage"]

_FREE_AT = struct.Struct("<d")  # when the last request will be through, on the clock that processes share


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way to a storage. `path`: a file that need not exist."""

    path: str
    bytes_per_s: float
    latency_s: float = 0.0

    def carry(self, num_bytes: int) -> None:
        """Wait until the link has moved this many bytes after all that it was asked for before."""
        time.sleep(max(0.0, self._book(num_bytes / self.bytes_per_s) + self.latency_s - time.monotonic()))

    def _book(self, seconds: float) -> float:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            booked = os.pread(fd, _FREE_AT.size, 0)
            free_at = _FREE_AT.unpack(booked)[0] if booked else 0.0
            end = max(free_at, time.monotonic()) + seconds
            os.pwrite(fd, _FREE_AT.pack(end), 0)
            return float(end)
        finally:
            os.close(fd)


class SlowStorage:
    """See `shardkeep.storage.Storage`; the module says what it adds. It counts as shared."""

    is_shared = True

    def __init__(self, inner: Storage, link: Link, count: _Count | None = None) -> None:
        self.url = inner.url
        self._inner = inner
        self._link = link
        self._count = count or _Count()

    @property
    def read_bytes(self) -> int:
        """Bytes of files read through this storage and its children, in this process."""
        return self._count.read_bytes

    def create(self, name: str) -> Writer:
        self._link.carry(0)
        return _SlowWriter(self._inner.create(name), self._link)

    def open(self, name: str) -> Reader:
        self._link.carry(0)
        return _SlowReader(self._inner.open(name), self._link, self._count)

    def put(self, name: str, data: Buffer, *, durable: bool) -> None:
        self._link.carry(len(data))
        self._inner.put(name, data, durable=durable)

    def get(self, name: str) -> bytes:
        data = self._inner.get(name)
        self._link.carry(len(data))
        self._count.add(len(data))
        return data

    def sizes(self) -> dict[str, int]:
        self._link.carry(0)
        return self._inner.sizes()

    def delete(self, name: str) -> None:
        self._link.carry(0)
        self._inner.delete(name)

    def child(self, name: str) -> SlowStorage:
        return SlowStorage(self._inner.child(name), self._link, self._count)

    def directories(self) -> list[str]:
        self._link.carry(0)
        return self._inner.directories()

    def remove_tree(self) -> None:
        self._link.carry(0)
        self._inner.remove_tree()

    def sync(self) -> None:
        self._link.carry(0)
        self._inner.sync()

    def make(self) -> None:
        self._link.carry(0)
        self._inner.make()

    def remove_if_empty(self) -> None:
        self._link.carry(0)
        self._inner.remove_if_empty()

    def free_bytes(self) -> int:
        return self._inner.free_bytes()


class _Count:
    """Bytes read by any thread."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.read_bytes += num_bytes


class _SlowReader:
    """See `shardkeep.storage.Reader`."""

    def __init__(self, inner: Reader, link: Link, count: _Count) -> None:
        self.size = inner.size
        self.close = inner.close
        self._inner, self._link, self._count = inner, link, count

    def read_into(self, offset: int, parts: Sequence[memoryview]) -> None:
        num_bytes = sum(map(len, parts))
        self._inner.read_into(offset, parts)
        self._link.carry(num_bytes)
        self._count.add(num_bytes)


class _SlowWriter:
    """See `shardkeep.storage.Writer`."""

    def __init__(self, inner: Writer, link: Link) -> None:
        self.close = inner.close
        self.abort = inner.abort
        self._inner, self._link = inner, link

    def append(self, parts: Sequence[Buffer]) -> None:
        self._link.carry(sum(map(len, parts)))
        self._inner.append(parts)
