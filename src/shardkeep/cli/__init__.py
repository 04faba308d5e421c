"""The command line, `shardkeep`. A wrong option gives one line on stderr and exit code 2."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from shardkeep.bench.config import BenchOptions
from shardkeep.demo.config import DemoConfig, WrongOption

WRONG_USE = 2
INTERRUPTED = 130
QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",  # the demo kills one, and says so itself
}
"""Ray reads these when it is imported."""

app = App(
    name="shardkeep",
    help="Checkpoints for sharded training that lives inside Ray actors.",
    version=lambda: version("shardkeep"),
    help_format="plaintext",
    result_action="return_value",
)


class Unusable(Exception):
    """The command cannot run here; the message is the one line to show."""


@app.command
def demo(config: Annotated[DemoConfig | None, Parameter(name="*")] = None) -> int:
    """Train a small Megatron model with GRPO in Ray actors, kill one while it saves, resume, and check.

    Takes about a minute on two cores. Exit code 0 only if every check held.
    """
    missing = [name for name in ("megatron", "ray", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise Unusable(f"the demo needs {', '.join(missing)}: pip install 'shardkeep[demo]'")
    for name, value in QUIET_RAY.items():
        os.environ.setdefault(name, value)
    from shardkeep.demo.main import run as run_demo

    return run_demo(config or DemoConfig())


@app.command
def bench(options: Annotated[BenchOptions | None, Parameter(name="*")] = None) -> int:
    """Measure saves and loads on this machine, as ratios to the hardware and to torch DCP and megatron-core.

    Takes about four minutes with the defaults. Exit code 0 if every goal that applies was reached, 1 if not.
    """
    from shardkeep.bench.main import run as run_bench

    return run_bench(options or BenchOptions())


def run(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    try:
        return int(app(list(arguments), print_error=False, exit_on_error=False) or 0)
    except (CycloptsError, WrongOption, Unusable) as error:
        print(f"shardkeep: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print("shardkeep: interrupted", file=sys.stderr)
        return INTERRUPTED


def main() -> None:
    """Entry point of the `shardkeep` command."""
    sys.exit(run(sys.argv[1:]))
