"""PROTOTYPE: how small a peak gets where ops may run again more than once. docs/low-budgets.md has the table.

    python -m benchmarks.low_budgets profile.json ... [--seconds 15] [--sharded]

For each profile: the floor with every op run again at most once (the planner's, found and proven), the
smallest peak that a local search finds with two levels (`planner/levels.py`), and what no number of runs
goes below. The search proves nothing.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from autoac.planner import Graph, Profile, build, floor, simulate
from autoac.planner.candidates import candidates
from autoac.planner.graph import Step
from autoac.planner.levels import Cost, anytime_floor, cost
from autoac.planner.units import format_bytes

Levels = tuple[int, ...]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class Found:
    """One row of the table. Bytes; times in microseconds."""

    name: str
    static: int  # below it nothing can be
    ceiling: int
    once_proven: int
    once: Cost
    twice: Cost
    anytime: int
    step_us: float


def sharded(graph: Graph) -> Graph:
    """The step without what sharding takes off the device: parameters, lasting gradients, optimizer state.

    Gradients that last are what backward holds from some step on for good; the rest are temporaries.
    """
    lasting = 0
    steps: list[Step] = []
    for step in reversed(graph.steps):
        lasting = min(lasting, step.other) if steps else step.other
        steps.append(replace(step, other=step.other - lasting, peak=max(step.peak - lasting, 0)))
    return replace(graph, static_bytes=0, closing_bytes=0, steps=tuple(reversed(steps)))


def search(graph: Graph, seconds: float) -> tuple[int, Cost, Cost]:
    """What is proven of once, the smallest peak found with it, and the smallest with two levels."""
    least = floor(graph, time_limit_s=seconds)
    simple = sorted(candidates(graph), key=lambda s: simulate(graph, s).peak.live_bytes)
    tops = [least.save_set, *simple[:2]]
    starts = {levels: cost(graph, levels) for top in tops for levels in nested(graph, top)}
    plain = {tuple(min(level, 1) for level in levels) for levels in starts}
    plain |= {tuple(int(op.id not in top) for op in graph.ops) for top in tops}
    once_levels = min(sorted(plain), key=lambda levels: _rank(cost(graph, levels)))
    once_levels = climb(graph, once_levels, deepest=1)
    best = min(starts, key=lambda levels: _rank(starts[levels]))
    twice = [cost(graph, climb(graph, levels, deepest=2)) for levels in (best, once_levels)]
    return least.proven, cost(graph, once_levels), min(twice, key=_rank)


def nested(graph: Graph, top: Iterable[int]) -> Iterator[Levels]:
    """Choices of levels in which some of `top` is saved and the rest kept once made.

    Saved are the ops of every k-th block and those outside all blocks, or all that crosses one of a few
    cuts through forward at which little is live.
    """
    inside = set(top)
    blocks = [_block(op.name) for op in graph.ops]
    for stride in (2, 3, 4, 6, 8, 12):
        if any(block % stride for block in blocks):
            yield tuple(
                2 if op.id not in inside else int(blocks[op.id] > 0 and blocks[op.id] % stride > 0)
                for op in graph.ops
            )
    for parts in (2, 3, 4, 5, 6, 8, 11, 16):
        crossing = _crossing(graph, parts)
        yield tuple(0 if op.id in crossing else 1 if op.id in inside else 2 for op in graph.ops)


def climb(graph: Graph, levels: Levels, deepest: int, sweeps: int = 3) -> Levels:
    """Other levels for one kind of op at a time, in all layers at once or in one, while the peak falls."""
    kinds: dict[str, list[int]] = {}
    for op in graph.ops:
        kinds.setdefault(_NUMBER.sub("*", op.name), []).append(op.id)
    best, best_cost = levels, cost(graph, levels)
    for _ in range(sweeps):
        before = best_cost
        for ops in kinds.values():
            for level in range(deepest + 1):
                # Saved ones stay, unless all change: which blocks are saved is what `nested` chose.
                for chosen in (ops, [op for op in ops if best[op] > 0]):
                    changed = list(best)
                    for i in chosen:
                        changed[i] = level
                    if tuple(changed) == best:
                        continue
                    found = cost(graph, changed)
                    if _rank(found) < _rank(best_cost):
                        best, best_cost = tuple(changed), found
        if best_cost.peak >= before.peak:
            break
    return best


def _rank(found: Cost) -> tuple[int, float]:
    return found.peak, found.recompute_us


def _block(name: str) -> int:
    """The first number in the module path; 0 outside all blocks."""
    match = _NUMBER.search(name.partition("/")[0])
    return int(match[0]) if match else 0


def _crossing(graph: Graph, parts: int) -> set[int]:
    """The ops whose outputs are read across one of `parts - 1` cuts, each where little crosses."""
    n = len(graph.ops)
    live = [0] * (n + 1)  # bytes that cross the cut before op i
    last = [max((r for w in op.writes for r in graph.values[w].readers), default=op.id) for op in graph.ops]
    for op in graph.ops:
        nbytes = sum(graph.nbytes(w) for w in op.writes)
        for i in range(op.id + 1, last[op.id] + 1):
            live[i] += nbytes
    cuts = []
    for k in range(1, parts):
        middle, reach = n * k // parts, max(n // (4 * parts), 1)
        near = range(max(middle - reach, 1), min(middle + reach, n))
        if near:
            cuts.append(min(near, key=lambda i: (live[i], abs(i - middle))))
    return {op.id for op in graph.ops if any(op.id < cut <= last[op.id] for cut in cuts)}


def measure(name: str, graph: Graph, seconds: float) -> Found:
    """One row."""
    proven, once, twice = search(graph, seconds)
    return Found(
        name=name,
        static=graph.static_bytes,
        ceiling=simulate(graph, graph.everything).peak.live_bytes,
        once_proven=proven,
        once=once,
        twice=twice,
        anytime=anytime_floor(graph),
        step_us=sum(op.runtime_us for op in graph.ops) + sum(step.runtime_us for step in graph.steps),
    )


def row(found: Found) -> str:
    """A row as Markdown."""
    size, step = format_bytes, max(found.step_us, 1e-9)
    cells = [
        found.name,
        size(found.ceiling),
        size(found.once_proven),
        f"{size(found.once.peak)} (+{found.once.recompute_us / step:.0%})",
        f"{size(found.twice.peak)} (+{found.twice.recompute_us / step:.0%})",
        f"{1 - found.twice.peak / found.once.peak:.1%}",
        size(found.anytime),
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| step | nothing recomputed | once, proven | once, found (time) | twice, found (time) | less"
    " | any number |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, default=15.0, help="for the solver, on each floor")
    parser.add_argument("--sharded", action="store_true", help="without parameters and what belongs to them")
    arguments = parser.parse_args()
    print(HEAD, flush=True)
    for path in arguments.profiles:
        profile = Profile.from_json(path.read_bytes())
        graph = build(profile)
        if arguments.sharded:
            graph = sharded(graph)
        print(row(measure(path.name.split(".")[0], graph, arguments.seconds)), flush=True)


if __name__ == "__main__":
    main()
