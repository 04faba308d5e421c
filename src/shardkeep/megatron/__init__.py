"""Drop-in for `megatron.core.dist_checkpointing.save` and `load`, and `install()` to put it there.

    import shardkeep as sk
    sk.megatron.install()      # in every worker, before the first save
    dist_checkpointing.save(state, directory, strategy, async_sharded_save=True)   # unchanged user code, on
    shardkeep

Of Megatron only its data contract is used (`mapping`), and one seam: `AsyncCallsQueue._get_async_caller`,
which install() points to a thread instead of a forked or spawned process.
"""

from shardkeep.megatron.api import load, save
from shardkeep.megatron.seam import install, uninstall

__all__ = ["install", "load", "save", "uninstall"]
