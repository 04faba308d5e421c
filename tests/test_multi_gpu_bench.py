"""`benchmarks/multi_gpu.py` on two CPU ranks with a tiny GPT: the whole script, and its digests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardkeep.bench import gpt

pytestmark = pytest.mark.megatron
SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "multi_gpu.py"


def run_script(tmp_path: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    line = "--device cpu --ranks 2 --params-b 0.001 --rounds 1 --steps 1 --deadline-s 3"
    done = subprocess.run(
        [sys.executable, SCRIPT, *line.split(), "--tmpfs", tmp_path, "--out", out, *options],
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.slow
def test_two_ranks_on_the_cpu(tmp_path: Path) -> None:
    result = run_script(tmp_path, "--launcher", "spawn")
    found = result["found"]
    assert list(found["layouts"]) == ["TP2 x PP1 x DP1", "TP1 x PP2 x DP1"]
    for ranks in found["layouts"].values():
        assert [each["rank"] for each in ranks] == [0, 1]
        for each in ranks:
            (on,) = each["paths"]
            assert [len(on[f"{name}_s"]) for name in ("save", "load", "stall", "write", "read")] == [2] * 5
            assert len(each["peers"]["megatron-core"]["save_s"]) == 2
        assert sum(each["paths"][0]["file_bytes"] for each in ranks) > ranks[0]["paths"][0]["num_bytes"]
    for ranks in found["restores"].values():
        assert all(each["num_keys"] > 50 and not each["different"] for each in ranks)
    survivor, victim = found["death"]
    assert victim is None
    assert survivor["error"] in ("SaveFailed", "DeadlineExceeded")
    assert survivor["old_checkpoint_stands"]
    assert {row["verdict"] for row in result["rows"]} == {"met"}


@pytest.mark.parametrize(
    ("world_size", "expected"),
    [(1, ["TP1 x PP1 x DP1"]), (2, ["TP2 x PP1 x DP1", "TP1 x PP2 x DP1"]), (3, ["TP3 x PP1 x DP1"])],
)
def test_layouts(world_size: int, expected: list[str]) -> None:
    assert [layout.name(world_size) for layout in gpt.layouts(world_size)] == expected


def test_layouts_of_eight() -> None:
    names = [layout.name(8) for layout in gpt.layouts(8)]
    assert names == ["TP8 x PP1 x DP1", "TP2 x PP1 x DP4", "TP1 x PP2 x DP4"]


@pytest.mark.parametrize("billions", [0.5, 1.0, 7.0])
def test_size_is_about_what_was_asked(billions: float) -> None:
    size = gpt.Size.of_params(billions)
    num_params = 12 * size.num_layers * size.hidden_size**2 + 2 * size.vocab_size * size.hidden_size
    assert num_params == pytest.approx(billions * 1e9, rel=0.15)
    assert size.num_layers % 2 == size.vocab_size % 8 == size.num_heads % 8 == 0


def digest_of(tensor: torch.Tensor, chunks: int, axis: int, *, prepended: int = 0) -> int:
    """The sum over the shards that a cut makes, as ranks would give it."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    total = 0
    for number, part in enumerate(tensor.chunk(chunks, axis)):
        shard = ShardedTensor.from_rank_offsets(
            "w",
            part,
            *[(at, 0, 1) for at in range(prepended)],
            (axis + prepended, number, chunks),
            prepend_axis_num=prepended,
        )
        total += gpt._digest(shard)
    return gpt._wrapped(total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_does_not_depend_on_the_cut(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(12, 8, dtype=dtype)
    whole = digest_of(tensor, 1, 0)
    assert {digest_of(tensor, n, axis) for n, axis in [(2, 0), (3, 0), (4, 1)]} == {whole}
    assert digest_of(tensor, 1, 0, prepended=1) == whole
    monkeypatch.setattr(gpt, "_PIECE_NUMEL", 20)
    assert digest_of(tensor, 2, 1) == whole


def test_digest_sees_a_bit_and_a_swap() -> None:
    tensor = torch.randn(6, 4)
    other, swapped = tensor.clone(), tensor.clone()
    other.view(torch.int32)[3, 2] ^= 1
    swapped[[0, 1]] = swapped[[1, 0]]
    assert len({digest_of(each, 1, 0) for each in (tensor, other, swapped)}) == 3


def test_digest_takes_scalars() -> None:
    assert digest_of(torch.tensor([2.5]), 1, 0) == torch.tensor([2.5]).view(torch.int32).item()
