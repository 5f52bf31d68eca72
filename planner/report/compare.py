"""Compare two plans: the decisions that differ, by module, and peak and time of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from autoac.planner.formats.op_key import OpKey
from autoac.planner.formats.policy import Policy
from autoac.planner.plan import Plan
from autoac.planner.report.by_module import (
    Decision,
    OpDecision,
    fold_paths,
    op_decisions,
    policy_decisions,
    runs_added_up,
    short_names,
)
from autoac.planner.units import format_bytes, format_us


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two plans, in numbers. Sizes are in bytes and times in microseconds."""

    model: str
    budget: int
    peak: int
    peak_at: str
    recompute_us: float
    kept: int  # ops
    again: int
    idle: int | None  # ops that backward does not need; None if unknown: then `kept` counts them
    moved: int = 0
    profile: str = ""  # digest of the profile that it was planned from


@dataclass(frozen=True, slots=True)
class DecisionChange:
    """Modules in each of which the two plans differ in the same way, on ops of the same names."""

    name: str  # "layers.0-11.mlp"
    modules: tuple[str, ...]
    gained: tuple[str, ...]  # ops of each module that only the second plan keeps
    lost: tuple[str, ...]  # ops that only the first plan keeps
    otherwise: tuple[str, ...]  # ops that neither keeps: "recomputes relu.default 2 times instead of once"
    gained_bytes: int  # held when backward begins, over all modules; 0 if that is not known
    lost_bytes: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Holds the changes from a first plan to a second."""

    before: Side
    after: Side
    changes: tuple[DecisionChange, ...]
    only_before: tuple[str, ...]  # ops that the second plan does not have at all
    only_after: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Return True if both plans have the same ops, and recompute, move or save each in the same way."""
        return not (self.changes or self.only_before or self.only_after)


def difference(
    before: Plan | Policy,
    after: Plan | Policy,
    unknown: Collection[str] = (),
    *,
    became: tuple[Sequence[OpDecision] | None, Sequence[OpDecision] | None] = (None, None),
) -> Difference:
    """Return which ops only one of two plans saves, and which ops both recompute or move, but differently.

    A Policy knows decisions but no bytes, and may save what backward does not need. A Plan (`as_planned`
    makes one from a policy and its profile) knows what is really held. If that is known of only one of the
    two, neither is judged by it: an op that backward does not need would look like a change.

    Args:
        before, after: the two plans or policies.
        unknown: keys of ops that the model did not have when `before` was made: it keeps none of them.
        became: for policies, the decisions on each op of `before` and of `after`, if they are known.
    """
    decided_before, decided_after = _held(before, became[0]), _held(after, became[1])
    known = decided_before is not None and decided_after is not None
    if decided_before is None or decided_after is None:
        decided_before, decided_after = _decided(before), _decided(after)
    of_before = {op.key: op for op in decided_before}
    of_after = {op.key: op for op in decided_after}
    names = short_names([*of_before, *of_after])

    modules: dict[str, list[tuple[str, OpDecision, OpDecision]]] = {}
    for key, old in of_before.items():
        new = of_after.get(key)
        was_saved = old.decision is Decision.SAVED and key not in unknown
        change = _change(old, new, was_saved) if new is not None else ""
        if new is not None and change:
            modules.setdefault(OpKey.parse(key).module, []).append((change, old, new))

    def signature(module: str) -> object:
        return tuple(
            (change, names[old.key], old.decision, old.runs, new.decision, new.runs)
            for change, old, new in modules[module]
        )

    changes = []
    for name, paths in fold_paths(modules, signature):
        pairs = [pair for path in paths for pair in modules[path]]
        of_one = modules[paths[0]]
        changes.append(
            DecisionChange(
                name=name,
                modules=paths,
                gained=tuple(names[new.key] for change, _, new in of_one if change == "gained"),
                lost=tuple(names[old.key] for change, old, _ in of_one if change == "lost"),
                otherwise=tuple(
                    _otherwise(names[new.key], old, new)
                    for change, old, new in of_one
                    if change == "otherwise"
                ),
                gained_bytes=sum(new.kept_bytes for change, _, new in pairs if change == "gained"),
                lost_bytes=sum(old.kept_bytes for change, old, _ in pairs if change == "lost"),
            )
        )
    return Difference(
        before=_side(before, decided_before, known),
        after=_side(after, decided_after, known),
        changes=tuple(changes),
        only_before=tuple(key for key in of_before if key not in of_after),
        only_after=tuple(key for key in of_after if key not in of_before),
    )


