"""Checkpoints that earlier releases wrote load bit-exact for ever, one pair per format version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import golden_states
import shardkeep as sk

VERSIONS = sorted(p.name for p in golden_states.GOLDEN.iterdir())


def emptied(value: Any) -> Any:
    """The same structure with other content."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {k: emptied(v) for k, v in value.items()}
    if isinstance(value, list) and any(isinstance(v, torch.Tensor | dict) for v in value):
        return [emptied(v) for v in value]
    return None


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)
    else:
        assert got == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_plain(version: str) -> None:
    path = golden_states.GOLDEN / version / "dcp"
    state = emptied(golden_states.plain_state())
    sk.load(state, path)
    assert_same(state, golden_states.plain_state())
    assert sk.verify(path).ok


@pytest.mark.megatron
@pytest.mark.parametrize("version", VERSIONS)
def test_megatron(version: str) -> None:
    path = golden_states.GOLDEN / version / "megatron"
    state, expected = golden_states.megatron_state(), golden_states.megatron_state()
    for sharded in state["model"].values():
        sharded.data.zero_()
    state["rng"].data = None
    state["iteration"] = 0
    sk.load(state, path)
    for name, sharded in state["model"].items():
        assert torch.equal(sharded.data, expected["model"][name].data)
    assert_same(state["rng"].data, expected["rng"].data)
    assert state["iteration"] == 42
    assert state["args"] == expected["args"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("version", VERSIONS)
def test_vanilla_dcp_reads_them(version: str) -> None:
    import torch.distributed.checkpoint as dcp

    state = emptied(golden_states.plain_state())
    dcp.load(state, checkpoint_id=golden_states.GOLDEN / version / "dcp", no_dist=True)
    assert_same(state, golden_states.plain_state())


def test_every_file_of_the_format_is_there() -> None:
    names = {p.name for p in Path(golden_states.GOLDEN / "v1" / "megatron").iterdir()}
    assert {"shardkeep.json", "common.pt", "metadata.json", ".metadata"} <= names
