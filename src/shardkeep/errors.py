"""Every error that shardkeep raises.

    ShardkeepError
    |-- InputError                 the caller's state or path cannot be used; nothing was written or changed
    |   |-- InvalidState           (ValueError) shards overlap, leave gaps, repeat or cannot be stored
    |   |-- StorageReleased        (ValueError) a tensor's memory was freed or shrunk (offloading)
    |   |-- AlreadyCommitted       (FileExistsError) the target holds a committed checkpoint
    |   |-- NotCommitted           (FileNotFoundError) the path holds no committed checkpoint
    |   |-- MissingKey             (KeyError) the state asks for a key that the checkpoint lacks
    |   |-- UnexpectedKey          (KeyError) the checkpoint holds a key that the state does not ask for
    |   |-- Mismatch               (ValueError) shape or dtype differ
    |   `-- NoSpace                (OSError) the file system cannot hold what the plan would write
    |-- SaveFailed                 (RuntimeError) a save failed on some rank; the previous checkpoint stands
    |   `-- StateChanged           weights changed while a lazy save was reading them
    |-- LoadFailed                 (RuntimeError) a load failed on some rank
    |-- DeadlineExceeded           (TimeoutError) ranks did not answer in time; they are named
    |-- Corrupt                    (ValueError) stored bytes are not what was written
    |-- UnsafePickle               (ValueError) a foreign file asks for a class outside the allow-list
    `-- Cancelled                  (RuntimeError) the caller cancelled the save

All are picklable, because Ray carries them between processes. `fields` holds what the message names.
"""

from __future__ import annotations

from typing import Any


class ShardkeepError(Exception):
    """Base. `what` says what happened; keyword fields (key, rank, host, path, expected, got, remedy, ...) say
    where.
    """

    def __init__(self, what: str, **fields: Any) -> None:
        super().__init__(_compose(what, fields))
        self.what = what
        self.fields = fields

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.what, self.fields))

    def __str__(self) -> str:  # KeyError would show the repr of its argument
        return str(self.args[0]) if self.args else ""


def _compose(what: str, fields: dict[str, Any]) -> str:
    where = [
        f"{name} {value!r}" if isinstance(value, str) else f"{name} {value}"
        for name, value in fields.items()
        if name not in ("expected", "got", "remedy")
    ]
    text = what + (f" ({', '.join(where)})" if where else "")
    if "expected" in fields or "got" in fields:
        text += f": expected {fields.get('expected')}, got {fields.get('got')}"
    return text + (f". {fields['remedy']}" if fields.get("remedy") else "")


def _rebuild(kind: type[ShardkeepError], what: str, fields: dict[str, Any]) -> ShardkeepError:
    return kind(what, **fields)


class InputError(ShardkeepError):
    """The caller's state or path cannot be used; nothing was written or changed."""


class InvalidState(InputError, ValueError):
    """Shards overlap, leave gaps, repeat, or hold something that cannot be stored."""


class StorageReleased(InputError, ValueError):
    """A tensor's memory was freed or shrunk, as offloading does with `resize_(0)`."""


class AlreadyCommitted(InputError, FileExistsError):
    """The target holds a committed checkpoint and `overwrite` was not asked for."""


class NotCommitted(InputError, FileNotFoundError):
    """The path holds no committed checkpoint."""


class MissingKey(InputError, KeyError):
    """The state asks for a key that the checkpoint lacks."""


class UnexpectedKey(InputError, KeyError):
    """The checkpoint holds a key that the state does not ask for."""


class Mismatch(InputError, ValueError):
    """Shape or dtype of the state and of the checkpoint differ."""


class NoSpace(InputError, OSError):
    """The file system has less room than the plan needs."""


class SaveFailed(ShardkeepError, RuntimeError):
    """A save failed on some rank. Every rank raises it; the previous checkpoint stands."""


class StateChanged(SaveFailed):
    """Weights changed while a lazy save was reading them; nothing is committed."""


class LoadFailed(ShardkeepError, RuntimeError):
    """A load failed on some rank. Every rank raises it."""


class DeadlineExceeded(ShardkeepError, TimeoutError):
    """Ranks did not answer before the deadline; the message names them."""


class Corrupt(ShardkeepError, ValueError):
    """Stored bytes are not what was written: a checksum, a size or a structure is wrong."""


class UnsafePickle(ShardkeepError, ValueError):
    """A foreign pickle asks for something outside the allow-list."""


class Cancelled(ShardkeepError, RuntimeError):
    """The caller cancelled the save before it was committed."""


def to_wire(error: BaseException) -> dict[str, Any]:
    """An error as plain values that another rank can rebuild without unpickling."""
    if isinstance(error, ShardkeepError):
        fields = {
            k: v if isinstance(v, (int, float, str, bool, type(None))) else str(v)
            for k, v in error.fields.items()
        }
        return {"kind": type(error).__name__, "what": error.what, "fields": fields}
    return {"kind": "", "what": f"{type(error).__name__}: {error}", "fields": {}}


def from_wire(wire: dict[str, Any]) -> ShardkeepError:
    """The inverse of `to_wire`; an error that is not ours comes back as a plain ShardkeepError."""
    named = globals().get(wire["kind"])
    ours = isinstance(named, type) and issubclass(named, ShardkeepError)
    kind: type[ShardkeepError] = named if ours else ShardkeepError  # type: ignore[assignment]
    return kind(wire["what"], **wire["fields"])
