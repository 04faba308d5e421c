"""A step of a run on disk: several components that count together or not at all.

`shardkeep.step.json` names each component's attempt and manifest digest and is written last, in one step.
Readers open a component by that attempt, so saving a step again can put new components in place while the old
step stays whole; files of older attempts go only after the new step manifest is durable.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardkeep import commit
from shardkeep import manifest as names
from shardkeep.catalog import committed_manifest
from shardkeep.errors import Corrupt, SaveFailed
from shardkeep.storage import Storage
from shardkeep.types import Manifest, SaveReport, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Which attempt of a component belongs to the step, and the digest of its manifest."""

    attempt: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepManifest:
    """The content of `shardkeep.step.json`."""

    format_version: int
    step: int
    components: dict[str, Component]
    digest: str


def commit_step(storage: Storage, step: int, reports: dict[str, SaveReport], *, durable: bool) -> StepReport:
    """Make the components, each already whole in its directory, the step. One process calls this, after all
    have saved.
    """
    record = {
        "format_version": names.FORMAT_VERSION,
        "step": step,
        "components": {
            name: {"attempt": r.attempt, "digest": r.manifest_digest} for name, r in reports.items()
        },
    }
    manifests = {name: _require_whole(storage, name, report) for name, report in reports.items()}
    if durable:
        storage.sync()  # the components' directories
    storage.put(names.STEP_MANIFEST, names.sealed(record), durable=durable)
    if durable:
        storage.sync()
    for name, manifest in manifests.items():
        commit.clean_up(storage.child(name), manifest, durable=durable)
    return StepReport(
        step=step,
        path=storage.url,
        num_bytes=sum(r.num_bytes for r in reports.values()),
        stall_s=sum(r.stall_s for r in reports.values()),
        seconds=_slowest(reports),
        components=dict(reports),
    )


def read_step(storage: Storage) -> StepManifest | None:
    """The step's manifest if the step is committed: it is valid, and every component it names is whole; else
    None.
    """
    try:
        step = names.unsealed(storage.get(names.STEP_MANIFEST), StepManifest, storage.url)
    except (FileNotFoundError, NotADirectoryError, Corrupt):
        return None
    for name, component in step.components.items():
        manifest = component_manifest(storage, name, component)
        if manifest is None or manifest.digest != component.digest:
            return None
    return step


def component_manifest(storage: Storage, name: str, component: Component) -> Manifest | None:
    """The manifest of the attempt that belongs to the step, if all its files are there."""
    return committed_manifest(storage.child(name), names.attempt_manifest_name(component.attempt))


def _require_whole(storage: Storage, name: str, report: SaveReport) -> Manifest:
    """The manifest of a component that was reported as saved, seen from here."""
    manifest = component_manifest(
        storage, name, Component(attempt=report.attempt, digest=report.manifest_digest)
    )
    if manifest is None or manifest.digest != report.manifest_digest:
        raise SaveFailed(
            f"component '{name}' was saved but is not whole where the step is committed",
            path=storage.child(name).url,
            expected=f"attempt {report.attempt}",
            got="nothing that is whole" if manifest is None else "another manifest",
            remedy="The process that commits must see the directory that the ranks write to.",
        )
    return manifest


def _slowest(reports: dict[str, SaveReport]) -> dict[str, float]:
    phases = {phase for r in reports.values() for phase in r.seconds}
    return {phase: max(r.seconds.get(phase, 0.0) for r in reports.values()) for phase in sorted(phases)}
