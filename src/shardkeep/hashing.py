"""A file's bytes, in order -> the checksums of its fixed-size chunks.

Either in the thread that writes, or, where cores are to spare, on a thread of its own while the same bytes
are written: what hashing costs is then hidden behind `pwrite`. Both give the same digests.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import xxhash

Part = bytes | memoryview


class Hasher:
    """Checksums of chunks of `chunk_bytes` (the last one may be shorter), 16 bytes each; none if
    `checksum` is "none".
    """

    def __init__(self, chunk_bytes: int, checksum: str = "xxh3_128") -> None:
        self._chunk_bytes = chunk_bytes
        self._hashing = checksum != "none"
        self._hasher = xxhash.xxh3_128()
        self._room = chunk_bytes  # bytes until the current chunk is full
        self._digests: list[bytes] = []

    @contextmanager
    def along(self, parts: Sequence[Part]) -> Iterator[None]:
        """Hash `parts` before or beside the body, which only reads them."""
        self.update(parts)
        yield

    def update(self, parts: Sequence[Part]) -> None:
        if self._hashing:
            for part in parts:
                self._update(part)

    def checksums(self) -> bytes:
        """The digests of all chunks, the last one included; call once, at the end."""
        if self._hashing and self._room < self._chunk_bytes:
            self._digests.append(self._hasher.digest())
        return b"".join(self._digests)

    def close(self) -> None:
        """No more parts come."""

    def _update(self, part: Part) -> None:
        while len(part) >= self._room:
            self._hasher.update(part[: self._room])
            self._digests.append(self._hasher.digest())
            part = part[self._room :]
            self._hasher.reset()
            self._room = self._chunk_bytes
        if part:
            self._hasher.update(part)
            self._room -= len(part)


class HasherBeside(Hasher):
    """A Hasher with a thread of its own, from the first parts to `close`."""

    def __init__(self, chunk_bytes: int, checksum: str = "xxh3_128") -> None:
        super().__init__(chunk_bytes, checksum)
        self._work: queue.SimpleQueue[Sequence[Part] | None] = queue.SimpleQueue()
        self._hashed: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shardkeep-hash")
        self._thread.start()

    @contextmanager
    def along(self, parts: Sequence[Part]) -> Iterator[None]:
        """Returns, or raises, only once the thread has let go of the parts: their memory is reused next."""
        self._work.put(parts)
        try:
            yield
        finally:
            error = self._hashed.get()
        if error is not None:
            raise error

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (parts := self._work.get()) is not None:
            try:
                self.update(parts)
                self._hashed.put(None)
            except BaseException as e:  # the thread's boundary: raised by `along`
                self._hashed.put(e)
