"""Each rule that says when a plan is made again, and the tolerances on both sides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ac_client.planning import trigger
from ac_client.planning.facts.forwards_in_flight import BackwardFacts
from ac_client.planning.trigger import MOST_CORRECTIONS, Correction, Form, Measured, PlannedFor, Present
from autoac.planner.units import format_bytes
from autoac.profiler.static_memory import OptimizerBytes

LIMIT = 1000
PLANNED = PlannedFor(LIMIT, peak=900, forward_nbytes=400)  # one more forward does not fit
LOOSE = replace(PLANNED, peak=100, forward_nbytes=10)  # twenty more fit
LARGE = replace(PLANNED, limit=10**7, peak=9_999_000)
TIGHTEST = replace(PLANNED, peak=1100, present=Present(others_nbytes=300))  # no plan keeps the limit


def again(planned: PlannedFor, now: Present | Measured) -> trigger.PlanAgain:
    rule: Any = trigger.present_rule if isinstance(now, Present) else trigger.measured_rule
    action = rule(planned, now)
    assert isinstance(action, trigger.PlanAgain)
    return action


def shown_by(planned: PlannedFor, **facts: Any) -> tuple[Form, str]:
    form, warning = trigger.backward_rule(planned, planned.form, BackwardFacts(**facts))
    return form, warning.text if warning is not None else ""


# --- what is present --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planned", "now"),
    [
        (PLANNED, Present()),
        (PLANNED, Present(others_nbytes=100)),  # they fit
        (LARGE, Present(others_nbytes=1000)),
        (replace(PLANNED, peak=LIMIT), Present(kept_nbytes=1 << 10)),  # a scalar loss
        (replace(LARGE, peak=5 * 10**6), Present(others_nbytes=60_000, kept_nbytes=60_000)),
        (replace(LARGE, present=Present(kept_nbytes=2_000)), Present(kept_nbytes=2_000)),
        (replace(LARGE, present=Present(gradients=True)), Present(gradients=True)),
        (replace(LARGE, present=Present(gradients=True)), Present()),  # a first microbatch has none
        (
            replace(PLANNED, present=Present(optimizers=OptimizerBytes(5, 2))),
            Present(optimizers=OptimizerBytes(5, 1)),
        ),
        (replace(LARGE, peak=10**7 + 1), Present(others_nbytes=2_000)),  # no plan has room for it
        (replace(TIGHTEST, gained_room=True), Present(others_nbytes=200)),  # they may hold more again
        (replace(TIGHTEST, peak=900), Present(others_nbytes=200)),
    ],
)
def test_plan_stays_if_what_is_present_is_counted_or_fits(planned: PlannedFor, now: Present) -> None:
    assert trigger.present_rule(planned, now) is None


@pytest.mark.parametrize(
    "now",
    [
        Present(others_nbytes=2_000),
        Present(kept_nbytes=2_000),
        Present(others_nbytes=1_000, kept_nbytes=1_000),
        Present(gradients=True),
        Present(optimizers=OptimizerBytes(50, 1)),
    ],
)
def test_what_is_present_is_counted_at_once(now: Present) -> None:
    assert again(LARGE, now).terms == replace(LARGE, present=now)


@pytest.mark.parametrize("counted", [OptimizerBytes(90, 1), OptimizerBytes(50, 0)])
def test_state_that_is_not_as_counted_is_planned_for(counted: OptimizerBytes) -> None:
    now = Present(optimizers=OptimizerBytes(50, 1))
    assert again(replace(PLANNED, present=Present(optimizers=counted)), now).terms.present == now


def test_gradients_count_in_all_later_plans() -> None:
    found = again(PLANNED, Present(gradients=True))
    assert found.reason == trigger.GRADIENTS
    assert again(found.terms, Present(optimizers=OptimizerBytes(50, 1))).terms.present.gradients


def test_less_than_counted_is_planned_for_once_if_no_plan_fitted() -> None:
    terms = again(TIGHTEST, Present(others_nbytes=200)).terms
    assert (terms.present.others_nbytes, terms.gained_room) == (200, True)


def test_another_share_of_the_device_is_planned_for() -> None:
    now = Present(share=0.5)
    terms = again(PLANNED, now).terms
    assert terms.present.share == 0.5
    assert trigger.present_rule(terms, now) is None


def test_gradients_that_backward_frees_or_finds_need_no_profile() -> None:
    frees = Present(gradients=True, frees_gradients=True)
    assert again(PLANNED, frees).terms.present == frees
    held = replace(frees, frees_gradients=False)
    assert again(replace(PLANNED, present=frees), held).terms.present == held


@pytest.mark.parametrize(
    ("now", "nbytes"),
    [(Present(gradients=True), 0), (Present(others_nbytes=5_000), 50)],
    ids=["step", "other"],
)
def test_correction_ends_with_the_step_that_it_was_measured_in(now: Present, nbytes: int) -> None:
    corrected = replace(LARGE, correction=Correction(1, nbytes=50, withheld=7))
    assert again(corrected, now).terms.correction == Correction(int(nbytes > 0), nbytes, withheld=7)


# --- the form of the step ---------------------------------------------------------------------------------


def test_more_forwards_in_flight_are_warned_of_and_planned_for() -> None:
    form, warning = trigger.form_rule(PLANNED, PLANNED.form, 1, left=False)
    assert form == Form(2)
    assert warning is not None
    assert "2 forwards wait for one backward, and the plan is for 1" in warning.text
    assert trigger.form_rule(LOOSE, LOOSE.form, 1, left=False) == (LOOSE.form, None)
    waiting = replace(PLANNED, microbatches=2)
    # Each has its own backward.
    assert trigger.form_rule(waiting, Form(2), 1, left=False) == (PLANNED.form, None)


def test_more_microbatches_that_wait_need_no_profile() -> None:
    planned, now = replace(PLANNED, microbatches=2), Present(microbatches=1)
    assert trigger.form_rule(planned, planned.form, 2, left=False)[0] == planned.form
    assert again(planned, now).terms.present == now
    assert trigger.present_rule(LOOSE, now) is None


@pytest.mark.parametrize(
    ("planned", "waiting", "tries"),
    [
        (PLANNED, 0, 1),
        (PLANNED, 1, 0),
        (LOOSE, 0, 0),
        (replace(PLANNED, forward_nbytes=LIMIT - PLANNED.peak), 0, 0),
        (replace(PLANNED, form=Form(tries=trigger.MOST_TRIES)), 0, 2),
    ],
    ids=["", "in the middle", "fits", "fits exactly", "twice"],
)
def test_forward_that_ran_other_ops_is_observed(planned: PlannedFor, waiting: int, tries: int) -> None:
    assert trigger.form_rule(planned, planned.form, waiting, left=True)[0].tries == tries


@pytest.mark.parametrize(
    ("planned", "facts"),
    [
        (LOOSE, {"passes": 2}),
        (replace(PLANNED, form=Form(passes=2)), {"passes": 2}),
        (LOOSE, {"creates_graph": True}),
    ],
)
def test_backward_of_the_planned_form_changes_nothing(planned: PlannedFor, facts: dict[str, Any]) -> None:
    assert shown_by(planned, **facts) == (planned.form, "")


@pytest.mark.parametrize("passes", [1, 2])
def test_gradient_penalty_is_warned_of_however_often_backward_runs(passes: int) -> None:
    form, text = shown_by(PLANNED, creates_graph=True, passes=passes)
    assert form == PLANNED.form
    assert "create_graph=True" in text
    assert f"headroom_bytes=...) for it: {format_bytes(2 * PLANNED.forward_nbytes)}" in text


def test_more_passes_of_backward_are_observed() -> None:
    form, text = shown_by(PLANNED, passes=2)
    assert form == Form(passes=2)
    assert "retain_graph=True" in text


def test_plan_that_was_made_elsewhere_is_said_to_stay() -> None:
    _, text = shown_by(replace(PLANNED, stays=trigger.ELSEWHERE), passes=2)
    assert "It was planned elsewhere and stays; one backward" in text


# --- what was measured ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planned", "peak"), [(PLANNED, 900), (PLANNED, LIMIT), (PLANNED, 300), (TIGHTEST, 1100)]
)
def test_plan_stays_if_its_peak_is_within_the_limit_or_as_predicted(planned: PlannedFor, peak: int) -> None:
    assert trigger.measured_rule(planned, Measured(peak)) is None


def test_peak_over_the_limit_is_corrected_and_the_last_time_with_a_margin() -> None:
    assert again(PLANNED, Measured(1001)).terms.correction == Correction(1, nbytes=101)
    once = replace(PLANNED, correction=Correction(MOST_CORRECTIONS - 1, nbytes=101, withheld=7))
    nbytes = 251 + round(trigger.LAST_MARGIN * LIMIT)
    assert again(once, Measured(1050)).terms.correction == Correction(MOST_CORRECTIONS, nbytes, withheld=7)


@pytest.mark.parametrize(
    "planned",
    [
        replace(PLANNED, stays=trigger.ELSEWHERE),
        replace(PLANNED, correction=Correction(MOST_CORRECTIONS, nbytes=50)),
    ],
    ids=["elsewhere", "corrected"],
)
def test_peak_over_the_limit_is_warned_of_if_the_plan_stays(planned: PlannedFor) -> None:
    warned = trigger.measured_rule(planned, Measured(1001))
    assert isinstance(warned, trigger.Warned)
    assert "planned elsewhere" in warned.text or "corrected 2 times" in warned.text


def test_stalls_that_were_not_foreseen_are_planned_for_with_a_slower_link() -> None:
    stalled = Measured(PLANNED.peak, stalled=1.1 * trigger.STALLED)
    terms = again(PLANNED, stalled).terms
    assert terms.link_share == trigger.SLOWER
    assert again(terms, stalled).terms.link_share == trigger.SLOWER**2
    assert again(terms, stalled._replace(moves_lose=True)).terms.link_share == 0
    assert trigger.measured_rule(PLANNED, Measured(PLANNED.peak, stalled=trigger.STALLED)) is None


def test_reserved_bytes_over_the_budget_are_warned_of_or_planned_for() -> None:
    assert trigger.measured_rule(PLANNED, Measured(reserved_over=20 << 20)) is None
    warned = trigger.measured_rule(PLANNED, Measured(reserved_over=21 << 20))
    assert isinstance(warned, trigger.Warned)
    assert 'Constraints(budget_of="reserved")' in warned.text
    over = Measured(990, reserved_over=80, of_reserved=True)
    assert again(PLANNED, over).terms.correction == Correction(1, withheld=80)
    once = replace(PLANNED, correction=Correction(MOST_CORRECTIONS - 1, withheld=80))
    assert again(once, over).terms.correction == Correction(
        MOST_CORRECTIONS, withheld=80 + 80 + trigger.SEGMENT
    )
    last = trigger.measured_rule(replace(PLANNED, correction=Correction(MOST_CORRECTIONS)), over)
    assert isinstance(last, trigger.Warned)
    assert "expandable_segments" in last.text
    for tightest in (
        replace(PLANNED, peak=LIMIT + 1),
        replace(PLANNED, peak=LIMIT - 79, correction=Correction(1, withheld=80)),
    ):
        assert trigger.measured_rule(tightest, over) == last
