"""Resolve nested policies for one op (rule 9 of the design).

Policies are resolved from the outermost to the innermost, starting from PREFER_SAVE. A later decision
replaces an earlier one, except that a MUST stands against any PREFER, and two different MUSTs are an error.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from autoac.planner.formats.policy import OFFLOAD, SAVE, Decision
from autoac.planner.formats.profile import LIFTABLE
from autoac.tape.checkpoints.own_checkpoints import context_of_forward
from autoac.tape.runtime.cursor import Cursor, UseGroup
from autoac.tape.torch_facts.op_facts import OpFacts
from autoac.tape.torch_facts.op_signature import Args, Kwargs
from autoac.tape.torch_facts.private import OpOverload, OpOverloadPacket

PolicyCallable = Callable[..., CheckpointPolicy | bool]

# Tuples: the hash of an enumeration is a call.
MUSTS = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE
SAVES = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE

_SAVE_FOR_OFFLOAD = {
    CheckpointPolicy.MUST_CPU_OFFLOAD: CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: CheckpointPolicy.PREFER_SAVE,
}


def without_offload(decision: CheckpointPolicy) -> CheckpointPolicy:
    """Return `decision` with the matching SAVE in place of a CPU_OFFLOAD; warn at the first of these."""
    save = _SAVE_FOR_OFFLOAD.get(decision)
    if save is None:
        return decision
    _warn_of_offload()
    return save


@functools.cache
def _warn_of_offload() -> None:
    warnings.warn(
        "CheckpointPolicy.MUST_CPU_OFFLOAD and PREFER_CPU_OFFLOAD save on the device here; to offload what "
        "is saved, run the region inside of torch.autograd.graph.save_on_cpu()",
        stacklevel=4,
    )


class PolicyConflict(RuntimeError):
    """Raised if two policies insist on different decisions for one op."""

    def __init__(self, op: str, outer: str, inner: str) -> None:
        self.op, self.outer, self.inner = op, outer, inner
        super().__init__(
            f"policies for {op} must not insist on different decisions, got {outer} and {inner}; make one "
            "of them a PREFER"
        )


# Each policy below has a `description` for error messages; `needs_output`, True if `decide` must see the
# output of the op; and `decide`, which returns the decision for one call of an op, or None to abstain.


@dataclass(frozen=True, slots=True)
class ConstantPolicy:
    """Make the same decision for every op."""

    decision: CheckpointPolicy
    description: str
    needs_output = False

    def decide(self, op: Any, facts: OpFacts, args: Args, kwargs: Kwargs, out: Any) -> CheckpointPolicy:
        return self.decision


@dataclass(frozen=True, slots=True)
class OpListPolicy:
    """Save the ops of a list and recompute the others, as torch's selective checkpoint does."""

    ops: frozenset[Any]
    needs_output = False

    @property
    def description(self) -> str:
        return f"a list of {len(self.ops)} ops to save"

    def decide(self, op: Any, facts: OpFacts, args: Args, kwargs: Kwargs, out: Any) -> CheckpointPolicy:
        listed = op in self.ops or getattr(op, "overloadpacket", None) in self.ops
        return CheckpointPolicy.MUST_SAVE if listed else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True, slots=True)
class FunctionPolicy:
    """Ask a function `(ctx, out, op, *args, **kwargs) -> CheckpointPolicy | bool`."""

    function: PolicyCallable
    needs_output = True

    @property
    def description(self) -> str:
        return f"the function {getattr(self.function, '__qualname__', self.function)!s}"

    def decide(self, op: Any, facts: OpFacts, args: Args, kwargs: Kwargs, out: Any) -> CheckpointPolicy:
        passed = {name: value for name, value in kwargs.items() if name != "out"}  # the same tensor as `out`
        return parse_decision(self.function(_CONTEXT, out, op, *args, **passed), self.description, op)


class TorchFunctionPolicy(FunctionPolicy):
    """Ask a function `(ctx, op, *args, **kwargs)`, the form that torch's selective checkpoint takes."""

    def decide(self, op: Any, facts: OpFacts, args: Args, kwargs: Kwargs, out: Any) -> CheckpointPolicy:
        return parse_decision(
            self.function(context_of_forward(out), op, *args, **kwargs), self.description, op
        )


_CONTEXT = SelectiveCheckpointContext(is_recompute=False)


def parse_decision(decision: Any, policy: str, op: Any) -> CheckpointPolicy:
    """Return what the function of `policy` returned for `op` as a CheckpointPolicy.

    True means MUST_SAVE, and False means PREFER_RECOMPUTE.

    Raises:
        TypeError: `decision` is neither a CheckpointPolicy nor a bool.
    """
    if isinstance(decision, bool):
        return CheckpointPolicy.MUST_SAVE if decision else CheckpointPolicy.PREFER_RECOMPUTE
    if isinstance(decision, CheckpointPolicy):
        return without_offload(decision)
    raise TypeError(f"{policy} must return a CheckpointPolicy or a bool for {op}, got {decision!r}")


