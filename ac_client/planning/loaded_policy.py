"""A policy as forwards carry it out, the step it was planned for, and what its steps have shown.

    PlannedBucket            one bucket of batches; the only part that changes
    +-- LoadedPolicy         the policy and its routes
    +-- ProfiledStep         the batch that was profiled, and its profile
    +-- PlannedFor           the loop and the bytes that the policy was planned for (trigger.py)
    +-- StepStatistics       peaks that the allocator reported

`model_planning.py` alone changes a bucket; `planned_forward.py` keeps what a route has learned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ac_client.compiled.policy_parts import PartCalls
from ac_client.planning.batch_shape import ModelCall, leaves_of
from ac_client.planning.trigger import ELSEWHERE, SMALL, TOGETHER, Form, PlannedFor, Warned
from autoac.planner import Plan, PlannerError, Policy, Profile, as_planned
from autoac.planner.errors import Holding
from autoac.planner.formats.policy import SAVE, Decision, cudnn_text
from autoac.planner.formats.policy_set import Extent, Shape
from autoac.planner.formats.profile import ESTIMATED
from autoac.planner.memory.lifetimes import live_at_peak
from autoac.planner.memory.simulate import waiting_bytes
from autoac.profiler import device_name
from autoac.tape.runtime.cursor import Route
from autoac.tape.torch_facts.inductor import compiled_parts
from autoac.tape.torch_facts.libraries import cudnn_of, has_expandable_segments

log = logging.getLogger("ac_client")


@dataclass(slots=True, eq=False)
class ForwardRoute:
    """The decisions of a policy for one forward, with facts about module calls from earlier forwards."""

    decisions: Mapping[str, Decision]
    route: Route
    compiled_calls: PartCalls
    # Module calls that wrote to nothing tracked: (path, first position) -> position after the call.
    quiet_calls: dict[tuple[str, int], int] = field(default_factory=dict)
    unrecorded: int = 0  # ops that the last walk ran without the dispatch mode
    compared: bool = False  # what backward recomputes was compared once
    nodes: int = 0  # of autograd, at most, that a forward made of which every op was recorded
    follows: bool = True  # record every op of the next forward, to notice ops that the policy does not have


@dataclass(frozen=True, eq=False)
class LoadedPolicy:
    """A policy, ready to run: each of its forwards has a ForwardRoute.

    Invariant: `forwards[i]` walks `policy.forwards[i]`, the i-th forward before a backward. Planning again
    makes another LoadedPolicy; only what a route has learned changes in this one.
    """

    policy: Policy
    plan: Plan | None = None  # None: the policy was made from a profile that is not here

    @cached_property
    def recomputes(self) -> bool:
        """Return True if the policy recomputes or moves at least one op."""
        return any(decision != "save" for decision in self.policy.decisions.values())

    @cached_property
    def communicates(self) -> bool:
        """Return True if backward repeats collectives: NOTE [ Recomputes that communicate ] in ranks.py."""
        decisions = self.policy.decisions.items()
        return any(how != SAVE and "/_c10d_functional." in key for key, how in decisions)

    @cached_property
    def forwards(self) -> tuple[ForwardRoute, ...]:
        """Return one route for each forward before a backward."""
        return tuple(
            ForwardRoute(
                decisions,
                Route(decisions, self.policy.use_groups, self.policy.moves, self.policy.needed_until),
                PartCalls(decisions, self.policy.moves),
            )
            for decisions in self.policy.forwards
        )

    def route(self, waiting: int) -> ForwardRoute:
        """Return the route of a forward; `waiting` earlier ones wait for their backward."""
        return self.forwards[min(waiting, len(self.forwards) - 1)]

    @property
    def n_recorded(self) -> int:
        """Return the number of forward ops that the runtime records: none if nothing is recomputed."""
        skipped = sum(forward.unrecorded for forward in self.forwards)
        return len(self.policy.decisions) - skipped if self.recomputes else 0

    @cached_property
    def waiting_nbytes(self) -> int:
        """Return the bytes that all forwards have saved as backward begins; 0 without a plan."""
        return waiting_bytes(self.plan.graph, self.plan.save_set) if self.plan is not None else 0

    @cached_property
    def fragments(self) -> int | None:
        """Return how many bytes CUDA's allocator reserves beyond those of the peak; None if not known."""
        plan = self.plan
        return fragments_of(plan) if plan is not None else None

    @cached_property
    def live_at_peak(self) -> tuple[Holding, ...]:
        """Return what is live at the planned peak, largest first; () without a plan."""
        plan = self.plan
        return tuple(live_at_peak(plan.graph, plan.save_set, plan.moved)) if plan is not None else ()


