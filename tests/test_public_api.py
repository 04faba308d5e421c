"""The public names and their signatures, as the design fixes them: a change here touches every user."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkeep as sk

SIGNATURES = {
    "save": "(state, path, *, overwrite=False, config=None)",
    "save_async": "(state, path, *, capture='snapshot', overwrite=False, config=None)",
    "prepare": "(state, config=None, *, capture='snapshot')",
    "register_optimizer": "(optimizer)",
    "load": "(state, path, *, strict=True, config=None)",
    "is_committed": "(path)",
    "verify": "(path)",
    "inspect": "(path)",
    "Run": "(root, *, keep=None, keep_every=None, step_name='step_{}', config=None)",
    "Run.step": "(self, step)",
    "Run.save_async": "(self, step, components, *, capture='snapshot')",
    "Run.steps": "(self)",
    "Run.latest": "(self)",
    "Run.load": "(self, step=None, *, components, strict=True)",
    "SaveHandle.wait": "(self, timeout_s=None)",
    "SaveHandle.wait_captured": "(self, timeout_s=None)",
    "SaveHandle.done": "(self)",
    "SaveHandle.cancel": "(self)",
    "SaveHandle.__await__": "(self)",
    "Checkpoint.read": "(self, key, box=None)",
}
STEP_SIGNATURES = {
    "save": "(component, state)",
    "put": "(component, values)",
    "put_files": "(component, files)",
}
REPORTS = {
    "SaveReport": "path attempt num_bytes num_items num_files seconds stall_s manifest_digest",
    "LoadReport": "path num_bytes read_bytes received_bytes seconds missing unexpected",
    "VerifyReport": "path num_files num_bytes problems checksums",
    "StepReport": "step path num_bytes stall_s seconds components",
}


def signature_of(thing: Any) -> str:
    """Names, kinds and defaults, without the types."""
    found = inspect.signature(thing)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def named(path: str) -> Any:
    found: Any = sk
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert signature_of(named(name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", STEP_SIGNATURES)
def test_signatures_of_a_step(tmp_path: Path, name: str) -> None:
    assert signature_of(getattr(sk.Run(tmp_path).step(1), name)) == STEP_SIGNATURES[name]


@pytest.mark.megatron
def test_signatures_of_megatron_are_those_of_the_installed_megatron() -> None:
    from megatron.core import dist_checkpointing

    assert signature_of(sk.megatron.save) == signature_of(dist_checkpointing.save)
    ours, theirs = (inspect.signature(m.load).parameters for m in (sk.megatron, dist_checkpointing))
    assert list(ours) == list(theirs)
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]
    defaults = [getattr(p.default, "value", p.default) for p in theirs.values()]  # of an enum, its value
    assert [p.default for p in ours.values()] == defaults
    assert signature_of(sk.megatron.install) == signature_of(sk.megatron.uninstall) == "()"


@pytest.mark.parametrize("name", REPORTS)
def test_reports_are_frozen_and_have_their_fields(name: str) -> None:
    report = getattr(sk, name)
    assert [f.name for f in dataclasses.fields(report)] == REPORTS[name].split()
    made = report(**{f.name: 0 for f in dataclasses.fields(report)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.path = "elsewhere"


def test_the_public_names() -> None:
    assert set(sk.__all__) == {
        *("save", "save_async", "load", "is_committed", "verify", "inspect", "Run", "Config", "SaveHandle"),
        *(
            "prepare",
            "register_optimizer",
            "Checkpoint",
            "SaveReport",
            "LoadReport",
            "VerifyReport",
            "StepReport",
        ),
        *("errors", "megatron", "ray", "__version__"),
    }
    for name in set(sk.__all__) - {"megatron", "ray"}:
        assert getattr(sk, name) is not None
    with pytest.raises(AttributeError, match="'shardkeep' has no attribute 'restore_all'"):
        sk.restore_all  # type: ignore[attr-defined]


def test_every_public_function_says_what_it_does() -> None:
    for name in SIGNATURES:
        assert (named(name).__doc__ or named(name.partition(".")[0]).__doc__ or "").strip(), name


def test_settings_are_keywords_with_their_defaults() -> None:
    assert {f.name: f.default for f in dataclasses.fields(sk.Config)} == {
        "staging_bytes": 0,
        "io_threads": 0,
        "chunk_bytes": 4 << 20,
        "split_bytes": 64 << 20,
        "checksum": "xxh3_128",
        "deadline_s": 600.0,
        "vanilla_metadata": True,
        "read_once": "auto",
        "check_capture": False,
        "durable": True,
    }
    with pytest.raises(TypeError):
        sk.Config(1 << 20)  # type: ignore[misc]


def test_the_first_page_of_the_readme_works(tmp_path: Path) -> None:
    """The calls of the package's docstring, in one go."""
    state = {"w": torch.rand(4, 4), "step": 3}
    sk.save(state, tmp_path / "a")
    got = {"w": torch.zeros(4, 4), "step": None}
    assert sk.load(got, tmp_path / "a").missing == ()
    assert torch.equal(got["w"], state["w"]) and got["step"] == 3  # type: ignore[arg-type]
    sk.save_async(state, tmp_path / "b").wait()
    assert sk.verify(tmp_path / "b").ok
    assert torch.equal(sk.inspect(tmp_path / "b").read("w"), state["w"])  # type: ignore[arg-type]
    run = sk.Run(tmp_path / "run", keep=3)
    with run.step(100) as step:
        step.save("policy", state)
        step.put("trainer", {"epoch": 1})
    assert run.load(components={"policy": got}) == run.latest() == 100
