"""Apply Constraints to a Graph.

    Profile, Constraints --constrained--> Graph --with_forward_limit--> Graph --> solver

NOTE [ Constraints are a graph ]

The solver, the simulator and the bounds know nothing about constraints. Each constraint becomes a part of the
graph:

- A pin sets `must_save` or `must_recompute` of an op.
- Extra bytes are added to the static bytes.
- A forward budget F below the budget B adds the difference B - F to the live bytes of every forward op
  (`Op.extra_bytes`). `live + (B - F) <= B` is exactly `live <= F`: in the simulator, in every row of the
  program and in the bounds. The peak of a finished plan is counted on the graph without that difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autoac.planner.errors import ConflictingPins, InvalidConstraints
from autoac.planner.formats.constraints import Constraints, Gradients
from autoac.planner.formats.profile import CROSSES, FUNCTIONAL_COLLECTIVE, PINNED, Profile
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import Graph, OpId
from autoac.planner.problem.microbatch import with_gradients
from autoac.planner.problem.op_patterns import OpNames
from autoac.planner.problem.save_sets import because_of, unsaved_with
from autoac.planner.units import format_bytes


def constrained(profile: Profile | Graph, constraints: Constraints) -> Graph:
    """Return the graph under `constraints`, except for the forward budget: see `with_forward_limit`.

    Some ops must be saved for a reason of their own: a collective, a shape that depends on data, an output
    whose values decide, an output that another FSDP unit reads. Such an op stays saved if a pattern of
    `pin_recompute` includes it among other ops. The pattern is an error if it leaves no op to recompute.

    Args:
        profile: one training step, or the Graph of one.
        constraints: the user's constraints.

    Raises:
        UnmatchedPattern: a pattern matches no op. The error suggests similar names.
        ConflictingPins: an op would have to be both saved and recomputed. The error names both reasons.
        InvalidConstraints: `gradients` needs bytes that the profile does not record.
    """
    graph = _with_gradients(profile, constraints.gradients)
    graph = replace(graph, static_bytes=graph.static_bytes + constraints.extra_static_bytes)
    if not constraints.save_collectives:
        ops = (replace(op, must_save="") if op.must_save == FUNCTIONAL_COLLECTIVE else op for op in graph.ops)
        graph = replace(graph, ops=tuple(ops))
    return _pinned(graph, constraints) if constraints.pins else graph


def with_forward_limit(graph: Graph, budget: int, forward: int | None) -> Graph:
    """Return `graph` with the difference of the two budgets counted as live in forward.

    A save set fits in `budget` in the returned graph exactly if, in `graph`, its peak fits in `budget` and
    its forward peak fits in `forward`.
    """
    if forward is None or forward >= budget:
        return graph
    reserve = budget - forward
    return replace(graph, ops=tuple(replace(op, extra_bytes=op.extra_bytes + reserve) for op in graph.ops))


@dataclass(slots=True)
class _Pins:
    """Collects the ops that must be saved and the ops that must be recomputed, each with a reason.

    Invariant: no op is in both.
    """

    graph: Graph
    names: OpNames
    save: dict[OpId, str]
    recompute: dict[OpId, str]
    by_user: set[OpId] = field(default_factory=set)  # saved because the user pinned them

    def pin_save(self, op: OpId, reason: str, *, by_user: bool, overrides: bool = False) -> None:
        """Pin `op` to be saved. An earlier reason stays, unless `overrides` is set."""
        if op in self.recompute:
            raise ConflictingPins(self.names.keys[op], reason, self.recompute[op])
        if op not in self.save or (overrides and op not in self.by_user):
            self.save[op] = reason
            if by_user:
                self.by_user.add(op)

    def pin_recompute(self, ops: Sequence[OpId], reason: str) -> None:
        """Pin `ops` to be recomputed, with the ops that this forces. Skip those that must be saved.

        Raises:
            ConflictingPins: the user pinned one of these ops to be saved, or none of `ops` may be recomputed.
        """
        blocked: list[tuple[OpId, OpId]] = []  # an op, and the saved op that blocks it
        for op in ops:
            together = unsaved_with(self.graph, op)
            saved = [other for other in together if other in self.save]
            for other in saved:
                if other in self.by_user:
                    raise self._conflict(op, other, reason)
            if saved:
                blocked.append((op, saved[0]))
            else:
                self.recompute.update(dict.fromkeys(together, reason))
        if len(blocked) == len(ops):
            raise self._conflict(*blocked[0], reason)

    def _conflict(self, op: OpId, saved: OpId, reason: str) -> ConflictingPins:
        because = self.save[saved]
        if saved != op:
            because = because_of(self.graph, saved, because)
        return ConflictingPins(self.names.keys[op], reason, because)


def _pinned(graph: Graph, constraints: Constraints) -> Graph:
    names = OpNames(graph)
    pins = _Pins(
        graph,
        names,
        save={op.id: op.must_save for op in graph.ops if op.must_save},
        recompute={op.id: "must_recompute in the profile" for op in graph.ops if op.must_recompute},
        by_user={op.id for op in graph.ops if op.must_save == PINNED},
    )
    for pattern in constraints.pin_save:
        for op in names.matching("pin_save", pattern):
            pins.pin_save(op, f"pin_save {pattern!r}", by_user=True, overrides=True)
    if constraints.fsdp_units:
        for op in _read_by_other_units(graph, names.units(constraints.fsdp_units)):
            pins.pin_save(op, CROSSES, by_user=False)
    for pattern in constraints.pin_recompute:
        pins.pin_recompute(names.matching("pin_recompute", pattern), f"pin_recompute {pattern!r}")
    return replace(
        graph,
        ops=tuple(
            replace(op, must_save=pins.save.get(op.id, ""), must_recompute=op.id in pins.recompute)
            for op in graph.ops
        ),
    )


def _read_by_other_units(graph: Graph, units: Sequence[tuple[str, ...]]) -> Iterator[OpId]:
    for op in graph.ops:
        readers = (r for w in op.writes for r in graph.versions[w].readers)
        if any(units[r] != units[op.id] for r in readers):
            yield op.id


def _with_gradients(profile: Profile | Graph, gradients: Gradients) -> Graph:
    if isinstance(profile, Graph):
        if gradients == "as profiled":
            return profile
        raise InvalidConstraints(
            f"gradients must be 'as profiled' for a Graph, got {gradients!r}. A Graph does not separate "
            "gradients from other bytes: pass a Profile"
        )
    if gradients == "absent" and (existing := profile.static.gradients):
        raise InvalidConstraints(
            f"gradients must be 'as profiled' or 'present' for this profile, got 'absent': "
            f"{format_bytes(existing)} of gradients existed when the step was profiled. Profile after "
            "optimizer.zero_grad(set_to_none=True)"
        )
    if gradients != "present":
        return build(profile)
    profile = with_gradients(profile)
    graph, others = build(profile), profile.gradient_nbytes
    return replace(
        graph, static_bytes=graph.static_bytes + others, closing_bytes=graph.closing_bytes - others
    )
