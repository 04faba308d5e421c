"""Tensor -> host memory that can be written: the ring through which tensors pass on their way to a file.

A contiguous CPU tensor is handed on without a copy. Anything else (device tensors, views) goes through the
ring's slots block by block; while one slot of a pair is written, the other is filled, on a CUDA stream of our
own. Invariants: host memory in use is `staging_bytes`, whatever the state's size; a slot is refilled only
after its consumer has asked for the next block; nothing about a tensor's memory is remembered between saves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from shardkeep.config import Config
from shardkeep.memory import as_bytes, host_bytes, is_direct, is_row_major

Item = tuple[bytes | torch.Tensor, ...]  # what lies back to back in a file


def uses_cuda() -> bool:
    """Whether this process has a CUDA context already; we never make one, least of all on another rank's
    device.
    """
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def allocate(num_bytes: int) -> torch.Tensor:
    """Host memory, page-locked if the process uses CUDA. Registered by hand: torch's pinned cache rounds to
    powers of two.
    """
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    if uses_cuda():
        try:
            torch.cuda.check_error(_cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0))
        except RuntimeError:
            with suppress(RuntimeError):  # CUDA keeps the error for the thread's next kernel: not training's
                torch.zeros(1, device="cuda")
            raise
    return buffer


def allocate_pair(num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two of them, or none: memory that goes with its page lock on cannot be locked again."""
    first = allocate(num_bytes)
    try:
        return first, allocate(num_bytes)
    except BaseException:
        free(first)
        raise


