"""Test that random programs under random policies, or between cuts, have the plain gradients, bit for bit."""

from __future__ import annotations

import os
import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import Program, gradients, same

from autoac.tape.runtime.cuts import Cuts

PROGRAMS = int(os.environ.get("AUTOAC_PROGRAMS", "400"))  # the nightly target runs more


@settings(max_examples=PROGRAMS, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(3, 30),
    save=st.sampled_from([0.0, 0.0, 0.3, 0.6]),
    nested=st.booleans(),
    twice=st.booleans(),
    factor=st.sampled_from([None, None, 0.0, 0.5, 1.0, 2.0]),
)
def test_random_program_has_the_plain_gradients(
    seed: int, length: int, save: float, nested: bool, twice: bool, factor: float | None
) -> None:
    program = Program(seed, length)
    plain = gradients(program, None, twice=twice)
    coin = random.Random(seed)
    if factor is None:
        planned = gradients(program, lambda *_, **__: coin.random() < save, nested=nested, twice=twice)
    else:
        planned = gradients(program, "recompute_all", twice=twice, cuts=Cuts(factor))
    if plain == "modified":
        return  # plain autograd rejects the program; under recomputation it may run
    assert isinstance(plain, list) == isinstance(planned, list), (plain, planned)
    if isinstance(plain, list):
        assert len(plain) == len(planned)
        assert all(same(a, b) for a, b in zip(plain, planned, strict=True))
