"""What a user insists on beside the budget: a pure transformation of the Graph.

    profile, Constraints --constrained--> Graph --held_back--> Graph     and from there on as ever

NOTE [ Constraints are a graph ]

Nothing behind this module knows of constraints. A pin is the `must_save` or `must_recompute` of an op. Bytes
are static bytes. A smaller limit for forward is the difference to the budget, counted as live at every op
of forward (`Op.extra_bytes`): with budget B and limit F, `live + (B - F) <= B` in forward is `live <= F`,
exactly, in the simulator, in every row of the program and in the bounds. The plan is then evaluated on the
graph without that difference.

Patterns name ops by their keys, `model.layers.3.mlp/aten.mm.default#1`:

- a whole key stands for that op alone;
- `MODULE` stands for all that runs in the module or inside it; `*` in it is one part of the path or a piece
  of one, `**` any number of parts, `.` the whole model: `model.layers.*.mlp`;
- `MODULE/OP` stands for these ops there: `aten.mm.default#1`, `aten.mm.default` or `aten.mm`, with `*` for
  anything. `*/aten.mm` is every matmul of the model.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from autoac.planner.errors import (
    ConflictingPins,
    InvalidConstraints,
    UnmatchedPattern,
)
from autoac.planner.formats.op_key import OpKey
from autoac.planner.formats.profile import DECIDES, PINNED, Count, Profile
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import Graph, OpId
from autoac.planner.problem.save_sets import because_of, unsaved_with
from autoac.planner.units import format_bytes

MOST_PATTERNS = 1000  # in one field

Patterns = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...], Field(max_length=MOST_PATTERNS)
]
Gradients = Literal["as profiled", "present", "absent"]

OUTSIDE = "outside of recompute_only"
CROSSES = "another FSDP unit reads it"


class Constraints(BaseModel):
    """What holds for a plan beside its budget. Pure data, the same in requests, in policies and in Python.

    Patterns are those of the module docstring. Bytes are on the device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pin_save: Patterns = ()  # ops that are never run again
    pin_recompute: Patterns = ()  # ops whose outputs are never saved
    recompute_only: Patterns = ()  # modules or ops; what is outside is saved. Empty: no such limit
    fsdp_units: Patterns = ()  # modules; what one of them reads of another, or of the rest, is saved
    save_deciding: bool = True  # save what decides where something goes; False: the planner may choose
    forward_budget_bytes: Annotated[int, Field(gt=0, le=2**53)] | None = None  # the most live in forward
    extra_static_bytes: Count = 0  # live over the whole step, and not in the profile
    gradients: Gradients = "as profiled"  # whether they exist before the step

    @property
    def pins(self) -> bool:
        """Whether any op is decided by them."""
        return bool(self.pin_save or self.pin_recompute or self.recompute_only or self.fsdp_units)

    @property
    def digest(self) -> str:
        """SHA-256 of what is asked for."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def beyond_the_graph(self) -> Constraints:
        """What is left to obey once `constrained` has made the graph: the limit of forward."""
        return Constraints(forward_budget_bytes=self.forward_budget_bytes)


def no_forward_budget(constraints: Constraints | None) -> Constraints:
    """`constraints`, for a question that is not asked of one budget; none: an empty one.

    Raises:
        InvalidConstraints: forward has a budget, which means something only beside the step's.
    """
    if constraints is None:
        return Constraints()
    if constraints.forward_budget_bytes is not None:
        raise InvalidConstraints(
            f"forward's budget of {constraints.forward_budget_bytes} bytes means nothing without the step's: "
            "leave it out here, or call plan() with both"
        )
    return constraints


def constrained(profile: Profile | Graph, constraints: Constraints) -> Graph:
    """The problem under `constraints`, except for the budget of forward: see `held_back`.

    An op that must be saved for a reason of its own (a collective, a shape that depends on data, an output
    that decides) stays saved where a pattern of `pin_recompute` merely includes it; so does what an FSDP
    unit reads. If such a pattern leaves nothing to run again, or is the op's whole key, that is an error.

    Args:
        profile: one training step, or the Graph of one.
        constraints: what is asked for.

    Raises:
        UnmatchedPattern: a pattern stands for no op; says which come near.
        ConflictingPins: an op would have to be saved and run again; names both sides.
        InvalidConstraints: gradients that this profile cannot tell of.
    """
    graph = profile if isinstance(profile, Graph) else build(profile)
    graph = _with_gradients(graph, profile, constraints.gradients)
    graph = replace(graph, static_bytes=graph.static_bytes + constraints.extra_static_bytes)
    if not constraints.save_deciding:
        ops = (replace(op, must_save="") if op.must_save == DECIDES else op for op in graph.ops)
        graph = replace(graph, ops=tuple(ops))
    return _pinned(graph, constraints) if constraints.pins else graph


def held_back(graph: Graph, budget: int, forward: int | None) -> Graph:
    """`graph` with the bytes that forward must leave of the budget counted as live in forward.

    A save set fits in `budget` there exactly if in `graph` it fits in `budget`, and in forward in `forward`.
    """
    if forward is None or forward >= budget:
        return graph
    kept_free = budget - forward
    return replace(graph, ops=tuple(replace(op, extra_bytes=op.extra_bytes + kept_free) for op in graph.ops))


# --- patterns -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Names:
    """The keys of a graph's ops, taken apart. By op."""

    keys: tuple[str, ...]

    @cached_property
    def modules(self) -> list[tuple[str, ...]]:
        return [_parts(key.module) for key in self.parsed]

    @cached_property
    def parsed(self) -> list[OpKey]:
        return [OpKey.parse(key) for key in self.keys]

    @cached_property
    def position(self) -> dict[str, int]:
        return {key: op for op, key in enumerate(self.keys)}

    def matching(self, field: str, pattern: str) -> list[OpId]:
        """The ops that `pattern` stands for, in order.

        Raises:
            UnmatchedPattern: none.
        """
        if pattern in self.position:
            return [OpId(self.position[pattern])]
        module, slash, name = pattern.rpartition("/")
        found = self._called(module, name) if slash else []
        found = found or self._called(pattern, "*")  # a module's name may contain "/"
        if not found:
            raise UnmatchedPattern(field, pattern, self._near(pattern), len(self.keys))
        return found

    def _called(self, module: str, name: str) -> list[OpId]:
        """Return the ops in modules that `module` stands for that answer to `name`."""
        inside = {parts: _inside(parts, module) for parts in dict.fromkeys(self.modules)}
        return [
            OpId(op)
            for op, key in enumerate(self.parsed)
            if inside[self.modules[op]] and _is_called(key, name)
        ]

    def unit_of(self, patterns: Sequence[str]) -> list[tuple[str, ...]]:
        """By op: the innermost module around it that one of `patterns` stands for; () for the rest.

        Raises:
            UnmatchedPattern: one of them stands for no module.
        """
        units: dict[tuple[str, ...], tuple[str, ...]] = {}
        for parts in dict.fromkeys(self.modules):
            ends = {end for pattern in patterns for end in _ends(parts, _parts(pattern))}
            units[parts] = parts[: max(ends, default=0)]
        for pattern in patterns:
            if not any(_ends(parts, _parts(pattern)) for parts in units):
                raise UnmatchedPattern("fsdp_units", pattern, self._near(pattern), len(self.keys))
        return [units[parts] for parts in self.modules]

    def _near(self, pattern: str) -> list[str]:
        paths = [".".join(parts[:i]) for parts in self.modules for i in range(1, len(parts) + 1)]
        known = list(self.keys) if "/" in pattern else list(dict.fromkeys([*paths, "."]))
        return difflib.get_close_matches(pattern, known, 3, 0.5)


