"""When a plan is made again: every trigger and every tolerance, in one table.

docs/budget.md is the page; the docstring of each row names loops that need it. A plan was made for a step
(`PlannedFor`). The steps that run show what they are (`StepFacts`). `next_action` compares the two and
returns what to do. It is asked at four moments, each with the facts that are known then:

    before a forward        waiting, loop, gradients, optimizers, others_nbytes, ran_skipped, left
    a forward has ended     ran_skipped
    a backward begins       backward, gradients
    a step is over          peak, reserved_over, stalled_us

A plan is made only before a forward and after a step. For facts from the other moments, the next forward is
planned again; a warning comes at once if the running step may go over the budget.

`model_planning.py` profiles, plans and logs; nothing here has an effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ac_client.planning.facts.forwards_in_flight import BackwardFacts
from autoac.planner.units import format_bytes, format_us
from autoac.profiler import Loop
from autoac.profiler.static_memory import OptimizerBytes

WATCHED_STEPS = 3  # after each planning: the optimizer's state and gradients that stay come with the second
MOST_CORRECTIONS = 2  # of one policy
LAST_MARGIN = 0.02  # of the limit: the error differed from plan to plan, and no correction follows
LARGE_OUTSIDE = 0.03  # of the limit: less made between the model and backward is not worth a warning
SEGMENT = 20 << 20  # bytes: the allocator reserves so many at once, and the last of them are rarely full
LARGE_KEPT = 0.01  # of the limit: less kept by names is counted only where the plan has no room for it
STALLED = 0.01  # of the step: shorter waits for copies, unforeseen, are not worth planning again
SLOWER = 0.5  # of the rates of a link that turned out to be slower
SMALL = 1 << 10  # bytes: less is not worth planning again
MOST_TRIES = 2  # steps that are observed because a forward ran other modules or other ops

NO_OPTIMIZER = OptimizerBytes(0, 0)

GRADIENTS = "gradients exist before the step"
ELSEWHERE = "planned elsewhere"  # the policy was given, and its profile is not here
TOGETHER = "planned by all ranks together (its recomputes communicate)"


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
    loop: Loop = field(default_factory=Loop)
    gradients: bool = False  # that exist before the step count, if the profile has none
    frees_gradients: bool | None = None  # the loop does, before backward; None: no backward has shown it yet
    optimizers: OptimizerBytes = NO_OPTIMIZER  # whose state and workspace count
    others_nbytes: int = 0  # held by other models and tensors on the device
    gained_room: bool = False  # others held less than they did before, once
    share: float = 1.0  # of what a forward may save, that it holds at most while it waits (device_share.py)
    kept_nbytes: int = 0  # held in forward alone, by names of the step before
    outside_nbytes: int = 0  # made between the model and backward, and counted in the profile
    tries: int = 0  # batches that were profiled because a forward ran other modules or other ops
    correction: Correction = Correction()
    step_us: float = 0.0  # predicted, with everything saved
    stall_us: float = 0.0  # predicted: compute waits for copies
    gained_us: float = math.inf  # predicted, with moves: the time that they save
    link_share: float = 1.0  # of the link's measured rates, which the plan counts on

    @property
    def expects_gradients(self) -> bool:
        """Return True if gradients count in backward, and no backward has shown yet if it finds them."""
        return self.gradients and self.frees_gradients is None

    def fits(self, forwards: int) -> bool:
        """Return True if as many forwards as these fit in addition, even if they save everything."""
        return self.peak + forwards * self.forward_nbytes <= self.limit


class StepFacts(NamedTuple):
    """The facts known of the loop and of its steps at one moment. Sizes are in bytes; None: not looked at."""

    waiting: int = 0  # forwards that wait for their backward
    loop: Loop | None = None  # as the steps so far have shown it, for as many forwards as are planned for now
    gradients: int | None = None  # that exist before the step, or before backward
    optimizers: OptimizerBytes | None = None  # of all that have stepped the model, or will
    others_nbytes: int | None = None  # held by other models and tensors on the device
    share: float | None = None  # of what a forward may save, that it may hold while it waits
    ran_skipped: Set[str] = frozenset()  # modules that ran, and that the profiled forward skipped
    left: bool = False  # a forward has run other ops than the policy has
    kept_nbytes: int = 0  # held by names of the step before, until this forward has ended
    kept_before: int = 0  # the same as the last forward began
    outside_nbytes: int = 0  # that a step made between the model and backward, at most
    can_profile: bool = True  # the batch is like the profiled one, and no profiler is running
    backward: BackwardFacts | None = None
    peak: int | None = None  # of the steps so far, at least
    reserved_over: int = 0  # by which the step took what the allocator has reserved over the budget
    of_reserved: bool = False  # the budget is for what the allocator has reserved
    stalled_us: float = 0.0  # that compute waited for copies
    finds_host_budget: bool = False  # no one has asked for moves


@dataclass(frozen=True, slots=True)
class Keep:
    """The plan stays."""

    warning: str = ""  # of the step that runs
    row: str = ""  # of the table


@dataclass(frozen=True, slots=True)
class PlanAgain:
    """Another plan is to be made, for `terms`."""

    terms: PlannedFor
    reason: str = ""  # in words
    warning: str = ""  # of the step that runs
    profiles: bool = False  # needs a profile of the batch that runs
    row: str = ""


Action = Keep | PlanAgain
Row = Callable[[PlannedFor, StepFacts], Action | None]

KEEP = Keep()


def next_action(planned: PlannedFor, facts: StepFacts) -> Action:
    """Return what to do about a plan, now that these facts are known: the first row that applies.

    If the plan stays, as one that was made elsewhere, only the warning is left.
    """
    measured = facts.peak is not None or facts.reserved_over > 0
    kept = KEEP
    for name, row in (MEASURED if measured else BACKWARD if facts.backward is not None else LOOP).items():
        action = row(planned, facts)
        if action is None:
            continue
        if isinstance(action, PlanAgain) and planned.stays:
            action = Keep(action.warning)
        if not isinstance(action, Keep):
            return replace(action, row=name)
        if action.warning and not kept.warning:
            kept = replace(action, row=name)
    return kept


# --- the device and its allocator -------------------------------------------------------------------------


def _over_limit(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Plan for what the step needed more than predicted, wherever. Loops: sharpness-aware, L-BFGS."""
    peak, correction = facts.peak, planned.correction
    if peak is None or peak <= max(planned.limit, planned.peak):
        return None
    if planned.stays or correction.times >= MOST_CORRECTIONS:
        if facts.of_reserved:
            return None  # fragments may leave room for it
        why = planned.stays or f"corrected {correction.times} times"
        return Keep(
            f"measured a peak of {format_bytes(peak)}, over the limit of "
            f"{format_bytes(planned.limit)}. The plan stays, because it was {why}"
            + (". Pass budget_gb and no policy to have this step planned" if why == ELSEWHERE else "")
        )
    margin = round(LAST_MARGIN * planned.limit) if correction.times == MOST_CORRECTIONS - 1 else 0
    nbytes = correction.nbytes + peak - planned.peak + margin
    correction = replace(correction, times=correction.times + 1, nbytes=nbytes)
    return PlanAgain(replace(planned, correction=correction), _measured(planned, peak))


