"""A state as the template of a load: which boxes and values it asks for, and how they are put back, in place.

`Template` has one implementation here, for plain states, and one in `shardkeep.megatron.state`. Comparing
keys is collective, since each rank of a model asks for its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from shardkeep.capture import capture, has_megatron_objects
from shardkeep.catalog import Catalog, resolve
from shardkeep.config import Config
from shardkeep.coordinate import Coordinator
from shardkeep.errors import MissingKey, UnexpectedKey
from shardkeep.load import Target as ReadTarget
from shardkeep.load import load_value, read_object, read_tensors
from shardkeep.storage import Storage
from shardkeep.types import Path, TensorShard, dtype_named, whole


class Template(Protocol):
    """What one rank asks for. `targets` are filled in place; `values` are the keys of objects."""

    targets: list[ReadTarget]
    values: list[str]

    def restore(self, values: Mapping[str, Any], common: Mapping[Any, Any], absent: frozenset[str]) -> None:
        """Put loaded objects and the checkpoint's common values back, after the targets have been filled.
        `absent`: keys that were asked for and are not stored.
        """

    def clear(self, absent: frozenset[str]) -> None:
        """Called when all checks have passed, before the targets are filled."""

    def served_by(self, common: Mapping[Any, Any]) -> set[str]:
        """Those of `values` that the checkpoint's common values answer."""

    def lacking_in(self, common: Mapping[Any, Any]) -> list[str]:
        """Common values that the state has and the checkpoint has not, by dotted path."""

    @property
    def loaded(self) -> Any:
        """The restored state, in the shape that the caller expects a load to return."""


def template(state: Mapping[str, Any]) -> Template:
    """The template that a state is. Raises InvalidState and StorageReleased as a save does."""
    if has_megatron_objects(state):
        from shardkeep.megatron.state import MegatronTemplate

        return MegatronTemplate(state)
    return PlainTemplate(state)


class PlainTemplate:
    """A nested dict of tensors and plain values. Tensors are filled in place, plain values replaced in their
    containers.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        captured = capture(state)
        self._state = state
        self._paths = captured.paths
        self.targets = [
            ReadTarget(key=s.header.key, box=s.header.box, shape=s.header.shape, tensor=s.tensor)
            for s in captured.shards
            if isinstance(s, TensorShard)
        ]
        self.values = [s.header.key for s in captured.shards if not isinstance(s, TensorShard)]

    def clear(self, absent: frozenset[str]) -> None:
        pass

    def served_by(self, common: Mapping[Any, Any]) -> set[str]:
        """A plain state may read a Megatron checkpoint, whose plain values are one dict."""
        return {key for key in self.values if has_at(common, self._paths[key])}

    def lacking_in(self, common: Mapping[Any, Any]) -> list[str]:
        return []

    @property
    def loaded(self) -> Mapping[str, Any]:
        return self._state

    def restore(self, values: Mapping[str, Any], common: Mapping[Any, Any], absent: frozenset[str]) -> None:
        for key in self.values:
            if key in values:
                put_at(self._state, self._paths[key], values[key])
            elif has_at(common, self._paths[key]):
                put_at(self._state, self._paths[key], at(common, self._paths[key]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`missing`: asked for by some rank, not stored; `rank` is the first that asks for the first of them.
    `unexpected`: stored, asked for by no rank.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    rank: int = 0


def compare(ranks: Coordinator, catalog: Catalog, wanted: Iterable[str], label: str) -> Difference:
    """Collective comparison of the keys that ranks ask for with those of the checkpoint."""
    everyone = ranks.gather(f"wanted{label}", sorted(set(wanted)))
    found = None
    if everyone is not None:
        asked = {key: rank for rank, keys in reversed(list(enumerate(everyone))) for key in keys}
        stored = set(catalog.items)
        missing = sorted(asked.keys() - stored)
        found = [missing, sorted(stored - asked.keys()), asked[missing[0]] if missing else 0]
    missing, unexpected, rank = ranks.broadcast(f"difference{label}", found)
    return Difference(missing=tuple(missing), unexpected=tuple(unexpected), rank=rank)


def require_equal(difference: Difference, path: str) -> None:
    """The strict rule: MissingKey or UnexpectedKey, naming the first keys."""
    if difference.missing:
        raise lacking(difference, path, "Pass strict=False to load what is there.")
    if difference.unexpected:
        raise unasked(difference.unexpected, path, "Pass strict=False to leave them out.")


def lacking(difference: Difference, path: str, remedy: str) -> MissingKey:
    """The error of keys that are asked for and not stored."""
    return MissingKey(
        f"the checkpoint lacks {some(difference.missing)}",
        key=difference.missing[0],
        rank=difference.rank,
        path=path,
        expected="a stored key for each key of the state",
        got=f"{len(difference.missing)} without",
        remedy=remedy,
    )


def unasked(keys: Collection[str], path: str, remedy: str) -> UnexpectedKey:
    """The error of keys that are stored and that no rank asks for."""
    return UnexpectedKey(
        f"the state does not ask for {some(keys)}",
        key=sorted(keys)[0],
        path=path,
        expected="a state that asks for every stored key",
        got=f"{len(keys)} left over",
        remedy=remedy,
    )


def some(keys: Collection[str]) -> str:
    """The first few keys, for a message."""
    shown = ", ".join(f"'{k}'" for k in sorted(keys)[:10])
    return shown + (f" and {len(keys) - 10} more" if len(keys) > 10 else "")


def at(container: Any, path: Path) -> Any:
    """The value at a path of keys and indices."""
    for step in path:
        container = container[_own_key(container, step)]
    return container


def has_at(container: Any, path: Path) -> bool:
    try:
        at(container, path)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def put_at(container: Any, path: Path, value: Any) -> None:
    """Replace the value at an existing path."""
    parent = at(container, path[:-1])
    assert isinstance(parent, MutableMapping | MutableSequence)
    parent[_own_key(parent, path[-1])] = value


def _own_key(container: Any, step: str | int) -> Any:
    """torch's flattening turns dict keys into text; find the key as the container has it."""
    if not isinstance(container, Mapping) or step in container:
        return step
    return next((k for k in container if str(k) == step), step)


def read_nested(storage: Storage, manifest_name: str, config: Config) -> dict[str, Any]:
    """A whole checkpoint of the `dcp` dialect as a new nested dict; for states that are small, such as a
    trainer's.
    """
    catalog = resolve(storage, manifest_name)
    tensors = {k: torch.empty(i.shape, dtype=dtype_named(i.dtype)) for k, i in catalog.tensors.items()}
    targets = [
        ReadTarget(key=k, box=whole(tuple(t.shape)), shape=tuple(t.shape), tensor=t)
        for k, t in tensors.items()
    ]
    read_tensors(storage, catalog, targets, config)
    values = {k: load_value(read_object(storage, catalog, k), k) for k in catalog.objects}
    return unflatten_state_dict(tensors | values, {k: tuple(p) for k, p in catalog.paths.items()})
