"""What a policy says of one op, and how nested policies resolve (rule 9 of the design).

Resolved from the outermost to the innermost, starting from PREFER_SAVE: a later word replaces an earlier
one, except that a MUST stands against any PREFER, and two different MUSTs are an error.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from ac_client.runtime.cursor import Cursor
from autoac.planner.formats.profile import DECIDES
from autoac.profiler.torch_facts.op_facts import OpFacts
from autoac.profiler.torch_facts.private import OpOverload, OpOverloadPacket

PolicyFunction = Callable[..., CheckpointPolicy | bool]

MUSTS = frozenset({CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE})
SAVES = frozenset({CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE})


_OFFLOADS = {
    CheckpointPolicy.MUST_CPU_OFFLOAD: CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: CheckpointPolicy.PREFER_SAVE,
}


def without_offload(word: CheckpointPolicy) -> CheckpointPolicy:
    """Return `word`, with the matching SAVE in place of a CPU_OFFLOAD; warn about the first of these."""
    saves = _OFFLOADS.get(word)
    if saves is None:
        return word
    _warn_of_offload()
    return saves


@functools.cache
def _warn_of_offload() -> None:
    warnings.warn(
        "CheckpointPolicy.MUST_CPU_OFFLOAD and PREFER_CPU_OFFLOAD save on the device here; to offload what "
        "is saved, run the region inside of torch.autograd.graph.save_on_cpu() or pass packing=",
        stacklevel=4,
    )


class PolicyConflict(RuntimeError):
    """Two policies insist on different things for one op."""

    def __init__(self, op: str, outer: str, inner: str) -> None:
        self.op, self.outer, self.inner = op, outer, inner
        super().__init__(
            f"policies insist on different things for {op}: {outer} and {inner}; make one of them a PREFER"
        )


class Decider(Protocol):
    """One policy of the stack."""

    @property
    def description(self) -> str: ...

    @property
    def after(self) -> bool:
        """Whether it wants to see the output before it decides."""

    def decide(
        self, op: Any, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> CheckpointPolicy | None:
        """What it says of this call; None if it has nothing to say."""


@dataclass(frozen=True, slots=True)
class Always:
    """The same for every op."""

    policy: CheckpointPolicy
    description: str
    after = False

    def decide(
        self, op: Any, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> CheckpointPolicy:
        return self.policy


@dataclass(frozen=True, slots=True)
class SaveThese:
    """Save the ops of a list and recompute the rest, as torch's selective checkpoint takes it."""

    ops: frozenset[Any]
    after = False

    @property
    def description(self) -> str:
        return f"a list of {len(self.ops)} ops to save"

    def decide(
        self, op: Any, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> CheckpointPolicy:
        listed = op in self.ops or getattr(op, "overloadpacket", None) in self.ops
        return CheckpointPolicy.MUST_SAVE if listed else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True, slots=True)