def _parts(path: str) -> tuple[str, ...]:
    """The parts of a module path; none for the whole model, which is "." in keys."""
    return tuple(path.split(".")) if path not in ("", ".") else ()


def _inside(module: tuple[str, ...], pattern: str) -> bool:
    """Whether `module` is one that `pattern` stands for, or inside one."""
    return pattern == "*" or bool(_ends(module, _parts(pattern)))


def _ends(module: tuple[str, ...], pattern: tuple[str, ...]) -> set[int]:
    """How many leading parts of `module` are together what `pattern` stands for: all ways."""
    ends = {0}
    for piece in pattern:
        if piece == "**":
            ends = set(range(min(ends), len(module) + 1))
        else:
            ends = {end + 1 for end in ends if end < len(module) and fnmatchcase(module[end], piece)}
        if not ends:
            break
    return ends


def _is_called(key: OpKey, pattern: str) -> bool:
    """Return True if `pattern` is the op's name: with its occurrence, without it, or without overload."""
    return any(
        fnmatchcase(name, pattern)
        for name in (f"{key.op}#{key.occurrence}", key.op, key.op.rpartition(".")[0])
    )


# --- pins -----------------------------------------------------------------------------------------------


def _pinned(graph: Graph, constraints: Constraints) -> Graph:
    names = _Names(tuple(op.name for op in graph.ops))
    save = {op.id: op.must_save for op in graph.ops if op.must_save}
    again = {op.id: "must_recompute in the profile" for op in graph.ops if op.must_recompute}
    by_user = {op for op, reason in save.items() if reason == PINNED}
    for pattern in constraints.pin_save:
        for op in names.matching("pin_save", pattern):
            if op in again:
                raise ConflictingPins(names.keys[op], f"pin_save {pattern!r}", again[op])
            if op not in by_user:
                save[op] = f"pin_save {pattern!r}"
                by_user.add(op)
    if constraints.recompute_only:
        inside = {o for p in constraints.recompute_only for o in names.matching("recompute_only", p)}
        for op in (op.id for op in graph.ops if op.id not in inside):
            if op in again:
                raise ConflictingPins(names.keys[op], OUTSIDE, again[op])
            if op not in save:
                save[op] = OUTSIDE
                by_user.add(op)
    if constraints.fsdp_units:
        for op in _crossing(graph, names.unit_of(constraints.fsdp_units)):
            if op in again:
                raise ConflictingPins(names.keys[op], CROSSES, again[op])
            save.setdefault(op, CROSSES)
    for pattern in constraints.pin_recompute:
        found = names.matching("pin_recompute", pattern)
        _run_again(graph, f"pin_recompute {pattern!r}", found, save, by_user, again)
    return replace(
        graph,
        ops=tuple(
            replace(op, must_save=save.get(op.id, ""), must_recompute=op.id in again) for op in graph.ops
        ),
    )


