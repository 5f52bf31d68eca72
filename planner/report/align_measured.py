"""Align a measured step with a simulated one: find which moment of one is which moment of the other.

NOTE [ Two clocks ] A step is measured under torch's profiler, which adds time to every op, and simulated with
run times that were taken without it. So bytes can be compared and times cannot. What can be compared is what
ran: ops of forward by module and name, nodes of autograd by name, and inside a node the ops that are run
again. Where a call is found in both steps, the measured moment is drawn at the simulated one; between two
such calls measured time is stretched evenly.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoac.planner.formats.op_key import SHARED_NAMES, OpKey, kernels_of
from autoac.planner.memory.clocks import Timing, runtime_us_of
from autoac.planner.memory.schedule import Backward, Compute, Event, Free, Recompute
from autoac.planner.memory.simulate import Timeline
from autoac.planner.problem.graph import Graph


@dataclass(frozen=True, slots=True)
class ProfiledCall:
    """An op or a node of autograd that the profiler saw run. Times are in microseconds of its clock."""

    begin_us: float
    end_us: float
    name: str  # "aten::mm"; of a node of autograd "MmBackward0"
    node: bool
    module: str = ""  # that was being called; "" in backward


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step as the allocator reported it, from the start of forward on. Microseconds and bytes."""

    time_us: tuple[float, ...]  # ascending; the first is the start
    live_bytes: tuple[int, ...]  # after each change
    ran: tuple[ProfiledCall, ...]  # in order of time
    end_us: float

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes live at once."""
        return max(self.live_bytes)


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """When the kernels of a simulated step begin, in microseconds from the start of forward."""

    events: tuple[int, ...]  # into Timeline.instants: all but frees, which take no time
    begin_us: tuple[float, ...]  # of each; the last is the optimizer's step
    end_us: float  # forward and backward are over

    @classmethod
    def of(cls, graph: Graph, timeline: Timeline, timing: Timing | None = None) -> KernelTimes:
        """Return the times of kernels that run one after the other, as long as the profile says.

        With moves, the times are those of `timing`, since compute also waits for copies.
        """
        events, begin, now = [], [], 0.0
        for i, instant in enumerate(timeline.instants):
            if isinstance(instant.event, Free):
                continue
            events.append(i)
            begin.append(now if timing is None else timing.begin_us[i])
            now += runtime_us_of(graph, instant.event)
        return cls(tuple(events), tuple(begin), now if timing is None else timing.end_us)


@dataclass(frozen=True, slots=True)
class AlignedStep:
    """A measured step whose times are mapped to those of the simulated step, to draw both on one axis."""

    time_us: tuple[float, ...]  # for each of MeasuredStep.time_us
    end_us: float
    matched: int  # events of the simulated step that were found in the measured one
    of: int  # events of the simulated step


def align(graph: Graph, timeline: Timeline, clock: KernelTimes, step: MeasuredStep) -> AlignedStep:
    """Return `step` in the time of `timeline`. See NOTE [ Two clocks ]."""
    kernels: list[Event] = [timeline.instants[i].event for i in clock.events[:-1]]
    backward_at = next((i for i, ran in enumerate(step.ran) if ran.node), len(step.ran))
    first_back = next((k for k, event in enumerate(kernels) if not isinstance(event, Compute)), len(kernels))
    pairs = [
        *_forward(graph, kernels[:first_back], step.ran[:backward_at]),
        *((first_back + k, us) for k, us in _backward(graph, kernels[first_back:], step.ran[backward_at:])),
    ]
    start = step.time_us[0]
    backward_end = max((ran.end_us for ran in step.ran if ran.node), default=step.end_us)
    measured, simulated = [start], [0.0]
    for k, us in pairs:
        if us > measured[-1]:
            measured.append(us)
            simulated.append(max(clock.begin_us[k], simulated[-1]))
    if backward_end > measured[-1]:
        measured.append(backward_end)
        simulated.append(clock.end_us)
    # The optimizer's run time is in no profile: it is as much longer or shorter as the rest of the step.
    scale = clock.end_us / (measured[-1] - start) if measured[-1] > start else 0.0
    tail = max(step.end_us - measured[-1], 0.0)
    measured.append(measured[-1] + max(tail, 1.0))
    simulated.append(simulated[-1] + max(tail, 1.0) * scale)
    drawn = np.interp(np.asarray((*step.time_us, step.end_us)), measured, simulated)
    return AlignedStep(tuple(drawn[:-1].tolist()), float(drawn[-1]), len(pairs), len(kernels))


def op_names(keys: Sequence[str]) -> frozenset[str]:
    """Return the names that torch's profiler has for the ops of these keys.

    >>> sorted(op_names(["h.3.mlp/aten.mm.default#1", "./mylib.scan.default#0"]))
    ['aten::mm', 'mylib::scan']
    """
    return frozenset(_profiler_name(op) for key in keys for op in kernels_of(OpKey.parse(key).op))


def _profiler_name(op: str) -> str:
    namespace, _, rest = op.partition(".")
    return f"{namespace}::{rest.partition('.')[0]}"


_NAMES_OF_KERNELS = {_profiler_name(kernel): name for name in SHARED_NAMES for kernel in kernels_of(name)}


def _name(profiled: str) -> str:
    """Return the name of an op of torch's profiler; equivalent kernels share one."""
    return _NAMES_OF_KERNELS.get(profiled, profiled)


