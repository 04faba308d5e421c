"""Byte ranges of files -> memory of tensors: the threads of a load.

In: for each file the segments wanted, each with a destination. Out: bytes read. Two kinds of work, in file
order:

- whole checksum chunks of one segment whose destination is plain memory: read straight into it, then
  checked there;
- everything else (edges, small tensors, strided or device destinations): chunks are read into scratch,
  checked, and the segments in them copied out. Small segments share a unit, so that each chunk is read
  once.

A destination gets unchecked bytes only for as long as their checksum takes; a wrong one is raised, never
returned from.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from shardkeep.catalog import Catalog
from shardkeep.config import Config
from shardkeep.errors import Corrupt, LoadFailed
from shardkeep.ranges import Archive, Flat, Strided, Unit
from shardkeep.storage import Reader, Storage

DIGEST_BYTES = 16
_ALIGN_BYTES = 64
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # any dtype of that size: bits are moved, not values

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITE = 0x200


def memory(address: int, num_bytes: int) -> memoryview:
    """Writable bytes at an address; the caller keeps the owner alive."""
    return _view(address, num_bytes, _WRITE)  # type: ignore[no-any-return]


class Checker:
    """Compares the chunks of a file with the checksums in the catalog; does nothing where there are none."""

    def __init__(self, catalog: Catalog, *, on: bool = True) -> None:
        self._catalog = catalog
        self._chunk = catalog.chunk_bytes
        self._on = on and catalog.checksum != "none"

    def check(self, file: str, start: int, data: memoryview) -> None:
        """`data` begins at `start`, a multiple of the chunk size, and ends with a chunk. `Corrupt` at the
        first wrong chunk."""
        if not self._on:
            return
        checksums = self._catalog.files[file].checksums
        chunk = self._chunk
        number = start // chunk
        for at in range(0, len(data), chunk):
            got = xxhash.xxh3_128_digest(data[at : at + chunk])
            expected = checksums[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            if got != expected:
                raise self._wrong(file, number, expected, got)
            number += 1

    def _wrong(self, file: str, number: int, expected: bytes, got: bytes) -> Corrupt:
        low, high = number * self._chunk, (number + 1) * self._chunk
        keys = sorted(
            {
                i.key
                for items in self._catalog.items.values()
                for i in items
                if i.file == file and i.offset < high and i.offset + i.length > low
            }
        )
        return Corrupt(
            "a chunk's checksum is wrong",
            file=file,
            path=self._catalog.url,
            chunk=number,
            offset=low,
            key=", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else ""),
            expected=expected.hex(),
            got=got.hex(),
            remedy="Load an earlier step; the stored file is damaged.",
        )


class Readers:
    """Files opened at first use, shared by the threads, closed after the last unit that needs them."""

    def __init__(self, storage: Storage, units: Sequence[Unit]) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._open: dict[str, Reader] = {}
        self._left: dict[str, int] = {}
        for unit in units:
            self._left[unit.file] = self._left.get(unit.file, 0) + 1

    def get(self, file: str) -> Reader:
        with self._lock:
            reader = self._open.get(file)
            if reader is None:
                reader = self._open[file] = self._storage.open(file)
            return reader

    def done(self, file: str) -> None:
        with self._lock:
            self._left[file] -= 1
            reader = self._open.pop(file, None) if not self._left[file] else None
        if reader is not None:
            reader.close()

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()
        self._open.clear()


def read_checked(reader: Reader, checker: Checker, file: str, url: str, start: int, into: memoryview) -> None:
    """Fill `into` from a file and check it; errors name the file."""
    try:
        reader.read_into(start, [into])
    except EOFError as e:
        raise Corrupt(
            "a file is shorter than it was",
            file=file,
            path=url,
            expected=f"at least {start + len(into)} bytes",
            got=f"{reader.size} bytes",
        ) from e
    checker.check(file, start, into)


def fetch(
    storage: Storage, catalog: Catalog, units: list[Unit], config: Config, device: torch.device | None
) -> int:
    """Do all `units` with `config.num_threads` threads; returns bytes read. The first error stops all threads
    and is raised. `device`: the one that tensors are on besides the CPU."""
    readers = Readers(storage, units)
    shared = _Shared(units)
    scratch = max((u.end - u.start for u in units if not u.address and u.archive is None), default=0)
    count = max(1, min(config.num_threads, len(units)))
    workers = [_Worker(catalog, readers, shared, scratch, device) for _ in range(count)]
    threads = [
        threading.Thread(target=w.run, name=f"shardkeep-load-{n}", daemon=True)
        for n, w in enumerate(workers[1:], 1)
    ]
    try:
        for thread in threads:
            thread.start()
        workers[0].run()
    finally:  # also when the caller's thread was interrupted: nothing may write to the tensors afterwards
        shared.stopped = True
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        readers.close()
    if shared.error is not None:
        raise shared.taken()
    return sum(unit.end - unit.start for unit in units)


class _Shared:
    """The queue of units, and the first error."""

    def __init__(self, units: list[Unit]) -> None:
        self._units = iter(units)
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.stopped = False

    def next(self) -> Unit | None:
        with self._lock:
            return None if self.error is not None or self.stopped else next(self._units, None)

    def taken(self) -> BaseException:
        """The first error, no longer held here: it and a frame of its traceback would keep each other."""
        error, self.error = self.error, None
        assert error is not None
        return error

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if self.error is None:
                self.error = error


def _unreadable(error: OSError, url: str) -> Corrupt | LoadFailed:
    kind = Corrupt if isinstance(error, FileNotFoundError) else LoadFailed
    found = kind(f"a file cannot be read: {error}", path=url)
    found.__cause__ = error
    return found


class _Worker:
    """One thread: takes units until there are none. Scratch is one slot, or two pinned ones when tensors are
    on a device: one is copied from while the other is filled."""

    def __init__(
        self, catalog: Catalog, readers: Readers, shared: _Shared, scratch: int, device: torch.device | None
    ) -> None:
        self._url = catalog.url
        self._checker = Checker(catalog)
        self._readers = readers
        self._shared = shared
        self._slot_bytes = scratch + _ALIGN_BYTES
        self._device = device
        self._slots: list[torch.Tensor] = []
        self._turn = 0
        if device is not None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def run(self) -> None:
        try:
            while (unit := self._shared.next()) is not None:
                self._do(unit)
                self._readers.done(unit.file)
        except OSError as e:
            self._shared.fail(_unreadable(e, self._url))
        except BaseException as e:
            self._shared.fail(e)
        finally:
            if self._device is not None:
                self._stream.synchronize()

    def _do(self, unit: Unit) -> None:
        reader = self._readers.get(unit.file)
        if unit.archive is not None:
            self._load_archive(reader, unit, unit.archive)
        elif unit.address:
            self._read(reader, unit, unit.address)
        else:
            slot = self._slot(unit)
            self._read(reader, unit, slot.data_ptr())
            for start, end, address, special in unit.segments:
                if special is None:
                    ctypes.memmove(address, slot.data_ptr() + start - unit.start, end - start)
                elif isinstance(special, Flat):
                    self._to_device(special.out, slot[start - unit.start : end - unit.start])
                else:
                    self._place(special, slot[start - unit.start : end - unit.start])
            if self._device is not None:
                self._copied[self._turn].record(self._stream)

    def _read(self, reader: Reader, unit: Unit, address: int) -> None:
        into = memory(address, unit.end - unit.start)
        read_checked(reader, self._checker, unit.file, self._url, unit.start, into)

    def _slot(self, unit: Unit) -> torch.Tensor:
        """Scratch that no copy to the device is still reading, with the first segment aligned in it."""
        if not self._slots:
            pinned = self._device is not None
            self._slots = [
                torch.empty(self._slot_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(1 + pinned)
            ]
        if self._device is not None:
            self._turn = 1 - self._turn
            self._copied[self._turn].synchronize()
        slot = self._slots[self._turn]
        shift = (unit.start - unit.segments[0].start - slot.data_ptr()) % _ALIGN_BYTES
        return slot[shift : shift + unit.end - unit.start]

    def _place(self, to: Strided, data: torch.Tensor) -> None:
        out, dtype = to.out, to.dtype
        if out.device.type == "cpu" and out.dtype == dtype and not out.is_conj() and not out.is_neg():
            _copy_words(out, data.data_ptr(), to.strides, dtype.itemsize)
            return  # by numpy, for torch would start its own threads under ours
        if data.data_ptr() % dtype.itemsize:
            data = data.clone()  # items lie at any offset of a file, and torch's kernels want aligned memory
        source = data.view(dtype).as_strided(tuple(out.shape), to.strides)
        if out.device.type == "cpu":
            out.copy_(source)
        else:
            self._to_device(out, source)

    def _to_device(self, out: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            # in stream order; a pageable source has been read when this returns
            out.copy_(source, non_blocking=True)

    def _load_archive(self, reader: Reader, unit: Unit, archive: Archive) -> None:
        from shardkeep.load import load_value

        data = bytearray(unit.end - unit.start)
        read_checked(reader, self._checker, unit.file, self._url, unit.start, memoryview(data))
        value: Any = load_value(data, archive.key)
        if not isinstance(value, torch.Tensor):
            raise Corrupt(
                "an item holds no tensor",
                key=archive.key,
                file=unit.file,
                path=self._url,
                got=type(value).__name__,
            )
        archive.place(value)


def _copy_words(out: torch.Tensor, address: int, strides: tuple[int, ...], itemsize: int) -> None:
    shape = tuple(out.shape)
    word = np.dtype(_WORDS[itemsize])
    source = _array(address, shape, strides, word)
    np.copyto(_array(out.data_ptr(), shape, out.stride(), word), source)


def _array(address: int, shape: tuple[int, ...], strides: tuple[int, ...], word: np.dtype[Any]) -> Any:
    extent = (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * word.itemsize
    return np.ndarray(
        shape, word, buffer=memory(address, extent), strides=[s * word.itemsize for s in strides]
    )
