"""Random number generators of a rank: seeded per data-parallel rank, saved and restored by plain values.

Four generators: Python's, NumPy's, torch's and the states that Megatron's tracker keeps. Their states
go into a checkpoint as tensors and numbers, which `torch.load(weights_only=True)` reads.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed


def seed_everything(seed: int, dp_rank: int) -> None:
    """Seed all four. Ranks of one tensor-parallel group draw alike, data-parallel ranks differ."""
    seed = seed + 10 * dp_rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def state_dict() -> dict[str, Any]:
    """The state of this rank's generators."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = _numpy_state()
    return {
        "python": {"version": version, "internal": torch.tensor(internal), "gauss": gauss},
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }


def load_state_dict(state: dict[str, Any]) -> None:
    """Continue where `state_dict` was taken."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def as_bytes() -> bytes:
    """The same states as bytes, to compare two runs by."""
    _, keys, *rest = _numpy_state()
    states = [torch.get_rng_state(), torch.cuda.get_rng_state()]
    states += [state for _, state in sorted(get_cuda_rng_tracker().get_states().items())]
    head = repr((random.getstate(), rest)).encode() + keys.tobytes()
    return head + b"".join(state.numpy().tobytes() for state in states)


def _numpy_state() -> tuple[str, np.ndarray[Any, np.dtype[np.uint32]], int, int, float]:
    return np.random.get_state(legacy=True)  # type: ignore[return-value]
