"""Target boxes + catalog -> filled tensors; and values of objects.

In: a catalog and `Target`s. Out: the caller's tensors, filled in place, from only the bytes that their
boxes need. Whatever can be known without reading (missing keys, shapes, dtypes, sizes of files, coverage)
is checked before the first byte moves.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardkeep import archive
from shardkeep.catalog import Catalog
from shardkeep.config import Config
from shardkeep.errors import Corrupt, Mismatch, MissingKey, StorageReleased, UnsafePickle
from shardkeep.fetch import Checker, fetch, read_checked, usable_bytes
from shardkeep.memory import is_direct, is_row_major
from shardkeep.nogc import no_gc
from shardkeep.ranges import Archive, Flat, Segment, Strided, Unit, granule, scratch_bytes, units_of
from shardkeep.reshard import Finder, blocks, contiguous_in, copies, show, start_of, strides
from shardkeep.storage import Buffer, Reader, Storage
from shardkeep.types import Box, Item, TensorInfo, dtype_name, dtype_named, whole

if TYPE_CHECKING:
    from shardkeep.together import Once

_SHOWN = 10
_dtype = lru_cache(maxsize=256)(dtype_named)
_FOREIGN_HOLE_BYTES = 256 << 10  # without checksums, holes larger than this are not worth reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A box of the stored tensor `key`, and the tensor to fill with it: the box's number of elements, any
    strides, any device; axes of size 1 may be missing. `shape` is the global shape the caller expects
    (None: not checked). `cast` converts a different dtype. `clip` allows another global shape: what both
    have is loaded, the rest of `tensor` is left as it is."""

    key: str
    box: Box
    tensor: torch.Tensor
    shape: tuple[int, ...] | None = None
    cast: bool = False
    clip: bool = False


def check_targets(catalog: Catalog, targets: Sequence[Target]) -> None:
    """Raise MissingKey, Mismatch or StorageReleased if the targets cannot be filled from this checkpoint."""
    missing = [t.key for t in targets if t.key not in catalog.tensors]
    if missing:
        missing = list(dict.fromkeys(missing))
        shown = ", ".join(repr(k) for k in missing[:_SHOWN]) + (
            f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        )
        objects = [k for k in missing if k in catalog.items]
        if objects:
            raise MissingKey(
                f"the checkpoint holds a plain value, not a tensor, for {objects[0]!r}; asked for: {shown}",
                path=catalog.url,
            )
        raise MissingKey(f"the checkpoint has no tensor {shown}", path=catalog.url, num_missing=len(missing))
    for target in targets:
        if not _plainly_fits(target, catalog.tensors[target.key]):
            _check(catalog, target)


def _plainly_fits(target: Target, info: TensorInfo) -> bool:
    """The common case, decided quickly: the whole tensor into a contiguous one of its shape and dtype on
    the CPU."""
    tensor, box = target.tensor, target.box
    if (
        box.shape != info.shape
        or any(box.offset)
        or tensor.shape != box.shape
        or tensor.dtype is not _dtype(info.dtype)
        or (target.shape is not None and target.shape != info.shape)
        or not is_direct(tensor)
    ):
        return False
    num_bytes: int = tensor.untyped_storage().nbytes()
    return (tensor.storage_offset() + tensor.numel()) * tensor.element_size() <= num_bytes


def _check(catalog: Catalog, target: Target) -> None:
    info = catalog.tensors[target.key]
    tensor, box = target.tensor, target.box
    if (
        target.shape is not None
        and target.shape != info.shape
        and not (target.clip and len(target.shape) == len(info.shape))
    ):
        raise Mismatch(
            "the global shape differs",
            key=target.key,
            path=catalog.url,
            expected=list(target.shape),
            got=f"{list(info.shape)} in the checkpoint",
        )
    if dtype_name(tensor.dtype) != info.dtype and not target.cast:
        raise Mismatch(
            "the dtype differs",
            key=target.key,
            path=catalog.url,
            expected=dtype_name(tensor.dtype),
            got=f"{info.dtype} in the checkpoint",
        )
    if len(box.shape) != len(info.shape):
        raise Mismatch(
            "the number of dimensions differs",
            key=target.key,
            path=catalog.url,
            expected=len(box.shape),
            got=f"{len(info.shape)} in the checkpoint",
        )
    if not target.clip and any(
        o < 0 or o + n > m for o, n, m in zip(box.offset, box.shape, info.shape, strict=True)
    ):
        raise Mismatch(
            "the box reaches outside the tensor",
            key=target.key,
            path=catalog.url,
            expected=show(box),
            got=f"{list(info.shape)} in the checkpoint",
        )
    _check_tensor(target)


