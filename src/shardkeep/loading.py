"""A checkpoint on its way into a template: `plan` changes nothing of the caller's, `fill` does.

Several loadings of one session are planned together, so that a component that cannot be loaded is known
before any other has changed. Collective calls carry the loading's label, which must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from shardkeep.agree import same_for_all
from shardkeep.catalog import Catalog, resolve
from shardkeep.config import Config
from shardkeep.coordinate import Coordinator
from shardkeep.load import Target, check_targets, load_value, read_common, read_object, read_tensors
from shardkeep.manifest import MANIFEST
from shardkeep.phases import Phases
from shardkeep.restore import Difference, Template, compare
from shardkeep.storage import Storage
from shardkeep.together import Together
from shardkeep.types import LoadReport

T = TypeVar("T", bound=Template)
Judge = Callable[[Difference, str], Any]


class Loading(Generic[T]):
    """`judge` raises at a difference between the keys or turns it into a result; `check` may refuse what the
    ranks ask for together. `exact_common`: plain values that the state has and the checkpoint's common state
    lacks count as missing (Megatron itself does not look).
    """

    def __init__(
        self,
        storage: Storage,
        config: Config,
        make_template: Callable[[], T],
        judge: Judge,
        *,
        check: Callable[[Coordinator, T], None] = lambda ranks, wanted: None,
        exact_common: bool = False,
        manifest_name: str = MANIFEST,
        label: str = "",
    ) -> None:
        self._storage, self.config = storage, config
        self.url = storage.url
        self._make_template, self._judge, self._check = make_template, judge, check
        self._exact_common = exact_common
        self._manifest_name = manifest_name
        self._label = label
        self._phases = Phases("load", storage.url)
        self.judged: Any = None

    def plan(self, together: Together) -> None:
        """Compare what is asked for with what is stored, read values and check targets."""
        ranks = together.ranks
        with self._phases("plan"):
            self._once = together.agree(self._storage, self.config, self._label)
            catalog, opened = self._open(ranks)
            wanted = self._make_template()
            self._check(ranks, wanted)
            common = read_common(opened, catalog)
            served = wanted.served_by(common)
            asked = [t.key for t in wanted.targets] + [k for k in wanted.values if k not in served]
            if self._exact_common:
                asked += wanted.lacking_in(common)
            self._difference = compare(ranks, catalog, asked, self._label)
            self.judged = self._judge(self._difference, self._storage.url)
            absent = frozenset(self._difference.missing)
            self._targets: list[Target] = [t for t in wanted.targets if t.key not in absent]
            check_targets(catalog, self._targets)
            keys = [k for k in wanted.values if k not in absent and k not in served]
            held = cast(Storage, self._once.hold_values(catalog, keys)) if self._once else self._storage
            self._values = {k: load_value(read_object(held, catalog, k), k) for k in keys}
        self._catalog, self._common, self._absent, self.template = catalog, common, absent, wanted

    def _open(self, ranks: Coordinator) -> tuple[Catalog, Storage]:
        """The catalog, the same on all ranks, and the storage to read common values from."""
        if self._once is not None:
            catalog, held = self._once.open(self._manifest_name, self._label)
            return catalog, cast(Storage, held)
        return same_for_all(ranks, resolve(self._storage, self._manifest_name), self._label), self._storage

    def fill(self) -> LoadReport:
        """Read the tensors and put everything into the template. Collective where ranks read together."""
        with self._phases("read"):
            self.template.clear(self._absent)
            moved = read_tensors(self._storage, self._catalog, self._targets, self.config, self._once)
        with self._phases("restore"):
            self.template.restore(self._values, self._common, self._absent)
        return LoadReport(
            path=self._storage.url,
            **moved._asdict(),
            seconds=dict(self._phases.seconds),
            missing=self._difference.missing,
            unexpected=self._difference.unexpected,
        )


def load_together(ranks: Coordinator, loadings: list[Loading[Any]]) -> list[LoadReport]:
    """Plan all, then fill all: nothing of the caller's has changed on any rank until everything is checked on
    all.
    """
    with Together(ranks) as together:
        for loading in loadings:
            loading.plan(together)
        ranks.settle("checked")
        reports = [loading.fill() for loading in loadings]
        ranks.settle("loaded")  # before any rank closes its connections
    return reports
