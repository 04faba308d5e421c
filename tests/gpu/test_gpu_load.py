"""Checkpoint -> device tensors: of any dtype and strides, and in the order of the caller's streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardkeep as sk
from craft import craft, grid
from device import CONFIG, DTYPES, MIB, keep_busy, needs_gpu, random, same_bits
from shardkeep.catalog import resolve
from shardkeep.load import Target, read_tensors
from shardkeep.storage import storage_for
from shardkeep.types import Box, whole

pytestmark = needs_gpu

SHAPE = (301, 517)


def fill(directory: Path, targets: list[Target]) -> None:
    storage = storage_for(directory)
    read_tensors(storage, resolve(storage), targets, CONFIG)


def all_of(key: str, tensor: torch.Tensor, **more: Any) -> Target:
    return Target(key=key, box=whole(tuple(tensor.shape)), tensor=tensor, **more)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides(tmp_path: Path, dtype: torch.dtype) -> None:
    source = random(*SHAPE, dtype=dtype)
    sk.save({"plain": source, "turned": source, "stepped": source, "cpu": source}, tmp_path / "c")
    state = {
        "plain": torch.zeros(SHAPE, dtype=dtype, device="cuda"),
        "turned": torch.zeros(SHAPE[::-1], dtype=dtype, device="cuda").t(),
        "stepped": torch.zeros((602, 1034), dtype=dtype, device="cuda")[::2, ::2],
        "cpu": torch.zeros(SHAPE, dtype=dtype),
    }
    before = {key: tensor.data_ptr() for key, tensor in state.items()}
    sk.load(state, tmp_path / "c", config=CONFIG)
    assert all(same_bits(tensor, source) for tensor in state.values())
    assert {key: tensor.data_ptr() for key, tensor in state.items()} == before
    around = state["stepped"]._base
    assert around is not None
    assert not around[1::2].view(torch.uint8).any()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64], ids=str
)
def test_boxes_of_a_tensor_cut_up_in_storage(tmp_path: Path, dtype: torch.dtype) -> None:
    source = random(*SHAPE, dtype=dtype)
    craft(tmp_path, {"w": (source.cpu(), grid(SHAPE, (3, 2))), "odd": torch.ones(1)})
    turned = torch.zeros(SHAPE[::-1], dtype=dtype, device="cuda").t()
    part = torch.zeros((100, 200), dtype=dtype, device="cuda")
    box = Box(offset=(150, 200), shape=(100, 200))
    fill(tmp_path, [all_of("w", turned), Target(key="w", box=box, tensor=part)])
    assert same_bits(turned, source)
    assert same_bits(part, source[150:250, 200:400])


def test_dtype_is_converted_on_request(tmp_path: Path) -> None:
    finite = torch.randn(SHAPE)
    craft(tmp_path, {"w": finite})
    half = torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda")
    fill(tmp_path, [all_of("w", half, cast=True)])
    assert torch.equal(half.cpu(), finite.bfloat16())


def test_load_comes_after_kernels_that_still_run(tmp_path: Path) -> None:
    sk.save({"w": torch.full((1000, 1000), 3.0, device="cuda")}, tmp_path / "c")
    target = torch.zeros(1000, 1000, device="cuda")
    torch.cuda.synchronize()
    keep_busy()
    target.fill_(9.0)
    sk.load({"w": target}, tmp_path / "c", config=CONFIG)
    assert (target == 3).all()


def test_every_stream_sees_what_was_loaded(tmp_path: Path) -> None:
    sk.save({"w": torch.full((3000, 1000), 3.0, device="cuda")}, tmp_path / "c")
    target = torch.zeros(3000, 1000, device="cuda")
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    sk.load({"w": target}, tmp_path / "c", config=CONFIG)
    with torch.cuda.stream(other):
        assert (target == 3).all()


def test_released_target_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    saved = {"a": random(100, 100), "b": random(100, 100, seed=1)}
    sk.save(saved, tmp_path / "c")
    target = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    target["b"].untyped_storage().resize_(0)
    with pytest.raises(sk.errors.StorageReleased, match="b"):
        sk.load(target, tmp_path / "c")
    assert not target["a"].any()


def test_corrupt_bytes_are_found(tmp_path: Path) -> None:
    source = random(1000, 1000)
    sk.save({"w": source}, tmp_path / "c", config=CONFIG)
    name = next(iter(sk.inspect(tmp_path / "c").files))
    with (tmp_path / "c" / name).open("r+b") as file:
        file.seek(MIB)
        byte = file.read(1)[0]
        file.seek(MIB)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(sk.errors.Corrupt):
        sk.load({"w": torch.zeros_like(source)}, tmp_path / "c", config=CONFIG)
