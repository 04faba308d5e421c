"""Megatron sharded state dicts <-> shards. Relies on `megatron.core.dist_checkpointing.mapping` alone.

Apart: factories are built, LocalNonpersistentObjects left out, ShardedTensors and ShardedObjects become
shards, the rest is the common state. Together: the reverse, as `dist_checkpointing.load` returns it. The
caller's containers are never changed on the way apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

from shardkeep.capture import has_own, object_shard, tensor_shard, tied, value_digest
from shardkeep.errors import InvalidState
from shardkeep.load import Target as ReadTarget
from shardkeep.restore import at
from shardkeep.types import Box, Captured, Path, Shard

_NOTHING = object()


@dataclass(slots=True, kw_only=True)
class Apart:
    """A sharded state dict taken apart; paths are keys and indices from its root."""

    tensors: list[tuple[Path, ShardedTensor]] = field(default_factory=list)
    objects: list[tuple[Path, ShardedObject]] = field(default_factory=list)
    local: list[tuple[Path, Any]] = field(default_factory=list)
    factories: list[tuple[Path, ShardedTensorFactory]] = field(default_factory=list)
    common: dict[Any, Any] = field(default_factory=dict)
    lists: set[Path] = field(default_factory=set)  # paths at which the state has a list
    # A quantised tensor of the state, and the node here that holds it as a plain one
    quantised: list[tuple[torch.Tensor, Any]] = field(default_factory=list)


def take_apart(state: Mapping[Any, Any]) -> Apart:
    """Sort the leaves of a sharded state dict."""
    apart = Apart()
    common = _visit(apart, state, ())
    apart.common = common if isinstance(common, dict) else {}
    return apart


def _visit(apart: Apart, node: Any, path: Path) -> Any:
    """Record the leaves below `node`; returns its common part, or _NOTHING. Containers that were empty
    stay.
    """
    if isinstance(node, dict):
        kept = {k: c for k, v in node.items() if (c := _visit(apart, v, (*path, k))) is not _NOTHING}
        return kept if kept or not node else _NOTHING
    if isinstance(node, list):
        apart.lists.add(path)
        children = [c for i, v in enumerate(node) if (c := _visit(apart, v, (*path, i))) is not _NOTHING]
        return children if children or not node else _NOTHING
    return _leaf(apart, node, path)


def _leaf(apart: Apart, node: Any, path: Path) -> Any:
    if isinstance(node, ShardedTensor | ShardedTensorFactory):
        node = _dequantised(apart, node)
    if isinstance(node, ShardedTensor):
        apart.tensors.append((path, node))
    elif isinstance(node, ShardedObject):
        apart.objects.append((path, node))
    elif isinstance(node, LocalNonpersistentObject):
        apart.local.append((path, node.unwrap()))
    elif isinstance(node, ShardedTensorFactory):
        apart.factories.append((path, node))
        _visit(apart, node.build(), path)
    else:
        return node
    return _NOTHING


def _dequantised(apart: Apart, node: Any) -> Any:
    """With Transformer Engine's quantised data as a plain tensor of its nominal dtype: what Megatron stores
    of it, and what it loads in its stead (`force_all_tensors_to_non_fp8`), since the model quantises again.
    The node given stays as it is.
    """
    method = "dequantize" if has_own(node.data, "dequantize") else "from_float8"  # of TE 2, of TE 1
    if not has_own(node.data, method):
        return node
    plain = copy.copy(node)
    with torch.no_grad():
        plain.data = getattr(node.data, method)()
    apart.quantised.append((node.data, plain))
    return plain


def capture_megatron(
    state: Mapping[str, Any], *, before_comparing: Callable[[Any], Any] | None = None
) -> Captured:
    """Shards and common values of a sharded state dict. `before_comparing` drops common values that may
    differ by rank.
    """
    apart = take_apart(state)
    shards = tied(_shards(apart))
    compared = before_comparing(apart.common) if before_comparing else apart.common
    digests = {str(k): value_digest(v) for k, v in compared.items()}
    return Captured(dialect="megatron", shards=shards, common=apart.common, digests=digests)


def _shards(apart: Apart) -> list[Shard]:
    shards: list[Shard] = [s for _, sharded in apart.tensors if (s := _tensor_shard(sharded))]
    return shards + [
        object_shard(o.unique_key, [o.data], is_main_replica(o.replica_id)) for _, o in apart.objects
    ]


def box_of(sharded: ShardedTensor) -> Box:
    """The box of a ShardedTensor in its global tensor, prepended axes included with size 1."""
    if getattr(sharded, "flattened_range", None) is not None:
        raise InvalidState(
            "flattened_range is not supported",
            key=sharded.key,
            remedy="Save the optimizer in the fully_reshardable or fully_sharded_model_space format.",
        )
    shape = (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)
    return Box(offset=tuple(sharded.global_offset), shape=shape)


def _tensor_shard(sharded: ShardedTensor) -> Shard | None:
    main = is_main_replica(sharded.replica_id)
    if sharded.data is None:
        if main:
            raise InvalidState("the main replica of a ShardedTensor has no data", key=sharded.key)
        return None
    return tensor_shard(sharded.key, sharded.data, tuple(sharded.global_shape), box_of(sharded), main)


class MegatronTemplate:
    """A sharded state dict as what to load; see `shardkeep.restore.Template`.

    ShardedTensors without data get an empty CPU tensor. `loaded` is what `dist_checkpointing.load` would
    return. `quantise`: write into the state's quantised tensors too, which that call leaves to the model.
    """

    def __init__(self, state: Mapping[str, Any], *, quantise: bool = True) -> None:
        self._state = state
        self._quantise = quantise
        self._apart = take_apart(state)
        for _, sharded in self._apart.tensors:
            if sharded.data is None:
                sharded.init_data("cpu", torch.zeros if sharded.allow_shape_mismatch else torch.empty)
        self.targets = [self._target(s) for _, s in self._apart.tensors]
        self.values = [o.unique_key for _, o in self._apart.objects]
        self.headers = [s.header for s in _shards(self._apart)]
        self.loaded: dict[Any, Any] = {}

    def _target(self, sharded: ShardedTensor) -> ReadTarget:
        """Megatron converts between dtypes on load, and loads what a tensor of another shape has in
        common.
        """
        return ReadTarget(
            key=sharded.key,
            box=box_of(sharded),
            shape=tuple(sharded.global_shape),
            tensor=sharded.data.detach(),
            cast=True,
            clip=sharded.allow_shape_mismatch,
        )

    def clear(self, absent: frozenset[str]) -> None:
        """Zeros around what a tensor of another shape has in common, as Megatron leaves them."""
        for _, sharded in self._apart.tensors:
            if sharded.allow_shape_mismatch and sharded.key not in absent:
                sharded.data.detach().zero_()

    def served_by(self, common: Mapping[Any, Any]) -> set[str]:
        return set()

    def lacking_in(self, common: Mapping[Any, Any]) -> list[str]:
        return _lacking(self._apart.common, common, "")

    def restore(self, values: Mapping[str, Any], common: Mapping[Any, Any], absent: frozenset[str]) -> None:
        """Assemble `loaded`, and bring the state itself up to date: objects, factories' tensors, common
        values.
        """
        self.loaded = _copied(common)
        for path, value in self._apart.local:
            self._place(path, value)
        for path, sharded in self._apart.tensors:
            if sharded.key not in absent:
                self._place(path, sharded.data)
        for path, stored in self._apart.objects:
            if stored.unique_key not in absent:
                stored.data = values[stored.unique_key][0]
                self._place(path, stored.data)
        for path, factory in self._apart.factories:
            if not any(s.key in absent for p, s in self._apart.tensors if p[: len(path)] == path):
                self._merge(path, factory)
        for quantised, node in self._apart.quantised if self._quantise else ():
            if node.key not in absent:
                with torch.no_grad():
                    quantised.copy_(node.data)
        _overwrite_common(self._state, self._apart.common, common)

    def _merge(self, path: Path, factory: ShardedTensorFactory) -> None:
        merged = factory.merge_fn(at(self.loaded, path))
        self._place(path, merged)
        if (
            isinstance(factory.data, torch.Tensor)
            and isinstance(merged, torch.Tensor)
            and factory.data.shape == merged.shape
        ):
            factory.data.detach().copy_(merged)

    def _place(self, path: Path, value: Any) -> None:
        """Set `loaded` at a path, making the dicts and lists that the state has there."""
        node: Any = self.loaded
        for depth, step in enumerate(path[:-1]):
            node = _child(node, step, list if path[: depth + 1] in self._apart.lists else dict)
        _set(node, path[-1], value)


def _child(node: Any, step: str | int, kind: type) -> Any:
    if isinstance(node, list):
        while len(node) <= int(step):
            node.append(None)
        if node[int(step)] is None:
            node[int(step)] = kind()
        return node[int(step)]
    return node.setdefault(step, kind())


def _set(node: Any, step: str | int, value: Any) -> None:
    if isinstance(node, list):
        while len(node) <= int(step):
            node.append(None)
        node[int(step)] = value
    else:
        node[step] = value


def _copied(node: Any) -> Any:
    """New containers around the same leaves."""
    if isinstance(node, Mapping):
        return {k: _copied(v) for k, v in node.items()}
    return [_copied(v) for v in node] if isinstance(node, list) else node


def _lacking(mine: Any, stored: Any, prefix: str) -> list[str]:
    """Dotted paths of plain values in `mine` that `stored` has not."""
    missing = []
    for key, value in mine.items():
        if key not in stored:
            missing.append(f"{prefix}{key}")
        elif isinstance(value, dict) and isinstance(stored[key], Mapping):
            missing += _lacking(value, stored[key], f"{prefix}{key}.")
    return missing


def _overwrite_common(state: Any, mine: Any, stored: Any) -> None:
    """Replace the plain values of `state` (those that `mine` names) by the stored ones."""
    for key in mine:
        if key not in stored:
            continue
        if isinstance(mine[key], dict) and isinstance(stored[key], Mapping):
            _overwrite_common(state[key], mine[key], stored[key])
        else:
            state[key] = stored[key]
