"""A real Megatron GPT on any number of GPUs: what saves cost its training, under several parallel layouts.

    python benchmarks/multi_gpu.py --ranks 8 --params-b 7 --disk /data/scratch

One rank per GPU, as Ray actors or processes of our own, with NCCL. For each layout (TP over all, TP 2 x DP,
PP 2 x DP): step time without saves; synchronous and asynchronous saves and loads on tmpfs and on a disk; each
rank's stall beside its own page-locked copy, with all ranks copying at once; the node's GB/s beside bare
`pwrite` from all ranks; balance of bytes over ranks; memory of the node; step times beside a lazy save;
megatron-core and torch DCP. Then each layout's checkpoint is restored under the next one, bit for bit, and
one rank is killed in the middle of a save.
Without GPUs, `--device cpu` runs the same on gloo, without goals for speed: it proves the script.

Writes benchmarks/results/multi_gpu_<n>x.json; exit code 1 if a goal was missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from shardkeep.bench import gpt, scaling
from shardkeep.bench.machine import hardware
from shardkeep.bench.rows import Row

RESULTS = Path(__file__).resolve().parent / "results"
PLACES = ("tmpfs", "disk")
CALL_S = 900.0
Outcomes = list[dict[str, Any] | None]  # of each rank; None: it died


class SpawnLauncher:
    """Rank processes of our own."""

    def __init__(self, num_ranks: int, device: str) -> None:
        from shardkeep.testing.cluster import ClusterPool

        self._num_ranks, self._pool = num_ranks, ClusterPool()

    def call(self, function: Callable[..., Any], *args: Any, may_die: bool = False) -> Outcomes:
        outcomes = self._pool.outcomes(
            self._num_ranks, function, *args, timeout_s=CALL_S, process_group=False
        )
        broken = [each for each in outcomes if not each.ok and not (may_die and each.exit_code == -9)]
        if broken:
            raise SystemExit("\n\n".join(each.describe() for each in broken))
        return [each.value if each.ok else None for each in outcomes]

    def close(self) -> None:
        self._pool.close()


class RayLauncher:
    """Ray actors, new ones for each call, one per GPU."""

    def __init__(self, num_ranks: int, device: str) -> None:
        import ray

        self._ray, self._num_ranks = ray, num_ranks
        self._gpus = 1 if device == "cuda" else 0
        paths = os.pathsep.join(entry for entry in sys.path if entry)
        ray.init(
            address="local",
            num_cpus=num_ranks,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": paths}},
        )

    def call(self, function: Callable[..., Any], *args: Any, may_die: bool = False) -> Outcomes:
        ray = self._ray
        name = f"{function.__module__}:{function.__qualname__}"
        actor = ray.remote(num_cpus=1, num_gpus=self._gpus)(RankActor)
        actors = [actor.remote(rank, self._num_ranks) for rank in range(self._num_ranks)]
        found: Outcomes = []
        for waiting in [each.call.remote(name, *args) for each in actors]:
            try:
                found.append(ray.get(waiting, timeout=CALL_S))
            except ray.exceptions.RayActorError:
                if not may_die:
                    raise
                found.append(None)
        for each in actors:
            ray.kill(each)
        return found

    def close(self) -> None:
        self._ray.shutdown()


class RankActor:
    """One rank as a Ray actor."""

    def __init__(self, rank: int, size: int) -> None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}

    def call(self, name: str, *args: Any) -> Any:
        module, _, function = name.partition(":")
        return getattr(importlib.import_module(module), function)(*args)


def measure(launcher: Any, args: argparse.Namespace, options: scaling.ScaleOptions) -> dict[str, Any]:
    """All layouts, restores between them, and a death."""
    layouts = gpt.layouts(args.ranks)
    names = [layout.name(args.ranks) for layout in layouts]
    found: dict[str, Any] = {"layouts": {}, "restores": {}}
    for layout, name in zip(layouts, names, strict=True):
        say(f"measuring {name}")
        found["layouts"][name] = launcher.call(scaling.measure, options, layout, scaling.new_call())
    for number, layout in enumerate(layouts):
        following = (number + 1) % len(layouts)
        say(f"restoring {names[number]} as {names[following]}")
        found["restores"][f"{names[number]} -> {names[following]}"] = launcher.call(
            scaling.restore, options, layout, layouts[following], scaling.new_call()
        )
    if args.ranks > 1:
        say("killing a rank in the middle of a save")
        call = scaling.new_call()
        found["death"] = launcher.call(scaling.death, options, layouts[0], call, may_die=True)
    return found


def goals(found: dict[str, Any], options: scaling.ScaleOptions) -> list[Row]:
    """What is asked of it, and whether it was reached. Of speed and memory only on GPUs: the CPU's model is
    too small for them.
    """
    rows: list[Row] = []
    for name, ranks in found["layouts"].items():
        for number, place in enumerate(PLACES[: len(options.paths)]):
            on = [each["paths"][number] for each in ranks]
            written = [each["file_bytes"] for each in on]
            balance = max(written) / statistics.mean(written)
            rows.append(_most(f"{name}, {place}: bytes of the busiest rank / mean", 1.1, balance))
            rows += _goals_of_speed(f"{name}, {place}", on, options) if options.device == "cuda" else []
        if options.device == "cuda":
            rows += _goals_beside_peers(name, ranks) + _goals_of_lazy(name, ranks)
    for name, ranks in found["restores"].items():
        different = max(len(each["different"]) for each in ranks)
        rows.append(_most(f"{name}: tensors that differ, of {ranks[0]['num_keys']}", 0, different, ""))
    if "death" in found:
        rows += _goals_of_death([each for each in found["death"] if each], options)
    return rows


def _goals_of_speed(name: str, ranks: list[dict[str, Any]], options: scaling.ScaleOptions) -> list[Row]:
    stalls = [_warm(each["stall_s"]) / _warm(each["copy_s"]) for each in ranks]
    limit_mib = options.config.staging_bytes / 2**20 + 64
    extra_mib = max(each["extra_bytes"] for each in ranks) / 2**20
    return [
        _least(f"{name}: save, speed / bare", 0.75, _slowest(ranks, "write_s") / _slowest(ranks, "save_s")),
        _least(f"{name}: load, speed / bare", 0.7, _slowest(ranks, "read_s") / _slowest(ranks, "load_s")),
        _most(f"{name}: stall of a snapshot / own copy, worst rank", 1.15, max(stalls)),
        _most(f"{name}: memory of a synchronous save, worst rank", limit_mib, extra_mib, "MiB"),
    ]


def _goals_beside_peers(name: str, ranks: list[dict[str, Any]]) -> list[Row]:
    save_s = _slowest([each["paths"][0] for each in ranks], "save_s")
    return [
        _least(
            f"{name}, {PLACES[0]}: save, speed / {peer}",
            8.0,
            _slowest([each["peers"][peer] for each in ranks], "save_s") / save_s,
        )
        for peer in ranks[0]["peers"]
    ]


def _goals_of_lazy(name: str, ranks: list[dict[str, Any]]) -> list[Row]:
    lazy = [each["lazy"] for each in ranks]
    slower = [
        (statistics.mean(each["beside_s"]) / statistics.mean(each["alone_s"]) - 1) * 100
        for each in lazy
        if each["beside_s"]
    ]
    return [
        _most(
            f"{name}: stall of a lazy save, worst rank",
            10.0,
            max(each["stall_s"] for each in lazy) * 1e3,
            "ms",
        ),
        Row(
            what=f"{name}: slowdown beside a lazy save, worst rank",
            target=3.0,
            sense="<=",
            reached=max(slower) if slower else None,
            unit="%",
            error=None if slower else "no whole step fitted beside the save: raise --params-b",
        ),
    ]


def _goals_of_death(survivors: list[dict[str, Any]], options: scaling.ScaleOptions) -> list[Row]:
    silent = sum(each["error"] not in ("SaveFailed", "DeadlineExceeded") for each in survivors)
    broken = sum(not each["old_checkpoint_stands"] for each in survivors)
    slowest_s = max(each["seconds"] for each in survivors)
    name = f"a rank killed, {len(survivors)} left"
    return [
        _most(f"{name}: ranks without an error", 0, silent, ""),
        _most(f"{name}: ranks that lost the old checkpoint", 0, broken, ""),
        _most(f"{name}: longest wait", options.deadline_s + 5, slowest_s, "s"),
    ]


def _least(what: str, target: float, reached: float) -> Row:
    return Row(what=what, target=target, sense=">=", reached=reached)


def _most(what: str, target: float, reached: float, unit: str = "x") -> Row:
    return Row(what=what, target=target, sense="<=", reached=reached, unit=unit)


def _warm(seconds: list[float]) -> float:
    return scaling.median_of_warm(seconds)


def _slowest(ranks: list[dict[str, Any]], name: str) -> float:
    """A call of all ranks takes as long as its slowest; the median over rounds, without the first."""
    return _warm([max(same) for same in zip(*(each[name] for each in ranks), strict=True)])


def table(found: dict[str, Any], options: scaling.ScaleOptions) -> Table:
    """One line per layout and place."""
    result = Table(title="layouts", title_justify="left", box=box.ASCII2)
    heads = "layout|place|GB|step s|save GB/s|bare GB/s|load GB/s|stall first, then s|committed s|copy s|MiB"
    for head in heads.split("|"):
        result.add_column(head, justify="left" if head in ("layout", "place") else "right", overflow="fold")
    for name, ranks in found["layouts"].items():
        for number, place in enumerate(PLACES[: len(options.paths)]):
            on = [each["paths"][number] for each in ranks]
            total = sum(each["file_bytes"] for each in on) / 1e9
            first_s = max(each["stall_s"][0] for each in on)
            result.add_row(
                name,
                place,
                f"{total:.2f}",
                f"{max(statistics.median(each['step_s']) for each in ranks):.3f}",
                f"{total / _slowest(on, 'save_s'):.2f}",
                f"{total / _slowest(on, 'write_s'):.2f}",
                f"{total / _slowest(on, 'load_s'):.2f}",
                f"{first_s:.3f}, {_slowest(on, 'stall_s'):.4f}",
                f"{_slowest(on, 'snapshot_s'):.3f}",
                f"{_slowest(on, 'copy_s'):.4f}" if on[0]["copy_s"] else "",
                f"{sum(each['extra_bytes'] for each in on) / 2**20:.0f}",
            )
    return result


def show(found: dict[str, Any], options: scaling.ScaleOptions, rows: list[Row]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(table(found, options))
    for row in rows:
        reached = "" if row.reached is None else f"{row.reached:.2f} {row.unit}".rstrip()
        console.print(
            f"{row.verdict:7} {row.what}: {reached} ({row.sense} {row.target:g})",
            markup=False,
            soft_wrap=True,
        )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="default: one per GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--launcher", choices=("ray", "spawn"), help="default: ray where it is installed")
    parser.add_argument(
        "--params-b", type=float, default=1.0, help="size of the model, in billions (default 1)"
    )
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, help="a directory on a disk, measured too")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the first (default 3)")
    parser.add_argument(
        "--steps", type=int, default=10, help="training steps timed without saves (default 10)"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="I/O threads a rank; 0: this node's cores / ranks, at most 8"
    )
    parser.add_argument(
        "--deadline-s", type=float, default=20.0, help="deadline of the save that a rank dies in"
    )
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/multi_gpu_<n>x.json")
    args = parser.parse_args()
    args.ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    if args.device == "cuda" and args.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {args.ranks} needs as many GPUs, there are {torch.cuda.device_count()}")
    if args.ranks < 1 or args.rounds < 1 or args.steps < 1:
        parser.error("--ranks, --rounds and --steps must be at least 1; without a GPU take --device cpu")
    args.launcher = args.launcher or ("ray" if importlib.util.find_spec("ray") else "spawn")
    args.threads = args.threads or max(1, min(8, len(os.sched_getaffinity(0)) // args.ranks))
    args.out = args.out or RESULTS / f"multi_gpu_{args.ranks}x.json"
    return args


def main() -> None:
    args = arguments()
    machine = hardware(args.tmpfs, args.device)
    places = [args.tmpfs] + ([args.disk] if args.disk else [])
    scratch = [tempfile.mkdtemp(dir=place, prefix="shardkeep-multi-") for place in places]
    options = scaling.ScaleOptions(
        device=args.device,
        params_b=args.params_b,
        paths=tuple(scratch),
        rounds=args.rounds,
        steps=args.steps,
        threads=args.threads,
        deadline_s=args.deadline_s,
        peers=not args.no_peers,
    )
    launcher = (RayLauncher if args.launcher == "ray" else SpawnLauncher)(args.ranks, args.device)
    try:
        found = measure(launcher, args, options)
    finally:
        launcher.close()
        for directory in scratch:
            shutil.rmtree(directory, ignore_errors=True)
    rows = goals(found, options)
    document = {
        "hardware": machine,
        "options": {**dataclasses.asdict(options), "ranks": args.ranks, "launcher": args.launcher},
        "found": found,
        "rows": [{**dataclasses.asdict(row), "verdict": row.verdict} for row in rows],
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    show(found, options, rows)
    print(f"written: {args.out}")
    sys.exit(int(any(row.is_bad for row in rows)))


if __name__ == "__main__":  # rank processes and megatron-core's helpers import this file again
    main()
