"""The policies of one planned model, by the shape of the batch, ready to be carried out."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from ac_client.planning.batch_shape import Key, leaves_of
from ac_client.planning.peak_counter import Seen
from ac_client.runtime.cursor import Route
from autoac.planner import Plan, Policy, Profile
from autoac.planner.errors import Holding
from autoac.planner.formats.policy_set import Extent, Shape
from autoac.planner.memory.lifetimes import live_at_peak
from autoac.profiler.steps.training_loop import ONE_FORWARD, Loop

MOST_BUCKETS = 32  # a loop that meets ever larger batches is not to plan for ever
MOST_KEYS = 10_000


Quiet = dict[tuple[str, int], int]
"""Calls of modules: the module's path and the position in the route at which it begins -> that behind it."""


class Loaded:
    """A policy as it is carried out, and what was seen of its steps."""

    def __init__(
        self,
        shape: Shape | None,
        policy: Policy,
        plan: Plan | None = None,
        profile: Profile | None = None,
        extra_static: int = 0,
        loop: Loop = ONE_FORWARD,
    ) -> None:
        self.shape = shape  # None: it serves every batch
        self.planned_for = shape  # the batch that was profiled
        self.profile = profile  # None: it was planned elsewhere, and cannot be planned again here
        self.extra_static = extra_static  # bytes that another rank holds beyond what is in the profile
        self.skipped: Set[str] = frozenset()  # modules with parameters that the profiled forward did not run
        self.met: set[str] = set()  # those of them that a forward has run since
        self.tries = 0  # further batches that were profiled, and ran no more modules
        self.beside = 0  # bytes of other planned models that are counted
        self.asked_for_room = 0  # how often others asked for it
        self.makes_room = False  # it is to be planned again, since others asked
        self.loop = loop  # that was profiled
        self.seen_loop = loop  # what steps showed since: planned for when it differs
        self.replaced = False  # by a plan for the same batch
        self.holds_outputs = False  # a step held again what others had let go of
        self.told_of_graph = False  # that a backward creates a graph
        self.told_of_loss = False  # that a loss outside of the model is large
        self.optimizers = 0  # how many were adopted when it was planned
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
        self._live_at_peak: tuple[Holding, ...] | None = None
        self.recomputes = "recompute" in policy.decisions.values()
        # For each forward before a backward; with it, calls of modules that once wrote to nothing tracked.
        self.ways: list[tuple[Route, Quiet]] = [(Route(decisions), {}) for decisions in policy.forwards]
        self.unrecorded = [0] * len(self.ways)  # ops that the last of each ran without the mode
        self.watched = 0  # steps that were compared with the prediction
        self.seen: Seen | None = None  # of those steps

    def hand_on(self, to: Loaded) -> None:
        """Give way to a plan for the same batch in another situation."""
        self.replaced = True
        to.holds_outputs = self.holds_outputs
        to.told_of_graph, to.told_of_loss = self.told_of_graph, self.told_of_loss

    @property
    def recorded(self) -> int:
        """Ops of forward that the runtime sees: none where nothing is recomputed."""
        return len(self.policy.decisions) - sum(self.unrecorded) if self.recomputes else 0

    def forward_at(self, waiting: int) -> int:
        """Return which of the planned forwards runs while `waiting` others wait for their backward."""
        return min(waiting, len(self.ways) - 1)

    @property
    def live_at_peak(self) -> tuple[Holding, ...]:
        """What is live at the planned peak, largest first; nothing where the plan was made elsewhere."""
        if self._live_at_peak is None:
            plan = self.plan
            self._live_at_peak = tuple(live_at_peak(plan.graph, plan.save_set)) if plan is not None else ()
        return self._live_at_peak


_Most = tuple[int, tuple[int, ...], Loaded]
"""A bucket: the sum of its dimensions, which tells most that do not cover a batch, and its dimensions."""


class Buckets:
    """All policies of a model while one set of its parameters trains.

    The choice among them is remembered by the batch's key.
    Of a key that is new, the first half is what the batch is built of. That is mostly not new, and the
    buckets that are built alike are remembered with it: then only dimensions are left to compare.
    """

    def __init__(self) -> None:
        self.all: list[Loaded] = []
        self.serves_all: Loaded | None = None  # one policy, whatever the batch
        self.unplanned: set[Key] = set()  # keys of batches with nothing to differentiate
        self.known: dict[Key, Loaded] = {}  # open to the hot path
        # By the first half of a key, with dimensions in the order of its second half, the smallest first.
        self._alike: dict[tuple[Any, ...], list[_Most]] = {}

    def covering(self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Loaded | None:
        """The smallest that covers the batch of `key`."""
        structure, dims = key
        alike = self._alike.get(structure)
        if alike is None:
            if len(self._alike) >= MOST_KEYS:
                self._alike.clear()
            alike = self._alike[structure] = self._built_alike(args, kwargs)
        total = sum(dims)
        for at_most, most, loaded in alike:
            if at_most >= total and all(map(operator.ge, most, dims)):
                return loaded
        return self.all[0] if self.all and self.all[0].shape is None else None

    def _built_alike(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Most]:
        leaves = leaves_of(args, kwargs)
        structure = Extent.of_leaves(leaves).structure
        read = [(Extent.of(one.shape), one) for one in self.all if one.shape is not None]
        alike = sorted(
            (entry for entry in read if entry[0].structure == structure), key=lambda entry: entry[0].elements
        )
        # An extent has its leaves by name; stable, so leaves of one name keep their order.
        by_name = sorted(range(len(leaves)), key=lambda i: leaves[i][0])
        begins, begin = [0] * len(leaves), 0
        for i in by_name:
            begins[i] = begin
            begin += len(leaves[i][2] or ())
        places = [
            place
            for first, (_, _, dims) in zip(begins, leaves, strict=True)
            for place in range(first, first + len(dims or ()))
        ]
        return [
            (sum(extent.dims), tuple(extent.dims[place] for place in places), loaded)
            for extent, loaded in alike
        ]

    def remember(self, key: Key, loaded: Loaded) -> None:
        """Choose `loaded` for batches of `key`."""
        if len(self.known) >= MOST_KEYS:
            self.known.clear()
        self.known[key] = loaded

    def add(self, loaded: Loaded) -> None:
        """One more; it takes the place of one for the same shape."""
        self.all = [*(old for old in self.all if old.shape != loaded.shape), loaded]
        self._alike.clear()
        self.known.clear()


def largest(loaded: Iterable[Loaded]) -> Loaded:
    """The one that keeps the most room for everything else: that with the largest save-all peak."""
    return max(loaded, key=lambda one: one.policy.predicted.save_all_peak_bytes)