def _run_again(
    graph: Graph,
    said: str,
    found: Sequence[OpId],
    save: dict[OpId, str],
    by_user: set[OpId],
    again: dict[OpId, str],
) -> None:
    """Add to `again` those of `found` that may be run again, and the ops that must be with them.

    Raises:
        ConflictingPins: the user has one of them saved, or none of them may.
    """
    obeyed = False
    blocked: list[tuple[OpId, OpId]] = []  # an op, and what keeps it from running again
    for op in found:
        chain = unsaved_with(graph, op)
        saved = [link for link in chain if link in save]
        for link in saved:
            if link in by_user:
                raise ConflictingPins(graph.ops[op].name, said, _because(graph, op, link, save))
        if saved:
            blocked.append((op, saved[0]))
        else:
            obeyed = True
            again.update(dict.fromkeys(chain, said))
    if not obeyed:
        op, link = blocked[0]
        raise ConflictingPins(graph.ops[op].name, said, _because(graph, op, link, save))


def _because(graph: Graph, op: OpId, link: OpId, save: dict[OpId, str]) -> str:
    return save[op] if link == op else because_of(graph, link, save[link])


def _crossing(graph: Graph, units: Sequence[tuple[str, ...]]) -> Iterator[OpId]:
    """The ops of which another unit reads an output."""
    for op in graph.ops:
        readers = (r for w in op.writes for r in graph.versions[w].readers)
        if any(units[r] != units[op.id] for r in readers):
            yield op.id


# --- gradients ------------------------------------------------------------------------------------------


def _with_gradients(graph: Graph, profile: Profile | Graph, wanted: Gradients) -> Graph:
    if wanted == "as profiled":
        return graph
    if isinstance(profile, Graph):
        raise InvalidConstraints(
            f"gradients={wanted!r} needs the Profile, and a Graph does not tell gradients apart; pass a "
            "Profile, or leave gradients as profiled"
        )
    existing, made = profile.static.gradients, profile.gradient_nbytes
    if wanted == "absent" and existing:
        raise InvalidConstraints(
            f"gradients='absent' cannot be told from this profile, in whose step {format_bytes(existing)} of "
            "gradients existed already; profile after optimizer.zero_grad(set_to_none=True)"
        )
    if wanted == "absent":
        return graph
    return replace(graph, static_bytes=graph.static_bytes + made, closing_bytes=graph.closing_bytes - made)
