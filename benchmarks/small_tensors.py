"""Save and load of states of many small tensors: torch DCP and shardkeep, in one process and one run.

In:  a number of tensors of 1 to 64 KiB, a directory (tmpfs by default), a number of repeats and of cores.
Out: seconds and ratios of the first save, repeated saves and loads, for a state in which nearly all shapes
     differ and for one of eight shapes; everything in benchmarks/results/<name>.json.
Fair: as in save_load.py, from which the contestants come. "First" is the first save of the process, with
     nothing cached. Both variants take about three minutes, nearly all of it torch DCP's.

    python benchmarks/small_tensors.py --tensors 50000 --repeats 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from save_load import RESULTS, Contestant, State, hardware, measure, ratio, shardkeep, torch_dcp

TARGET = 5.0  # times torch DCP's speed, first save and repeated ones
FEW_SHAPES = ((256,), (512, 2), (2048,), (64, 64), (96, 64), (8192,), (96, 128), (128, 128))


def make_state(variant: str, num_tensors: int) -> State:
    """float32 tensors of 1 to 64 KiB, about 32 KiB in the mean: one and two dimensions."""
    rng = random.Random(0)

    def shape() -> tuple[int, ...]:
        if variant == "few shapes":
            return rng.choice(FEW_SHAPES)
        rows = rng.randint(1, 128)
        return rows, rng.randint(-(-256 // rows), 16384 // rows)

    names = (f"model.layers.{n // 100}.part{n % 100}.weight" for n in range(num_tensors))
    return {name: torch.randn(shape()) for name in names}


def rows(variant: str, ours: Contestant, peer: Contestant) -> list[dict[str, Any]]:
    """What is compared, with the target where there is one."""
    result = []
    for operation in ("save", "load"):
        first = peer.cold[operation] / ours.cold[operation]
        for when, reached, ours_s, peer_s in (
            ("first", first, ours.cold[operation], peer.cold[operation]),
            ("repeat", ratio(ours, peer, operation), ours.median_s(operation), peer.median_s(operation)),
        ):
            target = TARGET if operation == "save" else 1.0
            row = {"variant": variant, "what": f"{operation}, {when}", "torch_dcp_s": peer_s}
            result.append(row | {"shardkeep_s": ours_s, "reached": reached, "target": target})
    return result


def run(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    state = make_state(variant, args.tensors)
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    ours = shardkeep(state, target)
    assert ours is not None
    peer = torch_dcp(state, target, 1)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="shardkeep-bench-") as scratch:
        measure([ours, peer], state, target, Path(scratch) / "checkpoint", args.repeats)
    return {
        "num_bytes": sum(t.nbytes for t in state.values()),
        "num_shapes": len({t.shape for t in state.values()}),
        "rows": rows(variant, ours, peer),
        "samples_s": {each.name: {"cold": each.cold, "warm": each.warm} for each in (ours, peer)},
    }


def table(results: dict[str, dict[str, Any]]) -> Table:
    shown = Table("state", "what")
    for heading in ("torch DCP s", "shardkeep s", "times as fast", "target"):
        shown.add_column(heading, justify="right")
    for variant, result in results.items():
        name = f"{variant} ({result['num_shapes']}, {result['num_bytes'] / 2**30:.2f} GiB)"
        for row in result["rows"]:
            verdict = "reached" if row["reached"] >= row["target"] else "MISSED"
            shown.add_row(
                name,
                row["what"],
                f"{row['torch_dcp_s']:.2f}",
                f"{row['shardkeep_s']:.2f}",
                f"{row['reached']:.1f}x",
                f"{row['target']:g}x {verdict}",
            )
            name = ""
    return shown


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare saves and loads of many small tensors.")
    parser.add_argument("--tensors", type=int, default=50_000, help="number of tensors (default 50000)")
    parser.add_argument("--repeats", type=int, default=1, help="repeated saves and loads (default 1)")
    parser.add_argument("--cores", type=int, default=2, help="cores to run on (default 2)")
    parser.add_argument(
        "--dir", type=Path, default=Path("/dev/shm"), help="where to write (default /dev/shm)"
    )
    parser.add_argument(
        "--name", default="small_tensors", help="name of the result file (default small_tensors)"
    )
    args = parser.parse_args()
    if min(args.tensors, args.repeats, args.cores) <= 0:
        parser.error("--tensors, --repeats and --cores must be positive")
    return args


def main() -> None:
    warnings.filterwarnings("ignore")
    args = _arguments()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    machine = hardware(args.dir, len(cores))  # before the run adds to the load
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    results = {variant: run(variant, args) for variant in ("many shapes", "few shapes")}
    console = Console(width=None if os.isatty(1) else 120)
    console.print(
        f"{machine['cpu']}, {machine['cores_used']} of {machine['cores']} cores, {machine['filesystem']},"
        f" load average {machine['load_average']:.1f} at the start; {args.tensors} tensors of 1 to 64 KiB"
    )
    console.print(table(results))
    RESULTS.mkdir(exist_ok=True)
    out = RESULTS / f"{args.name}.json"
    content = {"num_tensors": args.tensors, "hardware": machine, "variants": results}
    out.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"written: benchmarks/results/{out.name}")


if __name__ == "__main__":
    main()