class Asked:
    """A function `(ctx, out, op, *args, **kwargs) -> CheckpointPolicy | bool`."""

    function: PolicyFunction
    after = True

    @property
    def description(self) -> str:
        return _described(self.function)

    def decide(
        self, op: Any, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> CheckpointPolicy:
        named = {name: value for name, value in kwargs.items() if name != "out"}  # the same tensor as `out`
        return checked(self.function(_CONTEXT, out, op, *args, **named), self.description, op)


@dataclass(frozen=True, slots=True)
class AskedAsByTorch:
    """A function `(ctx, op, *args, **kwargs)`, as torch's selective checkpoint takes it."""

    function: PolicyFunction
    after = True  # ctx.op_output is the output

    @property
    def description(self) -> str:
        return _described(self.function)

    def decide(
        self, op: Any, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> CheckpointPolicy:
        context = SelectiveCheckpointContext(is_recompute=False, op_output=out)
        return checked(self.function(context, op, *args, **kwargs), self.description, op)


def _described(function: PolicyFunction) -> str:
    return f"the function {getattr(function, '__qualname__', function)!s}"


_CONTEXT = SelectiveCheckpointContext(is_recompute=False)


def checked(answer: Any, said_by: str, op: Any) -> CheckpointPolicy:
    """The answer of a policy function as a CheckpointPolicy: True means save, False recompute.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(answer, bool):
        return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    if isinstance(answer, CheckpointPolicy):
        return without_offload(answer)
    raise TypeError(
        f"{said_by} returned {answer!r} for {op}; a policy function returns a CheckpointPolicy or a bool"
    )


@dataclass(slots=True)
class Planned:
    """The decisions of a plan, found by walking along the ops."""

    cursor: Cursor
    after = False

    @property
    def description(self) -> str:
        return "the plan"

    def decide(
        self, op: Any, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], out: Any
    ) -> CheckpointPolicy | None:
        decision = self.cursor.op(facts.name)
        if decision is None:
            return None
        return CheckpointPolicy.PREFER_SAVE if decision == "save" else CheckpointPolicy.PREFER_RECOMPUTE


def decider(policy: Any) -> Decider:
    """The policy that the user named.

    Args:
        policy: "recompute_all", "must_save_all", a function `(ctx, out, op, *args, **kwargs)`, ops to
            save, a Cursor over a plan, or a Decider.

    Raises:
        TypeError, ValueError: it is none of these.
    """
    if isinstance(policy, Cursor):
        return Planned(policy)
    if isinstance(policy, (Always, SaveThese, Asked, AskedAsByTorch, Planned)):
        return policy
    if isinstance(policy, str):
        match policy:
            case "recompute_all":
                return Always(CheckpointPolicy.PREFER_RECOMPUTE, '"recompute_all"')
            case "must_save_all":
                return Always(CheckpointPolicy.MUST_SAVE, '"must_save_all"')
        raise ValueError(
            f'unknown policy {policy!r}: use "recompute_all", "must_save_all", a function or ops'
        )
    if isinstance(policy, CheckpointPolicy):
        return Always(without_offload(policy), policy.name)
    if isinstance(policy, Collection):
        return SaveThese(frozenset(_checked_ops(policy)))
    if callable(policy):
        _check_form(policy)
        return Asked(policy)
    raise TypeError(f"a policy is a name, a function, or a list of ops, not {type(policy).__name__}")


def _check_form(function: Callable[..., Any]) -> None:
    """Refuse `(ctx, op, *args, **kwargs)`: it would take the output for the op."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # written in C: cannot be told
        return
    if names[1:2] in (["op"], ["func"]):
        raise TypeError(
            f"{getattr(function, '__qualname__', function)} takes ({', '.join(names)}), as torch's selective "
            "checkpoint wants it; a policy here is (ctx, out, op, *args, **kwargs). Add the output, or pass "
            "the function to ac_client.checkpoint(context_fn=...)"
        )


def _checked_ops(ops: Iterable[Any]) -> Iterable[Any]:
    for op in ops:
        if not isinstance(op, (OpOverload, OpOverloadPacket)):
            raise TypeError(f"{op!r} is no op: list torch.ops.aten.mm.default and the like")
        yield op


Packing = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What to hold in place of a saved tensor, and how to get the tensor back."""


class Pushed(NamedTuple):
    """A policy of the stack, and who pushed it."""

    decider: Decider
    file: str
    line: int
    packing: Packing | None = None

    def __str__(self) -> str:
        return f"{self.decider.description} ({self.file}:{self.line})"


class Stack:
    """The policies in force, outermost first, and what they say together."""

    __slots__ = ("_always", "_plan", "after", "all_saved", "insists", "none_saved", "packing", "policies")

    def __init__(self, policies: Iterable[Pushed]) -> None:
        self.policies = tuple(policies)
        self.after = any(pushed.decider.after for pushed in self.policies)
        self.insists = ""  # who insisted that the op decided last is run again
        self.packing = next((p.packing for p in reversed(self.policies) if p.packing is not None), None)
        # The two common stacks of one policy need no resolving.
        only = self.policies[0].decider if len(self.policies) == 1 else None
        self._always = only.policy if isinstance(only, Always) else None
        self.all_saved = self._always in SAVES
        self.none_saved = self._always is not None and not self.all_saved  # but what must be
        self._plan = only.cursor if isinstance(only, Planned) else None
        if self._always is CheckpointPolicy.MUST_RECOMPUTE:
            self.insists = str(self.policies[0])

    def saves(
        self, op: Any, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any] | None, out: Any = None
    ) -> bool:
        """Whether the outputs of this call are saved.

        Raises:
            PolicyConflict: two policies of the stack insist on different things.
        """
        if self._plan is not None:
            # A plan has what decides run again only where the user lifted the default.
            return self._plan.op(facts.name) != "recompute" or facts.must_save not in ("", DECIDES)
        word = self._always
        if word is None:
            word, said_by = resolve(self.policies, op, facts, args, kwargs or {}, out)
            self.insists = str(said_by) if word is CheckpointPolicy.MUST_RECOMPUTE else ""
        return word in SAVES or (facts.must_save != "" and word is not CheckpointPolicy.MUST_RECOMPUTE)


def resolve(
    stack: Sequence[Pushed], op: Any, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> tuple[CheckpointPolicy, Pushed | None]:
    """What the whole stack says of one call, and which policy of it.

    Raises:
        PolicyConflict: two policies of the stack insist on different things.
    """
    result: CheckpointPolicy = CheckpointPolicy.PREFER_SAVE
    said_by: Pushed | None = None
    for pushed in stack:
        word = pushed.decider.decide(op, facts, args, kwargs, out)
        if word is None:
            continue
        if result in MUSTS:
            if word in MUSTS and word is not result:
                raise PolicyConflict(facts.name, f"{result.name} by {said_by}", f"{word.name} by {pushed}")
            continue
        result, said_by = word, pushed
    return result, said_by
