"""Find the ops that a user's patterns match. docs/constraints.md describes the patterns."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase

from autoac.planner.errors import UnmatchedPattern
from autoac.planner.formats.op_key import OpKey, kernels_of
from autoac.planner.problem.graph import Graph, OpId

MAX_SUGGESTIONS = 3
MIN_SIMILARITY = 0.5  # the least difflib ratio of a suggestion

Path = tuple[str, ...]
"""The parts of a module's path. () stands for the whole model."""


class OpNames:
    """Look up the ops of a graph by their keys.

    Invariant: `keys`, `parsed` and `modules` have one entry for each op, in forward order.
    """

    def __init__(self, graph: Graph) -> None:
        self.keys = [op.name for op in graph.ops]
        self.parsed = [OpKey.parse(key) for key in self.keys]
        self.modules = [_parts(key.module) for key in self.parsed]
        self._op_of_key = {key: OpId(op) for op, key in enumerate(self.keys)}

    def matching(self, field: str, pattern: str) -> list[OpId]:
        """Return the ops that `pattern` matches, in forward order.

        Raises:
            UnmatchedPattern: no op matches. The error names `field`.
        """
        if pattern in self._op_of_key:
            return [self._op_of_key[pattern]]
        module, slash, name = pattern.rpartition("/")
        found = self._in_modules(module, name) if slash else []
        found = found or self._in_modules(pattern, "*")  # a module's name may contain "/"
        if not found:
            raise UnmatchedPattern(field, pattern, self._similar(pattern), len(self.keys))
        return found

    def units(self, patterns: Sequence[str]) -> list[Path]:
        """Return for each op the innermost enclosing module that one of `patterns` matches, or ().

        Raises:
            UnmatchedPattern: one of the patterns matches no module.
        """
        unit_of: dict[Path, Path] = {}
        unmatched = set(patterns)
        for module in dict.fromkeys(self.modules):
            lengths = {0}
            for pattern in patterns:
                found = _matched_lengths(module, _parts(pattern))
                lengths |= found
                if found:
                    unmatched.discard(pattern)
            unit_of[module] = module[: max(lengths)]
        for pattern in patterns:
            if pattern in unmatched:
                raise UnmatchedPattern("fsdp_units", pattern, self._similar(pattern), len(self.keys))
        return [unit_of[module] for module in self.modules]

    def _in_modules(self, pattern: str, op_pattern: str) -> list[OpId]:
        inside = {
            module: pattern == "*" or bool(_matched_lengths(module, _parts(pattern)))
            for module in dict.fromkeys(self.modules)
        }
        return [
            OpId(op)
            for op, (module, key) in enumerate(zip(self.modules, self.parsed, strict=True))
            if inside[module] and _is_called(key, op_pattern)
        ]

    def _similar(self, pattern: str) -> list[str]:
        paths = [".".join(module[:i]) for module in self.modules for i in range(1, len(module) + 1)]
        known = self.keys if "/" in pattern else list(dict.fromkeys([*paths, "."]))
        return difflib.get_close_matches(pattern, known, MAX_SUGGESTIONS, MIN_SIMILARITY)


def _parts(path: str) -> Path:
    return tuple(path.split(".")) if path not in ("", ".") else ()


def _matched_lengths(module: Path, pattern: Path) -> set[int]:
    """Return the length of each prefix of `module` that matches `pattern`."""
    lengths = {0}
    for part in pattern:
        if part == "**":
            lengths = set(range(min(lengths), len(module) + 1))
        else:
            lengths = {n + 1 for n in lengths if n < len(module) and fnmatchcase(module[n], part)}
        if not lengths:
            break
    return lengths


def _is_called(key: OpKey, pattern: str) -> bool:
    """Return True if `pattern` matches the op's name, with or without its occurrence and overload.

    A pattern may also name any of its equivalent kernels.
    """
    return any(
        fnmatchcase(name, pattern)
        for op in {key.op, *kernels_of(key.op)}
        for name in (f"{op}#{key.occurrence}", op, op.rpartition(".")[0])
    )