def free(buffer: torch.Tensor) -> None:
    """Undo the page lock of `allocate`; the memory goes with the last reference."""
    if uses_cuda() and buffer.is_pinned():
        torch.cuda.check_error(_cudart().cudaHostUnregister(buffer.data_ptr()))


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class Ring:
    """Pairs of slots, shared by all saves of the process; together at most `total_bytes`. A thread holds one
    pair at a time, so waiting cannot deadlock.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._allocated_bytes = 0
        self._idle: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._changed = threading.Condition()

    @contextmanager
    def pair(self, slot_bytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """A pair of uint8 slots; blocks while others hold too much for a new one."""
        if 2 * slot_bytes > self._total_bytes:
            raise ValueError(
                f"two slots of {slot_bytes} bytes do not fit {self._total_bytes} bytes of staging"
            )
        slots = self._take(slot_bytes)
        try:
            yield slots
        finally:
            with self._changed:
                self._idle.append(slots)
                self._changed.notify_all()

    def reserve(self, slot_bytes: int) -> None:
        """Allocate all pairs of a size that there is room for, ahead of their use."""
        with ExitStack() as held:
            for _ in range(self._total_bytes // (2 * slot_bytes)):
                held.enter_context(self.pair(slot_bytes))

    def _take(self, slot_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self._changed:
            while True:
                for n, slots in enumerate(self._idle):
                    if slots[0].numel() == slot_bytes:
                        return self._idle.pop(n)
                if self._make_room(2 * slot_bytes):
                    break
                self._changed.wait()
            self._allocated_bytes += 2 * slot_bytes
        try:
            return allocate_pair(slot_bytes)
        except BaseException:
            with self._changed:
                self._allocated_bytes -= 2 * slot_bytes
                self._changed.notify_all()
            raise

    def _make_room(self, num_bytes: int) -> bool:
        """Free idle slots, of another size, as far as that is needed."""
        while self._allocated_bytes + num_bytes > self._total_bytes and self._idle:
            for slot in self._idle.pop():
                self._allocated_bytes -= slot.numel()
                free(slot)
        return self._allocated_bytes + num_bytes <= self._total_bytes


_rings: dict[tuple[int, bool], Ring] = {}
_rings_lock = threading.Lock()


def ring(config: Config) -> Ring:
    """The process's ring for this configuration. One from before CUDA was used is not pinned, so it is
    another.
    """
    key = (config.staging_bytes, uses_cuda())
    with _rings_lock:
        if key not in _rings:
            _rings[key] = Ring(config.staging_bytes)
        return _rings[key]


class Stager:
    """Feeds one writer thread. `ready` is an event after which the state's device tensors hold their
    values.
    """

    def __init__(self, slots: tuple[torch.Tensor, torch.Tensor], ready: torch.cuda.Event | None) -> None:
        self._slots = slots
        self._views = [host_bytes(slot) for slot in slots]
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._events: dict[torch.device, list[torch.cuda.Event]] = {}
        self._ready = ready

    def __enter__(self) -> Stager:
        return self

    def __exit__(self, *_: object) -> None:
        """After an error a copy may still be on its way into a slot, which the next save must not get yet."""
        for stream in self._streams.values():
            stream.synchronize()

    def blocks(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """The tensor's bytes in row-major order. Each block is valid until the next one is asked for."""
        if tensor.is_cuda:
            with torch.cuda.stream(self._side_stream(tensor.device)):
                yield from self._device_blocks(tensor)
            return
        for number, part in enumerate(cut(tensor, self._slots[0].numel())):
            slot, view = self._slots[number % 2], self._views[number % 2]
            num_bytes = part.numel() * part.element_size()
            slot[:num_bytes].view(part.dtype).view(part.shape).copy_(part)
            yield view[:num_bytes]

    def _device_blocks(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        """Few calls of torch: each gives the GIL away, and takes it back from a training thread."""
        is_plain = is_row_major(tensor)
        filled: tuple[memoryview, torch.cuda.Event] | None = None
        parts = cut(as_bytes(tensor) if is_plain else tensor, self._slots[0].numel())
        for number, part in enumerate(parts):
            which = number % 2
            slot, view, copied = self._slots[which], self._views[which], self._both(part)[which]
            source = part if is_plain else as_bytes(part)
            num_bytes = source.numel()
            (slot if num_bytes == len(view) else slot[:num_bytes]).copy_(source, non_blocking=True)
            copied.record()
            if filled:
                yield _settled(*filled)
            filled = view[:num_bytes], copied
        if filled:
            yield _settled(*filled)

    def _both(self, tensor: torch.Tensor) -> list[torch.cuda.Event]:
        """The events of both slots on a tensor's device, used again and again."""
        if tensor.device not in self._events:
            self._events[tensor.device] = [torch.cuda.Event(blocking=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        return self._events[tensor.device]

    def pack(self, items: Iterable[tuple[int, Item]], block_bytes: int) -> Iterator[memoryview]:
        """Small items (with their sizes in bytes) back to back, many in a slot, so that 50,000 tensors are
        not 50,000 waits. A block with device tensors fills a slot and costs one wait; others have about
        `block_bytes`, which stay in the core's cache. Each is valid until the next one is asked for. No
        item may be larger than a slot.
        """
        waiting: tuple[memoryview, torch.cuda.Event | None] | None = None
        block = _Block(self._slots[0], block_bytes)
        for num_bytes, item in items:
            used_bytes = block.used_bytes
            if used_bytes and used_bytes + num_bytes > block.limit_bytes:
                full = self._settle(block)
                if waiting:
                    yield _settled(*waiting)
                waiting = full if full[1] else None
                if not waiting:
                    yield full[0]
                block = _Block(self._slots[block.slot is self._slots[0]], block_bytes)
            block.add(item)
        full = self._settle(block)
        if waiting:
            yield _settled(*waiting)
        yield _settled(*full)

    def _settle(self, block: _Block) -> tuple[memoryview, torch.cuda.Event | None]:
        """Copy what a block has collected; the event comes after copies from a device."""
        copied = None
        for device in dict.fromkeys(t.device for _, t in block.collected):
            here = [(at, t) for at, t in block.collected if t.device == device]
            if device.type != "cuda":
                block.copy(here)
                continue
            if copied is not None:  # of another device: rare, so simply waited for
                copied.synchronize()
            with torch.cuda.stream(self._side_stream(device)):
                block.copy(here)
                copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                copied.record()
        return block.view[: block.used_bytes], copied

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if self._ready is not None:
                stream.wait_event(self._ready)
            self._streams[device] = stream
        return self._streams[device]


class _Block:
    """A slot that is being packed. Bytes and direct tensors are copied at once, others collected."""

    def __init__(self, slot: torch.Tensor, block_bytes: int) -> None:
        self.slot = slot
        self.view = host_bytes(slot)
        self.used_bytes = 0
        self.limit_bytes = min(block_bytes, len(self.view))
        self.collected: list[tuple[int, torch.Tensor]] = []  # place in the slot, tensor

    def add(self, item: Item) -> None:
        view, start = self.view, self.used_bytes
        for part in item:
            if isinstance(part, bytes):
                end = start + len(part)
                view[start:end] = part
            elif is_direct(part):
                end = start + part.nbytes
                view[start:end] = host_bytes(part)
            else:
                end = start + part.nbytes
                self.collected.append((start, part))
                self.limit_bytes = len(view)
            start = end
        self.used_bytes = start

    def copy(self, collected: Sequence[tuple[int, torch.Tensor]]) -> None:
        """One call for all of them, without the GIL."""
        sources = [as_bytes(t) for _, t in collected]
        places = [self.slot[at : at + s.numel()] for (at, _), s in zip(collected, sources, strict=True)]
        torch._foreach_copy_(places, sources, non_blocking=True)


def _settled(block: memoryview, copied: torch.cuda.Event | None) -> memoryview:
    if copied is not None:
        copied.synchronize()  # sleeps without the GIL; polling would steal it from the training thread
    return block


def cut(tensor: torch.Tensor, max_bytes: int) -> Iterator[torch.Tensor]:
    """Sub-views of at most `max_bytes`, which in order are the tensor in row-major order."""
    if tensor.numel() * tensor.element_size() <= max_bytes:
        if tensor.numel():
            yield tensor
        return
    if tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    row_bytes = tensor[0].numel() * tensor.element_size()
    if row_bytes > max_bytes:
        for row in tensor:
            yield from cut(row, max_bytes)
        return
    rows = max_bytes // row_bytes
    for start in range(0, tensor.shape[0], rows):
        yield tensor[start : start + rows]


def current_event() -> torch.cuda.Event | None:
    """An event on the caller's stream: copies on other streams wait for it, so they see the state as it is
    now.
    """
    if not uses_cuda():
        return None
    for device in range(torch.cuda.device_count()):  # of a process that uses several, wait for the others
        if device != torch.cuda.current_device() and torch.cuda.memory_allocated(device):
            torch.cuda.current_stream(device).synchronize()
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def current_device() -> int | None:
    """The device that the caller's thread uses; threads of ours have to be told."""
    return torch.cuda.current_device() if uses_cuda() else None


def use_device(device: int | None) -> None:
    """Make a thread use the device of the thread that began the save; its default would be device 0."""
    if device is not None:
        torch.cuda.set_device(device)
