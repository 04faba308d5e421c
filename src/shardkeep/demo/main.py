"""The entry point: starts Ray, runs the scenario as a Ray task, shows its events, reports.

run (this process)  ->  Ray task  ->  asyncio loop  ->  Scenario  ->  GrpoTrainer.train
    ->  save_checkpoints  ->  Dispatch.save  ->  MegatronPolicyWorker  ->  MegatronStrategy
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import ray
import torch

from shardkeep.demo import report
from shardkeep.demo.config import DemoConfig
from shardkeep.demo.events import EventLog, log_library_to
from shardkeep.demo.scenario import Scenario
from shardkeep.demo.worker import WORLD_SIZE

OBJECT_STORE_BYTES = 256 << 20


def run(config: DemoConfig) -> int:
    """Run the demo; 0 if every check held, 1 if not."""
    root = config.fresh_root()
    events = EventLog(root / "events.jsonl")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with report.Display(config) as display:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=OBJECT_STORE_BYTES,
        )
        try:
            task = play.remote(config, root)
            position = 0
            finished: list[ray.ObjectRef] = []
            while not finished:
                finished, _ = ray.wait([task], timeout=0.2)
                new, position = events.new_events(position)
                for event in new:
                    display.show(event)
            all_held = ray.get(task)
        finally:
            ray.shutdown()
    report.summary(list(events), root, display.console)
    return 0 if all_held else 1


@ray.remote(num_cpus=0)
def play(config: DemoConfig, root: Path) -> bool:
    """The Ray task that drives the job, on an asyncio loop: uvloop where it is installed."""
    num_gpus = 1 if torch.cuda.is_available() and torch.cuda.device_count() >= WORLD_SIZE else 0
    scenario = Scenario(config, root, num_gpus)
    log_library_to(scenario.events, source="trainer")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(scenario.play())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