def fragments_of(plan: Plan) -> int | None:
    """Return how many bytes the allocator of this process will reserve beyond those of the plan's peak."""
    return plan.fragment_bytes(expandable_segments=has_expandable_segments())


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """The step that was profiled for a policy."""

    shape: Shape | None = None  # of the profiled batch
    following: tuple[Shape, ...] = ()  # of the batches of the other forwards before the same backward
    profile: Profile | None = None  # as observed; None: it is not here, so the step cannot be planned again
    rank_nbytes: int = 0  # held by the neediest rank beyond what this profile counts
    skipped: frozenset[str] = frozenset()  # modules with parameters that the profiled forward did not run
    dropped_nbytes: int = 0  # of the batch, before the optimizer steps


def other_environment(policy: Policy, device: torch.device, ranks: str = "1") -> str:
    """Return how the device, libraries and ranks that `policy` was planned for differ from these; "" if not.

    An estimated policy names its device as the datasheet does, so only the model of the GPU counts.
    """
    here = {"torch": torch.__version__.partition("+")[0], "device": device_name(device), "ranks": ranks}
    libraries = ("torch", "cudnn", "ranks")
    planned = {name: policy.tools[name].partition("+")[0] for name in libraries if name in policy.tools}
    if device.type != "cuda":
        planned.pop("cudnn", None)
    elif "cudnn" in planned:
        here["cudnn"] = cudnn_text(cudnn_of(device))
    differing = [name for name in planned if planned[name] != here[name]]
    planned["device"] = policy.device
    estimated = policy.device.endswith(ESTIMATED)
    models = [word for word in policy.device.split() if any(map(str.isdigit, word)) and "GB" not in word]
    same = any(model in here["device"] for model in models) if estimated else policy.device == here["device"]
    if not same:
        differing.append("device")
    return ", ".join(f"{name} {planned[name]}, not {here[name]}" for name in differing)


def skipped_modules(model: nn.Module, called: Set[str]) -> frozenset[str]:
    """Return the paths of modules with their own parameters that are not in `called`.

    The set is empty if a part of the model is compiled, since compiled parts hide their modules.
    """
    if compiled_parts(model):
        return frozenset()
    return frozenset(
        path
        for path, module in model.named_modules()
        if path and path not in called and any(True for _ in module.parameters(recurse=False))
    )


def corrected(policy: Policy, nbytes: int, total: int) -> Policy:
    """Return `policy` with `nbytes` added to its predictions.

    Args:
        total: `Correction.total`, which the policy has as `corrected_by_bytes`.
    """
    predicted = policy.predicted
    moved = {
        name: max(0, getattr(predicted, name) + nbytes)
        for name in ("peak_bytes", "save_all_peak_bytes", "static_bytes")
    }
    return policy.model_copy(
        update={"corrected_by_bytes": total, "predicted": predicted.model_copy(update=moved)}
    )


@dataclass(slots=True)
class StepStatistics:
    """Measurements of the steps of one bucket. Peaks are those under the policy that is loaded now."""

    steps: int = 0
    corrections: int = 0  # plans that were made because a measured peak was not as predicted
    compared: int = 0  # steps whose peak was compared with the prediction
    peak: int | None = None  # of the compared ones, at least
    fragments: int | None = None  # that the allocator had reserved beyond the peak of the last compared step

    def forget_peaks(self) -> None:
        """Start to compare again, since another policy was loaded."""
        self.compared, self.peak, self.fragments = 0, None, None


