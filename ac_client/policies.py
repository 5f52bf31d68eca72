"""What a policy says of one op, and how nested policies resolve (rule 9 of the design).

Resolved from the outermost to the innermost, starting from PREFER_SAVE: a later word replaces an earlier
one, except that a MUST stands against any PREFER, and two different MUSTs are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from ac_client.cursor import Cursor

PolicyFunction = Callable[..., CheckpointPolicy | bool]

MUSTS = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE)
SAVES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


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

    def decide(
        self, op: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> CheckpointPolicy | None:
        """What it says of this call; None if it has nothing to say."""


@dataclass(frozen=True, slots=True)
class Always:
    """The same for every op."""

    policy: CheckpointPolicy
    description: str

    def decide(self, op: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> CheckpointPolicy:
        return self.policy


@dataclass(frozen=True, slots=True)
class SaveThese:
    """Save the ops of a list and recompute the rest, as torch's selective checkpoint takes it."""

    ops: frozenset[Any]

    @property
    def description(self) -> str:
        return f"a list of {len(self.ops)} ops to save"

    def decide(self, op: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> CheckpointPolicy:
        listed = op in self.ops or getattr(op, "overloadpacket", None) in self.ops
        return CheckpointPolicy.MUST_SAVE if listed else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True, slots=True)
class Asked:
    """A function `(ctx, op, *args, **kwargs) -> CheckpointPolicy | bool`, as torch's."""

    function: PolicyFunction

    @property
    def description(self) -> str:
        return f"the function {getattr(self.function, '__qualname__', self.function)!s}"

    def decide(self, op: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> CheckpointPolicy:
        answer = self.function(SelectiveCheckpointContext(is_recompute=False), op, *args, **kwargs)
        if isinstance(answer, bool):
            return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        if isinstance(answer, CheckpointPolicy):
            return answer
        raise TypeError(
            f"{self.description} returned {answer!r} for {op}; "
            "a policy function returns a CheckpointPolicy or a bool"
        )


@dataclass(slots=True)
class Planned:
    """The decisions of a plan, found by walking along the ops."""

    cursor: Cursor

    @property
    def description(self) -> str:
        return "the plan"

    def decide(
        self, op: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> CheckpointPolicy | None:
        decision = self.cursor.op(name)
        if decision is None:
            return None
        return CheckpointPolicy.PREFER_SAVE if decision == "save" else CheckpointPolicy.PREFER_RECOMPUTE


def decider(policy: Any) -> Decider:
    """The policy that the user named.

    Args:
        policy: "recompute_all", "must_save_all", a function `(ctx, op, *args, **kwargs)`, ops to save,
            or a Cursor over a plan.

    Raises:
        TypeError, ValueError: it is none of these.
    """
    if isinstance(policy, Cursor):
        return Planned(policy)
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
        return Always(policy, policy.name)
    if isinstance(policy, Collection):
        return SaveThese(frozenset(_checked_ops(policy)))
    if callable(policy):
        return Asked(policy)
    raise TypeError(f"a policy is a name, a function, or a list of ops, not {type(policy).__name__}")


def _checked_ops(ops: Iterable[Any]) -> Iterable[Any]:
    for op in ops:
        if not isinstance(op, (OpOverload, OpOverloadPacket)):
            raise TypeError(f"{op!r} is no op: list torch.ops.aten.mm.default and the like")
        yield op


def resolve(
    stack: Sequence[Decider], op: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> CheckpointPolicy:
    """What the whole stack says of one call.

    Raises:
        PolicyConflict: two policies of the stack insist on different things.
    """
    result, said_by = CheckpointPolicy.PREFER_SAVE, ""
    for policy in stack:
        word = policy.decide(op, name, args, kwargs)
        if word is None:
            continue
        if result in MUSTS:
            if word in MUSTS and word is not result:
                raise PolicyConflict(
                    name, f"{result.name} by {said_by}", f"{word.name} by {policy.description}"
                )
            continue
        result, said_by = word, policy.description
    return result
