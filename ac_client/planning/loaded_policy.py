"""A policy as forwards carry it out, the step it was planned for, and what its steps have shown.

    PlannedBucket            one bucket of batches; the only part that changes
    +-- LoadedPolicy         the policy and its routes
    +-- ProfiledStep          batch, loop, and bytes that the policy was planned for
    +-- Correction           bytes by which the prediction was wrong
    +-- StepStatistics       peaks that the allocator reported
    +-- ObservedLoop         what the training loop was seen to do

Who may change what: `replan.py` loads another policy, step, and correction; its `PeakWatch` adds to the
statistics; `loop_watch.py` keeps the observed loop; `planned_forward.py` keeps what a route has learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from ac_client.compiled.policy_parts import PartCalls
from ac_client.planning.peak_counter import PeakBounds
from ac_client.rerun.recorded_call import CallSite
from ac_client.runtime.cursor import Route
from autoac.planner import Plan, Policy, Profile
from autoac.planner.errors import Holding
from autoac.planner.formats.policy import Decision, cudnn_text
from autoac.planner.formats.policy_set import Shape
from autoac.planner.formats.profile import ESTIMATED
from autoac.planner.memory.lifetimes import live_at_peak
from autoac.planner.memory.module_reruns import module_reruns
from autoac.profiler import Loop, device_name
from autoac.profiler.torch_facts.inductor import compiled_parts
from autoac.profiler.torch_facts.libraries import cudnn_of


@dataclass(slots=True, eq=False)
class ForwardRoute:
    """The decisions of a policy for one forward, with facts about module calls from earlier forwards."""

    decisions: Mapping[str, Decision]
    route: Route
    compiled_calls: PartCalls
    # Module calls that wrote to nothing tracked: (path, first position) -> position after the call.
    quiet_calls: dict[tuple[str, int], int] = field(default_factory=dict)
    # Calls that may run again as a whole: first position -> position after the call.
    reruns: dict[int, int] = field(default_factory=dict)
    # Those of them that an audit has judged, by first position; None: recorded op by op.
    call_sites: dict[int, CallSite | None] = field(default_factory=dict)
    unrecorded: int = 0  # ops that the last walk ran without the dispatch mode
    compared: bool = False  # what backward recomputes was compared once


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
        """Return True if the policy recomputes at least one op."""
        return any(decision != "save" for decision in self.policy.decisions.values())

    @cached_property
    def forwards(self) -> tuple[ForwardRoute, ...]:
        """Return one route for each forward before a backward."""
        starts = (0, *self.policy.forward_ends)
        spans = module_reruns(self.plan.graph, self.plan.save_set) if self.plan is not None else ()
        return tuple(
            ForwardRoute(
                decisions,
                Route(decisions, self.policy.use_groups),
                PartCalls(decisions),
                reruns={b - start: e - start for b, e in spans if start <= b < start + len(decisions)},
            )
            for start, decisions in zip(starts, self.policy.forwards, strict=False)
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
    def live_at_peak(self) -> tuple[Holding, ...]:
        """Return what is live at the planned peak, largest first; () without a plan."""
        return tuple(live_at_peak(self.plan.graph, self.plan.save_set)) if self.plan is not None else ()


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """The step that a policy was planned for."""

    shape: Shape | None  # of the profiled batch
    profile: Profile | None = None  # None: it is not here, so the step cannot be planned again
    loop: Loop = field(default_factory=Loop)
    rank_nbytes: int = 0  # held by the neediest rank beyond what this profile counts
    others_nbytes: int = 0  # held by other planned models on the device
    n_adopted: int = 0  # optimizers that were seen to step the model, and are counted
    skipped: frozenset[str] = frozenset()  # modules with parameters that the profiled forward did not run

    @property
    def extra_static(self) -> int:
        """Return the bytes that are live over the whole step but that the profile does not count."""
        return self.rank_nbytes + self.others_nbytes


def other_environment(policy: Policy, device: torch.device) -> str:
    """Return how the device and the libraries that `policy` was planned for differ from these; "" if not.

    An estimated policy names its device as the datasheet does, so only the model of the GPU counts.
    """
    here = {"torch": torch.__version__.partition("+")[0], "device": device_name(device)}
    libraries = ("torch", "cudnn")
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


def skipped_modules(model: nn.Module, profile: Profile) -> frozenset[str]:
    """Return the paths of modules with their own parameters that `profile` did not run.

    A module has run if a module inside it has: a list of parametrizations runs no op of its own. The set is
    empty if a part of the model is compiled, since compiled parts hide their modules.
    """
    if compiled_parts(model):
        return frozenset()
    ran = {module[:end] for module in profile.modules for end in _ends_of_parts(module)}
    return frozenset(
        path
        for path, module in model.named_modules()
        if path and path not in ran and any(True for _ in module.parameters(recurse=False))
    )


def _ends_of_parts(path: str) -> list[int]:
    return [*(i for i, letter in enumerate(path) if letter == "."), len(path)]


@dataclass(frozen=True, slots=True)
class Correction:
    """Bytes that a new plan of the same step has to add to each simulated peak.

    Invariant: a plan keeps the limit, as far as its steps have shown, if its simulated peak is at most the
    limit less `total`.
    """

    times: int = 0  # how often a measured peak changed `nbytes`
    nbytes: int = 0  # needed beyond what the simulator counts; negative if less is needed
    withheld: int = 0  # of the budget, which the device did not have or another model asked for

    @property
    def total(self) -> int:
        """Return the bytes of the limit that a simulated peak may not use."""
        return self.nbytes + self.withheld


def corrected(policy: Policy, nbytes: int, total: int) -> Policy:
    """Return `policy` with `nbytes` added to its predictions.

    Args:
        total: of the correction, which the policy states.
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
    compared: int = 0  # steps whose peak was compared with the prediction
    peak: PeakBounds | None = None

    def add(self, peak: PeakBounds) -> None:
        """Count one more compared step, and combine what is known of its peak with what was known before."""
        self.peak = peak if self.peak is None else self.peak.joined(peak)
        self.compared += 1

    def forget_peaks(self) -> None:
        """Start to compare again, since another policy was loaded."""
        self.compared, self.peak = 0, None


