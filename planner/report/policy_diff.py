"""Compare the decisions of two policies, or of two plans, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoac.planner.formats.op_key import OpKey
from autoac.planner.formats.policy import Policy
from autoac.planner.plan import Plan
from autoac.planner.report.by_module import (
    Decision,
    OpDecision,
    aligned,
    fold_paths,
    op_decisions,
    policy_decisions,
    short_names,
)
from autoac.planner.units import format_bytes, format_us

ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class DiffRow:
    """Ops of one name, in modules alike, on which the two sides decide differently.

    Bytes and microseconds are sums over all modules, and 0 if a side is a Policy.
    Invariant: for plans of one profile, `recompute_us` adds up to the difference of the two plans.
    """

    module: str  # "layers.0-11.mlp"; "" for what is outside all modules
    modules: tuple[str, ...]  # the paths that it stands for
    op: str  # "mm.default#1"; the occurrence only if a module has several
    before: str  # "saved", "recomputed", "moved", "unused", "absent"
    after: str
    held_bytes: int  # more held on the device when backward begins; negative: fewer
    recompute_us: float  # more recomputed; negative: less


def diff_rows(before: Plan | Policy, after: Plan | Policy) -> tuple[DiffRow, ...]:
    """Return the decisions that differ, in the order in which the ops first run.

    A Policy knows no bytes, and may save what backward does not need. `as_planned` makes a Plan of it, which
    knows what is held. Unless both sides are plans, the decisions of the policies are compared.
    """
    held = isinstance(before, Plan) and isinstance(after, Plan)
    old, new = _by_key(before, held=held), _by_key(after, held=held)
    keys = list(dict.fromkeys([*old, *new]))
    names = short_names(keys)
    modules: dict[str, list[str]] = {}
    for key in keys:
        if _word(old.get(key)) != _word(new.get(key)):
            modules.setdefault(OpKey.parse(key).module, []).append(key)

    def changes(module: str) -> tuple[tuple[str, str, str], ...]:
        return tuple((names[key], _word(old.get(key)), _word(new.get(key))) for key in modules[module])

    rows = []
    for name, paths in fold_paths(modules, changes):
        for i, (op, was, now) in enumerate(changes(paths[0])):
            alike = [modules[path][i] for path in paths]
            held_bytes = sum(_held_bytes(new.get(key)) - _held_bytes(old.get(key)) for key in alike)
            recompute_us = sum(_runtime_us(new.get(key)) - _runtime_us(old.get(key)) for key in alike)
            rows.append(DiffRow(name, paths, op, was, now, held_bytes, recompute_us))
    return tuple(rows)


def diff_as_table(rows: Sequence[DiffRow], before: str = "before", after: str = "after") -> Iterator[str]:
    """Yield the lines of a table; `before` and `after` name the two sides. Bytes only if some are known."""
    columns = 6 if any(row.held_bytes or row.recompute_us for row in rows) else 4
    cells = [("module", "op", before, after, "held", "recompute")]
    for row in rows:
        several = f" ({len(row.modules)} modules)" if len(row.modules) > 1 else ""
        held = _signed(format_bytes(abs(row.held_bytes)), row.held_bytes)
        recompute = _signed(format_us(abs(row.recompute_us)), row.recompute_us)
        module = row.module or "(outside all modules)"
        cells.append((module + several, row.op, row.before, row.after, held, recompute))
    return aligned([line[:columns] for line in cells], words=4)


def _by_key(subject: Plan | Policy, *, held: bool) -> dict[str, OpDecision]:
    if isinstance(subject, Plan) and held:
        decisions = op_decisions(subject.graph, subject.save_set, subject.moved)
    else:
        decisions = policy_decisions(subject.policy() if isinstance(subject, Plan) else subject)
    return {op.key: op for op in decisions}


def _word(op: OpDecision | None) -> str:
    return ABSENT if op is None else op.decision.name.lower()


def _held_bytes(op: OpDecision | None) -> int:
    return 0 if op is None or op.decision is Decision.MOVED else op.kept_bytes


def _runtime_us(op: OpDecision | None) -> float:
    return 0.0 if op is None else op.runtime_us


def _signed(text: str, value: float) -> str:
    return f"{'+' if value > 0 else '-'}{text}" if value else ""
