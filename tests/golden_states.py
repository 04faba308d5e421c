"""The states of the golden checkpoints, and how they were made: `python tests/golden_states.py <version>`.

A golden checkpoint is never made again for the same format version: it stands for what older releases have
written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

GOLDEN = Path(__file__).resolve().parent / "golden"


def plain_state() -> dict[str, Any]:
    """One tensor of many kinds and some plain values, nested."""
    return {
        "model": {
            "weight": torch.arange(600, dtype=torch.float32).reshape(20, 30) / 7,
            "half": torch.arange(16, dtype=torch.float32).to(torch.bfloat16),
            "transposed": torch.arange(12).reshape(3, 4).t(),
            "empty": torch.empty(0, 3),
            "flags": torch.tensor([True, False, True]),
        },
        "step": torch.tensor(7),
        "history": [1, 2.5, "three"],
        "layers": [torch.ones(2), {"name": "last"}],
    }


def megatron_state() -> dict[str, Any]:
    """Two shards of one tensor, a prepended axis, an object and common values."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    full = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    halves = [
        ShardedTensor.from_rank_offsets("decoder.weight", full[:, 4 * i : 4 * i + 4].clone(), (1, i, 2))
        for i in range(2)
    ]
    layer = ShardedTensor.from_rank_offsets("layers.norm", torch.arange(5.0), (0, 0, 1), prepend_axis_num=1)
    return {
        "model": {"left": halves[0], "right": halves[1], "norm": layer},
        "rng": ShardedObject("rng", {"seed": 11, "state": torch.arange(4)}, (1,), (0,)),
        "iteration": 42,
        "args": {"lr": 1e-3, "names": ["a", "b"]},
    }


if __name__ == "__main__":
    import shardkeep as sk

    small = sk.Config(split_bytes=1024, chunk_bytes=1024)  # several boxes and several chunks
    sk.save(plain_state(), GOLDEN / sys.argv[1] / "dcp", config=small)
    sk.save(megatron_state(), GOLDEN / sys.argv[1] / "megatron", config=small)