@dataclass(slots=True)
class ObservedLoop:
    """The training loop around a bucket, as its steps have shown it."""

    loop: Loop  # planned for as soon as it differs from the step's own
    holds_outputs: bool = False  # a step held outputs again that earlier steps had dropped
    warned_of_graph: bool = False  # that a backward creates a graph
    warned_of_loss: bool = False  # that a loss outside of the model is large


class PlannedBucket:
    """The policy that runs the batches of one shape, with all that is needed to plan it again.

    Invariant: `plan` is None exactly if `profile` is.

    Attributes:
        shape: of the largest batch that the bucket serves; None if it serves every batch.
        ran_skipped: skipped modules of the step that a forward has run since.
        module_tries: further batches that were profiled because modules were skipped, and ran no more.
        may_lack_gradients: the profile has no gradients before the step, and later steps may have.
        room_requests: how often other models on the device asked for room.
        room_requested: they asked since the policy was planned.
        replaced: another bucket serves the same batches now.
        warned_over_budget: the user knows that this bucket goes over the budget and stays so.
    """

    def __init__(self, shape: Shape | None, loaded: LoadedPolicy, step: ProfiledStep | None = None) -> None:
        self.shape = shape
        self.loaded = loaded
        self.step = step or ProfiledStep(shape)
        self.correction = Correction()
        self.statistics = StepStatistics()
        self.observed = ObservedLoop(self.step.loop)
        self.ran_skipped: set[str] = set()
        self.module_tries = 0
        self.may_lack_gradients = self.profile is not None and not self.profile.static.gradients
        self.room_requests = 0
        self.room_requested = False
        self.replaced = False
        self.warned_over_budget = False

    @property
    def policy(self) -> Policy:
        """Return the policy that is loaded now."""
        return self.loaded.policy

    @property
    def plan(self) -> Plan | None:
        """Return the plan that the policy was made from; None if this process does not have its profile."""
        return self.loaded.plan

    @property
    def profile(self) -> Profile | None:
        """Return the profile that the policy was planned from; None if this process does not have it."""
        return self.step.profile

    def load(self, policy: Policy, plan: Plan) -> None:
        """Carry `policy` out from the next forward on."""
        self.loaded = LoadedPolicy(policy, plan)
        self.statistics.forget_peaks()

    def correct_prediction(self, nbytes: int) -> None:
        """Add `nbytes` to the prediction; the decisions stay."""
        self.correction = replace(self.correction, nbytes=self.correction.nbytes + nbytes)
        policy = corrected(self.policy, nbytes, self.correction.total)
        self.loaded = replace(self.loaded, policy=policy)

    def withhold(self, nbytes: int) -> None:
        """Have the next step planned for `nbytes` less, to make room for another model on the device."""
        self.room_requests += 1
        self.room_requested = True
        self.correction = replace(self.correction, withheld=self.correction.withheld + nbytes)

    def hand_over(self, to: PlannedBucket) -> None:
        """Mark the bucket as replaced by `to`, a new plan for the same batch in another form of loop."""
        self.replaced = True
        to.observed = replace(self.observed, loop=to.step.loop)


def largest(buckets: Iterable[PlannedBucket]) -> PlannedBucket:
    """Return the bucket with the largest save-all peak: it keeps the most room for everything else."""
    return max(buckets, key=lambda bucket: bucket.policy.predicted.save_all_peak_bytes)
