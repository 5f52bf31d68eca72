"""What each module keeps and recomputes, with layers that do the same told once.

`h.0-11.attn` stands for the `attn` of the layers `h.0` to `h.11`, which all decide alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from autoac.planner.formats.op_key import OpKey
from autoac.planner.memory.schedule import held_until, readers_until
from autoac.planner.problem.graph import Graph, SaveSet
from autoac.planner.problem.save_sets import recomputed_by_backward, with_forced_saves
from autoac.planner.units import format_bytes, format_us

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a number standing alone in a module path


class Decision(Enum):
    """What becomes of the outputs of an op."""

    SAVED = "keeps"  # saved, and held when backward begins
    RECOMPUTED = "recomputes"  # made again in backward
    UNUSED = "needs nothing of"  # backward asks for neither


@dataclass(frozen=True, slots=True)
class OpDecision:
    """What was decided about one op, with its numbers."""

    key: str  # "layers.3.mlp/aten.mm.default#1"
    decision: Decision
    kept_bytes: int = 0  # held when backward begins
    recomputed_bytes: int = 0  # that running it again allocates
    runtime_us: float = 0.0  # of running it again


@dataclass(frozen=True, slots=True)
class Row:
    """Modules that decide alike. Numbers are sums over all of them."""

    name: str  # "layers.0-11.mlp"; "" for what is outside all modules
    modules: tuple[str, ...]  # the paths that it stands for
    keeps: tuple[str, ...]  # ops, "mm.default#1"; the ordinal only where a module has several
    recomputes: tuple[str, ...]
    kept_bytes: int
    recomputed_bytes: int
    recompute_us: float


def op_decisions(graph: Graph, save_set: SaveSet) -> list[OpDecision]:
    """What `save_set` decides about each op of `graph`, in forward order."""
    save_set = with_forced_saves(graph, save_set)
    again = recomputed_by_backward(graph, save_set)
    until, nbytes = held_until(graph, save_set), _kept_nbytes(graph, save_set)
    n = len(graph.ops)
    found = []
    for op in graph.ops:
        if again[op.id]:
            fresh = sum(graph.nbytes(w) for w in op.writes if graph.versions[w].previous is None)
            found.append(OpDecision(op.name, Decision.RECOMPUTED, 0, fresh, op.recompute_us))
        elif op.id in save_set and any(until[w] > n for w in op.writes):
            found.append(OpDecision(op.name, Decision.SAVED, sum(nbytes[w] for w in op.writes)))
        else:
            found.append(OpDecision(op.name, Decision.UNUSED))
    return found


def _kept_nbytes(graph: Graph, save_set: SaveSet) -> list[int]:
    """By value: the bytes that saving it holds when backward begins.

    A version that was written over is held as a private copy for ops that read it again; what autograd holds
    of it is in the storage, which counts for the newest version that it is held for.
    """
    n = len(graph.ops)
    until, readers = held_until(graph, save_set), readers_until(graph, save_set)
    kept = [0] * len(graph.versions)
    for storage in graph.storages:
        saved = [v for v in storage.versions if graph.versions[v].op in save_set and until[v] > n]
        for v in saved:
            if v != storage.versions[-1] and readers[v] > n:
                kept[v] = storage.nbytes
        packed = [
            v
            for v in saved
            if any(graph.saved_tensors[h].dropped > n for h in graph.versions[v].saved_tensors)
        ]
        holding = saved[-1:] if storage.versions[-1] in saved else packed[-1:]
        for v in holding:
            kept[v] += storage.nbytes
    return kept


def by_module(ops: Iterable[OpDecision]) -> tuple[Row, ...]:
    """The rows of a table by module, in the order in which modules first ran. Idle modules have none."""
    modules: dict[str, list[OpDecision]] = {}
    for op in ops:
        modules.setdefault(OpKey.parse(op.key).module, []).append(op)
    groups = folded(
        modules, lambda module: tuple((OpKey.parse(op.key).label, op.decision) for op in modules[module])
    )
    rows = []
    for name, paths in groups:
        of_one = modules[paths[0]]
        of_all = [op for path in paths for op in modules[path]]
        keeps, recomputes = (_names(of_one, decision) for decision in (Decision.SAVED, Decision.RECOMPUTED))
        if keeps or recomputes:
            rows.append(
                Row(
                    name=name,
                    modules=paths,
                    keeps=keeps,
                    recomputes=recomputes,
                    kept_bytes=sum(op.kept_bytes for op in of_all),
                    recomputed_bytes=sum(op.recomputed_bytes for op in of_all),
                    recompute_us=sum(op.runtime_us for op in of_all),
                )
            )
    return tuple(rows)


def folded(modules: Iterable[str], signature: Callable[[str], object]) -> list[tuple[str, tuple[str, ...]]]:
    """Groups of module paths of equal signature that differ in numbers only, as (name, paths).

    A name has ranges for the numbers: `h.0-2,5.attn`. Every path that a name spells is in its group.
    """
    # A group: the path without its numbers, the signature, and for each number the values that it takes.
    groups: dict[tuple[tuple[str, ...], object, tuple[tuple[int, ...], ...]], list[str]] = {}
    for path in modules:
        numbers: tuple[tuple[int, ...], ...] = tuple((int(number),) for number in _NUMBER.findall(path))
        groups.setdefault((tuple(_NUMBER.split(path)), signature(path), numbers), []).append(path)
    for at in range(max((len(numbers) for _, _, numbers in groups), default=0)):
        merged: dict[
            tuple[tuple[str, ...], object, tuple[tuple[int, ...], ...]],
            list[tuple[tuple[tuple[int, ...], ...], list[str]]],
        ] = {}
        for (words, sign, numbers), paths in groups.items():
            rest = (*numbers[:at], *numbers[at + 1 :])
            merged.setdefault((words, sign, rest), []).append((numbers, paths))
        groups = {}
        for (words, sign, _), members in merged.items():
            first = members[0][0]
            if at < len(first):
                values = tuple(sorted({v for numbers, _ in members for v in numbers[at]}))
                first = (*first[:at], values, *first[at + 1 :])
            groups[words, sign, first] = [path for _, paths in members for path in paths]
    return [(_spelled(words, numbers), tuple(paths)) for (words, _, numbers), paths in groups.items()]


def in_words(rows: Iterable[Row]) -> Iterator[str]:
    """The rows as lines of text."""
    for row in rows:
        several = len(row.modules)
        yield (row.name or "(outside all modules)") + (f" ({several} modules)" if several > 1 else "")
        each = "each " if several > 1 else ""
        if row.keeps:
            yield f"  {each}keeps {', '.join(row.keeps)}{_amount(row.kept_bytes, several, format_bytes)}"
        if row.recomputes:
            yield (
                f"  {each}recomputes {', '.join(row.recomputes)}"
                f"{_amount(row.recompute_us, several, format_us)}"
            )


def as_table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as a table: modules, bytes kept, bytes and time recomputed; the last line is the sum."""
    head = ("module", "keeps", "recomputes", "in")
    body = [
        (
            row.name or "(outside all modules)",
            format_bytes(row.kept_bytes),
            format_bytes(row.recomputed_bytes),
            format_us(row.recompute_us),
        )
        for row in rows
    ]
    total = (
        "all",
        format_bytes(sum(row.kept_bytes for row in rows)),
        format_bytes(sum(row.recomputed_bytes for row in rows)),
        format_us(sum(row.recompute_us for row in rows)),
    )
    widths = [max(len(line[i]) for line in [head, *body, total]) for i in range(len(head))]
    for line in [head, *body, total]:
        cells = [line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, len(head)))]
        yield "  ".join(cells)


def _amount(of_all: float, several: int, written: Callable[[int], str] | Callable[[float], str]) -> str:
    if not of_all:
        return ""
    text: Callable[..., str] = written
    if several == 1:
        return f"  ({text(of_all)})"
    mean = round(of_all / several) if isinstance(of_all, int) else of_all / several
    return f"  ({text(mean)}, {text(of_all)} in all)"


def _spelled(words: tuple[str, ...], numbers: tuple[tuple[int, ...], ...]) -> str:
    text = words[0]
    for values, word in zip(numbers, words[1:], strict=True):
        text += ranges(values) + word
    return text


def ranges(values: Iterable[int]) -> str:
    """Ascending numbers, briefly.

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


def _names(ops: Sequence[OpDecision], decision: Decision) -> tuple[str, ...]:
    keys = [OpKey.parse(op.key) for op in ops]
    several = {key.op for key in keys if key.occurrence}
    return tuple(
        key.label if key.op in several else key.short_op
        for key, op in zip(keys, ops, strict=True)
        if op.decision is decision
    )