@dataclass(slots=True)
class PlannedPolicy:
    """Make the decisions of a plan, which a cursor looks up op by op."""

    cursor: Cursor
    needs_output = False

    @property
    def description(self) -> str:
        return "the plan"

    def decide(
        self, op: Any, facts: OpFacts, args: Args, kwargs: Kwargs, out: Any
    ) -> CheckpointPolicy | None:
        decision = self.cursor.next_decision(facts.name_in_keys)
        if decision is None:
            return None
        return (
            CheckpointPolicy.PREFER_SAVE if decision in (SAVE, OFFLOAD) else CheckpointPolicy.PREFER_RECOMPUTE
        )


OpPolicy = ConstantPolicy | OpListPolicy | FunctionPolicy | TorchFunctionPolicy | PlannedPolicy


_NAMED = {"recompute_all": CheckpointPolicy.PREFER_RECOMPUTE, "must_save_all": CheckpointPolicy.MUST_SAVE}


def parse_policy(policy: Any) -> OpPolicy:
    """Return the OpPolicy for what the user passed.

    Args:
        policy: "recompute_all", "must_save_all", a function `(ctx, out, op, *args, **kwargs)`, a list of ops
            to save, a Cursor over a plan, or an OpPolicy.

    Raises:
        TypeError, ValueError: `policy` is none of these.
    """
    if isinstance(policy, Cursor):
        return PlannedPolicy(policy)
    if isinstance(policy, OpPolicy):
        return policy
    if isinstance(policy, str):
        if policy in _NAMED:
            return ConstantPolicy(_NAMED[policy], f'"{policy}"')
        raise ValueError(
            f'policy must be "recompute_all", "must_save_all", a function or a list of ops, got {policy!r}'
        )
    if isinstance(policy, CheckpointPolicy):
        return ConstantPolicy(without_offload(policy), policy.name)
    if isinstance(policy, Collection):
        return OpListPolicy(frozenset(_checked_ops(policy)))
    if callable(policy):
        _check_signature(policy)
        return FunctionPolicy(policy)
    raise TypeError(f"policy must be a name, a function or a list of ops, got {type(policy).__name__}")


