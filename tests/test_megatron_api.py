"""`sk.megatron.save/load` on Megatron's mapping objects, in one process."""

from __future__ import annotations

import inspect
import logging
import pickle
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.validation import StrictHandling

import shardkeep as sk
from quantised import Quantised
from shardkeep.errors import InvalidState, Mismatch, MissingKey, UnexpectedKey

pytestmark = pytest.mark.megatron


def tensor(key: str, data: torch.Tensor, *offsets: tuple[int, int, int], **kwargs: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, *offsets, **kwargs)


def state(fill: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"w": tensor("w", torch.full((4, 3), fill)), "b": tensor("b", torch.full((3,), 2 * fill))},
        "rng": ShardedObject("rng", {"seed": fill}, (1,), (0,)),
        "step": int(fill),
    }


@pytest.fixture
def saved(tmp_path: Path) -> str:
    directory = str(tmp_path / "iter_1")
    sk.megatron.save(state(), directory)
    return directory


def test_signatures_are_megatrons() -> None:
    for name in ("save", "load"):
        theirs = inspect.signature(getattr(dist_checkpointing, name)).parameters
        ours = inspect.signature(getattr(sk.megatron, name)).parameters
        assert list(ours) == list(theirs)
        for parameter, their in theirs.items():
            default = getattr(their.default, "value", their.default)
            assert ours[parameter].default == default, parameter


def test_every_kind_of_entry_comes_back(tmp_path: Path) -> None:
    def build(key: str, t: torch.Tensor, replica_id: Any, flattened_range: Any) -> dict[str, Any]:
        gate, up = t.chunk(2)
        return {"gate": tensor(f"{key}.gate", gate), "up": tensor(f"{key}.up", up)}

    def merge(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([parts["gate"], parts["up"]])

    def whole(scale: float) -> dict[str, Any]:
        fused = torch.arange(8.0) * scale
        return {
            "fused": ShardedTensorFactory("fused", fused, build, merge),
            "layers": [
                tensor("layer", torch.full((2,), i * scale), (0, i, 2), prepend_axis_num=1) for i in range(2)
            ],
            "local": LocalNonpersistentObject("kept here"),
            "objects": {"extra": ShardedObject("extra", [scale], (1,), (0,))},
            "optimizer": {"param_groups": [{"lr": scale, "betas": (0.9, 0.95)}], "empty": {}},
            5: scale,
        }

    saved, template = whole(3.0), whole(0.0)
    sk.megatron.save(saved, str(tmp_path / "c"), content_metadata={"kind": "test"})
    loaded = sk.megatron.load(template, str(tmp_path / "c"))
    assert torch.equal(loaded["fused"], torch.arange(8.0) * 3)
    assert torch.equal(template["fused"].data, torch.arange(8.0) * 3)
    assert [t.tolist() for t in loaded["layers"]] == [[0.0, 0.0], [3.0, 3.0]]
    assert loaded["local"] == "kept here"
    assert loaded["objects"] == {"extra": [3.0]}
    assert loaded["optimizer"] == {"param_groups": [{"lr": 3.0, "betas": (0.9, 0.95)}], "empty": {}}
    assert loaded[5] == 3.0
    assert loaded["content_metadata"] == {"kind": "test"}
    assert "content_metadata" not in saved, "the caller's dict is not changed"
    assert isinstance(saved["fused"], ShardedTensorFactory)


def test_tensors_without_data_are_made(saved: str) -> None:
    template = {"w": tensor("w", torch.empty(4, 3)).without_data()}
    assert torch.equal(sk.megatron.load(template, saved)["w"], torch.ones(4, 3))


def test_dtypes_are_converted_as_megatron_does(saved: str) -> None:
    loaded = sk.megatron.load({"w": tensor("w", torch.zeros(4, 3, dtype=torch.float64))}, saved)
    assert loaded["w"].dtype == torch.float64
    assert torch.equal(loaded["w"], torch.ones(4, 3, dtype=torch.float64))


def test_a_shape_mismatch_is_refused_or_clipped(saved: str) -> None:
    with pytest.raises(Mismatch, match=r"key 'w'.*expected \[5, 3\], got \[4, 3\]"):
        sk.megatron.load({"w": tensor("w", torch.zeros(5, 3))}, saved)
    padded = tensor("w", torch.full((5, 3), 9.0), allow_shape_mismatch=True)
    loaded = sk.megatron.load({"w": padded}, saved)["w"]
    assert torch.equal(loaded, torch.cat([torch.ones(4, 3), torch.zeros(1, 3)]))


def test_a_load_that_is_refused_leaves_tensors_of_flexible_shape_alone(saved: str) -> None:
    live = torch.full((5, 3), 9.0)
    with pytest.raises(MissingKey):
        sk.megatron.load(
            {"w": tensor("w", live, allow_shape_mismatch=True), "new": tensor("new", torch.zeros(1))}, saved
        )
    assert live.unique().tolist() == [9.0]


def test_a_strict_load_misses_common_values_that_megatron_would_not(saved: str) -> None:
    template = {**state(0.0), "scheduler": {"num_steps": 3}}
    with pytest.raises(MissingKey, match=r"'scheduler'.*key 'scheduler'"):
        sk.load(template, saved)
    assert template["step"] == 0 and template["model"]["w"].data.unique().tolist() == [0.0]
    assert sk.load(template, saved, strict=False).missing == ("scheduler",)
    assert template["step"] == 1


def test_a_plain_state_reads_a_megatron_checkpoint(saved: str) -> None:
    plain = {"w": torch.zeros(4, 3), "b": torch.zeros(3), "step": 0, "rng/shard_0_1": None}
    assert sk.load(plain, saved).missing == ()
    assert plain["w"].unique().tolist() == [1.0] and plain["step"] == 1


def test_errors_are_megatrons_too_and_picklable(saved: str) -> None:
    with pytest.raises(CheckpointingException) as caught:
        sk.megatron.load({"none": tensor("none", torch.zeros(1))}, saved)
    assert isinstance(caught.value, MissingKey)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, CheckpointingException) and isinstance(again, MissingKey)
    assert str(again) == str(caught.value) and "none" in str(again)
    with pytest.raises(CheckpointingException, match="no checkpoint here"):
        sk.megatron.load(state(), saved + "x")