def _change(old: OpDecision, new: OpDecision, was_saved: bool) -> str:
    """Return the field of a DecisionChange for an op with these decisions; "" if nothing changed."""
    if was_saved != (new.decision is Decision.SAVED):
        return "lost" if was_saved else "gained"
    needed = {old.decision, new.decision} <= {Decision.RECOMPUTED, Decision.MOVED}
    return "otherwise" if needed and (old.decision, old.runs) != (new.decision, new.runs) else ""


def _otherwise(name: str, old: OpDecision, new: OpDecision) -> str:
    """Return in words what the second plan does with an op instead of the first; neither plan keeps it."""
    if old.decision is new.decision:
        return f"recomputes {name} {_times(new.runs)} instead of {_times(old.runs)}"
    moves = f"moves {name} to the host instead of recomputing it"
    return moves if new.decision is Decision.MOVED else f"recomputes {name} instead of moving it to the host"


def _times(runs: int) -> str:
    return "once" if runs == 1 else f"{runs} times"


def _held(subject: Plan | Policy, became: Sequence[OpDecision] | None) -> Sequence[OpDecision] | None:
    """Return the decisions by what is really held; None for a policy of which they are not known."""
    if isinstance(subject, Plan):
        return runs_added_up(op_decisions(subject.graph, subject.save_set, subject.moved))
    return became


def _decided(subject: Plan | Policy) -> Sequence[OpDecision]:
    return policy_decisions(subject.policy() if isinstance(subject, Plan) else subject)


def _side(subject: Plan | Policy, ops: Sequence[OpDecision], known: bool) -> Side:
    count = Counter(op.decision for op in ops)
    kept, again, idle, moved = (
        count[d] for d in (Decision.SAVED, Decision.RECOMPUTED, Decision.UNUSED, Decision.MOVED)
    )
    policy = subject.policy() if isinstance(subject, Plan) else subject
    predicted = policy.predicted
    return Side(
        policy.model,
        policy.budget_bytes,
        predicted.peak_bytes,
        predicted.peak_at,
        predicted.recompute_us,
        *(kept, again, idle if known else None, moved),
        policy.profile_digest,
    )


def difference_in_words(comparison: Difference, first: str = "the first", second: str = "the second") -> str:
    """Write the difference as text; `first` and `second` name the two plans."""
    return "\n".join(_lines(comparison, first, second))


def _lines(comparison: Difference, first: str, second: str) -> Iterator[str]:
    before, after = comparison.before, comparison.after
    if before.model != after.model:
        yield f"Two models: {before.model} and {after.model}."
    elif before.profile != after.profile:
        yield "Two profiles: the recompute time of each is by the run times of its own."
    if before.idle is None:
        yield "Ops that backward does not need count as kept: only with both profiles are they known."
    width = max(len(first), len(second))
    for name, side in ((first, before), (second, after)):
        yield (
            f"{name:<{width}}  budget {format_bytes(side.budget)}, peak {format_bytes(side.peak)} at"
            f" {side.peak_at}, {format_us(side.recompute_us)} of recompute ({side.again} ops)"
            f"{f', {side.moved} ops moved to the host' if side.moved else ''}"
        )
    peak, spent = after.peak - before.peak, after.recompute_us - before.recompute_us
    yield (
        f"{second} {'peaks' if peak else 'has the same peak'}"
        + (f" {format_bytes(abs(peak))} {'higher' if peak > 0 else 'lower'}" if peak else "")
        + (
            f" and recomputes {format_us(abs(spent))} {'more' if spent > 0 else 'less'}."
            if spent
            else " and recomputes as long."
        )
    )
    if comparison.same:
        yield "Both keep the same."
    for change in comparison.changes:
        several = len(change.modules)
        yield (change.name or "(outside all modules)") + (f" ({several} modules)" if several > 1 else "")
        for who, ops, nbytes in (
            (second, change.gained, change.gained_bytes),
            (first, change.lost, change.lost_bytes),
        ):
            if ops:
                yield f"  only {who} keeps {', '.join(ops)}" + (
                    f"  ({format_bytes(nbytes)})" if nbytes else ""
                )
        if change.otherwise:
            yield f"  {second} {', '.join(change.otherwise)}"
    for who, keys in ((first, comparison.only_before), (second, comparison.only_after)):
        if keys:
            more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
            yield f"only {who} has the ops {', '.join(keys[:5])}{more}"
