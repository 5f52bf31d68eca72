"""The policies of one planned model, by the shape of the batch, ready to be carried out."""

from __future__ import annotations

from collections.abc import Hashable

from ac_client.cursor import Route
from ac_client.peaks import Seen
from autoac.planner import Plan, Policy, Profile
from autoac.planner.policy_set import Extent, Shape

MOST_BUCKETS = 32  # a loop that meets ever larger batches is not to plan for ever
MOST_KEYS = 10_000


class Loaded:
    """A policy as it is carried out, and what was seen of its steps."""

    def __init__(
        self,
        shape: Shape | None,
        policy: Policy,
        plan: Plan | None = None,
        profile: Profile | None = None,
        extra_static: int = 0,
    ) -> None:
        self.shape = shape  # None: it serves every batch
        self.planned_for = shape  # the batch that was profiled
        self.profile = profile  # None: it was planned elsewhere, and cannot be planned again here
        self.extra_static = extra_static  # bytes that another rank holds beyond what is in the profile
        self.steps = 0
        self.corrections = 0
        self.correction = 0  # bytes that the device needs beside what the simulator says
        self.withheld = 0  # bytes of the budget that the device did not have
        self.told = False  # that it is over the budget and stays so
        self.knows_no_gradients = profile is not None and not profile.static.gradients
        self.load(policy, plan)

    def load(self, policy: Policy, plan: Plan | None) -> None:
        """Carry `policy` out from the next forward on."""
        self.policy, self.plan = policy, plan
        self.recomputes = "recompute" in policy.decisions.values()
        # With it, stretches of saved ops that once wrote to nothing tracked.
        self.way: tuple[Route, set[tuple[int, int]]] = Route(policy.decisions), set()
        self.watched = 0  # steps that were compared with the prediction
        self.seen: Seen | None = None  # of those steps


class Buckets:
    """All policies of a model. The choice among them is remembered by the batch's key."""

    def __init__(self) -> None:
        self.all: list[Loaded] = []
        self.known: dict[Hashable, Loaded] = {}  # open to the hot path
        self._alike: dict[Hashable, list[tuple[Extent, Loaded]]] = {}  # by structure, the smallest first

    def covering(self, batch: Extent) -> Loaded | None:
        """The smallest that covers `batch`."""
        for extent, loaded in self._alike.get(batch.structure, ()):
            if extent.covers(batch):
                return loaded
        return self.all[0] if self.all and self.all[0].shape is None else None

    def largest(self) -> Loaded:
        """The one that keeps the most room for everything else: that with the largest save-all peak."""
        return max(self.all, key=lambda loaded: loaded.policy.predicted.save_all_peak_bytes)

    def remember(self, key: Hashable, loaded: Loaded) -> None:
        """Choose `loaded` for batches of `key`."""
        if len(self.known) >= MOST_KEYS:
            self.known.clear()
        self.known[key] = loaded

    def add(self, loaded: Loaded) -> None:
        """One more; it takes the place of one for the same shape."""
        self.all = [*(old for old in self.all if old.shape != loaded.shape), loaded]
        read = [(Extent.of(one.shape), one) for one in self.all if one.shape is not None]
        self._alike = {}
        for extent, one in sorted(read, key=lambda entry: entry[0].elements):
            self._alike.setdefault(extent.structure, []).append((extent, one))
        self.known.clear()