@pytest.mark.parametrize("mode", [m.value for m in StrictHandling])
def test_strict_modes(saved: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """The template asks for 'new' (Megatron: unexpected) and not for 'b' and 'rng' (Megatron: missing)."""
    caplog.set_level(logging.WARNING, "shardkeep")

    def template() -> dict[str, Any]:
        return {"w": tensor("w", torch.zeros(4, 3)), "new": tensor("new", torch.zeros(2))}

    if mode in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
        with pytest.raises(MissingKey, match="'new'"):
            sk.megatron.load(template(), saved, strict=mode)
        with pytest.raises(MissingKey, match="'new'"):
            sk.megatron.load(template(), saved, strict=StrictHandling(mode))
        rest = {"w": tensor("w", torch.zeros(4, 3))}
        if mode == "raise_all":
            with pytest.raises(UnexpectedKey, match="'b', 'rng'"):
                sk.megatron.load(rest, saved, strict=mode)
        else:
            assert torch.equal(sk.megatron.load(rest, saved, strict=mode)["w"], torch.ones(4, 3))
        return
    result = sk.megatron.load(template(), saved, strict=mode)
    if mode.startswith("return"):
        loaded, missing, unexpected = result
        assert unexpected == {"new"}
        assert missing == ({"b", "rng"} if mode == "return_all" else set())
    else:
        loaded = result
        logged = [r.message for r in caplog.records if "not in the checkpoint" in r.message]
        assert len(logged) == (mode != "ignore_all")
        if mode == "log_all":
            assert "['new']" in logged[0] and "['b', 'rng']" in logged[0]
    assert torch.equal(loaded["w"], torch.ones(4, 3))
    assert "new" not in loaded


def test_an_invalid_strict_flag_names_the_modes(saved: str) -> None:
    with pytest.raises(ValueError, match="return_unexpected"):
        sk.megatron.load(state(), saved, strict="strictly")


def test_access_is_validated_on_save_and_load(tmp_path: Path, saved: str) -> None:
    twice = {"a": tensor("w", torch.ones(4, 3)), "b": tensor("w", torch.ones(4, 3))}
    gap = {"w": tensor("w", torch.ones(2, 3), (0, 0, 2))}
    for bad in (twice, gap):
        with pytest.raises(InvalidState, match="key 'w'"):
            sk.megatron.save(dict(bad), str(tmp_path / "bad"))
        assert not (tmp_path / "bad").exists()
        with pytest.raises(InvalidState, match="key 'w'"):
            sk.megatron.load(dict(bad), saved)
    assert sk.megatron.load(gap, saved, validate_access_integrity=False)["w"].shape == (2, 3)


def test_another_backend_is_refused(saved: str) -> None:
    with pytest.raises(CheckpointingException, match="zarr"):
        sk.megatron.save(state(), saved, sharded_strategy=("zarr", 1))


def test_saving_again_replaces(saved: str) -> None:
    sk.megatron.save(state(5.0), saved)
    loaded = sk.megatron.load(state(0.0), saved)
    assert loaded["model"]["w"].unique().tolist() == [5.0]
    assert (loaded["rng"], loaded["step"]) == ({"seed": 5.0}, 5)


def test_the_plain_metadata_helpers_of_megatron_read_ours(saved: str) -> None:
    assert dist_checkpointing.load_common_state_dict(saved)["step"] == 1
    assert sorted(dist_checkpointing.load_tensors_metadata(saved)) == ["b", "w"]
    assert dist_checkpointing.check_is_distributed_checkpoint(saved)


def test_install_reaches_names_imported_before_and_is_taken_back() -> None:
    framework = types.ModuleType("framework")
    exec("from megatron.core.dist_checkpointing import load, save", vars(framework))
    original = framework.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "framework", framework)
        sk.megatron.install()
        sk.megatron.install()
        try:
            assert framework.save is dist_checkpointing.save is dist_checkpointing.serialization.save
            assert framework.save is not original
        finally:
            sk.megatron.uninstall()
    assert framework.save is dist_checkpointing.save is original


