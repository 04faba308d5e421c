"""shardkeep: checkpoints of sharded training, saved without a child process, whole or not there at all.

    import shardkeep as sk

    sk.save(state, path)                       # on every rank of the job, or in one process
    sk.load(state, path)                       # into `state`, whatever the layout that saved
    handle = sk.save_async(state, path)        # returns once the state is copied; handle.wait() when
    committed

    run = sk.Run(root, keep=3)                 # numbered steps of components that commit together
    sk.megatron.install()                      # megatron.core.dist_checkpointing on shardkeep, code unchanged
    sk.ray.Dispatch(root, {"policy": actors})  # groups of Ray actors as one step

`import shardkeep` imports neither megatron nor ray; the submodules of these names do when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardkeep import errors
from shardkeep.checkpointer import is_committed, load, prepare, save, save_async
from shardkeep.config import Config
from shardkeep.handle import SaveHandle
from shardkeep.hold import register_optimizer
from shardkeep.inspect import Checkpoint, inspect
from shardkeep.run import Run
from shardkeep.types import LoadReport, SaveReport, StepReport, VerifyReport
from shardkeep.verify import verify
from shardkeep.version import __version__

if TYPE_CHECKING:
    from shardkeep import megatron, ray

__all__ = [
    "__version__",
    "Checkpoint",
    "Config",
    "LoadReport",
    "Run",
    "SaveHandle",
    "SaveReport",
    "StepReport",
    "VerifyReport",
    "errors",
    "inspect",
    "is_committed",
    "load",
    "megatron",
    "prepare",
    "ray",
    "register_optimizer",
    "save",
    "save_async",
    "verify",
]

_LAZY = ("megatron", "ray")  # each needs a package that a user may not have, or not want to import


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"shardkeep.{name}")
    raise AttributeError(f"module 'shardkeep' has no attribute '{name}'")
