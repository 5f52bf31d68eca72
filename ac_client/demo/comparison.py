"""Measure the rows of the demo, and check what they promise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from ac_client.demo.rows import Memory, Row, Step, measure
from ac_client.demo.setting import Setting
from ac_client.measure.forked_call import iterate_in_child
from ac_client.measure.quartiles import Quartiles

PLAIN = "plain"
CHECKPOINT = "checkpoint every block"
OURS = "autoac at that peak"
HALF = "autoac at half of that saving"

LEAST_TURNS = 20  # also after the time limit
TURNS_OF_A_ROW = 5  # about as long as a row takes before its first turn

OnStart = Callable[[str, int, int], None]  # called with what starts, and the shares done and in all


class Ratio(NamedTuple):
    """The time of one row's step as a multiple of another's, from pairs of steps next to each other.

    Invariant: low <= median <= high.
    """

    low: float  # the median's confidence interval of 95 %, which assumes no distribution
    median: float
    high: float
    least: float  # of the least times: what the machine's other work adds to both is not in them

    @classmethod
    def of(cls, times: Sequence[float], others: Sequence[float]) -> Ratio:
        """Return `times` over `others`, which are pairs."""
        ratios = sorted(a / b for a, b in zip(times, others, strict=True))
        # Each ratio is below the true median with probability 1/2: ranks n/2 -+ 1.96 standard deviations.
        rank = max(math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))), 1)
        return cls(ratios[rank - 1], median(ratios), ratios[-rank], min(times) / min(others))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the demo's table: how the model was trained, and what was measured."""

    row: Row
    memory: Memory
    steps: tuple[Step, ...] = ()  # in turn with those of the other rows

    @property
    def budget_bytes(self) -> int | None:
        """Return the budget of our plan; None for the other rows."""
        return self.row.budget_bytes

    @property
    def peak_bytes(self) -> int:
        """Return the measured peak."""
        return self.memory.peak_bytes

    @property
    def predicted_peak_bytes(self) -> int | None:
        """Return the peak that our plan predicts; None for the other rows."""
        policy = self.memory.policy
        return None if policy is None else policy.predicted.peak_bytes

    def time_over(self, other: Line) -> Ratio:
        """Return the time of a step as a multiple of the other row's step of the same turn."""
        return Ratio.of([step.cpu_s for step in self.steps], [step.cpu_s for step in other.steps])

    def equal_steps(self, plain: Line) -> list[bool]:
        """Return for each step, the first ones too, if loss and gradients are those of plain bit for bit."""
        planned = zip(self.memory.first_steps, plain.memory.steps, strict=False)
        trained = zip((*self.memory.steps, *self.steps), (*plain.memory.steps, *plain.steps), strict=True)
        return [a.digest == b.digest for a, b in (*planned, *trained)]


@dataclass(frozen=True, slots=True)
class Check:
    """A promise of the demo, such as "the peak is within the budget", and if the measurements keep it."""

    promise: str
    found: str
    kept: bool | None  # None: the measurements do not show it; False: it is broken, whatever the noise
    binding: bool = False  # the demo fails without it


