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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import xxhash

from shardkeep.catalog import Catalog
from shardkeep.config import Config, resolve
from shardkeep.errors import Corrupt, LoadFailed, ShardkeepError
from shardkeep.memory import bytes_at
from shardkeep.ranges import Archive, Flat, Strided, Unit
from shardkeep.stage import allocate_pair, current_device, free, ring, use_device
from shardkeep.storage import Reader, Storage

DIGEST_BYTES = 16
_ALIGN_BYTES = 64
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # any dtype of that size: bits are moved, not values


class Checker:
    """Compares the chunks of a file with the checksums in the catalog; does nothing where there are none."""

    def __init__(self, catalog: Catalog | None, *, on: bool = True) -> None:
        self._catalog = catalog if on and catalog is not None and catalog.checksum != "none" else None

    def check(self, file: str, start: int, data: memoryview) -> None:
        """`data` begins at `start`, a multiple of the chunk size, and ends with a chunk. `Corrupt` at the
        first wrong chunk."""
        if self._catalog is None:
            return
        checksums = self._catalog.files[file].checksums
        chunk = self._catalog.chunk_bytes
        number = start // chunk
        for at in range(0, len(data), chunk):
            got = xxhash.xxh3_128_digest(data[at : at + chunk])
            expected = checksums[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            if got != expected:
                raise _wrong(self._catalog, file, number, expected, got)
            number += 1


def _wrong(catalog: Catalog, file: str, number: int, expected: bytes, got: bytes) -> Corrupt:
    low, high = number * catalog.chunk_bytes, (number + 1) * catalog.chunk_bytes
    keys = sorted(
        {
            i.key
            for items in catalog.items.values()
            for i in items
            if i.file == file and i.offset < high and i.offset + i.length > low
        }
    )
    return Corrupt(
        "a chunk's checksum is wrong",
        file=file,
        path=catalog.url,
        chunk=number,
        offset=low,
        key=", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else ""),
        expected=expected.hex(),
        got=got.hex(),
        remedy="Load an earlier step; the stored file is damaged.",
    )


class Readers:
    """Files opened at first use, shared by the threads, closed after the last read that needs them: `files`
    has one entry per read.
    """

    def __init__(self, storage: Storage, files: Iterable[str]) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._open: dict[str, Reader] = {}
        self._left: dict[str, int] = {}
        for file in files:
            self._left[file] = self._left.get(file, 0) + 1

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
    storage: Storage, catalog: Catalog, units: list[Unit], config: Config, ready: Ready | None = None
) -> int:
    """Do all `units` with `config.num_threads` threads; returns bytes read. The first error stops all threads
    and is raised. `ready`: for the devices that tensors are on, besides the CPU.
    """
    readers = Readers(storage, (u.file for u in units))
    shared = _Shared(units)
    scratch = Scratch(
        config, max((u.end - u.start for u in units if not u.address and not u.archive), default=0)
    )
    count = max(1, min(scratch.num_pairs, len(units)))
    workers = [_Worker(catalog, readers, shared, scratch, ready or {}) for _ in range(count)]
    device = current_device()
    threads = [
        threading.Thread(target=w.run, args=(device,), name=f"shardkeep-load-{n}", daemon=True)
        for n, w in enumerate(workers[1:], 1)
    ]
    try:
        for thread in threads:
            thread.start()
        workers[0].run(device)
    finally:  # also when the caller's thread was interrupted: nothing may write to the tensors afterwards
        shared.stopped = True
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        readers.close()
    if shared.error is not None:
        raise shared.taken()
    return sum(unit.end - unit.start for unit in units)


