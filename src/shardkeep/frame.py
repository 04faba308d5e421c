"""(dtype, shape) -> the bytes before and after a payload that make it a `torch.save` archive.

torch lays the archive out itself: `torch.save` under `torch.serialization.skip_data` writes everything but
the tensor's bytes into a sparse memory file, from which head and tail are read back. So the archive is what
the installed torch would write, whatever its version, and no layout is copied from its sources.

That takes 0.4 ms, too long for 50,000 shapes. Further frames are therefore derived from torch's own: the
integers of its pickle are replaced, and what the zip format (PKWARE APPNOTE 4.3) computes from contents and
sizes is computed anew. The first ones of each dtype and number of dimensions are compared with torch's own;
if they differ, torch makes all of them. Only the record `.data/serialization_id`, which torch writes to a
log when it loads, stays that of the frame derived from.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import pickletools
import struct
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch

from shardkeep.types import dtype_named

_LOCAL_HEADER_BYTES = (
    30  # fixed part of a zip local file header; name and extra field follow (PKWARE APPNOTE 4.3.7)
)
_ALIGNMENT_BYTES = 64  # torch pads records to it, so what follows a payload depends on its size modulo this
_MAX_DERIVED_BYTES = 1 << 30  # far below the sizes at which zip (4 GiB) and pickle (2**31) change their form
_NUM_COMPARED = 4

Frame = tuple[bytes, bytes]  # head and tail


@lru_cache(maxsize=1024)
def frame(dtype: str, shape: tuple[int, ...]) -> Frame:
    """Head and tail of the archive of a contiguous CPU tensor; the payload between them has numel * itemsize
    bytes.
    """
    found = _template(dtype, shape)
    if found is None:
        return _by_torch(dtype, shape)
    pickled, template, num_bytes = found
    return template.derive(pickled, num_bytes)


def frame_bytes(dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """The lengths of head and tail, without making them."""
    found = _template(dtype, shape)
    if found:
        return found[1].head_bytes, found[1].tail_bytes
    head, tail = frame(dtype, shape)
    return len(head), len(tail)


def _by_torch(dtype: str, shape: tuple[int, ...]) -> Frame:
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


@dataclass(slots=True)
class _Script:
    """torch's pickle of a tensor as a format with places for its integers: numel, storage offset, sizes,
    strides.
    """

    form: bytes
    itemsize: int
    num_compared: int = 0
    is_usable: bool = True

    def pickled(self, shape: tuple[int, ...]) -> bytes:
        """The pickle for a shape."""
        strides, numel = [], 1
        for n in reversed(shape):
            strides.append(numel)
            numel *= n
        strides.reverse()
        return self.form % tuple([_pickled_int(n) for n in (numel, 0, *shape, *strides)])


def _pickled_int(number: int) -> bytes:
    """As every pickler since protocol 1 writes an integer of up to 31 bits."""
    if number < 1 << 8:
        return _PICKLED_BYTES[number]
    if number < 1 << 16:
        return b"M" + number.to_bytes(2, "little")
    return b"J" + number.to_bytes(4, "little")


_PICKLED_BYTES = [b"K" + number.to_bytes(1) for number in range(1 << 8)]


@lru_cache(maxsize=512)
def _script(dtype: str, num_dims: int) -> _Script | None:
    """None if torch's pickle holds other integers than those that are known how to fill in."""
    shape = tuple(range(3, 3 + num_dims))
    head, tail = _by_torch(dtype, shape)
    try:
        pickled = _Template(head, tail, _numel(shape) * dtype_named(dtype).itemsize).pickled
    except (_Unknown, struct.error):
        return None
    ops = [(op.name, arg, at or 0) for op, arg, at in pickletools.genops(pickled)]
    ints = [n for n, (name, _, _) in enumerate(ops) if name in ("BININT", "BININT1", "BININT2")]
    if [ops[n][1] for n in ints] != [_numel(shape), 0, *shape, *_placeholder(dtype, shape).stride()]:
        return None
    edges = [0, *(edge for n in ints for edge in (ops[n][2], ops[n + 1][2])), len(pickled)]
    between = [pickled[low:high] for low, high in zip(edges[::2], edges[1::2], strict=True)]
    return _Script(b"%b".join(part.replace(b"%", b"%%") for part in between), dtype_named(dtype).itemsize)


_templates: dict[
    tuple[int, int], _Template | None
] = {}  # by size of the pickle and of the payload's last part


def _template(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, _Template, int] | None:
    """What the frame of a shape is derived from (its pickle, a frame, the payload's bytes); None if torch has
    to make it.
    """
    script = _script(dtype, len(shape))
    if script is None or not script.is_usable:
        return None
    num_bytes = math.prod(shape) * script.itemsize
    if not 0 < num_bytes <= _MAX_DERIVED_BYTES:
        return None
    pickled = script.pickled(shape)
    kind = len(pickled), num_bytes % _ALIGNMENT_BYTES
    template = _templates.get(kind)
    is_new = template is None and kind not in _templates
    if is_new:
        try:
            _templates[kind] = _Template(*_by_torch(dtype, shape), num_bytes)
        except (_Unknown, struct.error):
            _templates[kind] = None
        template = _templates[kind]
    if template is None:
        return None
    if script.num_compared < _NUM_COMPARED and not is_new:
        script.num_compared += 1
        script.is_usable = template.is_same(template.derive(pickled, num_bytes), _by_torch(dtype, shape))
    return (pickled, template, num_bytes) if script.is_usable else None


class _Unknown(Exception):
    """torch's archive is not of the form that frames can be derived from."""


