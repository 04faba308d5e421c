"""Section `small`: tens of thousands of tensors of 1 to 64 KiB, beside torch DCP's default writer."""

from __future__ import annotations

from dataclasses import replace

from shardkeep.bench import peers, speed
from shardkeep.bench.config import BenchOptions
from shardkeep.bench.rows import Row, faster

_MAX_ROUNDS = 2


def run(options: BenchOptions) -> tuple[speed.Measured, list[Row]]:
    """The samples and the section's rows."""
    measured = speed.run(
        replace(
            options,
            tensors=options.small_tensors,
            min_kib=1.0,
            max_kib=64.0,
            rounds=min(options.rounds, _MAX_ROUNDS),
            peers=("dcp",),
        )
    )
    what = f"{measured.num_tensors:,} small tensors: "
    rows = [faster(measured.samples, operation, peers.DCP, 5.0, what=what) for operation in ("save",)]
    return measured, rows
