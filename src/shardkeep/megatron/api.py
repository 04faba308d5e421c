"""`save` and `load` with the signatures and meaning of `megatron.core.dist_checkpointing` 0.16.0.

Strategies are accepted and only checked for their backend: who writes what is planned by shardkeep, which
balances over all replicas as `FullyParallelSaveStrategyWrapper` does. Errors are shardkeep's and Megatron's
`CheckpointingException` at once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException

from shardkeep import checkpointer, columns, plan
from shardkeep.begun import Begun
from shardkeep.config import resolve
from shardkeep.coordinate import Coordinator
from shardkeep.errors import ShardkeepError
from shardkeep.handle import SaveHandle, background
from shardkeep.loading import Loading
from shardkeep.megatron.state import MegatronTemplate, capture_megatron
from shardkeep.megatron.strict import Strictness
from shardkeep.storage import storage_for
from shardkeep.types import CaptureMode, SaveReport, Target

log = logging.getLogger("shardkeep")

CONTENT_METADATA = "content_metadata"


def save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
) -> Any:
    """See `megatron.core.dist_checkpointing.save`. An existing checkpoint is replaced in one step, as
    trainers save a step again after a crash. With `async_sharded_save` the state is copied before this
    returns, and the AsyncRequest writes the copy.
    """
    _check_strategies(sharded_strategy, common_strategy)
    state = dict(sharded_state_dict)
    if content_metadata is not None:
        state[CONTENT_METADATA] = _without_groups(content_metadata)
    target = Target(
        storage=storage_for(checkpoint_dir),
        overwrite=True,
        lenient=True,
        check_cover=validate_access_integrity,
    )

    def take_apart(_: Mapping[str, Any]) -> Any:
        return capture_megatron(state, before_comparing=preprocess_common_before_consistancy_check)

    with as_megatron_errors():
        mode: CaptureMode = "snapshot" if async_sharded_save else "sync"
        begun = checkpointer.begin(state, target, resolve(None), mode=mode, take_apart=take_apart)
        if not async_sharded_save:
            checkpointer.finish(begun)
            return None
    pending = PendingSave(begun)
    if begun.frozen.unguarded:
        pending.start()  # no memory for a copy, and the caller may change the state when it has control
    return pending.request()


def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = "assume_ok_unexpected",
) -> Any:
    """See `megatron.core.dist_checkpointing.load`. `strict` takes Megatron's StrictHandling or its value;
    where it asks for the differing keys, returns (state dict, missing keys, unexpected keys) in Megatron's
    sense of these words.
    """
    _check_strategies(sharded_strategy, common_strategy)
    with as_megatron_errors():
        rule = Strictness.of(strict)
        loading = Loading(
            storage_for(checkpoint_dir),
            resolve(None),
            lambda: MegatronTemplate(sharded_state_dict, quantise=False),
            rule.judge,
            check=_check_access if validate_access_integrity else lambda ranks, template: None,
        )
        checkpointer.load_one(loading)
    missing, unexpected = loading.judged
    loaded = loading.template.loaded
    return (loaded, missing, unexpected) if rule.returns_keys else loaded


def _check_access(ranks: Coordinator, template: MegatronTemplate) -> None:
    """Main replicas of all ranks together must ask for every tensor exactly once, as Megatron demands."""
    everyone = ranks.gather("access", columns.pack(template.headers))
    if everyone is not None:
        plan.check_cover(columns.unpack(everyone), "megatron")


class PendingSave:
    """A captured save as Megatron's AsyncRequest: written by whoever runs its function, judged by its
    finalize function.
    """

    def __init__(self, begun: Begun) -> None:
        self._begun = begun
        self._writing: SaveHandle[SaveReport] | None = None
        self.report: SaveReport | None = None
        self._error: BaseException | None = None

    def request(self) -> Any:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

        return AsyncRequest(self.write, (), [self.finalize])

    def start(self) -> None:
        """Write in the background from now on; returns when the state is read. To wait for the commit here
        could be for ever: of the other ranks, those with memory for a copy write when Megatron runs their
        requests, which may come after a collective with this one.
        """
        with self._begun.or_abandoned():
            self._writing = background.submit(
                lambda: checkpointer.finish(self._begun), captured=self._begun.captured
            )
        self._begun.wait_unguarded()

    def write(self) -> None:
        """Write and commit, once; an error is kept for `finalize`, which Megatron calls on every rank at the
        same point.
        """
        if self.report or self._error:
            return
        try:
            self.report = self._writing.wait() if self._writing else checkpointer.finish(self._begun)
        except Exception as e:
            log.error("save failed: %s", e)
            self._error = e

    def finalize(self) -> None:
        with as_megatron_errors():
            if self._error is not None:
                raise self._error


@contextmanager
def as_megatron_errors() -> Iterator[None]:
    """Raise shardkeep's errors as CheckpointingException too, which code written for Megatron catches."""
    try:
        yield
    except CheckpointingException:
        raise
    except ShardkeepError as e:
        raise _both(type(e), e.what, e.fields) from e


def _both(kind: type[ShardkeepError], what: str, fields: dict[str, Any]) -> ShardkeepError:
    """An error that is `kind` and CheckpointingException; picklable through this function."""

    def reduce(self: ShardkeepError) -> Any:
        return _both, (kind, self.what, self.fields)

    both = type(
        kind.__name__, (kind, CheckpointingException), {"__reduce__": reduce, "__module__": kind.__module__}
    )
    error: ShardkeepError = both(what, **fields)
    return error


def _check_strategies(sharded: Any, common: Any) -> None:
    for strategy, known in ((sharded, "torch_dist"), (common, "torch")):
        backend = strategy[0] if isinstance(strategy, tuple) else getattr(strategy, "backend", known)
        if backend != known:
            raise CheckpointingException(
                f"shardkeep stores the backend '{known}', but the strategy asks for '{backend}'"
            )


def _without_groups(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron adds the layout's process group to the metadata that it is given; a group cannot be stored."""
    return {k: v for k, v in metadata.items() if not isinstance(v, dist.ProcessGroup)}
