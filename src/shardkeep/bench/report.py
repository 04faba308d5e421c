"""Results -> tables for people (plain where there is no terminal), or JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from shardkeep.bench import bare, ours
from shardkeep.bench.config import BenchOptions
from shardkeep.bench.contestant import Samples, by_name, ratio
from shardkeep.bench.rows import Row
from shardkeep.bench.speed import Measured

_STYLES = {"met": "green", "missed": "bold red", "failed": "bold red", "absent": "dim"}
_WIDTH = 150


def to_json(
    options: BenchOptions, machine: dict[str, Any], measured: dict[str, Measured], rows: list[Row]
) -> dict[str, Any]:
    """Everything: hardware, options, every sample, every row with its verdict."""
    chosen = {
        name: value for name, value in dataclasses.asdict(options).items() if name not in ("json", "out")
    }
    return {
        "hardware": machine,
        "options": {**chosen, "path": str(options.path), "sections": list(options.chosen_sections)},
        "measured": {name: dataclasses.asdict(each) for name, each in measured.items()},
        "rows": [{**dataclasses.asdict(row), "verdict": row.verdict} for row in rows],
    }


def show(machine: dict[str, Any], measured: dict[str, Measured], rows: list[Row]) -> None:
    """Print the tables to stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(_machine_lines(machine), markup=False, soft_wrap=True)
    for name, each in measured.items():
        for table in _tables(name, each):
            console.print(table)
    console.print(_goals(rows))


def _machine_lines(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    gpu = f"{machine['num_gpus']} x {machine['gpu']}, CUDA {machine['cuda']}, " if "gpu" in machine else ""
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {machine['kernel']}, {machine['filesystem']}; load average {machine['load_average']:.1f} at "
        f"the start\nPython {machine['python']}, {versions}"
    )


def _tables(section: str, measured: Measured) -> list[Table]:
    title = (
        f"{section}: {measured.num_bytes / 2**30:.2f} GiB in {measured.num_tensors} tensors, "
        f"{measured.num_threads} threads a rank"
    )
    tables = [_table(f"save, {title}", "save", measured), _table(f"load, {title}", "load", measured)]
    failed = [each for each in measured.samples if each.failed]
    for table in tables[:1]:
        for each in failed:
            table.add_row(each.name, *[""] * 7, f"failed: {each.failed}")
    return tables


def _table(title: str, operation: str, measured: Measured) -> Table:
    found = by_name(measured.samples)
    us, ceiling = found.get(ours.SYNC), found.get(bare.BARE)
    table = Table(title=title, title_justify="left", box=box.ASCII2)
    table.add_column("")
    headings = ("cold s", "warm s", "GB/s", "of bare", "shardkeep is", "stall first, then s", "memory MiB")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_column("how", overflow="fold")
    for each in measured.samples:
        warm_s = each.median_s(operation)
        if warm_s is not None:
            table.add_row(
                each.name,
                f"{each.cold[operation]:.3f}",
                f"{warm_s:.3f}",
                f"{measured.num_bytes / warm_s / 1e9:.2f}",
                _times(ratio(ceiling, each, operation), ""),
                _times(ratio(each, us, operation), "x"),
                _stalls(each) if operation == "save" else "",
                f"{each.peak_bytes.get(operation, 0) / 2**20:.0f}",
                each.note,
            )
    return table


def _stalls(samples: Samples) -> str:
    then_s = samples.median_s("stall")
    return "" if then_s is None else f"{samples.cold['stall']:.3f}, {then_s:.4f}"


def _times(value: float | None, sign: str) -> str:
    return "" if value is None else f"{value:.2f}{sign}"


def _goals(rows: list[Row]) -> Table:
    table = Table(title="goals", title_justify="left", box=box.ASCII2)
    for name in ("what", "target", "reached", "verdict", "note"):
        table.add_column(name, overflow="fold")
    for row in rows:
        reached = "" if row.reached is None else f"{row.reached:.2f} {row.unit}"
        table.add_row(
            row.what,
            f"{row.sense} {row.target:g} {row.unit}",
            reached,
            row.verdict,
            row.error or row.note,
            style=_STYLES[row.verdict],
        )
    return table
