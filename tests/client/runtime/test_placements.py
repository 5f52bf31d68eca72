"""Random programs over DTensors have the gradients of the plain ones, whatever is recomputed."""

from __future__ import annotations

import pytest
from fuzzers.placements import tried_on


@pytest.mark.parametrize(("world", "programs"), [(1, 60), (2, 30)])
def test_random_programs_over_placements_are_exact(world: int, programs: int) -> None:
    found = tried_on(world, 0, programs)
    assert not [one for one in found if one.differs]
    ran = [one for one in found if not one.refused]
    assert len(ran) > 0.9 * len(found)
    assert sum(one.recomputed for one in ran) > 2 * len(ran)
