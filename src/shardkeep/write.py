"""File layouts + shards -> files, checksummed on the way. N threads, one file each at a time.

Heads, payloads and tails go to the storage as they lie in memory (`pwritev`), so Python copies nothing. A
file's bytes are hashed in fixed chunks just before they are written, while they are in the CPU's cache. The
first error stops all threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
import xxhash

from shardkeep import stage
from shardkeep.config import Config, cores_per_rank
from shardkeep.errors import Cancelled
from shardkeep.frame import frame
from shardkeep.freeze import Frozen
from shardkeep.hashing import Hasher, HasherBeside
from shardkeep.memory import host_bytes, is_direct
from shardkeep.nogc import no_gc
from shardkeep.storage import Storage, Writer
from shardkeep.types import FileLayout, Item, Piece, RankResult, Shard, ShardHeader, StoredFile, TensorShard

_MAX_PARTS = 256

Digests = list[tuple[str, bytes]]  # key and payload digest of each piece

# What is hashed and then written at a time. With few threads it should still be in the core's cache for the
# write; with many, each return to Python waits for the GIL, and fewer, larger batches win (measured on 2 and
# on 16 cores).
_FEW_THREADS = 4
_BATCH_BYTES = 512 << 10
_BATCH_OF_MANY_BYTES = 4 << 20

# Beside training each return to Python takes the GIL from a thread that launches kernels: then few threads
# make few calls, each of many bytes (chosen on an H200, see `shardkeep bench --sections beside`).
_QUIET_SLOT_BYTES = 64 << 20
_PACKED_BYTES = 128 << 10  # pieces up to this size are copied together before they are hashed and written


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One rank's share of a save: what to write, where from, where to."""

    storage: Storage
    files: Sequence[FileLayout]
    shards: Sequence[Shard | None]  # None: not written by this rank
    payloads: dict[int, bytes]
    config: Config
    ready: torch.cuda.Event | None
    device: int | None = None
    quiet: bool = False  # a training thread of this process goes on meanwhile
    stop: threading.Event = field(default_factory=threading.Event)  # set by the first error, or to cancel
    read: Callable[[Job], object] = lambda job: None  # called when every byte of the state has been read

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self.config, quiet=self.quiet)

    @property
    def batch_bytes(self) -> int:
        if self.quiet:
            return self.slot_bytes
        return _BATCH_BYTES if self.config.num_threads <= _FEW_THREADS else _BATCH_OF_MANY_BYTES

    def hasher(self) -> Hasher:
        """Of one file. Beside the write if each of this rank's threads has a core for it; never beside
        training, whose thread would wait for the GIL more often.
        """
        beside = not self.quiet and cores_per_rank() >= 2 * self.config.num_threads
        return (HasherBeside if beside else Hasher)(self.config.chunk_bytes, self.config.checksum)


def slot_bytes(config: Config, *, quiet: bool) -> int:
    """Size of a slot of the ring for such a job."""
    return config.slot_of(_QUIET_SLOT_BYTES) if quiet else config.slot_bytes


class Stopped(Exception):
    """Another thread failed first, or the save was cancelled."""


def write_files(job: Job) -> dict[str, StoredFile]:
    """Write every file of the job; name -> size and checksums. Raises the first error after all threads have
    stopped; what was written by then is the caller's to remove.
    """
    _wait_until_ready(job)
    stored: dict[str, StoredFile] = {}
    errors: list[BaseException] = []
    reading = _Countdown(len(job.files), lambda: job.read(job))

    def write(file: FileLayout) -> None:
        try:
            stage.use_device(job.device)
            stored[file.name] = _write_file(job, file, reading)
        except BaseException as e:  # the thread's boundary: raised below
            job.stop.set()
            errors.append(e)

    _run([threading.Thread(target=write, args=(f,), name="shardkeep-write") for f in job.files], job.stop)
    if errors:
        raise _first(errors)
    return stored


def _wait_until_ready(job: Job) -> None:
    """Copies of device tensors in host memory are read as they lie there, and must have come."""
    if job.ready is not None:
        job.ready.synchronize()


def _first(errors: list[BaseException]) -> BaseException:
    """The error that stopped the others, taken off the list: a list in one of the frames of its traceback
    would keep it, and the state, until cycles are collected.
    """
    found = next((e for e in errors if not isinstance(e, Stopped)), None)
    errors.clear()
    return found or Cancelled("the save was cancelled")


def _run(threads: Sequence[threading.Thread], stop: threading.Event) -> None:
    """Start and join. Plain threads, one a file: a pool of `concurrent.futures` takes no work in a process
    that has begun to exit, where a save in the background still has to finish.
    """
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for thread in started:
            thread.join()
    except BaseException:  # interrupted, or no thread to be had
        stop.set()
        for thread in started:
            thread.join()
        raise


def result(files: Sequence[FileLayout], stored: dict[str, StoredFile], frozen: Frozen) -> RankResult:
    """What other ranks and the index need to know of the written files."""
    with no_gc():
        items = [
            _item(file.name, piece, frozen.headers[shard])
            for file in files
            for piece in file.pieces
            for shard in (piece.shard, *piece.also)
        ]
    paths = {i.key: frozen.paths[i.key] for i in items if i.key in frozen.paths}
    return RankResult(items=items, files=stored, paths=paths)


