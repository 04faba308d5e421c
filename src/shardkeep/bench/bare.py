"""The ceilings: what the kernel and the bus do with the same bytes and as many threads, and nothing else.

`pwrite` and an fsync per file, a file per thread; `preadv` of the same files; on a GPU the copy into
page-locked memory. A device state's bytes are written from, and read into, page-locked buffers of at most
4 GiB that are used again and again: more than any cache holds, and a small part of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from shardkeep.bench.contestant import Contestant, State

BARE, PINNED_COPY = "bare", "pinned copy"

_HOST_BYTES = 4 << 30


class Host:
    """Host memory for each tensor of a state: its own on the CPU, a page-locked buffer's part for a GPU's."""

    def __init__(self, state: State, target: State) -> None:
        self.state, self._locked = state, None
        if any(tensor.is_cuda for tensor in state.values()):
            sizes = [tensor.nbytes for tensor in state.values()]
            self._locked = lock_pages(min(max(_HOST_BYTES, *sizes), sum(sizes)))
            parts = _places(sizes, self._locked)
            self.source, self.sink = parts, parts
        else:
            self.source, self.sink = _bytes_of(state), _bytes_of(target)

    def close(self) -> None:
        if self._locked is not None:
            unlock_pages(self._locked)


def files(host: Host, num_threads: int, rank: int) -> Contestant:
    """The ceiling of saves and loads."""

    def each_part(work: Callable[[Path, Sequence[torch.Tensor]], None], path: Path, of: Any) -> None:
        names = [path / f"{rank}_{part}.bin" for part in range(num_threads)]
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(work, names, [of[part::num_threads] for part in range(num_threads)]))

    def save(path: Path) -> None:
        path.mkdir(exist_ok=True)
        each_part(_write, path, host.source)

    def load(path: Path) -> None:
        each_part(_read, path, host.sink)

    note = f"pwrite, preadv; {num_threads} threads; fsync"
    is_own = host.source is not host.sink
    return Contestant(name=BARE, note=note, save=save, load=load, is_checked=is_own)


def to_host(host: Host) -> Contestant:
    """The ceiling of a snapshot's stall: every tensor into page-locked memory, then one wait."""

    def copy(path: Path) -> None:
        for tensor, place in zip(host.state.values(), host.sink, strict=True):
            place.copy_(tensor.reshape(-1).view(torch.uint8), non_blocking=True)
        torch.cuda.synchronize()

    return Contestant(name=PINNED_COPY, note="device to page-locked host memory", save=copy)


def lock_pages(num_bytes: int) -> torch.Tensor:
    """Page-locked host memory, not from torch's cache, which rounds to powers of two."""
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    torch.cuda.check_error(_cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0))
    return buffer


def unlock_pages(buffer: torch.Tensor) -> None:
    torch.cuda.check_error(_cudart().cudaHostUnregister(buffer.data_ptr()))


def _cudart() -> Any:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _bytes_of(state: State) -> list[torch.Tensor]:
    return [tensor.reshape(-1).view(torch.uint8) for tensor in state.values()]


def _places(sizes: Sequence[int], buffer: torch.Tensor) -> list[torch.Tensor]:
    """One part after the other, from the buffer's start again when it is used up."""
    places, end = [], 0
    for size in sizes:
        start = end if end + size <= buffer.numel() else 0
        end = start + size
        places.append(buffer[start:end])
    return places


def _write(path: Path, parts: Sequence[torch.Tensor]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    offset = 0
    for part in parts:
        offset += _all_of(os.pwrite, fd, part, offset)
    os.fsync(fd)
    os.close(fd)


def _read(path: Path, parts: Sequence[torch.Tensor]) -> None:
    fd = os.open(path, os.O_RDONLY)
    offset = 0
    for part in parts:
        offset += _all_of(lambda f, view, at: os.preadv(f, [view], at), fd, part, offset)
    os.close(fd)


def _all_of(call: Callable[[int, memoryview, int], int], fd: int, part: torch.Tensor, offset: int) -> int:
    """Call until all has moved (Linux moves 2 GiB at most at a time); returns the bytes."""
    view = memoryview(part.numpy())  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        moved = call(fd, view[done:], offset + done)
        if moved == 0:
            raise OSError(f"file ended at byte {offset + done}")
        done += moved
    return done
