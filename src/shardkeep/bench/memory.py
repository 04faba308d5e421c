"""Section `memory`: host memory that a synchronous save takes, and that many in a row leave behind.

The ring is used by what cannot be written from its own memory: views, device tensors. `plain` is a contiguous
CPU state, which needs none of it. Runs before anything else has saved in this process, or the ring would be
there already and not be seen.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import shardkeep as sk
from shardkeep.bench.config import BenchOptions
from shardkeep.bench.contestant import State
from shardkeep.bench.machine import PeakMemory, own_bytes, trim
from shardkeep.bench.rows import Row
from shardkeep.bench.speed import make_state

MIB = 1 << 20
STAGING_BYTES = 256 * MIB
ALLOWED_BYTES = 64 * MIB
_SMALL_BYTES = 32 * MIB
_NUM_SAVES = 50
_GROWTH_BYTES = 4 * MIB


def run(options: BenchOptions) -> list[Row]:
    """Rows of the section. One process; the state is the one of section `speed`."""
    state = make_state(options, 0, 1)
    config = sk.Config(io_threads=options.threads, staging_bytes=STAGING_BYTES)
    with tempfile.TemporaryDirectory(dir=options.path, prefix="shardkeep-bench-") as scratch:
        path = Path(scratch) / "checkpoint"
        kinds = (
            [("plain", state), ("strided", strided(state))] if options.device == "cpu" else [("GPU", state)]
        )
        rows = [_peak(kind, partial(sk.save, of, path, config=config), path) for kind, of in kinds]
        few = {
            key: tensor[: _SMALL_BYTES // tensor.element_size()] for key, tensor in list(state.items())[:1]
        }
        rows.append(_growth(lambda: sk.save(few, path, overwrite=True, config=config)))
    return rows


def strided(state: State) -> State:
    """The same memory, transposed: nothing is contiguous, nothing is copied."""
    return {key: tensor[: tensor.numel() // 2 * 2].view(2, -1).t() for key, tensor in state.items()}


def _peak(kind: str, save: Callable[[], object], path: Path) -> Row:
    with PeakMemory() as peak:
        save()
    shutil.rmtree(path)
    return Row(
        what=f"host memory of a synchronous save, {kind} state",
        target=(STAGING_BYTES + ALLOWED_BYTES) / MIB,
        sense="<=",
        reached=peak.extra_bytes / MIB,
        unit="MiB",
        note=f"staging_bytes {STAGING_BYTES // MIB} MiB",
    )


def _growth(save: Callable[[], object]) -> Row:
    def after(num_saves: int) -> int:
        for _ in range(num_saves):
            save()
        trim()
        return own_bytes()

    second = after(2)
    return Row(
        what=f"memory after {_NUM_SAVES} saves, over the second's",
        target=_GROWTH_BYTES / MIB,
        sense="<=",
        reached=(after(_NUM_SAVES - 2) - second) / MIB,
        unit="MiB",
    )
