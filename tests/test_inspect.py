"""inspect: what a checkpoint holds, and any part of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from craft import ATTEMPT, craft, grid
from shardkeep.errors import Mismatch, MissingKey, NotCommitted
from shardkeep.inspect import inspect
from shardkeep.manifest import common_name, data_name
from shardkeep.types import Box, TensorInfo

W = torch.arange(48.0).reshape(6, 8)


def test_what_it_shows(tmp_path: Path) -> None:
    boxes = grid((6, 8), (2, 2))
    craft(
        tmp_path,
        {"w": (W, boxes), "s": torch.tensor(5)},
        objects={"o/shard_0_1": [{"a": 1}]},
        common={"it": 9},
    )
    ckpt = inspect(str(tmp_path))
    assert ckpt.path == str(tmp_path)
    assert ckpt.tensors == {
        "w": TensorInfo(dtype="float32", shape=(6, 8)),
        "s": TensorInfo(dtype="int64", shape=()),
    }
    assert ckpt.objects == ["o/shard_0_1"]
    assert set(ckpt.files) == {data_name(0, ATTEMPT, 0), data_name(0, ATTEMPT, 1), common_name(ATTEMPT)}
    assert ckpt.layout == {"world_size": 1, "tp": 1}
    assert ckpt.manifest is not None and ckpt.manifest.step == 7
    assert ckpt.boxes("w") == boxes
    assert ckpt.num_bytes == 48 * 4 + 8 + len_of(ckpt.read("o/shard_0_1"))
    assert ckpt.common() == {"it": 9}
    assert ckpt.read("o/shard_0_1") == {"a": 1}
    assert repr(ckpt).startswith(
        f"Checkpoint('{tmp_path}', megatron dialect by shardkeep 0.1.0, 2 tensors, 1 objects"
    )
    table = str(ckpt).splitlines()
    assert table[1].split() == ["key", "dtype", "shape", "boxes"]
    assert [line.split() for line in table[2:]] == [
        ["s", "int64", "scalar", "1"],
        ["w", "float32", "6x8", "4"],
    ]


def len_of(value: object) -> int:
    from craft import saved

    return len(saved([value]))


def test_reading(tmp_path: Path) -> None:
    craft(tmp_path, {"w": (W, grid((6, 8), (2, 2)))}, objects={"step": 3, "one": [4]})
    ckpt = inspect(tmp_path)
    assert torch.equal(ckpt.read("w"), W)
    assert torch.equal(ckpt.read("w", Box(offset=(2, 3), shape=(3, 4))), W[2:5, 3:7])
    assert ckpt.read("step") == 3
    assert ckpt.read("one") == [4]  # only a Megatron object is wrapped in a list
    assert ckpt.values() == {"step": 3, "one": [4]}
    assert ckpt.common() == {}
    with pytest.raises(MissingKey, match="neither a tensor nor a value 'x'"):
        ckpt.read("x")
    with pytest.raises(Mismatch, match="outside the tensor"):
        ckpt.read("w", Box(offset=(5, 0), shape=(2, 8)))


def test_a_long_table_is_cut(tmp_path: Path) -> None:
    craft(tmp_path, {f"k{n:03}": torch.zeros(1) for n in range(50)})
    lines = str(inspect(tmp_path)).splitlines()
    assert len(lines) == 1 + 1 + 20 + 1 and lines[-1] == "... and 30 more tensors"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(NotCommitted):
        inspect(tmp_path)
