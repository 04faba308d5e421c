"""The pickle that is written opcode by opcode loads as what DCP's own objects are."""

from __future__ import annotations

import io
import pickle
import pickletools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

from shardkeep import dcp_pickle, vanilla
from shardkeep.types import Box, Dialect, Index, Item, TensorInfo

NUMBERS = st.one_of(
    st.integers(0, 3),
    st.sampled_from([37, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**40, 2**63]),
)
KEYS = st.text(min_size=1, max_size=8) | st.sampled_from(["%b", "a%", "%%s", "layer.0.w"])
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "bool", "int64")


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    """Tensors of one or more boxes and objects, in files of any name, in any order."""
    items, tensors = [], {}
    for key in draw(st.lists(KEYS, unique=True, max_size=8)):
        is_tensor, num_dims = draw(st.booleans()), draw(st.integers(0, 4))
        numbers = st.lists(NUMBERS, min_size=num_dims, max_size=num_dims).map(tuple)
        if is_tensor:
            tensors[key] = TensorInfo(dtype=draw(st.sampled_from(DTYPES)), shape=draw(numbers))
        for _ in range(draw(st.integers(1, 3))):
            items.append(
                Item(
                    key=key,
                    kind="tensor" if is_tensor else "object",
                    dtype=tensors[key].dtype if is_tensor else "",
                    box=Box(offset=draw(numbers), shape=draw(numbers))
                    if is_tensor
                    else Box(offset=(), shape=()),
                    file=draw(st.sampled_from(["__0_1.distcp", "__1_%b.distcp"])),
                    offset=draw(NUMBERS),
                    length=draw(NUMBERS),
                    payload_offset=0,
                    num_bytes=0,
                )
            )
    paths = {i.key: draw(st.lists(KEYS | NUMBERS, max_size=3).map(tuple)) for i in items}
    return index_of(draw(st.permutations(items)), tensors, paths, draw(st.sampled_from(["dcp", "megatron"])))


def index_of(
    items: list[Item], tensors: dict[str, TensorInfo], paths: dict[str, Any], dialect: Dialect = "dcp"
) -> Index:
    return Index(
        format_version=1,
        attempt="1",
        dialect=dialect,
        checksum="xxh3_128",
        chunk_bytes=1,
        tensors=tensors,
        items=items,
        files={},
        paths=paths,
        fixed={},
    )


def spelled(value: Any) -> Any:
    """A value with the types of all that it holds; the `index` of a MetadataIndex does not count for `==`."""
    if isinstance(value, dict):
        return type(value), [(spelled(k), spelled(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [spelled(v) for v in value]
    if hasattr(value, "__dict__"):
        return type(value), sorted((k, spelled(v)) for k, v in vars(value).items())
    return type(value), value


def repr_of(data: bytes) -> str:
    return repr(spelled(pickle.loads(data)))


@given(indexes())
def test_it_loads_as_an_equal_object(index: Index) -> None:
    ours, own = dcp_pickle.dump(index), pickle.dumps(vanilla.dcp_objects(index))
    assert pickle.loads(ours) == pickle.loads(own)
    assert repr_of(ours) == repr_of(own)  # order, types and hints too
    assert pickle._Unpickler(io.BytesIO(ours)).load() == pickle.loads(own)  # type: ignore[attr-defined]


@given(indexes())
def test_it_names_no_other_classes_than_pickle_does(index: Index) -> None:
    """A reader that allows only some classes is not surprised."""
    ours, own = dcp_pickle.dump(index), pickle.dumps(vanilla.dcp_objects(index))
    base = {"torch.Size", "torch.float32"}  # named always, needed or not
    assert globals_in(own) - {"torch.Size"} <= globals_in(ours)
    known = globals_in(pickle.dumps(vanilla.dcp_objects(index_of(*everything()))))
    assert globals_in(ours) <= known | globals_in(own) | base


def everything() -> tuple[list[Item], dict[str, TensorInfo], dict[str, Any]]:
    """A tensor and an object: an index whose pickle names each class."""
    item = Item(
        key="t",
        kind="tensor",
        dtype="float32",
        box=Box(offset=(0,), shape=(4,)),
        file="f",
        offset=0,
        length=1,
        payload_offset=0,
        num_bytes=16,
    )
    other = Item(
        key="o",
        kind="object",
        dtype="",
        box=Box(offset=(), shape=()),
        file="f",
        offset=1,
        length=1,
        payload_offset=0,
        num_bytes=0,
    )
    return [item, other], {"t": TensorInfo(dtype="float32", shape=(4,))}, {"t": ("t",), "o": ("o",)}


def globals_in(data: bytes) -> set[str]:
    """The names that a pickle has a reader import."""
    found: set[str] = set()

    class Reader(pickle._Unpickler):  # type: ignore[name-defined, misc]
        def find_class(self, module: str, name: str) -> Any:
            found.add(f"{module}.{name}")
            return super().find_class(module, name)

    Reader(io.BytesIO(data)).load()
    return found


def test_equal_sizes_and_properties_are_one_object() -> None:
    items, tensors, paths = everything()
    again = [Item(**{f: getattr(i, f) for f in Item.__slots__} | {"key": i.key + "2"}) for i in items]
    tensors |= {"t2": tensors["t"]}
    entries = pickle.loads(dcp_pickle.dump(index_of(items + again, tensors, paths))).state_dict_metadata
    assert entries["t"].properties is entries["t2"].properties
    assert entries["t"].size is entries["t2"].chunks[0].sizes
    assert entries["t"].chunks is not entries["t2"].chunks


def test_the_opcodes_are_well_formed_and_no_more_bytes_than_pickles() -> None:
    items, tensors, _ = everything()
    many = [Item(**{f: getattr(items[0], f) for f in Item.__slots__} | {"key": f"t{n}"}) for n in range(1000)]
    index = index_of(many, {i.key: tensors["t"] for i in many}, {i.key: (i.key,) for i in many})
    data = dcp_pickle.dump(index)
    pickletools.dis(data, io.StringIO())  # raises where the stack or the memo is misused
    assert len(data) < len(pickle.dumps(vanilla.dcp_objects(index)))


@pytest.mark.parametrize("name", ["_StorageInfo", "MetadataIndex", "BytesStorageMetadata"])
def test_pickle_does_it_where_a_class_is_pickled_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A newer torch may change its classes: then the checkpoint takes longer, and is right."""

    @dataclass
    class Other:
        a: Any = None
        b: Any = None
        c: Any = None

        def __reduce__(self) -> Any:
            return Other, (self.a, self.b, self.c)

    monkeypatch.setattr(dcp_pickle, name, Other)
    index = index_of(*everything())
    with pytest.raises(dcp_pickle.Unknown):
        dcp_pickle.dump(index)
    metadata = pickle.loads(vanilla.dcp_metadata(index))
    assert isinstance(metadata, Metadata) and metadata == vanilla.dcp_objects(index)
    assert metadata.state_dict_metadata["t"].size == torch.Size([4])