def _check_signature(function: Callable[..., Any]) -> None:
    """Reject `(ctx, op, *args, **kwargs)`, which would take the output for the op."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # written in C, so the signature is unknown
        return
    if names[1:2] in (["op"], ["func"]):
        raise TypeError(
            "a policy function must take (ctx, out, op, *args, **kwargs), got "
            f"{getattr(function, '__qualname__', function)}({', '.join(names)}), the form of torch's "
            "selective checkpoint. Add the output, or pass the function to "
            "ac_client.checkpoint(context_fn=...)"
        )


def _checked_ops(ops: Iterable[Any]) -> Iterable[Any]:
    for op in ops:
        if not isinstance(op, (OpOverload, OpOverloadPacket)):
            raise TypeError(f"a list of ops must hold ops such as torch.ops.aten.mm.default, got {op!r}")
        yield op


class PolicyFrame(NamedTuple):
    """A policy on the stack, and the line of code that pushed it."""

    policy: OpPolicy
    file: str
    line: int
    checkpoint: UseGroup | None = None  # of what runs inside, if this is a call of `checkpoint`
    site: Hashable = None  # the code that runs inside; None in a plan

    def __str__(self) -> str:
        return f"{self.policy.description} ({self.file}:{self.line})"


# NOTE [ Nested checkpoints ]
#
# What an inner checkpoint makes while the outer one is recomputed is not kept, as in torch. So an op inside
# of d checkpoints has d use groups, and runs again at most once for each level:
#
#     with checkpoint A:            a = exp(x)      level 1: one run
#         with checkpoint B:        b = sin(a)      level 1: for readers in A after B
#                                                   level 2: for readers and saved tensors in B
#             c = tanh(b)           c               packs its output in B: its level 2
#         d = cos(c)                d               reads level 1 of c, which reads level 1 of b
#
# Backward of cos runs a, b, c and d; of these only a stays, for the recompute of B. Then backward of tanh
# runs b and c from a.
#
# These are the use groups of a plan, except that nobody knows their positions beforehand. The position of a
# use at level k is -k. The group of level k serves uses up to -k while its checkpoint is open, and no use
# once it is closed. A plan decides alone: under a plan, checkpoints make no groups.


class OpenCheckpoints:
    """The use groups of an op that runs inside of several checkpoints.

    Attributes:
        use_groups: of each open checkpoint, the outermost first.
        position: of the use by a tensor that is packed now.
    """

    def __init__(self, use_groups: Sequence[UseGroup]) -> None:
        self.use_groups = tuple(use_groups)
        self.position = -len(self.use_groups)


Grouping = Cursor | OpenCheckpoints


class PolicyStack:
    """The policies in force, outermost first, resolved together.

    Attributes:
        frames: the policies.
        cursor: that of the only policy, if it is a plan; None otherwise.
        needs_output: True if a policy must see the output of an op.
        grouping: a plan in which ops have use groups, or several checkpoints; None if ops run once.
        moving: a plan that moves outputs of ops to the host; None if there is none.
        holding: a plan that holds what a backward inside of forward unpacks; None if there is none.
        planned: the plan's decision for the op decided last; None if it has none, or other policies apply.
    """

    def __init__(self, frames: Iterable[PolicyFrame]) -> None:
        self.frames = tuple(frames)
        self.needs_output = any(frame.policy.needs_output for frame in self.frames)
        # Two common stacks of a single policy need no resolving.
        only = self.frames[0].policy if len(self.frames) == 1 else None
        self._constant = only.decision if isinstance(only, ConstantPolicy) else None
        self.cursor = only.cursor if isinstance(only, PlannedPolicy) else None
        cursors = [f.policy.cursor for f in self.frames if isinstance(f.policy, PlannedPolicy)]
        self.grouping: Grouping | None = next((cursor for cursor in cursors if cursor.route.use_groups), None)
        self.moving: Cursor | None = next((cursor for cursor in cursors if cursor.route.moves), None)
        self.holding: Cursor | None = next((cursor for cursor in cursors if cursor.route.needed_until), None)
        self.planned: Decision | None = None
        checkpoints = [f.checkpoint for f in self.frames if f.checkpoint is not None]
        if not cursors and len(checkpoints) > 1:
            self.grouping = OpenCheckpoints(checkpoints)

    def saves(self, op: Any, facts: OpFacts, args: Args, kwargs: Kwargs | None, out: Any = None) -> bool:
        """Return True if the outputs of this call are saved.

        Raises:
            PolicyConflict: two policies of the stack insist on different decisions.
        """
        if self.cursor is not None:
            # A plan recomputes what is LIFTABLE only where the user lifted the default.
            self.planned = decision_of_plan = self.cursor.next_decision(facts.name_in_keys)
            saved = decision_of_plan is None or decision_of_plan in (SAVE, OFFLOAD)
            return saved or facts.must_save not in LIFTABLE
        decision = self._constant
        if decision is None:
            decision = resolve(self.frames, op, facts, args, kwargs or {}, out)
        return decision in SAVES or (
            facts.must_save != ""
            and (facts.never_recomputed or decision is not CheckpointPolicy.MUST_RECOMPUTE)
        )

    def saves_function(self, facts: OpFacts) -> bool | None:
        """Return True if a call of a Function is saved, False if not; None if its ops inside decide.

        A plan, "recompute_all" and the like decide about the call. Lists and functions of ops know nothing of
        Functions: without a plan, they decide about the visible ops inside, and a call is saved if one op is.
        """
        if self.cursor is not None or self._constant is not None:
            return self.saves(None, facts, (), None)
        deciding = [f for f in self.frames if isinstance(f.policy, (ConstantPolicy, PlannedPolicy))]
        if len(deciding) < len(self.frames) and not any(type(f.policy) is PlannedPolicy for f in deciding):
            return None
        return resolve(deciding, None, facts, (), {}, None) in SAVES


def resolve(
    frames: Sequence[PolicyFrame], op: Any, facts: OpFacts, args: Args, kwargs: Kwargs, out: Any
) -> CheckpointPolicy:
    """Return the decision of the whole stack for one call.

    Raises:
        PolicyConflict: two policies of the stack insist on different decisions.
    """
    result: CheckpointPolicy = CheckpointPolicy.PREFER_SAVE
    decided_by: PolicyFrame | None = None
    plan_saves = False
    for frame in frames:
        decision = frame.policy.decide(op, facts, args, kwargs, out)
        if decision is None:
            continue
        if type(frame.policy) is PlannedPolicy:
            plan_saves = decision in SAVES
        elif plan_saves and decision is CheckpointPolicy.MUST_RECOMPUTE:
            continue  # the plan has applied the pins, and knows which pinned ops must not run again
        if result in MUSTS:
            if decision in MUSTS and decision is not result:
                raise PolicyConflict(
                    facts.name, f"{result.name} by {decided_by}", f"{decision.name} by {frame}"
                )
            continue
        result, decided_by = decision, frame
    return result
