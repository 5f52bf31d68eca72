"""Measure the rows of the demo, and check what they promise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from ac_client.demo.largest_batch import LargestBatches, largest_batches
from ac_client.demo.rows import NAMES, Memory, Row, Step, measure
from ac_client.demo.setting import DecoderSetting, Setting, UNetSetting
from ac_client.measure.forked_call import iterate_in_child

SETTINGS = DecoderSetting(), UNetSetting()
SMALL = DecoderSetting(layers=2, width=128, heads=4, vocabulary=256, tokens=128, keep_gradients=False)

LEAST_TURNS = 20  # also after the time limit
TURNS_OF_A_ROW = 5  # about as long as a row takes before its first turn
TURNS_OF_BATCHES = 20

OnStart = Callable[[str, int, int], None]  # called with what starts, and the shares done and in all


class Ratio(NamedTuple):
    """The time of one row's step as a multiple of another's, from pairs of steps next to each other.

    Invariant: low <= median <= high.
    """

    low: float  # the median's confidence interval of 95 %, which assumes no distribution
    median: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float], others: Sequence[float]) -> Ratio:
        """Return `times` over `others`, which are pairs."""
        ratios = sorted(a / b for a, b in zip(times, others, strict=True))
        # Each ratio is below the true median with probability 1/2: ranks n/2 -+ 1.96 standard deviations.
        rank = max(math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))), 1)
        return cls(ratios[rank - 1], median(ratios), ratios[-rank])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the demo's table: how the model was trained, and what was measured."""

    row: Row
    memory: Memory
    steps: tuple[Step, ...] = ()  # in turn with those of the other rows

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
class ModelComparison:
    """The rows of one model: plain, the checkpoint, and ours."""

    setting: Setting
    lines: tuple[Line, ...]

    @property
    def plain(self) -> Line:
        """Return the row of plain training."""
        return self.lines[0]

    @property
    def ours(self) -> Line:
        """Return the row that runs under a plan."""
        return self.lines[-1]

    @property
    def name(self) -> str:
        """Return the name of the model."""
        return self.setting.describe().partition(",")[0]


@dataclass(frozen=True, slots=True)
class Demo:
    """All models and the largest batches, and the promises about them."""

    models: tuple[ModelComparison, ...]
    batches: LargestBatches
    seconds: float

    @property
    def checks(self) -> list[Check]:
        """Judge the promises of the demo."""
        ours = [model.ours for model in self.models]
        use = max(line.peak_bytes / (line.row.budget_bytes or 1) for line in ours)
        error = max(abs((line.predicted_peak_bytes or 0) / line.peak_bytes - 1) for line in ours)
        equal = {model.name: model.ours.equal_steps(model.plain) for model in self.models}
        unequal = [name for name, steps in equal.items() if not all(steps)]
        words = ", ".join(unequal) or f"at all {sum(map(len, equal.values()))} steps compared"
        return [
            Check("the peak is within the budget", f"at most {use:.2%} of it", use <= 1, binding=True),
            Check("gradients equal those of plain bit for bit", words, not unequal, binding=True),
            Check("the peak was predicted within 1 %", f"off by {error:.3%}", error <= 0.01),
            *map(_check_time, self.models),
            _check_batches(self.batches),
        ]

    @property
    def failed(self) -> bool:
        """Return True if a row of ours exceeded its budget or has other gradients than plain."""
        return any(check.binding and not check.kept for check in self.checks)


def _check_time(model: ModelComparison) -> Check:
    ratio = model.ours.time_over(model.lines[1])
    word = "less" if ratio.high < 1 else "more" if ratio.low > 1 else "cannot tell"
    words = f"{word}, {ratio} of its time"
    return Check(f"{model.name}: less time than the checkpoint at its peak", words, word == "less" or None)


def _check_batches(batches: LargestBatches) -> Check:
    sizes = ", ".join(f"{batch.row.name} {batch.samples}" for batch in batches.rows)
    within = all(batch.peak_bytes <= batches.budget_bytes for batch in batches.rows)
    return Check("the largest batches fit, by real steps", sizes, within, binding=True)


def run(
    settings: Sequence[Setting] = SETTINGS,
    small: DecoderSetting = SMALL,
    *,
    turns: int = 100,
    limit_s: float = 50,
    on_start: OnStart = lambda name, done, total: None,
) -> Demo:
    """Measure the rows of each model: plain, the checkpoint around every block, and ours at its peak.

    Each row has a process of its own. They take timed steps in turn, every second turn in reverse, so that
    what else the machine does adds to all rows alike.

    Args:
        settings: the models.
        small: the model of the largest batches.
        turns: timed steps of each row, if the time limit allows.
        limit_s: no turn begins later, except for the first `LEAST_TURNS`.
        on_start: called before each row and turn.

    Raises:
        RuntimeError: a row could not be measured.
    """
    start = time.monotonic()
    rows = [(setting, method) for setting in settings for method in NAMES]
    before = TURNS_OF_A_ROW * len(rows) + TURNS_OF_BATCHES
    on_start("the largest batches in the same memory", 0, before + turns)
    batches = largest_batches(small)
    lines: list[Line] = []
    with ExitStack() as stack:
        children: list[Iterator[Any]] = []
        for number, (setting, method) in enumerate(rows):
            row = Row(method, lines[-1].peak_bytes if method == "ours" else None)
            done = TURNS_OF_BATCHES + TURNS_OF_A_ROW * number
            on_start(f"row {number + 1} of {len(rows)}: {row.name}", done, before + turns)
            children.append(stack.enter_context(closing(iterate_in_child(measure, row, setting))))
            lines.append(Line(row, next(children[-1])))
        for turn in range(turns):
            if turn >= LEAST_TURNS and time.monotonic() - start > limit_s:
                break
            on_start("steps in turn", before + turn, before + turns)
            for number in range(len(lines))[:: -1 if turn % 2 else 1]:
                steps = (*lines[number].steps, next(children[number]))
                lines[number] = replace(lines[number], steps=steps)
    firsts = range(0, len(lines), len(NAMES))
    models = [ModelComparison(rows[i][0], tuple(lines[i : i + len(NAMES)])) for i in firsts]
    return Demo(tuple(models), batches, time.monotonic() - start)
