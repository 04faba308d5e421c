"""Tensors as plain bytes, without a copy and without side effects on the tensor."""

from __future__ import annotations

import ctypes

import torch


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable. The caller keeps the tensor alive for as long as it
    uses the view.

    Not `tensor.numpy()`: that marks the storage as not resizable for good, and a framework that offloads with
    `storage.resize_(0)` would fail at its next attempt."""
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())).cast("B")


def is_direct(tensor: torch.Tensor) -> bool:
    """Whether the tensor's own memory is its row-major content."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
