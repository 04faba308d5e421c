"""Checkpoints of other tools, and pickles that mean harm."""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from craft import saved
from shardkeep import foreign
from shardkeep.errors import Corrupt, UnsafePickle
from shardkeep.inspect import inspect
from shardkeep.types import Box, TensorInfo

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def dcp_state() -> dict[str, Any]:
    g = torch.Generator().manual_seed(3)
    return {
        "f32": torch.randn(37, 11, generator=g),
        "bf16": torch.randn(64, 33, generator=g).bfloat16(),
        "f8": torch.randn(130, generator=g).to(torch.float8_e4m3fn),
        "f8b": torch.randn(7, generator=g).to(torch.float8_e5m2),
        "c64": torch.randn(5, 6, dtype=torch.complex64, generator=g),
        "c128": torch.randn(3, dtype=torch.complex128, generator=g),
        "bool": torch.rand(50, generator=g) > 0.5,
        "i8": torch.arange(-5, 5, dtype=torch.int8),
        "u16": torch.arange(9, dtype=torch.int32).to(torch.uint16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "none_left": torch.empty(4, 0, 2, dtype=torch.int64),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "channels_last": torch.randn(2, 3, 4, 5, generator=g).to(memory_format=torch.channels_last),
        "view": torch.arange(100)[10:20],
        "conj": torch.randn(4, dtype=torch.complex64, generator=g).conj(),
        "parameter": torch.nn.Parameter(torch.randn(4, 4, generator=g)),
        "big": torch.randn(700, 1024, generator=g),
        "nested": {
            "list": [1, {"t": torch.ones(3)}, "x"],
            "lr": 0.1,
            "none": None,
            "s": "text",
            "flag": True,
        },
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, NaNs and all."""
    a, b = a.detach().resolve_conj().contiguous(), b.detach().resolve_conj().contiguous()
    raw = [torch.flatten(t).view(torch.uint8) if t.numel() else torch.empty(0) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def test_everything_that_dcp_writes_is_read_to_the_bit(tmp_path: Path) -> None:
    state = dcp_state()
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    ckpt = inspect(tmp_path)
    assert ckpt.manifest is None and ckpt.dialect == "dcp"
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert same(ckpt.read(key), value), key
    assert same(ckpt.read("nested.list.1.t"), torch.ones(3))
    assert ckpt.values() == {
        "nested.list.0": 1,
        "nested.list.2": "x",
        "nested.lr": 0.1,
        "nested.none": None,
        "nested.s": "text",
        "nested.flag": True,
    }
    box = Box(offset=(100, 17), shape=(300, 400))
    assert same(ckpt.read("big", box), state["big"][100:400, 17:417])
    box = Box(offset=(0, 1, 0, 2), shape=(2, 2, 3, 2))
    assert same(ckpt.read("channels_last", box), state["channels_last"][0:2, 1:3, 0:3, 2:4])


def test_paths_of_nested_values_are_known(tmp_path: Path) -> None:
    dcp.save(
        {"a": {"b.c": torch.ones(1), "d": [5, torch.ones(2)]}}, checkpoint_id=str(tmp_path), no_dist=True
    )
    assert inspect(tmp_path)._catalog.paths == {
        "a.b.c": ("a", "b.c"),
        "a.d.0": ("a", "d", 0),
        "a.d.1": ("a", "d", 1),
    }


def metadata_with(extra: Any = None) -> Metadata:
    """A Metadata as megatron-core 0.16 and before pickle it: planner data with plans, `mcore_data` on top."""
    properties = TensorProperties(dtype=torch.bfloat16)
    size, offsets = torch.Size([4, 6]), torch.Size([2, 0])
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=torch.Size([2, 6]))
    index = MetadataIndex("w", offsets)
    item = WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
    )
    metadata = Metadata(
        state_dict_metadata={
            "w": TensorStorageMetadata(properties=properties, size=size, chunks=[chunk]),
            "obj/shard_0_1": BytesStorageMetadata(),
        },
        planner_data=[SavePlan([item]), {"x": OrderedDict(a={1, 2}, b=frozenset([3]), c=slice(1, 2))}],
        storage_data={
            index: _StorageInfo("__0_0.distcp", 0, 1000),
            MetadataIndex("obj/shard_0_1"): _StorageInfo("__0_1.distcp", 7, 500),
        },
    )
    metadata.all_local_plans = [SavePlan([item])]  # type: ignore[attr-defined]
    metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (8, 3)}}  # type: ignore[attr-defined]
    if extra is not None:
        metadata.extra = extra  # type: ignore[attr-defined]
    return metadata


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_megatron_is_understood_without_its_classes(protocol: int) -> None:
    parsed = foreign.parse_metadata(pickle.dumps(metadata_with(), protocol=protocol), "m")
    assert parsed.tensors == {"w": TensorInfo(dtype="bfloat16", shape=(4, 6))}
    (item,) = parsed.items["w"]
    assert (item.box, item.file, item.offset, item.length, item.num_bytes) == (
        Box(offset=(2, 0), shape=(2, 6)),
        "__0_0.distcp",
        0,
        1000,
        24,
    )
    assert item.payload_offset == -1
    (thing,) = parsed.items["obj/shard_0_1"]
    assert (thing.kind, thing.file, thing.payload_offset, thing.num_bytes) == (
        "object",
        "__0_1.distcp",
        7,
        500,
    )
    assert parsed.files == {"__0_0.distcp", "__0_1.distcp"}
    assert parsed.mcore == {"w": {"nd_reformulated_orig_global_shape": (8, 3)}}


@pytest.mark.parametrize("name", ["MCoreMetadata", "MCoreSavePlan"])
def test_classes_that_megatron_removed_are_still_known(name: str) -> None:
    module = "megatron.core.dist_checkpointing.strategies.torch"
    stream = b"\x80\x04c" + module.encode() + b"\n" + name.encode() + b"\n)\x81}(\x8c\x01aK\x01ub."
    assert foreign.unpickle(stream, "m").get("a") == 1


class Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
@pytest.mark.parametrize(
    ("evil", "name"),
    [
        (Evil(os.system, "touch {}"), f"{os.name}.system"),
        (Evil(eval, "1"), "builtins.eval"),
        (Evil(getattr, "x", "join"), "builtins.getattr"),
        (Evil(__import__, "os"), "builtins.__import__"),
        (Evil(torch.load, "x"), "torch.serialization.load"),
        (Evil(io.FileIO, "x"), "_io.FileIO"),
    ],
)
def test_a_pickle_that_calls_something_is_refused_by_name(
    tmp_path: Path, evil: Evil, name: str, protocol: int
) -> None:
    proof = tmp_path / "proof"
    if evil.call[0] is os.system:
        evil = Evil(os.system, f"touch {proof}")
    data = pickle.dumps(metadata_with(evil), protocol=protocol)
    with pytest.raises(UnsafePickle) as error:
        foreign.parse_metadata(data, "ckpt/.metadata")
    refused = error.value.fields.get("name", "")
    assert (
        refused.replace("__builtin__", "builtins") == name or "opcode" in error.value.fields or protocol < 2
    )
    assert "ckpt/.metadata" in str(error.value)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (b"\x80\x04Nr\xff\xff\xff\x7f.", Corrupt),  # LONG_BINPUT: would allocate a memo of 16 GiB
        (b"(lp99999999999\n.", Corrupt),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", Corrupt),  # BINBYTES8 of 2**63
        (b"\x80\x04\x8d\xff\xff\xff\xff\x00\x00\x00\x00ab.", Corrupt),
        (b"\x80\x04X\xff\xff\xff\x7fab.", Corrupt),
        (b"", Corrupt),
        (b"\x80\x04", Corrupt),
        (b"garbage", Corrupt),
        (b"~garbage", UnsafePickle),
        (b"\x80\x04}.", Corrupt),  # a dict, not a Metadata
        (b"\x80\x04\x82\x01.", UnsafePickle),  # EXT1: the extension registry
        (b"i__main__\nX\n.", UnsafePickle),  # INST
        (b"Pid\n.", UnsafePickle),
        (b"\x80\x04ccollections\nOrderedDict\n}(\x8c\x01aK\x01ub.", Corrupt),  # state for a function
        (b"\x80\x04ctorch\nSize\n}(\x8c\x08__code__K\x01ub.", Corrupt),
        (b"\x80\x04" + b"(" * 100_000 + b".", Corrupt),
    ],
)
def test_streams_made_to_hurt_end_in_an_error(stream: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        foreign.parse_metadata(stream, "m")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_damage_to_a_metadata_file_gets_past_the_errors(data: st.DataObject) -> None:
    good = pickle.dumps(metadata_with(), protocol=4)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    bad = bad[: data.draw(st.integers(0, len(good)))] if data.draw(st.booleans()) else bad
    with suppress(Corrupt, UnsafePickle):
        foreign.parse_metadata(bytes(bad), "m")


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "a/../../b", ""])
def test_an_item_outside_the_directory_is_refused(file: str) -> None:
    metadata = metadata_with()
    metadata.storage_data = {MetadataIndex("w", torch.Size([2, 0])): _StorageInfo(file, 0, 10)}
    with pytest.raises(Corrupt, match="no usable place"):
        foreign.parse_metadata(pickle.dumps(metadata), "m")


def test_a_compressed_item_is_refused_and_not_misread() -> None:
    metadata = metadata_with()
    metadata.storage_data = {MetadataIndex("w", torch.Size([2, 0])): _StorageInfo("f", 0, 10, ["zstd"])}
    with pytest.raises(Corrupt, match=r"transformed.*zstd"):
        foreign.parse_metadata(pickle.dumps(metadata), "m")


def test_an_item_that_is_no_archive_names_file_and_key(tmp_path: Path) -> None:
    dcp.save({"w": torch.randn(100)}, checkpoint_id=str(tmp_path), no_dist=True)
    path = tmp_path / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    end = data.rfind(b"PK\x05\x06")
    struct.pack_into("<I", data, end, 0)
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=r"not a torch\.save archive.*__0_0\.distcp.*'w'"):
        inspect(tmp_path).read("w")


def test_a_truncated_foreign_file_is_named_before_anything_is_read(tmp_path: Path) -> None:
    dcp.save({"w": torch.randn(1000)}, checkpoint_id=str(tmp_path), no_dist=True)
    path = tmp_path / "__0_0.distcp"
    size = path.stat().st_size
    os.truncate(path, size - 100)
    with pytest.raises(
        Corrupt, match=rf"__0_0\.distcp.*expected at least {size} bytes, got {size - 100} bytes"
    ):
        inspect(tmp_path).read("w")


def test_common_values_of_either_megatron_form(tmp_path: Path) -> None:
    common = {"iteration": 5, "args": {"lr": 0.1}}
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    metadata = Metadata(state_dict_metadata={}, storage_data={})
    (tmp_path / "old" / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "old" / "common.pt").write_bytes(saved(common))
    data = saved([common])
    metadata.state_dict_metadata = {"common_state/shard_0_1": BytesStorageMetadata()}
    metadata.storage_data = {
        MetadataIndex("common_state/shard_0_1"): _StorageInfo("__0_0.distcp", 0, len(data))
    }
    (tmp_path / "new" / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "new" / "__0_0.distcp").write_bytes(data)
    for name in ("old", "new"):
        ckpt = inspect(tmp_path / name)
        assert ckpt.dialect == "megatron"
        assert ckpt.common() == common, name
        assert ckpt.objects == [], name