class PlannedBucket:
    """The policy that runs the batches of one shape, with all that is needed to plan it again.

    Args:
        shape: of the largest batch that it serves; None if it serves every batch.
        loaded: the policy.
        step: the step that the policy was planned for. Profile and plan are both here, or both are None.
        terms: the loop and the bytes that the policy was planned for.

    Attributes:
        extent: the parsed shape.
        shown: the form of the loop, as steps have shown it. The next forward is planned for it.
        frees_gradients: the loop frees them between forward and backward; None: no backward has shown it.
        forwards: how many were to run under it.
        left_at: the last of them that ran other ops than the policy has; 0 if none did.
        left_until: the forward from which on to observe another like it.
        observed_for: forms of step that were observed: once each, since steps of two forms may take turns.
        stale: what steps did that the prediction does not count; "" if nothing is known.
        warned: subjects that were warned of.
    """

    def __init__(
        self,
        shape: Shape | None,
        loaded: LoadedPolicy,
        step: ProfiledStep | None = None,
        terms: PlannedFor | None = None,
    ) -> None:
        self.shape = shape
        self.extent = Extent.of(shape) if shape is not None else None
        self.statistics = StepStatistics()
        self.forwards = self.left_at = self.left_until = 0
        self.warned: set[str] = set()
        terms = terms or PlannedFor(loaded.policy.budget_bytes, form=Form(len(loaded.policy.forwards)))
        self.shown = terms.form
        self.frees_gradients: bool | None = terms.present.frees_gradients or None
        self.observed_for: set[Form] = set()
        self.load(loaded, step or ProfiledStep(shape), terms)

    @property
    def policy(self) -> Policy:
        """Return the policy that is loaded now."""
        return self.loaded.policy

    @property
    def left(self) -> bool:
        """Return True if a forward has run other ops than the policy has, and the next may be like it."""
        return 0 < self.left_until <= self.forwards

    def leave(self) -> None:
        """Note that a forward has run other ops than the policy has.

        The next forwards may be like it. If an observed one was not, such forwards take turns with others:
        then the next is as far away as the last.
        """
        if self.left_at != self.forwards:
            turns = self.left_at and self.planned_for.form.tries
            self.left_until = self.forwards + (self.forwards - self.left_at if turns else 1)
            self.left_at = self.forwards

    @property
    def plan(self) -> Plan | None:
        """Return the plan that the policy was made from; None if this process does not have its profile."""
        return self.loaded.plan

    @property
    def profile(self) -> Profile | None:
        """Return the profile of the step that the policy was planned for; None if this process has none."""
        return self.step.profile

    def covers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True if the step that was planned covers a step on this batch, so that peaks compare."""
        shape = self.step.shape
        return shape is None or Extent.of(shape).covers(Extent.of_leaves(leaves_of(args, kwargs)))

    def covers_next(self, call: ModelCall, waiting: int) -> bool:
        """Return True if the planned step has a forward like this after so many that wait."""
        following = self.step.following[waiting - 1 :] if waiting else ()
        extent = Extent.of_leaves(leaves_of(call.args, call.kwargs))
        return bool(following) and Extent.of(following[0]).covers(extent)

    def takes_more(self, found: Profile, than: Profile) -> bool:
        """Return True if a step takes more under the plan by the profile `found` than by `than`."""
        counted = map(self.planned_for.counted_in, (found, than))
        try:
            now, before = (as_planned(self.policy, profile).peak for profile in counted)
        except PlannerError:  # other ops, or a constraint that `found` does not meet
            return True
        return now > before + SMALL

    def load(self, loaded: LoadedPolicy, step: ProfiledStep, terms: PlannedFor) -> None:
        """Carry the policy out from the next forward on. It was planned for `step` and `terms`."""
        self.loaded, self.step, self.stale = loaded, step, ""
        self.statistics.forget_peaks()
        self.left_until = 0
        self.warned.discard("over the limit")
        predicted, profile = loaded.policy.predicted, step.profile
        own = predicted.peak_bytes - predicted.static_bytes
        if profile is not None:
            own += profile.static.inputs
        self.planned_for = replace(
            terms,
            peak=predicted.peak_bytes,
            forward_nbytes=own,
            microbatches=predicted.microbatches,
            stays=ELSEWHERE if profile is None else TOGETHER if loaded.communicates else "",
        )

    def warn(self, name: str, warning: Warned) -> None:
        """Log a warning, if its subject was not warned of before."""
        self.stale = warning.text.partition(": this step")[0].partition(". ")[0]
        if warning.subject not in self.warned:
            self.warned.add(warning.subject)
            log.warning("%s: %s", name, warning.text)


def largest(buckets: Iterable[PlannedBucket]) -> PlannedBucket:
    """Return the bucket with the largest save-all peak: it keeps the most room for everything else."""
    return max(buckets, key=lambda bucket: bucket.policy.predicted.save_all_peak_bytes)