def _check_tensor(target: Target) -> None:
    tensor = target.tensor
    if tensor.numel() != target.box.numel:
        raise Mismatch(
            "the tensor has not the box's number of elements",
            key=target.key,
            expected=f"{target.box.numel} for {show(target.box)}",
            got=f"{tensor.numel()} in {list(tensor.shape)}",
        )
    if not tensor.numel():
        return
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        raise Mismatch(
            "the tensor cannot be filled in place",
            key=target.key,
            expected="a strided tensor on cpu or cuda",
            got=f"{tensor.layout} on {tensor.device}",
        )
    reach = (
        tensor.storage_offset()
        + 1
        + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    )
    have = tensor.untyped_storage().nbytes()
    if reach * tensor.element_size() > have:
        raise StorageReleased(
            "the tensor's memory was released",
            key=target.key,
            expected=f"{reach * tensor.element_size()} bytes",
            got=f"{have} bytes",
            remedy="Bring the tensor back (reload it from the offload buffer) before loading into it.",
        )


class Moved(NamedTuple):
    """Bytes of tensors that a load has placed, read from storage and received from other ranks."""

    num_bytes: int
    read_bytes: int
    received_bytes: int


def read_tensors(
    storage: Storage, catalog: Catalog, targets: Sequence[Target], config: Config, once: Once | None = None
) -> Moved:
    """Fill every target; with `once` together with the other ranks, which then all call this.

    Raises what `check_targets` does, and `Corrupt` for missing regions or files that are too short, before
    anything has changed; `Corrupt` for a wrong checksum and `LoadFailed` for an I/O error while reading,
    when tensors may be partly filled.
    """
    check_targets(catalog, targets)
    scratch = scratch_bytes(once.room if once else usable_bytes(config), catalog)
    units, num_bytes = _plan(storage, catalog, targets, scratch)
    devices = {t.tensor.device for t in targets if t.tensor.device.type == "cuda"}
    ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}
    if once is not None:
        return Moved(num_bytes, *once.fetch(units, catalog.files, scratch, Checker(catalog), ready))
    return Moved(num_bytes, fetch(storage, catalog, units, config, ready) if units else 0, 0)


def _plan(
    storage: Storage, catalog: Catalog, targets: Sequence[Target], scratch: int
) -> tuple[list[Unit], int]:
    """The reads that fill `targets`, and the payload bytes that they place."""
    planner = _Planner(storage, catalog, scratch)
    try:
        with no_gc():
            for target in targets:
                planner.add(target)
            return planner.units(), planner.num_bytes
    finally:
        planner.close()