def _item(file: str, piece: Piece, header: ShardHeader) -> Item:
    return Item(
        key=header.key,
        kind=header.kind,
        dtype=header.dtype,
        box=piece.box,
        file=file,
        offset=piece.offset,
        length=piece.length,
        payload_offset=piece.offset + piece.head_bytes,
        num_bytes=piece.num_bytes,
    )


def checksums(data: bytes, config: Config) -> bytes:
    """The chunk checksums of a small file that is written in one go."""
    hasher = Hasher(config.chunk_bytes, config.checksum)
    hasher.update([data])
    return hasher.checksums()


class _Countdown:
    """Calls `action` once, from whichever thread is the last of `count` to say so."""

    def __init__(self, count: int, action: Callable[[], object]) -> None:
        self._left = count
        self._action = action
        self._lock = threading.Lock()
        if not count:
            action()

    def one(self) -> None:
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._action()


def _write_file(job: Job, file: FileLayout, reading: _Countdown) -> StoredFile:
    writer = job.storage.create(file.name)
    try:
        with (
            stage.ring(job.config).pair(job.slot_bytes) as slots,
            stage.Stager(slots, job.ready) as stager,
            closing(job.hasher()) as hasher,
        ):
            sink = _Sink(writer, hasher, job.batch_bytes)
            _write_pieces(job, file, stager, sink)
        reading.one()  # before the file is synced, which takes longest on a disk
    except BaseException:
        writer.abort()
        raise
    writer.close(durable=job.config.durable)
    return StoredFile(size=sink.size, checksums=hasher.checksums())


def payload_digests(job: Job) -> Digests:
    """What the tensors of a job hold now, in the order of files and pieces. Reads everything."""
    _wait_until_ready(job)
    found: Digests = []
    with stage.ring(job.config).pair(job.slot_bytes) as slots, stage.Stager(slots, job.ready) as stager:
        for file in job.files:
            for piece in file.pieces:
                shard = job.shards[piece.shard]
                _, content, _ = _contents(job, piece)
                if shard is not None and isinstance(content, torch.Tensor):
                    hasher = xxhash.xxh3_128()
                    for block in [host_bytes(content)] if is_direct(content) else stager.blocks(content):
                        hasher.update(block)
                    found.append((shard.header.key, hasher.digest()))
    return found


def _write_pieces(job: Job, file: FileLayout, stager: stage.Stager, sink: _Sink) -> None:
    packed_bytes = min(_PACKED_BYTES, job.slot_bytes)
    for is_small, pieces in itertools.groupby(file.pieces, key=lambda p: p.length <= packed_bytes):
        if is_small:
            _write_packed(job, pieces, stager, sink)
            continue
        for piece in pieces:
            _write_piece(job, piece, stager, sink)
    sink.flush()


def _write_piece(job: Job, piece: Piece, stager: stage.Stager, sink: _Sink) -> None:
    _check_stop(job)
    head, content, tail = _contents(job, piece)
    sink.add(head)
    if isinstance(content, bytes):
        sink.add(content)
    elif is_direct(content):
        for part in _parts(host_bytes(content), sink.batch_bytes):
            _check_stop(job)
            sink.add(part)
    else:
        for block in stager.blocks(content):
            _check_stop(job)
            for part in _parts(block, sink.batch_bytes):
                sink.add(part)
            sink.flush()  # the slot is refilled next
    sink.add(tail)


def _write_packed(job: Job, pieces: Iterable[Piece], stager: stage.Stager, sink: _Sink) -> None:
    """Small pieces, many at a time: what each costs in Python is then a copy, not a write and a hash."""
    items = ((piece.length, _contents(job, piece)) for piece in pieces)
    for block in stager.pack(items, sink.batch_bytes):
        _check_stop(job)
        sink.add(block)
        sink.flush()  # the slot is refilled next


def _contents(job: Job, piece: Piece) -> tuple[bytes, bytes | torch.Tensor, bytes]:
    """Head, content and tail of a piece."""
    shard = job.shards[piece.shard]
    if not isinstance(shard, TensorShard):
        return b"", job.payloads[piece.shard], b""
    tensor, header = shard.tensor, shard.header
    box = piece.box
    if box is not header.box:
        tensor = tensor.view(header.box.shape)[box.slices_in(header.box)]
    head, tail = frame(header.dtype, box.shape)
    is_as_laid_out = len(head) == piece.head_bytes and len(tail) == piece.tail_bytes
    assert is_as_laid_out, "a frame is not as it was laid out"
    return head, tensor, tail


def _check_stop(job: Job) -> None:
    if job.stop.is_set():
        raise Stopped


def _parts(view: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, len(view), size):
        yield view[start : start + size]


class _Sink:
    """Collects parts and writes them about a batch at a time, hashed on the way."""

    def __init__(self, writer: Writer, hasher: Hasher, batch_bytes: int) -> None:
        self.batch_bytes = batch_bytes
        self.size = 0
        self._writer = writer
        self._hasher = hasher
        self._pending: list[bytes | memoryview] = []
        self._pending_bytes = 0

    def add(self, part: bytes | memoryview) -> None:
        """Append bytes that stay unchanged until the next `flush`."""
        if not part:
            return
        self._pending.append(part)
        self._pending_bytes += len(part)
        if self._pending_bytes >= self.batch_bytes or len(self._pending) >= _MAX_PARTS:
            self.flush()

    def flush(self) -> None:
        with self._hasher.along(self._pending):
            self._writer.append(self._pending)
        self.size += self._pending_bytes
        self._pending = []
        self._pending_bytes = 0
