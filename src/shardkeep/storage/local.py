"""Files in a directory of a local or shared POSIX file system, through bare system calls (each releases the
GIL).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from shardkeep.storage import TEMPORARY, Buffer, mount

_MAX_PARTS = 512  # below IOV_MAX (1024) of every Linux


class LocalStorage:
    """See `shardkeep.storage.Storage`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.url = os.path.abspath(os.fspath(directory))

    @property
    def is_shared(self) -> bool:
        return mount.is_shared(self.url)

    def _path(self, name: str) -> str:
        return os.path.join(self.url, name)

    def create(self, name: str) -> LocalWriter:
        return LocalWriter(self._path(name))

    def open(self, name: str) -> LocalReader:
        return LocalReader(self._path(name))

    def put(self, name: str, data: Buffer, *, durable: bool) -> None:
        path = self._path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}{TEMPORARY}"
        fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
        try:
            _write_all(fd, [data], 0)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)

    def get(self, name: str) -> bytes:
        with open(self._path(name), "rb") as f:
            return f.read()

    def sizes(self) -> dict[str, int]:
        try:
            with os.scandir(self.url) as entries:
                return dict(_named_sizes(entries))
        except FileNotFoundError:
            return {}

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def child(self, name: str) -> LocalStorage:
        return LocalStorage(self._path(name))

    def directories(self) -> list[str]:
        try:
            with os.scandir(self.url) as entries:
                return [e.name for e in entries if e.is_dir()]
        except FileNotFoundError:
            return []

    def remove_tree(self) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self.url)

    def sync(self) -> None:
        _sync_directory(self.url)

    def make(self) -> None:
        missing = []
        path = self.url
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        os.makedirs(self.url, exist_ok=True)
        for created in missing:  # a new directory is durable once its parent is synced
            _sync_directory(os.path.dirname(created))

    def remove_if_empty(self) -> None:
        with suppress(OSError):  # not empty, or already gone
            os.rmdir(self.url)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.url).free


class LocalWriter:
    """See `shardkeep.storage.Writer`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self._end = 0

    def append(self, parts: Sequence[Buffer]) -> None:
        for start in range(0, len(parts), _MAX_PARTS):
            self._end = _write_all(self._fd, parts[start : start + _MAX_PARTS], self._end)

    def close(self, *, durable: bool) -> None:
        try:
            if durable:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def abort(self) -> None:
        os.close(self._fd)
        os.unlink(self._path)


class LocalReader:
    """See `shardkeep.storage.Reader`."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size
        self._path = path

    def read_into(self, offset: int, parts: Sequence[memoryview]) -> None:
        views: list[memoryview] = [p for p in parts if len(p)]
        while views:
            got = os.preadv(self._fd, views[:_MAX_PARTS], offset)
            if got == 0:
                raise EOFError(
                    f"{self._path} ends at {offset}, {sum(map(len, views))} bytes before the end of the range"
                )
            offset += got
            views = _advance(views, got)

    def close(self) -> None:
        os.close(self._fd)


def _write_all(fd: int, parts: Sequence[Buffer], offset: int) -> int:
    """Write every byte of `parts` at `offset`, however short the kernel's writes are; returns the new end."""
    views = [memoryview(p) for p in parts if len(p)]
    while views:
        wrote = os.pwritev(fd, views, offset)
        offset += wrote
        views = _advance(views, wrote)
    return offset


def _advance(views: list[memoryview], done: int) -> list[memoryview]:
    """`views` without their first `done` bytes."""
    for i, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[i + 1 :]]
        done -= len(view)
    return []


def _named_sizes(entries: Iterable[os.DirEntry[str]]) -> Iterator[tuple[str, int]]:
    for entry in entries:
        with suppress(FileNotFoundError):  # removed or renamed since it was listed
            if entry.is_file():
                yield entry.name, entry.stat().st_size


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
