"""Test the prediction of fragments on a step that is seen by eye. Sizes are in MiB."""

from __future__ import annotations

from graphs import no_temporaries, step_with_fragments

from autoac.planner import plan
from autoac.planner.formats.profile import CROSSES
from autoac.planner.memory.fragments import loop_log

MIB = 1 << 20


def test_the_state_of_the_optimizer_lies_where_activations_were() -> None:
    """Draw the segments: P parameter, A output, G gradient, t temporary, S the optimizer's state.

    step 1, backward      [P 12] [A 8, t 3, 9 free] [G 12]                       12 + 20 + 12
    optimizer             [P 12] [S 12, 8 free]     [G 12] [S 12]                    + 12
    step 2, backward      [P 12] [S 12, A 8]        [t 3, 9 free] [S 12] [G 12]      + 12
    """
    found = plan(step_with_fragments(), budget_bytes=1 << 40)
    assert found.peak == (12 + 24 + 8 + 3 + 12) * MIB
    assert found.fragment_bytes() == (68 - 59) * MIB


def test_segments_that_grow_have_fewer_fragments() -> None:
    """Three pages hold P, a hole of 11 where A and t were, G, S and S; step 2 fits in there."""
    found = plan(step_with_fragments(), budget_bytes=1 << 40)
    assert found.fragment_bytes(expandable_segments=True) == (60 - 59) * MIB


def test_gradients_of_a_sharded_model_have_segments_of_their_own() -> None:
    """Nothing lies where the gradient was: in step 2, t needs a segment.

    step 1, and optimizer [P 12] [S 12, 8 free] [S 12]              12 + 20 + 12   and [G 12]
    step 2                [P 12] [S 12, A 8]    [S 12] [t 3, 17 free]     + 20
    """
    sharded = step_with_fragments().model_copy(update={"reasons": (CROSSES,)})
    assert plan(sharded, budget_bytes=1 << 40).fragment_bytes() == (64 + 12 - 59) * MIB


def test_log_has_the_peak_of_the_simulator() -> None:
    profile = step_with_fragments()
    found = plan(profile, budget_bytes=1 << 40)
    assert loop_log(profile, found.graph, found.save_set).most == found.peak


def test_fragments_of_a_profile_without_temporaries_are_not_known() -> None:
    profile = step_with_fragments().model_copy(update={"temporaries": no_temporaries(2)})
    assert plan(profile, budget_bytes=1 << 40).fragment_bytes() is None