def _op_name(key: str) -> str:
    op = OpKey.parse(key).op
    return op if op in SHARED_NAMES else _profiler_name(op)


def _forward(
    graph: Graph, kernels: Sequence[Event], ran: Sequence[ProfiledCall]
) -> Iterator[tuple[int, float]]:
    """Yield (kernel, when it began), in order, for the ops of forward that were seen in their module."""
    names: list[Hashable] = []
    for event in kernels:
        assert isinstance(event, Compute)
        key = graph.ops[event.op].name
        names.append((OpKey.parse(key).module, _op_name(key)))
    for k, i in longest_common_subsequence(names, [(seen.module, _name(seen.name)) for seen in ran]):
        yield k, ran[i].begin_us


def _backward(
    graph: Graph, kernels: Sequence[Event], ran: Sequence[ProfiledCall]
) -> Iterator[tuple[int, float]]:
    """Yield (index of a kernel, when it began) for steps of backward and the ops that run again in them."""
    works = [k for k, event in enumerate(kernels) if isinstance(event, Backward)]
    steps = [graph.steps[event.step] for k in works if isinstance(event := kernels[k], Backward)]
    named = [j for j, step in enumerate(steps) if step.unpacks]
    nodes = [i for i, seen in enumerate(ran) if seen.node]
    pairs = longest_common_subsequence([steps[j].name for j in named], [ran[i].name for i in nodes])
    for a, b in pairs:
        j, i = named[a], nodes[b]
        node = ran[i]
        last = nodes[b + 1] if b + 1 < len(nodes) else len(ran)
        inside = [seen for seen in ran[i + 1 : last] if seen.begin_us < node.end_us]
        first = works[j - 1] + 1 if j else 0
        burst = [event for event in kernels[first : works[j]] if isinstance(event, Recompute)]
        began = node.begin_us
        again = [_op_name(graph.ops[event.op].name) for event in burst]
        for k, at in longest_common_subsequence(again, [_name(seen.name) for seen in inside]):
            yield first + k, inside[at].begin_us
            began = inside[at].end_us
        yield works[j], began
        for work, step in zip(works[j + 1 :], steps[j + 1 :], strict=True):
            if step.unpacks:
                break
            yield work, node.end_us  # what autograd does with the node's gradients


def longest_common_subsequence(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return a longest common subsequence as ascending positions in both.

    Bit-parallel, so that steps of thousands of ops take well below a second: H. Hyyro, Bit-parallel
    LCS-length computation revisited (2004). Row `i` has a 0 where the length grows with the entry of `b`.

    >>> longest_common_subsequence("abcbd", "xbbd")
    [(1, 1), (3, 2), (4, 3)]
    """
    of_a = set(a)
    places = [j for j, item in enumerate(b) if item in of_a]
    masks: dict[Hashable, int] = {}
    for at, j in enumerate(places):
        masks[b[j]] = masks.get(b[j], 0) | 1 << at
    full = (1 << len(places)) - 1
    row, rows = full, []
    for item in a:
        shared = row & masks.get(item, 0)
        row = ((row + shared) | (row - shared)) & full
        rows.append(row)
    pairs = []
    i, at = len(a) - 1, len(places) - 1
    while i >= 0 and at >= 0:
        if rows[i] >> at & 1:
            at -= 1
        elif i and not rows[i - 1] >> at & 1:
            i -= 1
        else:
            pairs.append((i, places[at]))
            i, at = i - 1, at - 1
    return pairs[::-1]


def thin_out(levels: Sequence[int], most: int) -> list[int]:
    """Return the positions of about `most` levels: the first, and the highest and last of each stretch."""
    if len(levels) <= most:
        return list(range(len(levels)))
    positions = [0]
    stretch = max(1, 2 * len(levels) // most)
    for begin in range(0, len(levels), stretch):
        end = min(begin + stretch, len(levels))
        highest = max(range(begin, end), key=lambda i: levels[i])
        positions += [highest, end - 1]
    return sorted(set(positions))
