"""The coordinator of a single process: what comes back is what many ranks would get, and nothing travels."""

from __future__ import annotations

from typing import Any

import msgspec

from shardkeep.errors import ShardkeepError
from shardkeep.rendezvous import me, own_addresses


class Alone:
    """The coordinator of a single process."""

    rank = 0
    world_size = 1

    def gather(self, name: str, value: Any) -> list[Any] | None:
        return [_through_wire(value)]

    def broadcast(self, name: str, value: Any = None) -> Any:
        return _through_wire(value)

    def scatter(self, name: str, values: list[Any] | None = None) -> Any:
        assert values is not None
        return _through_wire(values[0])

    def settle(self, name: str) -> None:
        pass

    def check(self) -> None:
        pass

    def who(self, rank: int) -> str:
        return f"rank {rank} ({me()})"

    def addresses(self) -> list[str]:
        return own_addresses()

    def fail(self, error: BaseException) -> ShardkeepError:
        return error if isinstance(error, ShardkeepError) else ShardkeepError(str(error))

    def finish(self) -> None:
        pass


def _through_wire(value: Any) -> Any:
    """What the value looks like after msgpack (tuples become lists), so that one process behaves like
    many.
    """
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