@dataclass(frozen=True, slots=True)
class DemoComparison:
    """All rows, the first of them plain, and the promises about them."""

    setting: Setting
    lines: tuple[Line, ...]
    seconds: float

    @property
    def plain(self) -> Line:
        """Return the row of plain training."""
        return self.lines[0]

    @property
    def ours(self) -> list[Line]:
        """Return the rows that run under a plan."""
        return [line for line in self.lines if line.row.method == "ours"]

    def line(self, name: str) -> Line:
        """Return the row called `name`."""
        return next(line for line in self.lines if line.row.name == name)

    @property
    def checks(self) -> list[Check]:
        """Judge the promises of the demo."""
        use = max(line.peak_bytes / (line.budget_bytes or 1) for line in self.ours)
        error = max(abs((line.predicted_peak_bytes or 0) / line.peak_bytes - 1) for line in self.ours)
        equal = {line.row.name: line.equal_steps(self.plain) for line in self.ours}
        unequal = [name for name, steps in equal.items() if not all(steps)]
        ratio = self.line(OURS).time_over(self.line(CHECKPOINT))
        less, more = ratio.high < 1, ratio.low > 1
        return [
            Check("the peak is within the budget", f"at most {use:.2%} of it", use <= 1, binding=True),
            Check(
                "gradients equal those of plain bit for bit",
                ", ".join(unequal) or f"at all {sum(map(len, equal.values()))} steps compared",
                not unequal,
                binding=True,
            ),
            Check("the peak was predicted within 1 %", f"off by {error:.3%}", error <= 0.01),
            Check(
                "less time than the checkpoint at its peak",
                f"{'less' if less else 'more' if more else 'cannot tell'}, {ratio} of its time, "
                f"{ratio.least:.2f} by the least of {len(self.plain.steps)} steps",
                True if less else None,
            ),
        ]

    @property
    def failed(self) -> bool:
        """Return True if a row of ours exceeded its budget or has other gradients than plain."""
        return any(check.binding and not check.kept for check in self.checks)

    def data(self) -> dict[str, Any]:
        """Return everything but the timelines as JSON types."""
        return {
            "setting": asdict(self.setting),
            "seconds": round(self.seconds, 1),
            "rows": [
                asdict(line.row)
                | {"peak_bytes": line.peak_bytes, "predicted_peak_bytes": line.predicted_peak_bytes}
                | {"first_steps_cpu_s": [step.cpu_s for step in line.memory.first_steps]}
                | {"step_cpu_s": Quartiles.of([step.cpu_s for step in line.steps])._asdict()}
                | {"time_over_plain": line.time_over(self.plain)._asdict()}
                | {"equal_steps": line.equal_steps(self.plain)}
                for line in self.lines
            ],
            "checks": [asdict(check) for check in self.checks],
        }


def run(
    setting: Setting | None = None,
    *,
    turns: int = 100,
    limit_s: float = 50,
    on_start: OnStart | None = None,
) -> DemoComparison:
    """Measure the rows: plain, the checkpoint around every block, and ours at two budgets.

    Our budgets are the measured peak of the checkpoint, and the middle between it and plain's.
    Each row has a process of its own. They take timed steps in turn, every second turn in reverse, so that
    what else the machine does adds to all rows alike.

    Args:
        setting: the model; the default is small.
        turns: timed steps of each row, if the time limit allows.
        limit_s: no turn begins later, except for the first `LEAST_TURNS`.
        on_start: called before each row and turn.

    Raises:
        RuntimeError: a row could not be measured.
    """
    setting = setting or Setting()
    on_start = on_start or (lambda name, done, total: None)
    start = time.monotonic()
    methods = {PLAIN: "plain", CHECKPOINT: "checkpoint", OURS: "ours", HALF: "ours"}
    lines: list[Line] = []
    before = TURNS_OF_A_ROW * len(methods)
    with ExitStack() as stack:
        children = []
        for number, (name, method) in enumerate(methods.items()):
            on_start(f"row {number + 1} of {len(methods)}: {name}", TURNS_OF_A_ROW * number, before + turns)
            peaks = [line.peak_bytes for line in lines]
            budgets = {OURS: peaks[1:2], HALF: [sum(peaks[:2]) // 2]}
            row = Row(name, method, *budgets.get(name, []))
            children.append(stack.enter_context(closing(iterate_in_child(measure, row, setting))))
            lines.append(Line(row, _next_of(children[-1], row)))
        for turn in range(turns):
            if turn >= LEAST_TURNS and time.monotonic() - start > limit_s:
                break
            on_start("steps in turn", before + turn, before + turns)
            for number in range(len(lines))[:: -1 if turn % 2 else 1]:
                line = lines[number]
                lines[number] = replace(line, steps=(*line.steps, _next_of(children[number], line.row)))
    return DemoComparison(setting, tuple(lines), time.monotonic() - start)


def _next_of(child: Iterator[Any], row: Row) -> Any:
    try:  # without a time limit: a row takes seconds on two idle cores, and minutes on a busy machine
        return next(child)
    except RuntimeError as error:
        raise RuntimeError(f"the row {row.name!r} could not be measured: {error}") from None