def _fragments(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Leave room for the fragments that the allocator turned out to hold, if the budget is for them too.

    The last time leave a segment more: a plan that needs one more than the plan before is not corrected.
    Loops: all with `Constraints(budget_of="reserved")`.
    """
    over, correction = facts.reserved_over, planned.correction
    if over <= (0 if facts.of_reserved else SEGMENT):
        return None
    held = f"the allocator has reserved {format_bytes(over)} more than the budget, for fragments"
    is_tightest = planned.peak > planned.limit - correction.withheld  # of those found: it is over its limit
    if not facts.of_reserved or planned.stays or is_tightest or correction.times >= MOST_CORRECTIONS:
        advice = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        if not facts.of_reserved:
            advice += ', or pass constraints=Constraints(budget_of="reserved"), whose budget counts them'
        return Keep(f"{held}. Where the device is nearly full, {advice}")
    margin = SEGMENT if correction.times == MOST_CORRECTIONS - 1 else 0
    correction = replace(correction, times=correction.times + 1, withheld=correction.withheld + over + margin)
    return PlanAgain(replace(planned, correction=correction), held)


def _stalls(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Plan for a link of half the rates. If stalls go on, halve the rates again, until nothing moves.

    If they cost more than moves save, which nobody has asked for, nothing moves from now on.

    Loops: those that copy batches to the device over the same link.
    """
    if facts.stalled_us - planned.stall_us <= STALLED * planned.step_us:
        return None
    lost = facts.finds_host_budget and facts.stalled_us - planned.stall_us > planned.gained_us
    return PlanAgain(
        replace(planned, link_share=0.0 if lost else SLOWER * planned.link_share),
        f"compute waits {format_us(facts.stalled_us)} for copies to and from the host, and the plan foresaw "
        f"{format_us(planned.stall_us)}",
    )


def _measured(planned: PlannedFor, nbytes: int) -> str:
    return f"the measured peak was {format_bytes(nbytes)}, and the predicted one {format_bytes(planned.peak)}"


# --- before a forward -------------------------------------------------------------------------------------


def _gradients(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Plan for gradients before the step. The new plan serves first microbatches too, which need less.

    If backward does not find them, they count in forward alone. Loops: accumulation, `zero_grad` after the
    forward, or with `set_to_none=False`.
    """
    if not facts.gradients or planned.gradients:
        return None
    return PlanAgain(replace(planned, gradients=True, correction=_anew(planned)), GRADIENTS)


def _optimizers(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Count the state that is there. Loops: accumulation, two optimizers, late averages, offloaded state."""
    needs, counted = facts.optimizers, planned.optimizers
    if needs is None or (needs.state == counted.state and needs.workspace <= counted.workspace):
        return None
    return PlanAgain(
        replace(planned, optimizers=needs, correction=_anew(planned)),
        f"optimizers hold {format_bytes(needs.state)} of state as a forward begins",
    )


def _other_ops(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Plan a forward that runs other modules or other ops than the profiled one, as the next may, too.

    Loops: stochastic depth; a first forward that fills caches, or finds a memory bank empty.
    """
    if not (facts.ran_skipped or facts.left) or planned.fits(1):
        return None
    warning = ""
    if facts.ran_skipped:
        some = sorted(facts.ran_skipped, key=lambda path: (len(path), path))
        more = f" and {len(some) - 3} more" if len(some) > 3 else ""
        warning = _may_go_over(
            planned,
            f"modules run that the profiled forward skipped ({', '.join(some[:3])}{more}). They are decided "
            "like the nearest layer that it ran, or else saved",
            "later steps that run yet others may, too; a first batch that runs all modules is planned best",
            again=True,
        )
    if facts.waiting or not facts.can_profile or planned.tries >= MOST_TRIES:
        return Keep(warning)
    return PlanAgain(
        replace(planned, tries=planned.tries + 1, correction=_anew(planned)),
        "a forward runs other ops than the profiled one",
        warning,
        profiles=True,
    )


def _other_models(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Count what others hold, if the plan leaves no room for it, or if all get another share of the device.

    If no plan was found that keeps the limit, and the others hold less now, count that, too, but once: what
    they hold may differ from forward to forward. Loops: two planned models (GAN); on a GPU a moving average.
    """
    if facts.others_nbytes is None:
        return None
    more = facts.others_nbytes - planned.others_nbytes
    lacks_room = more > SMALL and planned.peak <= planned.limit < planned.peak + more
    gains_room = more < 0 and planned.peak > planned.limit and not planned.gained_room
    share = planned.share if facts.share is None else facts.share
    if share == planned.share and not (lacks_room or gains_room):
        return None
    warning = ""
    if facts.waiting and lacks_room:
        warning = (
            "another planned model trains on the same device, and what it holds is not in this plan: this "
            f"step may go over the limit of {format_bytes(planned.limit)}. The plan is made again at the "
            "next step"
        )
    return PlanAgain(
        replace(
            planned,
            others_nbytes=facts.others_nbytes,
            gained_room=planned.gained_room or gains_room,
            share=share,
        ),
        of_others(facts.others_nbytes),
        warning,
    )


def _last_step(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Count what variables such as `loss` keep of the last step: a loop rebinds them after the next forward.

    If the plan has room for these bytes, count them only if as many were kept of the step before. Otherwise
    they may be garbage that Python has not collected yet. Loops: logits in the loop, distillation.
    """
    more = facts.kept_nbytes - planned.kept_nbytes
    fits_no_more = planned.peak <= planned.limit < planned.peak + more
    large = more > LARGE_KEPT * min(planned.limit, planned.peak) and facts.kept_before >= facts.kept_nbytes
    if more <= SMALL or not (fits_no_more or large):
        return None
    return PlanAgain(
        replace(planned, kept_nbytes=facts.kept_nbytes),
        f"names of the last step hold {format_bytes(facts.kept_nbytes)} during the next forward",
    )


def _loop(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Plan for the form of loop that the steps since have shown: more forwards, more passes of backward.

    Loops: one that begins to pair forwards (siamese), or has a second loss, after its first step.
    """
    if facts.loop is None:
        return None
    loop, in_flight, warning = facts.loop, facts.waiting + 1, ""
    if 1 < loop.forwards <= planned.microbatches:  # each has a backward of its own
        loop = replace(loop, forwards=planned.loop.forwards)
    counted = max(loop.forwards, planned.loop.forwards, planned.microbatches)
    if in_flight > counted and not planned.fits(facts.waiting):
        loop = replace(loop, forwards=in_flight)
        warning = _may_go_over(
            planned,
            f"{in_flight} forwards wait for one backward, and the plan is for {counted}",
            "raise the budget, or run as many in each step",
            again=True,
        )
    profiles = replace(loop, drops=planned.loop.drops) != planned.loop
    if loop == planned.loop or (profiles and not facts.can_profile):
        return Keep(warning) if warning else None
    return PlanAgain(
        replace(planned, loop=loop, correction=_anew(planned)),
        f"the loop has {loop_in_words(loop)}",
        warning,
        profiles,
    )


def _outside(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Plan for more that is made between the model and backward. Loops: a loss whose terms come later."""
    if facts.outside_nbytes <= planned.outside_nbytes or facts.waiting or not facts.can_profile:
        return None
    if planned.correction.times:
        return None  # its peak was measured, whatever made it
    terms = replace(planned, outside_nbytes=facts.outside_nbytes, correction=_anew(planned))
    return PlanAgain(terms, "more is made between the model and its backward than before", profiles=True)


# --- as backward begins -----------------------------------------------------------------------------------


def _graph_created(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Warn of a graph of backward itself. Loops: gradient penalty, meta-learning."""
    backward = facts.backward
    if backward is None or not backward.creates_graph or planned.fits(2 * backward.graphs):
        return None
    several = f" ({backward.graphs} such graphs before one is freed)" if backward.graphs > 1 else ""
    warning = _may_go_over(
        planned,
        "a backward with create_graph=True (a gradient penalty, meta-learning) runs over its forward, which "
        f"no plan counts, so the budget cannot be kept{several}",
        "compute the penalty in the forward of the module that is planned, or leave "
        "Constraints(headroom_bytes=...) for it: "
        f"{format_bytes(2 * backward.graphs * planned.forward_nbytes)}, if they save as much as forwards do",
    )
    return Keep(warning)


def _passes(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Observe a step with more passes of backward than planned for. Loops: a second loss now and then."""
    backward = facts.backward
    if backward is None or backward.creates_graph or planned.fits(1):
        return None
    if backward.passes <= planned.loop.passes:
        return None
    warning = _may_go_over(
        planned,
        f"{backward.passes} passes of backward go through one graph (retain_graph=True), and the plan is for "
        f"{planned.loop.passes}",
        "one backward of the sum of the losses needs less",
        again=True,
    )
    loop = replace(planned.loop, passes=backward.passes)
    return PlanAgain(replace(planned, loop=loop), warning=warning)


def _outputs_held(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Plan for outputs that the observed step had dropped. Loops: logits that are logged now and then."""
    backward = facts.backward
    if backward is None or not backward.first or not (planned.loop.drops and backward.held_nbytes):
        return None
    warning = ""
    if planned.peak + backward.held_nbytes > planned.limit:
        warning = _may_go_over(
            planned,
            f"outputs of {format_bytes(backward.held_nbytes)} are held in backward, and the plan is for a "
            "loop that drops them before",
            "drop them in every step, as in loss = model(batch).loss, or hold them in every step",
            again=True,
        )
    loop = replace(planned.loop, drops=frozenset())
    return PlanAgain(replace(planned, loop=loop), warning=warning)


def _gradients_held(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Note if backward finds the gradients that forward found; once it did, they count in all later plans.

    Loops: accumulation that begins later, `zero_grad` after the forward.
    """
    if facts.gradients is None or planned.frees_gradients is False:
        return None
    if not facts.gradients:
        if planned.frees_gradients:
            return None
        return PlanAgain(replace(planned, gradients=False, frees_gradients=True))
    terms, warning = replace(planned, frees_gradients=False), ""
    if planned.frees_gradients:
        terms = replace(terms, gradients=False)
        warning = _may_go_over(
            planned,
            f"gradients of {format_bytes(facts.gradients)} are held in backward, and the plan is for a loop "
            "that frees them before",
            "call zero_grad() before the forward",
            again=True,
        )
    return PlanAgain(terms, warning=warning)


def _loss_outside(planned: PlannedFor, facts: StepFacts) -> Action | None:
    """Warn of more between the model and backward than is planned for. Loops: as of `_outside`."""
    backward = facts.backward
    if backward is None or not backward.first:
        return None
    made = backward.nbytes_outside
    if made - planned.outside_nbytes <= LARGE_OUTSIDE * planned.limit:
        return None
    if backward.nbytes_live + made <= planned.limit:
        return None
    warning = _may_go_over(
        planned,
        f"between the model's forward and its backward about {format_bytes(made)} were made, and the plan "
        f"counts {format_bytes(planned.outside_nbytes)}",
        "a first step that makes as much is planned best",
        again=True,
    )
    return PlanAgain(replace(planned, outside_nbytes=made), warning=warning)


MEASURED: dict[str, Row] = {
    "over the limit": _over_limit,
    "fragments": _fragments,
    "stalls": _stalls,
}
LOOP: dict[str, Row] = {
    "gradients": _gradients,
    "optimizers": _optimizers,
    "other ops": _other_ops,
    "other models": _other_models,
    "last step": _last_step,
    "outside": _outside,
    "loop": _loop,
}
BACKWARD: dict[str, Row] = {
    "graph created": _graph_created,
    "passes": _passes,
    "outputs held": _outputs_held,
    "gradients held": _gradients_held,
    "loss outside": _loss_outside,
}


# --- words ------------------------------------------------------------------------------------------------


def loop_in_words(loop: Loop) -> str:
    """Return what a training loop does, in words."""
    n = loop.forwards
    words = f"{n} forward{'s' if n > 1 else ''} before one backward"
    if loop.passes > 1:
        words += f" of {loop.passes} passes"
    return words + (", and outputs that are dropped before it" if loop.drops else "")


def of_others(nbytes: int) -> str:
    """Return words for messages: `nbytes` are held by other models and tensors on the device."""
    return f"other models and tensors on the device hold {format_bytes(nbytes)}"


def _may_go_over(planned: PlannedFor, observed: str, advice: str, *, again: bool = False) -> str:
    """Return the warning of a step that its plan was not made for.

    Args:
        observed: what the step does.
        advice: what the user can do about it.
        again: later steps are planned for it, if the profile is here.
    """
    if again:
        steps = "this step"
        then = f"It was {planned.stays} and stays; " if planned.stays else "It is planned again; "
        then += advice
    else:
        steps, then = "this step and later steps", advice[0].upper() + advice[1:]
    return f"{observed}: {steps} may go over the limit of {format_bytes(planned.limit)}. {then}"


def _anew(planned: PlannedFor) -> Correction:
    """Return the correction with which a plan of another step begins: withheld bytes stay withheld."""
    return Correction(withheld=planned.correction.withheld)
