"""Test which reason for saving an op wins, and which of them a plan may lift."""

from __future__ import annotations

import pytest
import torch

from autoac.planner.formats.profile import CROSSES, DECIDES, FUNCTIONAL_COLLECTIVE, PINNED
from autoac.tape.capture.op_recorder import RecordedOp
from autoac.tape.torch_facts.op_facts import facts_of


@pytest.mark.parametrize(
    ("before", "after"),
    [("", CROSSES), (DECIDES, DECIDES), (FUNCTIONAL_COLLECTIVE, CROSSES), (PINNED, PINNED)],
)
def test_reason_that_constraints_lift_gives_way_to_one_that_stays(before: str, after: str) -> None:
    op = RecordedOp(facts_of(torch.ops.aten.sin.default), "m", (), (), False, 0, before, must_recompute=True)
    op.force_save(CROSSES)
    assert (op.must_save, op.must_recompute) == (after, False)
