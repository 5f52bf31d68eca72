"""Summarize what each module keeps and recomputes; layers that decide alike share one row.

`h.0-11.attn` stands for the `attn` of the layers `h.0` to `h.11`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from autoac.planner.formats.op_key import NUMBER, OpKey
from autoac.planner.formats.policy import OFFLOAD, SAVE, Policy
from autoac.planner.memory.schedule import held_until, readers_until
from autoac.planner.problem.graph import Graph, OpId, SaveSet
from autoac.planner.problem.save_sets import recomputed_by_backward, with_forced_saves
from autoac.planner.units import format_bytes, format_us

_Numbers = tuple[tuple[int, ...], ...]

MOST_OPS = 24  # named in a line of words
MOST_CHARACTERS = 120  # of a module's name there


class Decision(Enum):
    """The decision about an op. The value is the verb for its module."""

    SAVED = "keeps"  # saved, and held when backward begins
    RECOMPUTED = "recomputes"  # run again in backward
    MOVED = "moves"  # to the host and back
    UNUSED = "needs nothing of"  # backward needs none of its outputs


@dataclass(frozen=True, slots=True)
class OpDecision:
    """The decision of a plan about one op, and its cost in bytes and time."""

    key: str  # "layers.3.mlp/aten.mm.default#1"
    decision: Decision
    kept_bytes: int = 0  # held when backward begins, on the device or, if moved, on the host
    recomputed_bytes: int = 0  # that running it again allocates
    runtime_us: float = 0.0  # of running it again, all runs together
    runs: int = 1  # how often backward runs it, if it is recomputed


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """Modules for whose ops the plan makes the same decisions. Numbers are sums over all of them."""

    name: str  # "layers.0-11.mlp"; "" for what is outside all modules
    modules: tuple[str, ...]  # the paths that it stands for
    keeps: tuple[str, ...]  # ops, "mm.default#1"; the occurrence only if a module has several
    recomputes: tuple[str, ...]
    kept_bytes: int
    recomputed_bytes: int
    recompute_us: float
    moves: tuple[str, ...] = ()  # ops
    moved_bytes: int = 0


def op_decisions(graph: Graph, save_set: SaveSet, moved: Collection[OpId] = ()) -> list[OpDecision]:
    """Return the decision of `save_set` about each op of `graph`, in forward order; each run is one op.

    Args:
        moved: ops of which `graph` moves the outputs.
    """
    save_set = with_forced_saves(graph, save_set)
    recomputed = recomputed_by_backward(graph, save_set)
    until, nbytes = held_until(graph, save_set), _kept_nbytes(graph, save_set)
    n = len(graph.ops)
    decisions = []
    for op in graph.ops:
        if op.id in moved:
            decisions.append(OpDecision(op.name, Decision.MOVED, sum(map(graph.nbytes, op.writes))))
        elif recomputed[op.id]:
            fresh = sum(graph.nbytes(w) for w in op.writes if graph.versions[w].previous is None)
            decisions.append(OpDecision(op.name, Decision.RECOMPUTED, 0, fresh, op.recompute_us))
        elif op.id in save_set and any(until[w] > n for w in op.writes):
            decisions.append(OpDecision(op.name, Decision.SAVED, sum(nbytes[w] for w in op.writes)))
        else:
            decisions.append(OpDecision(op.name, Decision.UNUSED))
    return decisions


def runs_added_up(ops: Iterable[OpDecision]) -> list[OpDecision]:
    """Return `ops` with the runs of each op with use groups as one decision."""
    result: list[OpDecision] = []
    for op in ops:
        if "@" not in op.key or OpKey.parse(op.key).run == 1:
            result.append(op)
        elif op.decision is Decision.RECOMPUTED:
            first = result[-1]
            result[-1] = replace(first, runtime_us=first.runtime_us + op.runtime_us, runs=first.runs + 1)
    return result


def policy_decisions(policy: Policy) -> list[OpDecision]:
    """Return the decisions of `policy`. Bytes are 0. An op that backward does not need may count as saved."""
    return [
        OpDecision(key, Decision.SAVED)
        if decision == SAVE
        else OpDecision(key, Decision.MOVED)
        if decision == OFFLOAD
        else OpDecision(key, Decision.RECOMPUTED, runs=int(decision.partition("@")[2] or 1))
        for key, decision in policy.decisions.items()
    ]


def _kept_nbytes(graph: Graph, save_set: SaveSet) -> list[int]:
    """Return by version the bytes that saving it holds when backward begins.

    A version that was written over is held as a private copy for ops that read it again. What autograd holds
    of it is the storage, which counts once: for the newest version that autograd holds.
    """
    n = len(graph.ops)
    until, readers = held_until(graph, save_set), readers_until(graph, save_set)
    nbytes = [0] * len(graph.versions)
    for storage in graph.storages:
        saved = [v for v in storage.versions if graph.versions[v].op in save_set and until[v] > n]
        for v in saved:
            if v != storage.versions[-1] and readers[v] > n:
                nbytes[v] = storage.nbytes
        packed = [
            v
            for v in saved
            if any(graph.saved_tensors[h].dropped > n for h in graph.versions[v].saved_tensors)
        ]
        holding = saved[-1:] if storage.versions[-1] in saved else packed[-1:]
        for v in holding:
            nbytes[v] += storage.nbytes
    return nbytes


def by_module(ops: Iterable[OpDecision]) -> tuple[ModuleRow, ...]:
    """Return the rows of a table by module, in the order in which modules first ran; none for unused ones."""
    modules: dict[str, list[OpDecision]] = {}
    signatures: dict[str, list[object]] = {}
    for op in runs_added_up(ops):
        key = OpKey.parse(op.key)  # once: a policy may have a million
        modules.setdefault(key.module, []).append(op)
        signatures.setdefault(key.module, []).append((key.label, op.decision, op.runs))

    rows = []
    for name, paths in fold_paths(modules, lambda module: tuple(signatures[module])):
        of_one = modules[paths[0]]
        of_all = [op for path in paths for op in modules[path]]
        names = short_names([op.key for op in of_one])
        keeps = tuple(names[op.key] for op in of_one if op.decision is Decision.SAVED)
        recomputes = tuple(
            names[op.key] + (f" {op.runs} times" if op.runs > 1 else "")
            for op in of_one
            if op.decision is Decision.RECOMPUTED
        )
        moves = tuple(names[op.key] for op in of_one if op.decision is Decision.MOVED)
        if keeps or recomputes or moves:
            moved_bytes = sum(op.kept_bytes for op in of_all if op.decision is Decision.MOVED)
            kept_bytes = sum(op.kept_bytes for op in of_all) - moved_bytes
            recomputed_bytes = sum(op.recomputed_bytes for op in of_all)
            us = sum(op.runtime_us for op in of_all)
            rows.append(
                ModuleRow(
                    name, paths, keeps, recomputes, kept_bytes, recomputed_bytes, us, moves, moved_bytes
                )
            )
    return tuple(rows)


def short_names(keys: Collection[str]) -> dict[str, str]:
    """Return by key the name of the op, with its occurrence only if its module has several of the kind."""
    parsed = {text: OpKey.parse(text) for text in keys}
    several = {(key.module, key.op) for key in parsed.values() if key.occurrence}
    return {
        text: key.label if (key.module, key.op) in several else key.short_op for text, key in parsed.items()
    }


def fold_paths(paths: Iterable[str], signature: Callable[[str], object]) -> list[tuple[str, tuple[str, ...]]]:
    """Group module paths that differ in numbers only and have equal signatures, as (name, paths).

    A name has ranges for the numbers: `h.0-2,5.attn`. Every path that a name spells is in its group.
    """
    # A group: the path without its numbers, the signature, and for each number the values that it takes.
    groups: dict[tuple[tuple[str, ...], object, _Numbers], list[str]] = {}
    for path in paths:
        numbers: _Numbers = tuple((int(number),) for number in NUMBER.findall(path))
        groups.setdefault((tuple(NUMBER.split(path)), signature(path), numbers), []).append(path)
    for at in range(max((len(numbers) for _, _, numbers in groups), default=0)):
        merged: dict[tuple[tuple[str, ...], object, _Numbers], list[tuple[_Numbers, list[str]]]] = {}
        for (words, sign, numbers), members in groups.items():
            rest = (*numbers[:at], *numbers[at + 1 :])
            merged.setdefault((words, sign, rest), []).append((numbers, members))
        groups = {}
        for (words, sign, _), alike in merged.items():
            numbers = alike[0][0]
            if at < len(numbers):
                values = tuple(sorted({value for numbers, _ in alike for value in numbers[at]}))
                numbers = (*numbers[:at], values, *numbers[at + 1 :])
            groups[words, sign, numbers] = [path for _, members in alike for path in members]
    return [(_spelled(words, numbers), tuple(members)) for (words, _, numbers), members in groups.items()]


def rows_in_words(rows: Iterable[ModuleRow]) -> Iterator[str]:
    """Yield the rows as lines of text."""
    for row in rows:
        several = len(row.modules)
        name = row.name if len(row.name) <= MOST_CHARACTERS else f"{row.name[:MOST_CHARACTERS]}..."
        yield (name or "(outside all modules)") + (f" ({several} modules)" if several > 1 else "")
        each = "each " if several > 1 else ""
        if row.keeps:
            yield f"  {each}keeps {_few(row.keeps)}{_amount(row.kept_bytes, several, format_bytes)}"
        if row.moves:
            moved = _amount(row.moved_bytes, several, format_bytes)
            yield f"  {each}moves {_few(row.moves)} to the host and back{moved}"
        if row.recomputes:
            recompute = _amount(row.recompute_us, several, format_us)
            yield f"  {each}recomputes {_few(row.recomputes)}{recompute}"


def aligned(rows: Sequence[Sequence[str]], words: int = 1) -> Iterator[str]:
    """Yield a line for each row of a table: the first `words` columns flush left, all others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_OPS} more" if len(names) > MOST_OPS else ""
    return ", ".join(names[:MOST_OPS]) + more


def _amount(total: float, several: int, text: Callable[..., str]) -> str:
    if not total:
        return ""
    if several == 1:
        return f"  ({text(total)})"
    mean = round(total / several) if isinstance(total, int) else total / several
    return f"  ({text(mean)}, {text(total)} in all)"


def _spelled(words: tuple[str, ...], numbers: tuple[tuple[int, ...], ...]) -> str:
    text = words[0]
    for values, word in zip(numbers, words[1:], strict=True):
        text += ranges(values) + word
    return text


def ranges(values: Iterable[int]) -> str:
    """Return ascending numbers as ranges.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    spans: list[list[int]] = []
    for v in values:
        if spans and v == spans[-1][1] + 1:
            spans[-1][1] = v
        else:
            spans.append([v, v])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
