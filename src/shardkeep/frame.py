"""(dtype, shape) -> the bytes before and after a payload that make it a `torch.save` archive.

torch lays the archive out itself: `torch.save` under `torch.serialization.skip_data` writes everything but
the tensor's bytes into a sparse memory file, from which head and tail are read back. So the archive is what
the installed torch would write, whatever its version, and no layout is copied from its sources. Frames are
cached; they depend on nothing else.
"""

from __future__ import annotations

import os
import struct
import zipfile
from functools import lru_cache

import torch

from shardkeep.types import dtype_named

_LOCAL_HEADER_BYTES = (
    30  # fixed part of a zip local file header; name and extra field follow (PKWARE APPNOTE 4.3.7)
)


@lru_cache(maxsize=65536)
def frame(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Head and tail of the archive of a contiguous CPU tensor; the payload between them has numel * itemsize
    bytes.
    """
    fd = os.memfd_create("shardkeep-frame")  # reserved payload bytes stay a hole: no memory is used for them
    with open(fd, "w+b") as file:
        with torch.serialization.skip_data():
            torch.save(_placeholder(dtype, shape), file)
        size = file.tell()
        start = payload_start(file, "data/0")
        end = start + dtype_named(dtype).itemsize * _numel(shape)
        return os.pread(fd, start, 0), os.pread(fd, size - end, end)


def payload_start(file: object, record: str) -> int:
    """Offset of a stored record's bytes inside an archive; the local header's own lengths decide."""
    with zipfile.ZipFile(file) as archive:  # type: ignore[call-overload]
        entry = next(i for i in archive.infolist() if i.filename.endswith(f"/{record}"))
        archive.fp.seek(entry.header_offset)
        header = archive.fp.read(_LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    return int(entry.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes)


def _placeholder(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the right layout; its pages are never touched, so it costs address space only."""
    return torch.empty(shape, dtype=dtype_named(dtype))


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