class _Planner:
    """Collects the segments of each file. Changes nothing but its own lists; opens foreign files to find
    payloads."""

    def __init__(self, storage: Storage, catalog: Catalog, scratch: int) -> None:
        self._storage = storage
        self._catalog = catalog
        self._chunk = granule(catalog)
        self._scratch = scratch
        self._hole = max(self._chunk, _FOREIGN_HOLE_BYTES)
        self._segments: dict[str, list[Segment]] = {}
        self._archives: list[Unit] = []
        self._finders: dict[str, Finder] = {}
        self._readers: dict[str, Reader] = {}
        self._payloads: dict[Item, int | None] = {}
        self.num_bytes = 0

    def add(self, target: Target) -> None:
        key = target.key
        finder = self._finders.get(key)
        if finder is None:
            finder = self._finders[key] = Finder(self._catalog.items[key])
        dtype = _dtype(self._catalog.tensors[key].dtype)
        itemsize = dtype.itemsize
        tensor, box = target.tensor, target.box
        same = tensor.dtype is dtype and is_row_major(tensor)
        direct = same and tensor.device.type == "cpu"
        for item, part in copies(key, box, finder, partial=target.clip):
            self.num_bytes += part.numel * itemsize
            payload = item.payload_offset if item.payload_offset >= 0 else self._payload(item)
            self._check_size(item)
            if payload is None:
                self._add_archive(item, part, box, tensor.detach())
            elif direct and part is box and item.box == box:  # the layout has not changed
                self._to(item.file).append(Segment(payload, payload + item.num_bytes, tensor.data_ptr()))
            elif same and contiguous_in(item.box, part) and contiguous_in(box, part):
                start = payload + start_of(item.box, part) * itemsize
                self._add_plain(
                    item.file, start, part.numel * itemsize, tensor, start_of(box, part) * itemsize
                )
            else:
                self._add_strided(item, part, box, tensor.detach(), payload, dtype)

    def _add_plain(self, file: str, start: int, num_bytes: int, tensor: torch.Tensor, at: int) -> None:
        if tensor.device.type == "cpu":
            segment = Segment(start, start + num_bytes, tensor.data_ptr() + at)
        else:
            flat = tensor.detach().view(-1).view(torch.uint8)
            segment = Segment(start, start + num_bytes, 0, Flat(flat[at : at + num_bytes]))
        self._to(file).append(segment)

    def _add_strided(
        self, item: Item, part: Box, box: Box, tensor: torch.Tensor, payload: int, dtype: torch.dtype
    ) -> None:
        out = tensor.view(box.shape)
        steps = strides(item.box.shape)
        segments = self._to(item.file)
        room = max(dtype.itemsize, self._scratch - 2 * self._chunk if self._chunk > 1 else self._scratch)
        for start, span, sub in blocks(item.box, part, dtype.itemsize, room, self._hole):
            into = Strided(out[sub.slices_in(box)], dtype, steps)
            segments.append(Segment(payload + start, payload + start + span, 0, into))

    def _add_archive(self, item: Item, part: Box, box: Box, tensor: torch.Tensor) -> None:
        out = tensor.view(box.shape)[part.slices_in(box)]

        def place(value: torch.Tensor) -> None:
            if value.numel() != item.box.numel:
                raise Corrupt(
                    "an item's tensor has another shape than the metadata says",
                    key=item.key,
                    file=item.file,
                    expected=list(item.box.shape),
                    got=list(value.shape),
                )
            out.copy_(value.reshape(item.box.shape)[part.slices_in(item.box)])

        self._archives.append(
            Unit(item.file, item.offset, item.offset + item.length, 0, (), Archive(item.key, place))
        )

    def _to(self, file: str) -> list[Segment]:
        found = self._segments.get(file)
        if found is None:
            found = self._segments[file] = []
        return found

    def _check_size(self, item: Item) -> None:
        stored = self._catalog.files.get(item.file)
        if stored is None:
            raise Corrupt(
                "a file of the checkpoint is missing", file=item.file, path=self._catalog.url, key=item.key
            )
        if item.offset + item.length > stored.size:
            raise Corrupt(
                "a file is shorter than its items",
                file=item.file,
                path=self._catalog.url,
                key=item.key,
                expected=f"at least {item.offset + item.length} bytes",
                got=f"{stored.size} bytes",
            )

    def _payload(self, item: Item) -> int | None:
        self._check_size(item)
        if item not in self._payloads:
            reader = self._readers.get(item.file)
            if reader is None:
                reader = self._readers[item.file] = self._storage.open(item.file)
            self._payloads[item] = archive.payload_offset(item, archive.cached_reads(item, reader))
        return self._payloads[item]

    def units(self) -> list[Unit]:
        """All reads, in the order of files and offsets."""
        found: list[Unit] = []
        for file in sorted(self._segments):
            segments = self._segments[file]
            segments.sort(key=lambda s: s[0])
            units = list(units_of(file, self._catalog.files[file].size, segments, self._chunk, self._scratch))
            units.sort(key=lambda u: u.start)
            found += units
        return found + self._archives

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


