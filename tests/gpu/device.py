"""What the GPU tests share: tensors with every bit pattern, and a way to keep a stream busy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardkeep as sk

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 1 << 20
BUSY_CYCLES = 1_000_000_000  # about half a second, far longer than it takes to reach the copy
CONFIG = sk.Config(
    io_threads=2, staging_bytes=1 * MIB
)  # slots of 256 KiB, so that small tensors take several

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """A GPU tensor of random bits."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    made = (raw % 2).bool() if dtype == torch.bool else raw.view(dtype)
    return made.view(shape).cuda()


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape hold the same bits, wherever and however they lie."""
    assert (first.dtype, first.shape) == (second.dtype, second.shape)
    flat = [
        t.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        for t in (first, second)
    ]
    return torch.equal(*flat)


def keep_busy(stream: torch.cuda.Stream | None = None) -> None:
    """Put a long kernel on a stream: what is enqueued next runs only after it."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)


def save_by(capture: str, state: dict[str, torch.Tensor], path: Path) -> None:
    """A committed checkpoint, by `save` or by `save_async`."""
    if capture == "save":
        sk.save(state, path, config=CONFIG)
    else:
        sk.save_async(state, path, capture=capture, config=CONFIG).wait()
