"""Options -> measurements -> tables or JSON; exit code 0 only if no goal that applies was missed."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout

import torch

from shardkeep.bench import beside, memory, planning, report, rows, small, speed
from shardkeep.bench.config import BenchOptions
from shardkeep.bench.machine import hardware
from shardkeep.bench.rows import Row
from shardkeep.demo.config import WrongOption


def run(options: BenchOptions) -> int:
    """Run the sections; 1 if a row was missed or could not be judged for an error, else 0."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise WrongOption("--device cuda needs a GPU that torch can use")
    options.check_room()
    machine = hardware(options.path, options.device)
    with redirect_stdout(sys.stderr):  # peers print
        measured, goals = _sections(options)
    document = json.dumps(report.to_json(options, machine, measured, goals), indent=1)
    if options.out:
        options.out.write_text(document + "\n")
    if options.json:
        print(document)
    else:
        report.show(machine, measured, goals)
    return int(any(row.is_bad for row in goals))


def _sections(options: BenchOptions) -> tuple[dict[str, speed.Measured], list[Row]]:
    """In this order, since section `memory` has to be the first that saves."""
    measured: dict[str, speed.Measured] = {}
    goals: list[Row] = []
    chosen = options.chosen_sections
    if "memory" in chosen:
        goals += memory.run(options)
    if "speed" in chosen:
        measured["speed"] = speed.run(options)
        goals += rows.of_speed(measured["speed"].samples, options.device)
    if "small" in chosen:
        measured["small"], of_small = small.run(options)
        goals += of_small
    if "beside" in chosen:
        goals += beside.run(options)
    if "plan" in chosen:
        goals += planning.run(options)
    return measured, goals
