"""Each row of the table that says when a plan is made again, and the tolerances on both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ac_client.planning.facts.forwards_in_flight import BackwardFacts
from ac_client.planning.next_action import (
    ELSEWHERE,
    LAST_MARGIN,
    MOST_CORRECTIONS,
    MOST_TRIES,
    SEGMENT,
    SLOWER,
    Correction,
    Keep,
    PlanAgain,
    PlannedFor,
    StepFacts,
    next_action,
)
from autoac.planner.units import format_bytes
from autoac.profiler import Loop
from autoac.profiler.static_memory import OptimizerBytes

LIMIT = 1000
PLANNED = PlannedFor(LIMIT, peak=900, forward_nbytes=400)  # one more forward does not fit
LOOSE = replace(PLANNED, peak=100, forward_nbytes=10)  # twenty more fit
HELD = replace(PLANNED, loop=Loop(drops=frozenset({1})))


def again(row: str, planned: PlannedFor, facts: StepFacts) -> PlanAgain:
    action = next_action(planned, facts)
    assert isinstance(action, PlanAgain)
    assert action.row == row
    return action


def backward(*, gradients: int | None = None, **facts: Any) -> StepFacts:
    return StepFacts(gradients=gradients, backward=BackwardFacts(**facts))


KEPT: list[tuple[str, PlannedFor, StepFacts]] = [
    ("nothing is known", PLANNED, StepFacts()),
    ("the peak is as predicted", PLANNED, StepFacts(peak=900)),
    ("the peak is at the limit", replace(PLANNED, peak=LIMIT), StepFacts(peak=LIMIT)),
    (
        "the tightest plan peaks over the limit, as predicted",
        replace(PLANNED, peak=1100),
        StepFacts(peak=1100),
    ),
    ("the peak is over the predicted one, within the limit", PLANNED, StepFacts(peak=950)),
    ("the peak is far under the predicted one: that of a smaller batch, say", PLANNED, StepFacts(peak=300)),
    ("gradients were planned for", replace(PLANNED, gradients=True), StepFacts(gradients=70)),
    (
        "the optimizer's state is counted",
        replace(PLANNED, optimizers=OptimizerBytes(5, 2)),
        StepFacts(optimizers=OptimizerBytes(5, 1)),
    ),
    ("all modules fit", LOOSE, StepFacts(ran_skipped={"a"})),
    ("other models fit", PLANNED, StepFacts(others_nbytes=100)),
    ("names keep a scalar loss", replace(PLANNED, peak=LIMIT), StepFacts(kept_nbytes=1 << 10)),
    ("names keep little", replace(PLANNED, limit=10**7, peak=9 * 10**6), StepFacts(kept_nbytes=80_000)),
    (
        "names keep little, and no plan fitted",
        replace(PLANNED, limit=10**6, peak=2 * 10**6),
        StepFacts(kept_nbytes=5_000),
    ),
    ("the loop is as planned", PLANNED, StepFacts(loop=Loop())),
    ("two forwards in flight fit", LOOSE, StepFacts(waiting=1, loop=Loop())),
    ("a second pass fits", LOOSE, backward(passes=2)),
    ("a second pass was planned for", replace(PLANNED, loop=Loop(passes=2)), backward(passes=2)),
    ("a gradient penalty fits", LOOSE, backward(creates_graph=True)),
    ("outputs are dropped, as planned", HELD, backward(dropped=frozenset({1, 2}))),
    ("outputs are dropped now and then", PLANNED, backward(dropped=frozenset({1}), dropped_nbytes=300)),
    ("other ops fit", LOOSE, StepFacts(left=True)),
    ("other ops were observed twice", replace(PLANNED, tries=2), StepFacts(left=True)),
    ("the loss outside fits", PLANNED, backward(nbytes_outside=300, nbytes_live=700)),
    ("the loss outside is small", PLANNED, backward(nbytes_outside=30, nbytes_live=999)),
]


@pytest.mark.parametrize(("planned", "facts"), [case[1:] for case in KEPT], ids=[case[0] for case in KEPT])
def test_plan_stays(planned: PlannedFor, facts: StepFacts) -> None:
    assert next_action(planned, facts) == Keep()


def test_peak_over_the_limit_is_corrected_and_the_last_time_with_a_margin() -> None:
    correction = again("over the limit", PLANNED, StepFacts(peak=1001)).terms.correction
    assert correction == Correction(1, nbytes=101)
    once = replace(PLANNED, correction=Correction(MOST_CORRECTIONS - 1, nbytes=101, withheld=7))
    correction = again("over the limit", once, StepFacts(peak=1050)).terms.correction
    assert correction == Correction(MOST_CORRECTIONS, nbytes=251 + round(LAST_MARGIN * LIMIT), withheld=7)


@pytest.mark.parametrize(
    "planned",
    [replace(PLANNED, stays=ELSEWHERE), replace(PLANNED, correction=Correction(MOST_CORRECTIONS, nbytes=50))],
    ids=["elsewhere", "corrected"],
)
def test_peak_over_the_limit_is_warned_of_if_the_plan_stays(planned: PlannedFor) -> None:
    action = next_action(planned, StepFacts(peak=1001))
    assert isinstance(action, Keep)
    assert action.row == "over the limit"
    assert "planned elsewhere" in action.warning or "corrected 2 times" in action.warning


def test_stalls_that_were_not_foreseen_are_planned_for_with_a_slower_link() -> None:
    planned = replace(PLANNED, step_us=1000.0, stall_us=5.0)
    facts = StepFacts(peak=planned.peak, stalled_us=16.0)
    terms = again("stalls", planned, facts).terms
    assert terms.link_share == SLOWER
    assert again("stalls", terms, facts).terms.link_share == SLOWER**2
    assert next_action(planned, facts._replace(stalled_us=15.0)) == Keep()


def test_reserved_bytes_over_the_budget_are_warned_of_or_planned_for() -> None:
    assert next_action(PLANNED, StepFacts(reserved_over=20 << 20)) == Keep()
    action = next_action(PLANNED, StepFacts(reserved_over=21 << 20))
    assert isinstance(action, Keep)
    assert action.row == "fragments"
    assert 'Constraints(budget_of="reserved")' in action.warning
    facts = StepFacts(peak=990, reserved_over=80, of_reserved=True)
    correction = again("fragments", PLANNED, facts).terms.correction
    assert correction == Correction(1, withheld=80)
    once = replace(PLANNED, correction=Correction(MOST_CORRECTIONS - 1, withheld=80))
    correction = again("fragments", once, facts).terms.correction
    assert correction == Correction(MOST_CORRECTIONS, withheld=80 + 80 + SEGMENT)
    last = next_action(replace(PLANNED, correction=Correction(MOST_CORRECTIONS)), facts)
    assert isinstance(last, Keep)
    assert "expandable_segments" in last.warning
    for tightest in (
        replace(PLANNED, peak=LIMIT + 1),
        replace(PLANNED, peak=LIMIT - 79, correction=Correction(1, withheld=80)),
    ):
        assert next_action(tightest, facts) == last


def test_gradients_before_the_step_need_no_profile() -> None:
    action = again("gradients", PLANNED, StepFacts(gradients=70, can_profile=False))
    assert not action.profiles
    assert action.terms.expects_gradients
    assert next_action(action.terms, StepFacts(gradients=70)) == Keep()
    found = again("gradients held", action.terms, backward(gradients=70))
    assert (found.terms.gradients, found.terms.frees_gradients, found.warning) == (True, False, "")
    for gradients in (70, 0, None):
        assert next_action(found.terms, backward(gradients=gradients)) == Keep(), (
            "a first microbatch has none"
        )


def test_gradients_that_backward_does_not_find_count_in_forward_alone() -> None:
    counted = replace(PLANNED, gradients=True)
    freed = again("gradients held", counted, backward(gradients=0)).terms
    assert (freed.gradients, freed.frees_gradients) == (False, True)
    in_forward = again("gradients", freed, StepFacts(gradients=70)).terms
    assert (in_forward.gradients, in_forward.frees_gradients) == (True, True)
    for gradients in (0, None):
        assert next_action(in_forward, backward(gradients=gradients)) == Keep()
    held = again("gradients held", in_forward, backward(gradients=70))
    assert "gradients of 70 B are held" in held.warning
    counted = again("gradients", held.terms, StepFacts(gradients=70)).terms
    assert (counted.gradients, counted.frees_gradients) == (True, False)


@pytest.mark.parametrize("counted", [OptimizerBytes(0, 0), OptimizerBytes(90, 1), OptimizerBytes(50, 0)])
def test_state_that_is_not_as_counted_is_planned_for(counted: OptimizerBytes) -> None:
    facts = StepFacts(optimizers=OptimizerBytes(50, 1))
    action = again("optimizers", replace(PLANNED, optimizers=counted), facts)
    assert not action.profiles
    assert action.terms.optimizers == facts.optimizers


def test_modules_that_the_profile_skipped_are_profiled_between_steps() -> None:
    facts = StepFacts(ran_skipped={"b", "a.b", "c", "d"})
    action = again("other ops", PLANNED, facts)
    assert action.profiles
    assert action.terms.tries == 1
    assert "(b, c, d and 1 more)" in action.warning
    tried = replace(PLANNED, tries=MOST_TRIES)
    for planned, now in (PLANNED, facts._replace(waiting=1)), (tried, facts):
        kept = next_action(planned, now)
        assert isinstance(kept, Keep)
        assert kept.warning


def test_bytes_of_other_models_are_counted_if_the_plan_leaves_no_room() -> None:
    large = replace(PLANNED, limit=10**7, peak=9_999_000)
    action = again("other models", large, StepFacts(others_nbytes=2_000))
    assert action.terms.others_nbytes == 2_000
    assert not action.warning
    assert "may go over" in again("other models", large, StepFacts(waiting=1, others_nbytes=2_000)).warning
    for room in (
        replace(large, peak=9_998_000),
        replace(large, peak=10**7 + 1),
    ):  # more than enough, and none
        assert next_action(room, StepFacts(others_nbytes=2_000)) == Keep()


def test_other_models_that_hold_less_are_counted_if_no_plan_fitted() -> None:
    tightest = replace(PLANNED, peak=1100, others_nbytes=300)
    action = again("other models", tightest, StepFacts(others_nbytes=200))
    assert action.terms.others_nbytes == 200
    assert next_action(replace(tightest, peak=900), StepFacts(others_nbytes=200)) == Keep()
    once = replace(action.terms, peak=1100)
    assert next_action(once, StepFacts(others_nbytes=100)) == Keep(), "they may hold more again"


def test_another_share_of_the_device_is_planned_for() -> None:
    facts = StepFacts(others_nbytes=0, share=0.5)
    action = again("other models", PLANNED, facts)
    assert action.terms.share == 0.5
    assert next_action(action.terms, facts) == Keep()


def test_graph_that_a_name_carries_into_the_next_step_is_counted() -> None:
    large = replace(PLANNED, limit=10**7, peak=9_999_000)
    action = again("last step", large, StepFacts(kept_nbytes=2_000))
    assert (action.terms.kept_nbytes, action.profiles) == (2_000, False)
    half = replace(large, peak=5 * 10**6)
    again("last step", half, StepFacts(kept_nbytes=60_000, kept_before=60_000))
    assert next_action(half, StepFacts(kept_nbytes=60_000)) == Keep(), "it may be garbage"
    assert next_action(replace(large, kept_nbytes=2_000), StepFacts(kept_nbytes=2_000)) == Keep()


def test_more_forwards_in_flight_are_warned_of_and_observed() -> None:
    action = again("loop", PLANNED, StepFacts(waiting=1, loop=Loop()))
    assert (action.terms.loop, action.profiles) == (Loop(2), True)
    assert "2 forwards wait for one backward, and the plan is for 1" in action.warning


def test_loop_that_differs_in_dropped_outputs_alone_needs_no_profile() -> None:
    assert not again("loop", HELD, StepFacts(loop=Loop(), can_profile=False)).profiles
    assert again("loop", HELD, StepFacts(loop=Loop(passes=2))).profiles


def test_gradient_penalty_is_warned_of_however_often_backward_runs() -> None:
    for facts in (
        backward(creates_graph=True),
        backward(creates_graph=True, passes=2),
    ):
        action = next_action(PLANNED, facts)
        assert isinstance(action, Keep)
        assert "create_graph=True" in action.warning
        assert f"headroom_bytes=...) for it: {format_bytes(2 * PLANNED.forward_nbytes)}" in action.warning


def test_more_passes_of_backward_are_observed() -> None:
    action = again("passes", PLANNED, backward(passes=2))
    assert action.terms.loop == Loop(passes=2)
    assert "retain_graph=True" in action.warning


@pytest.mark.parametrize(("held", "warns"), [(100, False), (101, True)])
def test_outputs_that_are_held_count_again(held: int, warns: bool) -> None:
    action = again("outputs held", HELD, backward(held_nbytes=held))
    assert action.terms.loop == Loop()
    assert bool(action.warning) is warns


def test_forward_that_ran_other_ops_is_observed() -> None:
    action = again("other ops", PLANNED, StepFacts(left=True))
    assert action.profiles
    assert action.terms.tries == 1
    assert next_action(PLANNED, StepFacts(left=True, waiting=1)) == Keep()


def test_larger_loss_outside_of_the_model_is_warned_of_and_observed() -> None:
    facts = backward(nbytes_outside=301, nbytes_live=700)
    action = again("loss outside", PLANNED, facts)
    assert "about 301 B were made, and the plan counts 0 B" in action.warning
    assert next_action(replace(PLANNED, outside_nbytes=301), facts) == Keep()
    then = again("outside", PLANNED, StepFacts(outside_nbytes=301))
    assert then.profiles
    assert then.terms.outside_nbytes == 301


def test_plan_that_was_made_elsewhere_stays_with_the_warning_of_each_row() -> None:
    elsewhere = replace(PLANNED, stays=ELSEWHERE)
    action = next_action(elsewhere, backward(passes=2))
    assert isinstance(action, Keep)
    assert "It was planned elsewhere and stays; one backward" in action.warning
    assert next_action(elsewhere, StepFacts(gradients=70)) == Keep()


@pytest.mark.parametrize(
    ("row", "facts"),
    [("gradients", StepFacts(gradients=70)), ("loop", StepFacts(loop=Loop(2)))],
)
def test_correction_ends_with_the_step_that_it_was_measured_in(row: str, facts: StepFacts) -> None:
    corrected = replace(PLANNED, correction=Correction(1, nbytes=50, withheld=7))
    assert again(row, corrected, facts).terms.correction == Correction(withheld=7)
