"""Section `small`: saves of tens of thousands of tensors of 1 to 64 KiB, beside torch DCP's default writer.

Of loads ours alone runs, to compare what was saved: DCP's would take most of the section's minutes.
"""

from __future__ import annotations

from dataclasses import replace

from shardkeep.bench import ours, peers, speed
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
        ),
        only=(peers.DCP, ours.SYNC),
    )
    what = f"{measured.num_tensors:,} small tensors: "
    return measured, [faster(measured.samples, "save", peers.DCP, 5.0, what=what)]
