"""Errors: their place in the tree, what their text says, their way through pickle and between ranks."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from shardkeep import errors
from shardkeep.errors import ShardkeepError, from_wire, to_wire

# The tree that the docstring draws: class -> (parent, the standard error that it also is).
TREE = {
    errors.InputError: (ShardkeepError, Exception),
    errors.InvalidState: (errors.InputError, ValueError),
    errors.StorageReleased: (errors.InputError, ValueError),
    errors.AlreadyCommitted: (errors.InputError, FileExistsError),
    errors.NotCommitted: (errors.InputError, FileNotFoundError),
    errors.MissingKey: (errors.InputError, KeyError),
    errors.UnexpectedKey: (errors.InputError, KeyError),
    errors.Mismatch: (errors.InputError, ValueError),
    errors.NoSpace: (errors.InputError, OSError),
    errors.SaveFailed: (ShardkeepError, RuntimeError),
    errors.StateChanged: (errors.SaveFailed, RuntimeError),
    errors.LoadFailed: (ShardkeepError, RuntimeError),
    errors.DeadlineExceeded: (ShardkeepError, TimeoutError),
    errors.Corrupt: (ShardkeepError, ValueError),
    errors.UnsafePickle: (ShardkeepError, ValueError),
    errors.Cancelled: (ShardkeepError, RuntimeError),
}
FIELDS = {
    "key": "model.w",
    "rank": 3,
    "host": "node-1",
    "expected": "f32 (2, 3)",
    "got": "f16 (2, 3)",
    "remedy": "Cast it.",
}
every_error = pytest.mark.parametrize("kind", [ShardkeepError, *TREE], ids=lambda kind: kind.__name__)


def test_the_tree_is_complete() -> None:
    found = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ShardkeepError)}
    assert found == {ShardkeepError, *TREE}


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_each_error_is_also_a_standard_error(kind: type[ShardkeepError]) -> None:
    parent, standard = TREE[kind]
    assert issubclass(kind, parent)
    assert issubclass(kind, standard)
    assert kind.__name__ in errors.__doc__


@every_error
def test_the_text_carries_where_expected_got_and_remedy(kind: type[ShardkeepError]) -> None:
    error = kind("the dtype differs", **FIELDS)
    assert str(error) == (
        "the dtype differs (key 'model.w', rank 3, host 'node-1'): "
        "expected f32 (2, 3), got f16 (2, 3). Cast it."
    )


@every_error
def test_bare_text_is_left_alone(kind: type[ShardkeepError]) -> None:
    assert str(kind("it failed")) == "it failed"


@every_error
def test_pickle_copy_and_the_wire_keep_class_text_and_fields(kind: type[ShardkeepError]) -> None:
    error = kind("it failed", **FIELDS)
    wire = msgspec.json.decode(msgspec.json.encode(to_wire(error)))
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error), from_wire(wire)):
        assert type(twin) is kind
        assert (twin.what, twin.fields) == ("it failed", FIELDS)
        assert str(twin) == str(error)


def test_fields_that_no_wire_carries_travel_as_text() -> None:
    wire = to_wire(errors.Mismatch("the shape differs", expected=(2, 3), got=[4]))
    assert wire["fields"] == {"expected": "(2, 3)", "got": "[4]"}
    assert str(from_wire(wire)) == "the shape differs: expected (2, 3), got [4]"


def test_an_error_of_others_crosses_the_wire_with_its_name() -> None:
    error = from_wire(to_wire(KeyError("step")))
    assert type(error) is ShardkeepError
    assert str(error) == "KeyError: 'step'"


@pytest.mark.parametrize("kind", ["Any", "to_wire", "__builtins__", "OSError", "no such"])
def test_the_wire_makes_nothing_but_our_errors(kind: str) -> None:
    assert type(from_wire({"kind": kind, "what": "x", "fields": {}})) is ShardkeepError
