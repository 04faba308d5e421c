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
    gpus_per_actor = _gpus_per_actor()
    with report.Display(config, root) as display:
        ray.init(
            address="local",
            num_cpus=WORLD_SIZE + 1,
            num_gpus=gpus_per_actor * WORLD_SIZE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=OBJECT_STORE_BYTES,
        )
        try:
            task = play.remote(config, root, gpus_per_actor)
            position, finished = 0, False
            while not finished:
                finished = bool(ray.wait([task], timeout=0.2)[0])
                new, position = events.new_events(position)
                for event in new:
                    display.show(event)
            all_held = ray.get(task)
        finally:
            ray.shutdown()
    report.summary(list(events), root, display.console)
    return 0 if all_held else 1


@ray.remote(num_cpus=0)
def play(config: DemoConfig, root: Path, gpus_per_actor: int) -> bool:
    """The Ray task that drives the job, on an asyncio loop: uvloop's where it is installed."""
    scenario = Scenario(config, root, gpus_per_actor)
    log_library_to(scenario.events, source="trainer")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(scenario.play())


def _gpus_per_actor() -> int:
    """1 if there is a GPU for every rank, as two cannot share one through NCCL; else 0: none is used."""
    if torch.cuda.device_count() >= WORLD_SIZE:
        return 1
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
