"""Define StepGraph, one training step as the benchmark's planners see it, and its JSON format.

The README next to this file describes the format; check.py states the rules that a schedule obeys. Readers of
other formats make StepGraphs; a planner is a function from a StepGraph and a budget to events.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

FORMAT = "autoac-step-graph/1"

Event = tuple[str, int] | tuple[str, int, tuple[int, ...]]
"""("compute", op), ("compute", op, values written over) or ("free", value)."""
Planner = Callable[["StepGraph", int], list[Event]]
"""(graph, budget in bytes) -> events; raises NoSchedule if it finds none."""


class NoSchedule(Exception):
    """A planner found no schedule within the budget; the message says why."""


@dataclass(frozen=True, slots=True)
class StepOp:
    """An op of the step.

    Invariant: `reads` names values that earlier ops write.
    """

    name: str
    us: float
    reads: tuple[int, ...]
    repeatable: bool = True  # False: runs once only
    workspace_bytes: int = 0  # live while the op runs, in addition to its outputs
    first_bytes: int = 0  # live while the op runs for the first time
    before_bytes: int = 0  # live while other ops run again just before the first run of this one


@dataclass(frozen=True, slots=True)
class StepValue:
    """An output of an op.

    Invariant: the op reads `previous`.
    """

    op: int
    nbytes: int
    previous: int | None = None  # the value that the op may write over
    held_until: int = 0  # may be freed once so many ops have run for the first time


@dataclass(frozen=True, slots=True)
class Published:
    """A schedule's cost as its authors state it, in microseconds of the whole step."""

    budget: int
    us: float
    optimal: bool = False  # proven, by the authors' solver


@dataclass(frozen=True)
class StepGraph:
    """One training step: ops in the order of their first runs.

    Invariant: values are in the order of the ops that write them.
    """

    name: str
    source: str  # whence the graph was taken, in words
    ops: tuple[StepOp, ...]
    values: tuple[StepValue, ...]
    forward_ops: int  # the first ops are forward
    static_bytes: int = 0
    keep: tuple[int, ...] = ()  # values that are live at the end
    rule: Literal["step", "checkmate"] = "step"  # of memory; check.py has both
    published: tuple[Published, ...] = field(default=(), compare=False)

    @functools.cached_property
    def writes(self) -> list[list[int]]:
        """The values that each op writes."""
        found: list[list[int]] = [[] for _ in self.ops]
        for value, written in enumerate(self.values):
            found[written.op].append(value)
        return found

    @functools.cached_property
    def readers(self) -> list[list[int]]:
        """The ops that read each value, in order."""
        found: list[list[int]] = [[] for _ in self.values]
        for op, reading in enumerate(self.ops):
            for value in reading.reads:
                found[value].append(op)
        return found

    @functools.cached_property
    def needed_until(self) -> list[int]:
        """The last op whose first run may need each value, recomputes of other values included."""
        needed = [value.op for value in self.values]
        for v in reversed(range(len(self.values))):
            for reader in self.readers[v]:
                later = (needed[w] for w in self.writes[reader] if self.ops[reader].repeatable)
                needed[v] = max(needed[v], reader, *later)
            if v in self.keep:
                needed[v] = len(self.ops)
        return needed

    @property
    def us(self) -> float:
        """The time of the step if each op runs once."""
        return sum(op.us for op in self.ops)

    def to_json(self) -> dict[str, Any]:
        """Return the graph as plain lists and dicts, ready for `json.dump`."""
        return {
            "format": FORMAT,
            "name": self.name,
            "source": self.source,
            "rule": self.rule,
            "static_bytes": self.static_bytes,
            "forward_ops": self.forward_ops,
            "ops": {column: [getattr(op, column) for op in self.ops] for column in StepOp.__slots__},
            "values": {column: [getattr(v, column) for v in self.values] for column in StepValue.__slots__},
            "keep": list(self.keep),
            "published": [{"budget": p.budget, "us": p.us, "optimal": p.optimal} for p in self.published],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepGraph:
        """Return the graph in `data`.

        Raises:
            ValueError: `data` is of another format, or breaks an invariant.
        """
        if data.get("format") != FORMAT:
            raise ValueError(f"format must be {FORMAT!r}, got {data.get('format')!r}")
        ops = (dict(zip(data["ops"], row, strict=True)) for row in zip(*data["ops"].values(), strict=True))
        values = zip(*(data["values"][column] for column in StepValue.__slots__), strict=True)
        return cls(
            name=data["name"],
            source=data["source"],
            ops=tuple(StepOp(**{**op, "reads": tuple(op["reads"])}) for op in ops),
            values=tuple(StepValue(*value) for value in values),
            forward_ops=data["forward_ops"],
            static_bytes=data["static_bytes"],
            keep=tuple(data["keep"]),
            rule=data["rule"],
            published=tuple(Published(**p) for p in data["published"]),
        ).checked()

    def checked(self) -> StepGraph:
        """Return the graph itself.

        Raises:
            ValueError: an invariant is broken.
        """
        order = [value.op for value in self.values]
        if order != sorted(order) or any(not 0 <= op < len(self.ops) for op in order):
            raise ValueError("values must be in the order of the ops that write them")
        for number, op in enumerate(self.ops):
            if any(not 0 <= v < len(order) or order[v] >= number for v in op.reads):
                raise ValueError(f"op {number} ({op.name}) must read values of earlier ops, got {op.reads}")
        for number, value in enumerate(self.values):
            if value.previous is not None and value.previous not in self.ops[value.op].reads:
                raise ValueError(f"value {number} must be written by an op that reads {value.previous}")
        return self