def read_tensor(
    storage: Storage, catalog: Catalog, key: str, config: Config, box: Box | None = None
) -> torch.Tensor:
    """A new CPU tensor that holds a stored tensor, or a box of it."""
    if key not in catalog.tensors:
        raise MissingKey(f"the checkpoint has no tensor {key!r}", path=catalog.url)
    info = catalog.tensors[key]
    box = box or whole(info.shape)
    tensor = torch.empty(box.shape, dtype=dtype_named(info.dtype))
    read_tensors(storage, catalog, [Target(key=key, box=box, tensor=tensor)], config)
    return tensor


def read_object(storage: Storage, catalog: Catalog, key: str) -> bytes:
    """The bytes of an object, as `torch.save` wrote them, checked. MissingKey if there is no such object."""
    items = catalog.items.get(key, [])
    if not items or key in catalog.tensors:
        raise MissingKey(f"the checkpoint has no value {key!r}", path=catalog.url)
    if len(items) > 1:
        raise Corrupt(
            "a value is stored more than once", key=key, path=catalog.url, expected=1, got=len(items)
        )
    item = items[0]
    stored = catalog.files.get(item.file)
    if stored is None or item.offset + item.length > stored.size:
        raise Corrupt(
            "a file is missing or shorter than its items",
            file=item.file,
            path=catalog.url,
            key=key,
            expected=f"at least {item.offset + item.length} bytes",
            got=f"{stored.size if stored else 0} bytes",
        )
    return read_range(storage, catalog, item.file, item.payload_offset, item.num_bytes)


def read_range(storage: Storage, catalog: Catalog, file: str, start: int, num_bytes: int) -> bytes:
    """A range of a file, checked: whole chunks are read, and only the range is returned."""
    chunk = granule(catalog)
    low = start // chunk * chunk
    high = min(catalog.files[file].size, -(-(start + num_bytes) // chunk) * chunk)
    data = bytearray(high - low)
    try:
        reader = storage.open(file)
    except FileNotFoundError as e:
        raise Corrupt("a file of the checkpoint is missing", file=file, path=catalog.url) from e
    try:
        read_checked(reader, Checker(catalog), file, catalog.url, low, memoryview(data))
    finally:
        reader.close()
    return bytes(memoryview(data)[start - low : start - low + num_bytes])


def read_common(storage: Storage, catalog: Catalog) -> dict[Any, Any]:
    """The plain values of the Megatron dialect: `common.pt` or, from megatron-core 0.19, an object of its
    own; {} without."""
    if catalog.common_item is not None:
        item = catalog.common_item
        value = load_value(
            read_range(storage, catalog, item.file, item.payload_offset, item.num_bytes), item.key
        )
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    elif catalog.common is not None:
        if catalog.common in catalog.files:
            data = read_range(storage, catalog, catalog.common, 0, catalog.files[catalog.common].size)
        else:
            data = storage.get(catalog.common)
        value = load_value(data, catalog.common)
    else:
        return {}
    if not isinstance(value, dict):
        raise Corrupt("the common values are not a dict", path=catalog.url, got=type(value).__name__)
    return value


def load_value(data: Buffer, key: str) -> Any:
    """`torch.load(weights_only=True)` of a value, on the CPU. UnsafePickle names the class that it would
    need."""
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as e:
        name = re.search(r"(?:GLOBAL|class|type) ([\w.]+\.[\w.]+)", str(e))
        raise UnsafePickle(
            "a stored value needs a class that is not known to be safe",
            key=key,
            name=name[1] if name else str(e).splitlines()[0],
            remedy="If you trust the checkpoint, call torch.serialization.add_safe_globals([...]) "
            "with that class before loading.",
        ) from e
    except (RuntimeError, EOFError, ValueError, KeyError) as e:
        raise Corrupt(f"a stored value cannot be read: {type(e).__name__}: {e}", key=key) from e
