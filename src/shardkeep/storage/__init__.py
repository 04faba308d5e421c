"""Where bytes live: one protocol, one file per backend, no policy.

A storage is bound to one directory (later: one prefix). Names are `str` relative to it, since `Path` mangles
`s3://`. Every method may be called from any thread. Nothing here knows what a checkpoint is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

TEMPORARY = ".shardkeep-tmp"  # ends the name of a file that `put` has not finished

Buffer = bytes | bytearray | memoryview


class Writer(Protocol):
    """A new file being written from start to end."""

    def append(self, parts: Sequence[Buffer]) -> None:
        """Write all bytes of `parts`, in order, at the end. OSError if the storage refuses."""

    def close(self, *, durable: bool) -> None:
        """Finish; with `durable` the bytes survive a power loss once the directory is synced."""

    def abort(self) -> None:
        """Close and remove what was written."""


class Reader(Protocol):
    """A file open for positioned reads."""

    size: int

    def read_into(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Fill `parts`, in order, from `offset`. EOFError if the file ends before."""

    def close(self) -> None: ...


class Storage(Protocol):
    """A directory of files."""

    url: str

    @property
    def is_shared(self) -> bool:
        """Whether reads go over a network to a store that all ranks share."""

    def create(self, name: str) -> Writer:
        """A new file; FileExistsError if the name is taken."""

    def open(self, name: str) -> Reader:
        """An existing file; FileNotFoundError if there is none."""

    def put(self, name: str, data: Buffer, *, durable: bool) -> None:
        """Replace `name` by `data` in one step: readers see the old bytes or the new, whatever happens
        between.
        """

    def get(self, name: str) -> bytes:
        """All bytes of a small file; FileNotFoundError if there is none."""

    def sizes(self) -> dict[str, int]:
        """Name and size of every file directly in the directory; empty if it does not exist."""

    def delete(self, name: str) -> None:
        """Remove a file; nothing happens if there is none."""

    def child(self, name: str) -> Storage:
        """The storage of a directory in this one, which need not exist."""

    def directories(self) -> list[str]:
        """Names of the directories directly in this one; empty if it does not exist."""

    def remove_tree(self) -> None:
        """Remove the directory and all that is in it; nothing happens if there is none."""

    def sync(self) -> None:
        """Make all creations, replacements and deletions so far durable."""

    def make(self) -> None:
        """Create the directory and its parents, durably."""

    def remove_if_empty(self) -> None:
        """Remove the directory if nothing is in it."""

    def free_bytes(self) -> int:
        """Room for more bytes, or a very large number if the backend has no limit."""


def storage_for(path: str | os.PathLike[str]) -> Storage:
    """The storage of the directory that a user names."""
    from shardkeep.storage.local import LocalStorage

    return LocalStorage(path)
