"""Carry a policy out in compiled code: choose for each compiled graph of a forward what it saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autoac.planner.formats.op_key import OpKey
from autoac.planner.formats.policy import Decision
from autoac.profiler.joint_graph.decided_part import compile_decided, ops_of
from autoac.profiler.joint_graph.joint_graph import joined
from autoac.profiler.torch_facts.module_paths import ROOT
from autoac.profiler.torch_facts.second_stage import BoxedCall, CompiledPart


@dataclass(slots=True, eq=False)
class PartCalls:
    """The calls of compiled graphs in one forward, as earlier forwards made them."""

    calls: list[tuple[CompiledPart, str, BoxedCall]] = field(default_factory=list)  # with the outer module


class PolicyParts:
    """Decides, by a policy, what the compiled graphs of one forward save.

    Args:
        decisions: of the policy, by op key.
        known: what earlier forwards under the same policy found; kept up to date.
        module: returns the path of the module that is running.
    """

    def __init__(
        self, decisions: Mapping[str, Decision], known: PartCalls, module: Callable[[], str] = lambda: ROOT
    ) -> None:
        self._decisions, self._known, self._module = decisions, known, module
        self._n = 0  # calls of compiled graphs so far in this forward

    def callable_of(self, part: CompiledPart) -> BoxedCall:
        """Return the code of `part` for its next call in this forward."""
        n, known = self._n, self._known.calls
        self._n += 1
        outer = self._module()
        if n < len(known) and known[n][0] is part and known[n][1] == outer:
            return known[n][2]
        del known[n:]
        seen: Counter[tuple[str, str]] = Counter()
        for other, where, _ in known:
            seen.update((joined(where, module), op) for module, op in ops_of(other))
        saved = []
        for module, op in ops_of(part):
            name = joined(outer, module), op
            key = str(OpKey(*name, seen[name]))
            seen[name] += 1
            saved.append(self._decisions.get(key, "save") == "save")
        code = compile_decided(part, tuple(saved))
        known.append((part, outer, code))
        return code
