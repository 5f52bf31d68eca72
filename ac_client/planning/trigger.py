"""When a plan is made again. docs/budget.md is the page.

A plan is made for a form of step (`Form`), and with bytes that are on the device as a forward begins
(`Present`). Three rules compare it (`PlannedFor`) with the steps that run:

1. `present_rule`, before a forward: more is present than was counted. The same profile is planned with it.
2. `form_rule`, before a forward, and `backward_rule`, as a backward begins: the step has another form. If it
   may go over the limit, a warning says so once, and the next step is observed.
3. `measured_rule`, after a step: its peak, the allocator's fragments or waits for copies are more than was
   predicted. The same profile is planned for less memory, or for a slower link. If no plan fits so, or the
   second one is over the limit, too, the next step is observed.

`model_planning.py` profiles, plans and logs; nothing here has an effect.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ac_client.planning.facts.forwards_in_flight import BackwardFacts
from autoac.planner import Profile
from autoac.planner.problem.microbatch import with_gradients
from autoac.planner.units import format_bytes
from autoac.profiler.static_memory import OptimizerBytes

WATCHED_STEPS = 3  # of each plan, before which all tensors on the device are measured
MOST_CORRECTIONS = 2  # of one policy
LAST_MARGIN = 0.02  # of the limit: the error differed from plan to plan, and no correction follows
SEGMENT = 20 << 20  # bytes: the allocator reserves so many at once, and the last of them are rarely full
STALLED = 0.01  # of the step: shorter waits for copies, unforeseen, are not worth planning again
SLOWER = 0.5  # of the rates of a link that turned out to be slower
SMALL = 1 << 10  # bytes: less is not worth planning again
MOST_TRIES = 2  # steps that are observed because a forward ran other modules or other ops

GRADIENTS = "gradients exist before the step"
ELSEWHERE = "planned elsewhere"  # the policy was given, and its profile is not here
TOGETHER = "planned by all ranks together (its recomputes communicate)"


@dataclass(frozen=True, slots=True)
class Form:
    """Describe what a loop does between two steps of its optimizer, as far as a plan depends on it."""

    forwards: int = 1  # that run before one backward, which covers all of them
    passes: int = 1  # of backward, through the same graph (`retain_graph=True`)
    tries: int = 0  # how often a step was observed because a forward ran other modules or other ops
    over: bool = False  # a step was observed because corrected plans did not keep the limit

    def __str__(self) -> str:
        words = f"{self.forwards} forward{'s' if self.forwards > 1 else ''} before one backward"
        words += f" of {self.passes} passes" if self.passes > 1 else ""
        words += ", other ops than in the first step" if self.tries else ""
        return words + (", more memory than in the first step" if self.over else "")


@dataclass(frozen=True, slots=True)
class Present:
    """Count what is on the device as a forward begins and not in a profile. Sizes are in bytes."""

    gradients: bool = False  # as many as the profiled step makes
    frees_gradients: bool = False  # before backward
    optimizers: OptimizerBytes = field(default_factory=lambda: OptimizerBytes(0, 0))
    others_nbytes: int = 0  # held by other models and tensors on the device
    kept_nbytes: int = 0  # held by names of the step before, until the forward has ended
    microbatches: int = 0  # that wait, each for its own backward, beyond those of the profile
    share: float = 1.0  # of what a forward may save, that it holds at most while it waits (device_share.py)


@dataclass(frozen=True, slots=True)
class Correction:
    """Bytes that a new plan of the same step has to add to each simulated peak.

    Invariant: a plan keeps the limit, as far as its steps have shown, if its simulated peak is at most the
    limit less `total`.
    """

    times: int = 0  # how often a measured peak changed `nbytes`
    nbytes: int = 0  # needed beyond what the simulator counts
    withheld: int = 0  # of the limit, for fragments

    @property
    def total(self) -> int:
        """Return the bytes of the limit that a simulated peak may not use."""
        return self.nbytes + self.withheld


@dataclass(frozen=True, slots=True)
class PlannedFor:
    """The step that a plan was made for, and the plan's peak. Sizes are in bytes."""

    limit: int  # of the peak: the budget less headroom
    peak: int = 0  # predicted, the correction included
    forward_nbytes: int = 0  # that one more forward in flight holds at most
    microbatches: int = 1  # of a pipeline's stage, the one at work and those that wait
    stays: str = ""  # why it is never made again: how it was planned; "" if it may be
    form: Form = Form()
    present: Present = field(default_factory=Present)
    gained_room: bool = False  # less was present than before, once
    correction: Correction = Correction()
    link_share: float = 1.0  # of the link's measured rates, which the plan counts on

    def fits(self, forwards: int) -> bool:
        """Return True if as many forwards as these fit in addition, even if they save everything."""
        return self.peak + forwards * self.forward_nbytes <= self.limit

    def counted_in(self, profile: Profile) -> Profile:
        """Return `profile`, which was observed, for a step of these terms with the same ops."""
        present = self.present
        kept = present.kept_nbytes
        if present.gradients and present.frees_gradients:
            kept += profile.gradient_nbytes
        elif present.gradients:
            profile = with_gradients(profile)
        profile = present.optimizers.counted_in(profile.with_kept(kept))
        if present.microbatches:
            before, static = profile.waiting_microbatches, profile.static
            waiting = before + present.microbatches
            static = static.model_copy(update={"inputs": static.inputs * (1 + waiting) // (1 + before)})
            profile = profile.model_copy(update={"waiting_microbatches": waiting, "static": static})
        if profile.link is None or self.link_share == 1:
            return profile
        link = profile.link.slower(self.link_share) if self.link_share else None
        return profile.model_copy(update={"link": link})


class Measured(NamedTuple):
    """Hold what the steps of a plan have shown by now. Sizes are in bytes."""

    peak: int | None = None  # at least; None: not compared
    fragments: int | None = None  # that the allocator has reserved beyond the peak
    reserved_over: int = 0  # by which the step took what the allocator has reserved over the budget
    of_reserved: bool = False  # the budget is for what the allocator has reserved
    stalled: float = 0.0  # share of the step that compute waited for copies, longer than predicted
    moves_lose: bool = False  # these waits cost more than moves save, which no one has asked for


class Warned(NamedTuple):
    """A warning of the step that runs."""

    subject: str  # one warning for each
    text: str


class PlanAgain(NamedTuple):
    """Another plan is to be made of the same profile, for `terms`."""

    terms: PlannedFor
    reason: str  # in words


# --- 1. what is present -----------------------------------------------------------------------------------


def present_rule(planned: PlannedFor, now: Present) -> PlanAgain | None:
    """Plan for what is present and was not counted.

    Gradients and state count exactly. What else is there may differ
    from forward to forward: it counts once the plan has no room for it. If no plan was found that keeps the
    limit, less of it counts, too, but once. Another share of the device is planned for.
    """
    counted = planned.present
    gradients = now.gradients and not counted.gradients
    state, workspace = now.optimizers.state, now.optimizers.workspace
    steps = state != counted.optimizers.state or workspace > counted.optimizers.workspace
    held = now.frees_gradients != counted.frees_gradients
    waiting = now.microbatches - counted.microbatches
    waits = waiting > 0 and not planned.fits(waiting)
    exact = gradients or steps or held or waits
    others = now.others_nbytes - counted.others_nbytes
    more = others + max(0, now.kept_nbytes - counted.kept_nbytes)
    lacks = more > SMALL and planned.peak <= planned.limit < planned.peak + more
    gains = others < 0 and planned.peak > planned.limit and not planned.gained_room
    if not (exact or lacks or gains or now.share != counted.share):
        return None
    present = replace(
        now,
        gradients=now.gradients or counted.gradients,
        kept_nbytes=max(now.kept_nbytes, counted.kept_nbytes),
        microbatches=max(now.microbatches, counted.microbatches),
    )
    terms = replace(
        planned,
        present=present,
        gained_room=planned.gained_room or gains,
        correction=Correction(withheld=planned.correction.withheld) if exact else planned.correction,
    )
    if gradients:
        return PlanAgain(terms, GRADIENTS)
    if steps:
        return PlanAgain(terms, f"optimizers hold {format_bytes(state)} of state as a forward begins")
    if held:
        return PlanAgain(terms, "backward finds other gradients than before")
    if waits:
        return PlanAgain(terms, f"{waiting} more forwards wait, each for a backward of its own")
    reason = of_others(now.others_nbytes)
    if now.kept_nbytes:
        reason += f", and names of the last step hold {format_bytes(now.kept_nbytes)}"
    return PlanAgain(terms, reason)


# --- 2. the form of the step ------------------------------------------------------------------------------


def form_rule(planned: PlannedFor, shown: Form, waiting: int, *, left: bool) -> tuple[Form, Warned | None]:
    """Return the form of step to plan for as a forward begins, and a warning.

    Args:
        shown: by the steps so far.
        waiting: how many forwards wait for their backward.
        left: forwards like this one have run other ops than the policy has.
    """
    form, warning = shown, None
    if left and not waiting and planned.form.tries < MOST_TRIES and not planned.fits(1):
        form = replace(form, tries=planned.form.tries + 1)
    if 1 < form.forwards <= planned.microbatches:  # each has a backward of its own
        form = replace(form, forwards=planned.form.forwards)
    counted = max(form.forwards, planned.form.forwards, planned.microbatches)
    if waiting >= counted and not planned.fits(waiting):
        if planned.microbatches == 1:  # else the same profile is planned with more copies
            form = replace(form, forwards=waiting + 1)
        what = f"{waiting + 1} forwards wait for one backward, and the plan is for {counted}"
        warning = may_go_over(planned, "forwards", what, "raise the budget, or run as many in each step")
    return form, warning


def backward_rule(planned: PlannedFor, shown: Form, backward: BackwardFacts) -> tuple[Form, Warned | None]:
    """Return the form of step that a backward shows as it begins, and a warning.

    Args:
        shown: by the steps before.
    """
    if backward.creates_graph:
        graphs, needs = backward.graphs, 2 * backward.graphs
        if not planned.fits(needs):
            several = f" ({graphs} such graphs before one is freed)" if graphs > 1 else ""
            text = (
                "a backward with create_graph=True (a gradient penalty, meta-learning) runs over its forward,"
                f" which no plan counts, so the budget cannot be kept{several}: this step and later steps may"
                f" go over the limit of {format_bytes(planned.limit)}. Compute the penalty in the forward of"
                " the module that is planned, or leave Constraints(headroom_bytes=...) for it: "
                f"{format_bytes(needs * planned.forward_nbytes)}, if they save as much as forwards do"
            )
            return shown, Warned("graph created", text)
    elif backward.passes > planned.form.passes and not planned.fits(1):
        what = f"{backward.passes} passes of backward go through one graph (retain_graph=True), and the plan"
        advice = "one backward of the sum of the losses needs less"
        warning = may_go_over(planned, "passes", f"{what} is for {planned.form.passes}", advice)
        return replace(shown, passes=max(shown.passes, backward.passes)), warning
    return shown, None


# --- 3. what was measured ---------------------------------------------------------------------------------


def measured_rule(planned: PlannedFor, measured: Measured) -> PlanAgain | Warned | None:
    """Plan for what a step needed more than predicted, wherever: its peak, fragments, or waits for copies.

    The last time leave a margin. Fragments count if the budget is for them. If waits go on, halve the rates
    of the link again, until nothing moves.
    """
    peak, over, correction = measured.peak, measured.reserved_over, planned.correction
    stays = planned.stays or (
        f"corrected {correction.times} times" if correction.times >= MOST_CORRECTIONS else ""
    )
    last, warning = correction.times == MOST_CORRECTIONS - 1, None
    again = replace(correction, times=correction.times + 1)
    if peak is not None and peak > max(planned.limit, planned.peak):
        if not stays:
            margin = round(LAST_MARGIN * planned.limit) if last else 0
            again = replace(again, nbytes=correction.nbytes + peak - planned.peak + margin)
            reason = f"the measured peak was {format_bytes(peak)}, and the predicted one "
            return PlanAgain(replace(planned, correction=again), reason + format_bytes(planned.peak))
        if not measured.of_reserved:  # fragments may leave room for it
            text = f"measured a peak of {format_bytes(peak)}, over the limit of {format_bytes(planned.limit)}"
            text += f". The plan stays, because it was {stays}"
            if stays == ELSEWHERE:
                text += ". Pass budget_gb and no policy to have this step planned"
            warning = Warned("over the limit", text)
    if over > (0 if measured.of_reserved else SEGMENT):
        held = f"the allocator has reserved {format_bytes(over)} more than the budget, for fragments"
        # It is over its limit, so it is the tightest one that was found.
        is_tightest = planned.peak > planned.limit - correction.withheld
        if measured.of_reserved and not (stays or is_tightest):
            withheld = correction.withheld + over + (SEGMENT if last else 0)
            return PlanAgain(replace(planned, correction=replace(again, withheld=withheld)), held)
        advice = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        if not measured.of_reserved:
            advice += ', or pass constraints=Constraints(budget_of="reserved"), whose budget counts them'
        warning = warning or Warned("fragments", f"{held}. Where the device is nearly full, {advice}")
    if measured.stalled > STALLED and not planned.stays:
        share = 0.0 if measured.moves_lose else SLOWER * planned.link_share
        reason = f"compute waits for copies to and from the host, {measured.stalled:.0%} of the step longer"
        return PlanAgain(replace(planned, link_share=share), f"{reason} than was foreseen")
    return warning


# --- words ------------------------------------------------------------------------------------------------


def of_others(nbytes: int) -> str:
    """Return words for messages: `nbytes` are held by other models and tensors on the device."""
    return f"other models and tensors on the device hold {format_bytes(nbytes)}"


def may_go_over(planned: PlannedFor, subject: str, what: str, advice: str) -> Warned:
    """Return the warning of a step that its plan was not made for.

    Args:
        what: the step does.
        advice: what the user can do about it.
    """
    then = f"It was {planned.stays} and stays" if planned.stays else "It is planned again"
    over = f"this step may go over the limit of {format_bytes(planned.limit)}"
    return Warned(subject, f"{what}: {over}. {then}; {advice}")