class FirstError:
    """The first error of several threads; the others follow from it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if self.error is None:
                self.error = error

    def taken(self) -> BaseException:
        """The error, no longer held here: it and a frame of its traceback would keep each other."""
        error, self.error = self.error, None
        assert error is not None
        return error


class _Shared(FirstError):
    """The queue of units, and the first error."""

    def __init__(self, units: list[Unit]) -> None:
        super().__init__()
        self._units = iter(units)
        self.stopped = False

    def next(self) -> Unit | None:
        with self._lock:
            return None if self.error is not None or self.stopped else next(self._units, None)


class _Worker:
    """One thread: takes units until there are none. Of its two slots of scratch, one is copied from to a
    device while the other is filled.
    """

    def __init__(
        self, catalog: Catalog, readers: Readers, shared: _Shared, scratch: Scratch, ready: Ready
    ) -> None:
        self._url = catalog.url
        self._checker = Checker(catalog)
        self._readers = readers
        self._shared = shared
        self._scratch = scratch
        self._placer = Placer(ready)
        self._slots: tuple[torch.Tensor, ...] = ()
        self._copied: list[list[torch.cuda.Event]] = [[], []]
        self._turn = 0

    def run(self, device: int | None) -> None:
        with ExitStack() as held:
            try:
                use_device(device)
                while (unit := self._shared.next()) is not None:
                    if not self._slots and not unit.address and unit.archive is None:
                        self._slots = held.enter_context(self._scratch.pair())
                    self._do(unit)
                    self._readers.done(unit.file)
            except BaseException as e:
                self._shared.fail(as_load_error(e, self._url))
            finally:
                self._placer.finish()

    def _do(self, unit: Unit) -> None:
        reader = self._readers.get(unit.file)
        if unit.archive is not None:
            load_archive(reader, self._checker, self._url, unit, unit.archive)
        elif unit.address:
            self._read(reader, unit, unit.address)
        else:
            self._turn = 1 - self._turn
            wait_for(self._copied[self._turn])
            data = part_for(self._slots[self._turn], unit, unit.start, unit.end)
            self._read(reader, unit, data.data_ptr())
            self._placer.place(unit, data)
            self._copied[self._turn] = self._placer.mark()

    def _read(self, reader: Reader, unit: Unit, address: int) -> None:
        into = bytes_at(address, unit.end - unit.start)
        read_checked(reader, self._checker, unit.file, self._url, unit.start, into)


def as_load_error(error: BaseException, url: str) -> BaseException:
    """An error of storage as what a load raises, with its cause; others as they are."""
    if isinstance(error, ShardkeepError) or not isinstance(error, OSError):
        return error
    kind = Corrupt if isinstance(error, FileNotFoundError) else LoadFailed
    found = kind(f"a file cannot be read: {error}", path=url)
    found.__cause__ = error
    return found


class Scratch:
    """Host memory for bytes on their way to where they cannot be read directly: pairs of slots of the
    process's staging ring, of the size that saves use, so that a load after a save allocates and pins
    nothing. For reads that do not fit those (three chunks, where a checkpoint has chunks of megabytes and the
    configuration slots of less) slots are larger and threads fewer. Together at most `staging_bytes`, except
    that one pair is always given.
    """

    def __init__(self, config: Config, longest_bytes: int) -> None:
        config = resolve(config)
        self._ring = ring(config)
        self._slot_bytes = max(config.slot_bytes, longest_bytes + _ALIGN_BYTES)
        fitting = config.staging_bytes // (2 * self._slot_bytes)
        self._fits = fitting > 0
        self.num_pairs = max(1, min(config.num_threads, fitting))

    @contextmanager
    def pair(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self._fits:
            with self._ring.pair(self._slot_bytes) as slots:
                yield slots
            return
        own = allocate_pair(self._slot_bytes)
        try:
            yield own
        finally:
            for slot in own:
                free(slot)


def usable_bytes(config: Config) -> int:
    """The longest read that fits a slot of the staging ring wherever its segments have to be aligned."""
    return config.slot_bytes - _ALIGN_BYTES


def part_for(slot: torch.Tensor, unit: Unit, start: int, end: int) -> torch.Tensor:
    """Room for bytes [start, end) of a file, with the first segment of a unit in them aligned."""
    first = unit.segments[0].start if unit.segments else unit.start
    shift = (start - first - slot.data_ptr()) % _ALIGN_BYTES
    return slot[shift : shift + end - start]


Ready = Mapping[torch.device, torch.cuda.Event]
"""For each device that tensors are on: an event of the caller's stream, after which they may be filled."""


def wait_for(events: Sequence[torch.cuda.Event]) -> None:
    for event in events:
        event.synchronize()


class Placer:
    """Copies a unit's bytes to its segments; one per thread, with its own stream per device."""

    def __init__(self, ready: Ready) -> None:
        self._ready = ready
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def place(self, unit: Unit, data: torch.Tensor) -> None:
        """`data` are the unit's bytes; they must stay until the events of `mark` have come."""
        if unit.address:
            ctypes.memmove(unit.address, data.data_ptr(), unit.end - unit.start)
        for start, end, address, special in unit.segments:
            part = data[start - unit.start : end - unit.start]
            if special is None:
                ctypes.memmove(address, part.data_ptr(), end - start)
            elif isinstance(special, Flat):
                self._to_device(special.out, part)
            else:
                self._place_strided(special, part)

    def mark(self) -> list[torch.cuda.Event]:
        """Events after which everything placed so far has been copied."""
        events = []
        for stream in self._streams.values():
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
            events.append(event)
        return events

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def _place_strided(self, to: Strided, data: torch.Tensor) -> None:
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
        with torch.cuda.stream(self._stream(out.device)):
            # in stream order; a pageable source has been read when this returns
            out.copy_(source, non_blocking=True)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(self._ready[device])
        return stream


def load_archive(reader: Reader, checker: Checker, url: str, unit: Unit, archive: Archive) -> None:
    """Let torch load a whole foreign item, and copy from it."""
    from shardkeep.load import load_value

    data = bytearray(unit.end - unit.start)
    read_checked(reader, checker, unit.file, url, unit.start, memoryview(data))
    value: Any = load_value(data, archive.key)
    if not isinstance(value, torch.Tensor):
        raise Corrupt(
            "an item holds no tensor", key=archive.key, file=unit.file, path=url, got=type(value).__name__
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
        shape, word, buffer=bytes_at(address, extent), strides=[s * word.itemsize for s in strides]
    )
