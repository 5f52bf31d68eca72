"""Compare a hollow step with a plain one, and combine the hollow step's records with the plain step's
times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from autoac.profiler.errors import Unsteady
from autoac.profiler.steps.hollow import HollowStep


def with_times_of(hollow: HollowStep, plain: HollowStep) -> HollowStep:
    """Return `hollow` with the run times of `plain`.

    Raises:
        Unsteady: the two steps differ in an op, a storage, or a saved tensor.
    """
    for kind, of_hollow, of_plain in _comparisons(hollow, plain):
        for i, (a, b) in enumerate(zip_longest(of_hollow, of_plain)):
            if a != b:
                raise Unsteady(f"{kind} {i}", a or "nothing", b or "nothing")
    return replace(hollow, op_times=plain.op_times, times_ns=plain.times_ns, timing_note=plain.timing_note)


def _comparisons(hollow: HollowStep, plain: HollowStep) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield descriptions of both steps that must be equal, each with its kind."""

    def ops(step: HollowStep) -> list[str]:
        return [f"{op.facts.name} in {op.module} on {op.signature[1:]}" for op in step.forward.ops]

    def storages(step: HollowStep) -> list[str]:
        record = step.allocations
        return [
            f"{s.nbytes} bytes" if s.address and record.block_at(s.address, s.mark) else "elsewhere"
            for s in step.forward.storages
        ]

    def saved(step: HollowStep) -> list[str]:
        rows = zip(step.saved.versions, step.saved.packed, strict=True)
        return [f"version {version} after {ops} ops" for version, ops in rows]

    def events(step: HollowStep) -> list[str]:
        return [f"{event.kind} of {event.saved} by {event.node}" for event in step.saved.events]

    def marks(step: HollowStep) -> list[str]:
        return [str(len(step.times_ns))]

    for kind, of in (
        ("op", ops),
        ("storage", storages),
        ("saved tensor", saved),
        ("event of a saved tensor", events),
        ("number of marks:", marks),
    ):
        yield kind, of(hollow), of(plain)
