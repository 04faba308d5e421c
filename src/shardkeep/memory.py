"""Tensors as plain bytes, without a copy and without side effects on the tensor."""

from __future__ import annotations

import ctypes

import torch

# A ctypes array would be a new type for each size: 20 us, and kept.
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable. The caller keeps the tensor alive for as long as it
    uses the view.

    Not `tensor.numpy()`: that marks the storage as not resizable for good, and a framework that offloads with
    `storage.resize_(0)` would fail at its next attempt."""
    num_bytes = tensor.nbytes
    if not num_bytes:
        return memoryview(b"")
    return bytes_at(tensor.data_ptr(), num_bytes)


def bytes_at(address: int, num_bytes: int) -> memoryview:
    """Writable bytes at an address; the caller keeps their owner alive."""
    return _view(address, num_bytes, _WRITABLE)  # type: ignore[no-any-return]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The row-major content of any tensor as uint8 on its device; a copy where its memory is not that."""
    return resolved(tensor).contiguous().view(-1).view(torch.uint8)


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with conjugation and sign in its memory, on its device; itself if they are.

    Not left to a copy: an asynchronous one to the host resolves them on the host at once, before the bytes
    have come (torch 2.11), and what then arrives is stored unconjugated."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg()
    return tensor


def is_row_major(tensor: torch.Tensor) -> bool:
    """Whether the tensor's own memory, wherever it is, holds its row-major content."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether the tensor's own memory is its row-major content, and the host's."""
    return tensor.is_cpu and is_row_major(tensor)
