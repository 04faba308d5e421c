"""State -> `Captured`: shards with their boxes, and plain values. Pure: no I/O, no collectives; the state is
not changed.

A state is a nested dict. Without Megatron objects it is taken apart as torch DCP does it (dotted keys,
`paths` to go back): tensors and DTensors become shards, every other leaf an object. With Megatron objects
`shardkeep.megatron` takes it apart. Every tensor's memory is checked here, anew at each call, since
frameworks release and move storages between saves.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parameter import is_lazy

from shardkeep.errors import InvalidState, StorageReleased
from shardkeep.memory import host_bytes
from shardkeep.types import (
    Box,
    Captured,
    ObjectShard,
    Path,
    Shard,
    ShardHeader,
    TensorShard,
    dtype_name,
    whole,
)

# torch neither copies nor serialises these: integers of less than a byte, raw dtypes of quantised tensors.
_NO_TENSORS_OF = frozenset(
    getattr(torch, name)
    for name in (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        *("qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
    )
    if hasattr(torch, name)
)

_PLAIN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})


def capture(state: Mapping[str, Any]) -> Captured:
    """Take `state` apart. InvalidState for what cannot be stored, StorageReleased for a tensor without its
    memory.
    """
    if not isinstance(state, Mapping):
        raise InvalidState("the state must be a dict", expected="dict", got=type(state).__name__)
    if has_megatron_objects(state):
        from shardkeep.megatron.state import capture_megatron

        return capture_megatron(state)
    return _capture_plain(state)


def _capture_plain(state: Mapping[str, Any]) -> Captured:
    flat, paths = _flatten(state)
    shards: list[Shard] = []
    for key, value in flat.items():
        shards.extend(
            tensor_shards(key, value) if isinstance(value, torch.Tensor) else [object_shard(key, value)]
        )
    digests = {s.header.key: value_digest(s.value) for s in shards if isinstance(s, ObjectShard)}
    return Captured(dialect="dcp", shards=tied(shards), paths=paths, digests=digests)


def tied(shards: list[Shard]) -> list[Shard]:
    """The shards, with `tied_to` set in those whose box of the same tensor memory has come before under
    another key. Overlapping views are not tied. Looked at anew for each save: storages move.
    """
    first: dict[int, list[TensorShard]] = {}  # by address
    return [_tied_to_first(s, first) if isinstance(s, TensorShard) else s for s in shards]


def _tied_to_first(shard: TensorShard, first: dict[int, list[TensorShard]]) -> TensorShard:
    address = shard.tensor.data_ptr() if shard.header.num_bytes else 0
    if not address:
        return shard
    there = first.get(address)
    if there is None:
        first[address] = [shard]
        return shard
    same = next((s for s in there if _memory(s) == _memory(shard)), None)
    if same is None:
        there.append(shard)
    elif same.header.key != shard.header.key:
        return replace(shard, header=replace(shard.header, tied_to=same.header.key))
    return shard


def _memory(shard: TensorShard) -> tuple[Any, ...]:
    """Equal for two shards that are the same bytes, now and in a checkpoint."""
    t, h = shard.tensor, shard.header
    return t.device, h.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg(), h.box, h.shape


def _flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    try:
        flat, mapping = flatten_state_dict(dict(state))
    except ValueError as e:
        raise InvalidState(f"two entries of the state have one dotted key: {e}") from e
    return flat, {key: tuple(path) for key, path in mapping.items()}


def tensor_shards(key: str, tensor: torch.Tensor) -> list[Shard]:
    """The shards of a plain tensor (one, whole) or of a DTensor (this rank's chunks)."""
    if not isinstance(tensor, DTensor):
        check_kind(key, tensor)  # before its shape is asked for, which some kinds have not
        shape = tuple(tensor.shape)
        return [_checked_shard(key, tensor, shape, whole(shape))]
    if any(isinstance(p, Partial) for p in tensor.placements):
        raise InvalidState(
            "a DTensor with Partial placement holds no final values",
            key=key,
            remedy="Call full_tensor() or redistribute it before saving.",
        )
    local = tensor.to_local()
    if tensor.numel() and not local.numel():  # an uneven layout leaves this rank nothing
        return []
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    boxes = [Box(offset=tuple(c.offsets), shape=tuple(c.sizes)) for c in chunks]
    return [tensor_shard(key, local, tuple(tensor.shape), box) for box in boxes]


def tensor_shard(
    key: str, tensor: torch.Tensor, shape: tuple[int, ...], box: Box, is_main: bool = True
) -> Shard:
    """A checked shard: the tensor holds `box` of a global tensor of `shape`."""
    check_kind(key, tensor)
    shard = _checked_shard(key, tensor, shape, box, is_main)
    held = shard.tensor
    if held.numel() != box.numel:
        raise InvalidState(
            "a shard's tensor does not hold its box", key=key, expected=box.shape, got=tuple(held.shape)
        )
    return shard


def _checked_shard(
    key: str, tensor: torch.Tensor, shape: tuple[int, ...], box: Box, is_main: bool = True
) -> TensorShard:
    tensor = (tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor).detach()
    check_memory(key, tensor)
    header = ShardHeader(
        key=key,
        kind="tensor",
        dtype=dtype_name(tensor.dtype),
        shape=shape,
        box=box,
        is_main=is_main,
        num_bytes=tensor.nbytes,
    )
    return TensorShard(header=header, tensor=tensor)


def object_shard(key: str, value: Any, is_main: bool = True) -> Shard:
    """A value stored as one item."""
    header = ShardHeader(
        key=key, kind="object", dtype="", shape=(), box=whole(()), is_main=is_main, num_bytes=0
    )
    return ObjectShard(header=header, value=value)


def check_kind(key: str, tensor: torch.Tensor) -> None:
    """InvalidState for a tensor that has no elements in plain memory of its own, naming what it is."""
    kind = _special_kind(tensor)
    if kind:
        dequantised = has_own(tensor, "dequantize") or tensor.is_quantized
        raise InvalidState(
            "only plain strided tensors with memory can be stored",
            key=key,
            expected="a strided tensor",
            got=kind,
            remedy="Store what its dequantize() returns, and copy that back into it after a load."
            if dequantised
            else "Convert it, or store the plain tensors that it is made of.",
        )


def _special_kind(tensor: torch.Tensor) -> str | None:
    """What to call a tensor that is not plain."""
    if type(tensor) not in _PLAIN_CLASSES and (kind := _special_class(tensor)):
        return kind
    kind = None
    if tensor.is_nested:
        kind = "a nested tensor"
    elif tensor.layout != torch.strided:
        kind = f"a tensor of layout {tensor.layout}"
    elif tensor.is_meta:
        kind = "a tensor on device meta"
    elif tensor.is_quantized or tensor.dtype in _NO_TENSORS_OF:
        kind = f"a tensor of {tensor.dtype}"
    return kind


def _special_class(tensor: torch.Tensor) -> str | None:
    """What to call a tensor whose class alone says that it is not plain."""
    if is_wrapper(tensor) and not isinstance(tensor, AsyncCollectiveTensor):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
    if is_lazy(tensor):
        return f"an uninitialised {type(tensor).__name__}"
    return None


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that computes its own operations (Transformer Engine's, torchao's): its
    elements lie elsewhere, and its data pointer is null.
    """
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def has_own(value: Any, method: str) -> bool:
    """Whether a value is a wrapper whose class brings a method that plain tensors lack or cannot use."""
    if not isinstance(value, torch.Tensor) or not is_wrapper(value):
        return False
    return getattr(type(value), method, None) is not getattr(torch.Tensor, method, None)


def check_memory(key: str, tensor: torch.Tensor) -> None:
    """StorageReleased where the storage of a plain tensor is smaller than the tensor needs."""
    num_bytes = tensor.nbytes
    if num_bytes == 0:
        return
    if tensor.is_contiguous():
        needed = tensor.storage_offset() * tensor.element_size() + num_bytes
    else:
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + extent) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if held < needed:
        raise StorageReleased(
            "the tensor's memory was released or shrunk",
            key=key,
            expected=f"{needed} bytes",
            got=f"{held} bytes",
            remedy="Bring an offloaded model back before saving it.",
        )


def leaves(value: Any) -> Iterator[Any]:
    """Every leaf below nested dicts and lists."""
    if isinstance(value, Mapping):
        for child in value.values():
            yield from leaves(child)
    elif isinstance(value, list):
        for child in value:
            yield from leaves(child)
    else:
        yield value


def has_megatron_objects(state: Mapping[str, Any]) -> bool:
    """Whether any leaf is one of Megatron's sharded or local objects. Does not import megatron."""
    mapping = sys.modules.get("megatron.core.dist_checkpointing.mapping")
    if mapping is None:  # nobody imported it, so the state cannot hold its objects
        return False
    kinds = (mapping.ShardedBase, mapping.LocalNonpersistentObject)
    return any(isinstance(leaf, kinds) for leaf in leaves(state))


def value_digest(value: Any) -> str:
    """A digest by content: equal values give equal digests on every rank, whatever their identity or
    insertion order.
    """
    hasher = xxhash.xxh3_64()
    for part in _canonical(value):
        hasher.update(part)
    return hasher.hexdigest()


def _canonical(value: Any) -> Iterator[bytes]:
    yield type(value).__name__.encode()
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from _canonical(value[key])
    elif isinstance(value, (list, tuple)):
        yield str(len(value)).encode()
        for child in value:
            yield from _canonical(child)
    elif isinstance(value, (set, frozenset)):  # the order of strings differs from process to process
        yield "".join(sorted(value_digest(child) for child in value)).encode()
    else:
        yield from _canonical_leaf(value)


def _canonical_leaf(value: Any) -> Iterator[bytes]:
    kind: Any = type(value)
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        if value.device.type != "meta" and value.numel():
            held = value.detach().cpu().contiguous()  # alive for as long as its bytes are looked at
            yield bytes(host_bytes(held))
    elif isinstance(value, enum.Enum):
        yield value.name.encode()
    elif hasattr(value, "tobytes"):  # numpy arrays and scalars; the bytes of objects would be addresses
        yield f"{getattr(value, 'dtype', '')}{getattr(value, 'shape', '')}".encode()
        is_plain = not getattr(getattr(value, "dtype", None), "hasobject", False)
        yield from [value.tobytes()] if is_plain else _canonical(value.tolist())
    elif isinstance(value, bytes):
        yield value
    elif kind.__repr__ is not object.__repr__:
        yield repr(value).encode()
    elif hasattr(value, "__dict__"):
        yield from _canonical(vars(value))
