"""A plain step beside the hollow one: the same ops, with times taken on true numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from autoac.profiler.errors import Unsteady
from autoac.profiler.steps.hollow import HollowStep


def with_times_of(hollow: HollowStep, plain: HollowStep) -> HollowStep:
    """`hollow` with the run times of `plain`, if both did the same.

    Raises:
        Unsteady: they did not.
    """
    for what, of_hollow, of_plain in _facts(hollow, plain):
        for i, (a, b) in enumerate(zip_longest(of_hollow, of_plain)):
            if a != b:
                raise Unsteady(f"{what} {i}", _told(a), _told(b))
    return replace(hollow, measured=plain.measured, times_ns=plain.times_ns)


def _told(fact: Any) -> str:
    return "nothing" if fact is None else str(fact)


def _facts(hollow: HollowStep, plain: HollowStep) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """What both steps must have in common, by name."""

    def ops(step: HollowStep) -> list[Any]:
        return [f"{op.facts.name} in {op.module} on {op.signature[1:]}" for op in step.forward.ops]

    def storages(step: HollowStep) -> list[Any]:
        record = step.allocations
        return [
            f"{s.nbytes} bytes" if s.address and record.block_at(s.address, s.mark) else "elsewhere"
            for s in step.forward.storages
        ]

    def saved(step: HollowStep) -> list[Any]:
        return [f"value {v} after {n} ops" for v, n in zip(step.saved.values, step.saved.packed, strict=True)]

    def events(step: HollowStep) -> list[Any]:
        return [f"{event.kind} of {event.saved} by {event.node}" for event in step.saved.events]

    yield "op", ops(hollow), ops(plain)
    yield "storage", storages(hollow), storages(plain)
    yield "saved tensor", saved(hollow), saved(plain)
    yield "event of a saved tensor", events(hollow), events(plain)
    yield "number of marks:", [len(hollow.times_ns)], [len(plain.times_ns)]
