"""One error for all ranks of a session: an exception on one of them -> what every rank raises.

In: whatever is raised while a session goes on. Out: the session's shared error, told to the others, marked so
that nobody tells it again. Invariant: an error that is raised keeps neither its own frames nor the state
alive once it is handled.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from shardkeep.errors import DeadlineExceeded, ShardkeepError

if TYPE_CHECKING:
    from shardkeep.coordinate import Coordinator

E = TypeVar("E", bound=BaseException)


class RemoteError(Exception):
    """Another rank failed; carries the session's shared error. Internal: `session` turns it into that
    error.
    """

    def __init__(self, error: ShardkeepError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def sharing(coordinator: Coordinator, failure: type[ShardkeepError]) -> Iterator[None]:
    """Turn an error inside into the session's shared error (see `session`)."""
    try:
        yield
    except RemoteError as e:
        coordinator.finish()
        raise _marked(e.error) from None
    except Exception as e:
        # No name for it here: the error's traceback has this frame, and the two would keep each other, and
        # with them the state, until cycles are collected.
        raise _told(e, coordinator, failure)  # noqa: B904
    except BaseException as e:  # an interrupt goes on as itself, but the others must not wait for us
        coordinator.fail(as_shared(e, coordinator, failure))
        coordinator.finish()
        _marked(e)
        raise


def _told(error: Exception, coordinator: Coordinator, failure: type[ShardkeepError]) -> ShardkeepError:
    """What all ranks raise for an error of this one, or of one that was first."""
    own = as_shared(error, coordinator, failure)
    shared = coordinator.fail(own)
    coordinator.finish()
    shared.__cause__ = error if shared is own and error is not own else None
    return _marked(shared)


def _marked(error: E) -> E:
    error.__dict__["shardkeep_is_shared"] = True
    return error


def is_shared(error: BaseException) -> bool:
    """Whether a session has raised this error, so that every rank knows of it."""
    return "shardkeep_is_shared" in error.__dict__


def as_shared(
    error: BaseException, coordinator: Coordinator, failure: type[ShardkeepError]
) -> ShardkeepError:
    """An error as all ranks will raise it."""
    where = {} if coordinator.world_size == 1 else {"rank": coordinator.rank, "host": socket.gethostname()}
    if isinstance(error, DeadlineExceeded):
        return failure(error.what, **{**where, **error.fields})
    if isinstance(error, ShardkeepError):
        return type(error)(error.what, **{**where, **error.fields})
    return failure(f"{type(error).__name__}: {error}", **where)