def test_quantised_tensors_are_stored_and_loaded_as_megatron_does(tmp_path: Path) -> None:
    """Transformer Engine's: in their nominal dtype. What is loaded is plain; the model quantises again."""

    def build(key: str, t: torch.Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        return [tensor(f"{key}.{n}", part) for n, part in enumerate(t.chunk(2))]

    def sharded(weight: torch.Tensor, fused: torch.Tensor) -> dict[str, Any]:
        return {"w": tensor("w", weight), "f": ShardedTensorFactory("f", fused, build, torch.cat)}

    weight = torch.nn.Parameter(Quantised(torch.tensor([[1.0, -2.0], [0.3, 0.7]])))
    fused = Quantised(torch.tensor([4.0, 3.0, -1.0, 0.1]))
    given = sharded(weight, fused)
    sk.megatron.save(given, str(tmp_path / "a"))
    assert isinstance(given["w"].data, Quantised) and given["f"].data is fused  # not ours to change
    expected = {"w": weight.dequantize().detach(), "f": fused.dequantize()}
    item = sk.inspect(tmp_path / "a").read("w")
    assert type(item) is torch.Tensor and torch.equal(item, expected["w"])

    blank, blank_fused = Quantised(torch.zeros(2, 2)), Quantised(torch.zeros(4))
    loaded = sk.megatron.load(sharded(blank, blank_fused), str(tmp_path / "a"))
    for key in ("w", "f"):
        assert type(loaded[key]) is torch.Tensor and torch.equal(loaded[key], expected[key])
    assert blank.dequantize().count_nonzero() == 0  # `load_state_dict` would fill it

    sk.load(sharded(blank, blank_fused), tmp_path / "a")  # in place, as this one promises
    assert torch.equal(blank.dequantize(), expected["w"])
    assert torch.equal(blank_fused.dequantize(), expected["f"])


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_a_quantised_tensor_that_torch_has_is_refused_by_its_name(tmp_path: Path) -> None:
    quantised = torch._empty_affine_quantized([3], scale=0.1, zero_point=0, dtype=torch.qint8)
    with pytest.raises(InvalidState, match=r"key 'w'.*torch\.qint8"):
        sk.megatron.save({"w": tensor("w", quantised)}, str(tmp_path / "a"))
    assert not (tmp_path / "a").exists() or not list((tmp_path / "a").iterdir())