_Field = tuple[str, Literal["pickle", "crc", "num_bytes", "offset", "id"]]  # struct code and what it holds
_CRC: _Field = ("I", "crc")
_NUM_BYTES: _Field = ("I", "num_bytes")
_OFFSET: _Field = ("I", "offset")
_LONG_OFFSET: _Field = ("Q", "offset")


class _Form:
    """Bytes with fields to fill in, as one `struct` call. Offsets shift; an id stays as it is."""

    def __init__(self, data: bytes, fields: dict[int, _Field]) -> None:
        form, at = "<", 0
        held: list[str] = []  # what each value of the struct is
        for start, (code, what) in sorted(fields.items()):
            form += f"{start - at}s{code}"
            held += ["constant", what]
            at = start + struct.calcsize(f"<{code}")
        self._struct = struct.Struct(f"{form}{len(data) - at}s")
        self._held = [*held, "constant"]
        values = self._struct.unpack(data)
        pairs = list(zip(self._held, values, strict=True))
        self._constants = [v for what, v in pairs if what in ("constant", "id")]
        self._offsets = [v for what, v in pairs if what == "offset"]
        self._in_order = operator.itemgetter(*self._order())

    def _order(self) -> list[int]:
        """Where `fill` has each value of the struct: constants, then what changes, then offsets."""
        num = len(self._constants)
        constants, offsets = itertools.count(), itertools.count(num + 3)
        changing = {"pickle": num, "crc": num + 1, "num_bytes": num + 2}
        return [
            changing[what] if what in changing else next(offsets if what == "offset" else constants)
            for what in self._held
        ]

    def fill(self, pickled: bytes, crc: int, num_bytes: int, shift: int) -> bytes:
        values = [*self._constants, pickled, crc, num_bytes, *[at + shift for at in self._offsets]]
        return self._struct.pack(*self._in_order(values))

    def without_id(self, data: bytes) -> list[Any]:
        """The values of other data of this form, those that an id determines left out."""
        values = self._struct.unpack(data)
        return [v for v, what in zip(values, self._held, strict=True) if what != "id"]


class _Template:
    """A frame of torch's from which those of other shapes are made, if pickles are of the same size and
    payloads of the same size modulo the alignment. Raises _Unknown for an archive of another form.
    """

    def __init__(self, head: bytes, tail: bytes, num_bytes: int) -> None:
        self.head_bytes, self.tail_bytes = len(head), len(tail)
        self.pickled = b""
        self._head, self._tail, self._num_bytes = head, tail, num_bytes
        _require(tail[:4] == b"PK\7\x08" and tail[-22:-18] == b"PK\5\6")
        size, directory = struct.unpack_from("<II", tail, len(tail) - 10)
        at = directory - len(head) - num_bytes
        end = at + size
        self._in_head: dict[int, _Field] = {}
        self._in_tail: dict[int, _Field] = {8: _NUM_BYTES, 12: _NUM_BYTES, len(tail) - 6: _OFFSET}
        if tail[end : end + 4] == b"PK\6\6":  # zip64's end of the directory and its locator
            _require(tail[end + 56 : end + 60] == b"PK\6\7")
            self._in_tail |= {end + 48: _LONG_OFFSET, end + 64: _LONG_OFFSET}
        while at < end:
            at = self._add_entry(at)
        _require(self.pickled != b"")
        in_tail = {len(head) + at: field for at, field in self._in_tail.items()}
        self._form = _Form(head + tail, self._in_head | in_tail)

    def _add_entry(self, at: int) -> int:
        """Note the fields of a central directory's entry and of its record; returns the next one's place."""
        base, tail = len(self._head) + self._num_bytes, self._tail
        _require(tail[at : at + 4] == b"PK\1\2")
        _, size, *lengths = struct.unpack_from("<IIHHH", tail, at + 20)
        (local,) = struct.unpack_from("<I", tail, at + 42)
        name = tail[at + 46 : at + 46 + lengths[0]].partition(b"/")[2]
        is_before = local < base
        where, start = (self._head, local) if is_before else (tail, local - base)
        _require(where[start : start + 4] == b"PK\3\4")
        start += _LOCAL_HEADER_BYTES + sum(struct.unpack_from("<HH", where, start + 26))
        if name == b"data/0":
            _require(size == self._num_bytes and start == len(self._head))
            self._in_tail |= {at + 20: _NUM_BYTES, at + 24: _NUM_BYTES}
        else:
            _require(where[start + size : start + size + 4] == b"PK\7\x08")  # a data descriptor, with the CRC
        if not is_before:
            self._in_tail[at + 42] = _OFFSET
        if name == b"data.pkl":
            _require(is_before)
            self.pickled = where[start : start + size]
            self._in_head |= {start: (f"{size}s", "pickle"), start + size + 4: _CRC}
            self._in_tail[at + 16] = _CRC
        elif name == b".data/serialization_id":
            _require(not is_before)
            self._in_tail |= {start: (f"{size}s", "id"), start + size + 4: ("I", "id"), at + 16: ("I", "id")}
        return at + 46 + int(sum(lengths))

    def derive(self, pickled: bytes, num_bytes: int) -> Frame:
        """The frame for another pickle and payload."""
        crc, shift = zlib.crc32(pickled), num_bytes - self._num_bytes
        both = self._form.fill(pickled, crc, num_bytes, shift)
        return both[: self.head_bytes], both[self.head_bytes :]

    def is_same(self, a: Frame, b: Frame) -> bool:
        """Whether two frames differ in their serialization ids alone."""
        if [len(x) for x in a] != [len(x) for x in b]:
            return False
        return self._form.without_id(b"".join(a)) == self._form.without_id(b"".join(b))


def _require(condition: bool) -> None:
    if not condition:
        raise _Unknown
