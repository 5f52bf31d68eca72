"""One run of a training loop, plain or planned: the peak of each step, what was said, and the numbers."""

from __future__ import annotations

import gc
import hashlib
import logging
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import numpy
import torch
from torch import Tensor, nn

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import PlannerError
from autoac.planner.units import GIB
from autoac.tape.torch_facts.storage_table import has_storage
from autoac.tape.unseen.fingerprints import Comparison

SETTLED = 4  # steps, or turns of a loop that repeats after several, after which no plan is made


class Meter(Protocol):
    """Measures the peak of each step."""

    device: str
    rest: int  # bytes before the last step

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def peaks(self) -> list[int]:
        """Return the peak of each step; 0 where it was not measured."""


class OnCpu:
    """Peaks of steps on a CPU, from the allocator's record above what is alive when the step begins.

    No other record may run while a step is observed, so only steps after the third are measured.
    """

    device = "cpu"

    def __init__(self) -> None:
        self._peaks: list[int] = []
        self.rest = 0
        self._timeline: AllocatorTimeline | None = None
        self._alive: list[Any] = []  # weak references: they note what is released of the time before
        gc.collect()
        self._others = set(self._storages())  # of runs before

    def _storages(self) -> dict[int, Any]:
        """Return the storages of all tensors that Python knows, by address."""
        tensors = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
        tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
        storages = [one.untyped_storage() for one in tensors if one.device.type == "cpu" and has_storage(one)]
        return {storage._cdata: storage for storage in storages}

    def begin(self) -> None:
        if len(self._peaks) < 3:
            return
        gc.collect()
        alive = [storage for at, storage in self._storages().items() if at not in self._others]
        self.rest = sum(storage.nbytes() for storage in alive)
        timeline = AllocatorTimeline("cpu", base=self.rest)

        def watch(storage: Any) -> weakref.ref[Any]:
            nbytes = storage.nbytes()
            return weakref.ref(storage, lambda _: timeline.note_release(nbytes))

        self._alive = [watch(storage) for storage in alive]
        del alive
        self._timeline = timeline.__enter__()

    def end(self) -> None:
        timeline, self._timeline = self._timeline, None
        self._alive.clear()
        if timeline is not None:
            timeline.__exit__(None, None, None)
        self._peaks.append(0 if timeline is None else timeline.peak_bytes)

    def peaks(self) -> list[int]:
        return self._peaks


class OnStandin:
    """Peaks of steps on the stand-in device, from its counter."""

    device = "cuda"

    def __init__(self) -> None:
        self._peaks: list[int] = []
        self.rest = 0
        gc.collect()
        self._before = torch.cuda.memory_allocated()
        assert not self._before, f"{self._before} bytes of an earlier run are on the device"

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self.rest = torch.cuda.memory_allocated() - self._before

    def end(self) -> None:
        self._peaks.append(torch.cuda.max_memory_allocated() - self._before)

    def peaks(self) -> list[int]:
        return self._peaks


class Messages(logging.Handler):
    """Keep what is logged and warned in each step."""

    LASTING = (
        "cannot be kept",
        "later steps",
        "these steps may go over",
        "The plan stays",
        "present plan stays",
        "the first steps may go over",
    )

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.warnings: list[tuple[int, str]] = []  # with their steps
        self.planned: list[int] = []  # the step of each observed step and each plan
        self.plans = 0
        self.step = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            self.warnings.append((self.step, text))
        elif "observing one step" in text or ": planning " in text:
            self.planned.append(self.step)
            self.plans += ": planning " in text

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Receive the messages of ours in the body, in place of the log's handlers."""
        log = logging.getLogger("ac_client")
        before = log.level, log.propagate, log.handlers
        log.propagate, log.handlers = False, [self]
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            level, log.propagate, log.handlers = before
            log.setLevel(level)

    def about_budget(self, step: int) -> bool:
        """Return True if a warning of this step is about the budget."""
        words = ("budget", "limit", "the measured peak was")
        return any(n == step and any(w in text for w in words) for n, text in self.warnings)

    def said_by(self, step: int) -> bool:
        """Return True if a warning of this step, or an earlier one that lasts, says that it may be over."""
        observed = any(n == step + 1 and "was observed, without" in text for n, text in self.warnings)
        lasting = any(n < step and any(words in text for words in self.LASTING) for n, text in self.warnings)
        return observed or lasting or self.about_budget(step)

    def claims(self, measured: set[int]) -> int:
        """Count the warnings of `measured` steps that say more than what may happen, or what is assumed."""
        hedged = (
            "may go over",
            "The plan is for a loop that drops them",
            "without a plan",
            "no plan yet",
            "gap of the best plan",
        )
        return sum(n in measured and not any(hedge in text for hedge in hedged) for n, text in self.warnings)


class Run:
    """One run of a loop: an Env, and what was found.

    Args:
        budget: in bytes; None: the loop runs plainly.

    Attributes:
        error: that ended the run.
    """

    def __init__(self, loop: Callable[[Any], None], meter: Meter, budget: int | None, steps: int = 5) -> None:
        self._budget, self._steps, self._n, self._kept = budget, steps, 0, list[nn.Module]()
        self.device, self._meter, self.messages = meter.device, meter, Messages()
        self.digests: list[str] = []  # of gradients and weights, as the loop notes them
        self.error: Exception | None = None
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        with self.messages.heard(), mock.patch.object(Comparison, "enabled", False):
            try:
                loop(self)
            except Exception as error:  # noqa: BLE001 - of whatever the loop does
                self.error = error.with_traceback(None)  # whose frames hold the model
        self.note(*self._kept)
        trained = [p for m in self._kept for p in m.parameters() if p.requires_grad]
        self.gradient_nbytes = sum(p.nbytes for p in trained)
        del trained
        self._kept.clear()
        self.peaks = meter.peaks()
        gc.collect()

    def plan(self, model: nn.Module, optimizer: Any = None, others: Iterable[nn.Module] = ()) -> None:
        if self._budget is None:
            return
        # No allocator of a CPU knows what else is there. docs/budget.md says to leave headroom for it.
        tensors = (t for other in others for t in (*other.parameters(), *other.buffers()))
        held = sum(tensor.nbytes for tensor in tensors) if self.device == "cpu" else 0
        ac_client.apply(
            model,
            self._budget / GIB,
            optimizer=optimizer,
            host_budget_gb=0,  # no moves: whether a link is fast enough depends on the machine's load
            constraints=ac_client.Constraints(headroom_bytes=held),
        )

    def keep(self, *modules: nn.Module) -> None:
        self._kept += modules

    def note(self, *modules: nn.Module) -> None:
        """Compare the weights, buffers and gradients of these modules, as they are now."""
        digest = hashlib.sha256()
        for module in modules:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            for tensor in (*module.state_dict().values(), *gradients):
                digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        self.digests.append(digest.hexdigest())

    def steps(self) -> range:
        return range(self._steps)

    @contextmanager
    def step(self) -> Iterator[None]:
        torch.manual_seed(1000 + self._n)
        self.messages.step = self._n
        self._meter.begin()
        try:
            yield
        finally:
            self._meter.end()
        self._n += 1


@dataclass(frozen=True, slots=True)
class Row:
    """Hold what one loop did under one budget. Sizes are in bytes."""

    loop: str
    budget: int
    plain: int  # peak without a plan
    peaks: tuple[int, ...] = ()  # of the steps; 0: not measured
    warnings: tuple[tuple[int, str], ...] = ()  # with the step of each
    planned: tuple[int, ...] = ()  # steps that were observed, or before which a plan was made
    faults: tuple[str, ...] = ()  # the kind of each, a colon, and more
    said: tuple[int, ...] = ()  # steps over the budget, and said to be

    @property
    def verdict(self) -> str:
        return "; ".join(self.faults) or (f"over and said: {_steps(self.said)}" if self.said else "ok")

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table, in which nothing differs between two runs of the same code."""
        peaks = " ".join(f"{peak:,}" if peak else "-" for peak in self.peaks)
        words = "; ".join(f"{step}: {text.partition(': ')[2][:100]}" for step, text in self.warnings)
        return (
            self.loop,
            f"{self.budget:,}",
            f"{self.plain:,}",
            peaks,
            _steps(self.planned),
            words.replace("|", "/").replace("\n", " "),
            self.verdict.replace("|", "/").replace("\n", " "),
        )


HEAD = ("loop", "budget", "plain", "peak of each step", "planned in", "words", "verdict")


def judged(
    name: str,
    budget: int,
    plain: Run,
    run: Run,
    period: int | None = 1,
    *,
    begins: int = 0,
    feasible: bool = False,
) -> Row:
    """Return the row of a planned run.

    Args:
        period: steps after which the loop repeats; None if it never does.
        begins: the step from which it repeats.
        feasible: another way to recompute keeps the budget in this loop.
    """
    messages, peaks, faults = run.messages, run.peaks, []
    if isinstance(run.error, PlannerError):
        faults.append(f"refused: {run.error}")
    elif run.error is not None:
        faults.append(f"crash: {type(run.error).__name__}: {run.error}")
    elif differ := [i for i, (a, b) in enumerate(zip(plain.digests, run.digests, strict=True)) if a != b]:
        faults.append(f"bits differ: {_steps(differ)}")
    over = {i for i, peak in enumerate(peaks) if peak > budget}
    said = {i for i in over if messages.said_by(i)}
    later = {i for i in over - said if messages.about_budget(i + 1)}
    if silent := over - said - later:
        most = max(peaks[i] for i in silent)
        faults.append(f"over in silence: {_steps(silent)}, by {most - budget:,}")
    if later:
        faults.append(f"over, said a step later: {_steps(later)}")
    if feasible and any("cannot be kept" in text for _, text in messages.warnings):
        faults.append("kept by checkpoints: a warning says that the budget cannot be kept")
    elif not over and (claims := messages.claims({i for i, peak in enumerate(peaks) if peak})):
        faults.append(f"false words: {claims}")
    if not messages.plans and run.error is None:
        faults.append("never planned")
    planned = sorted(set(messages.planned))
    if period is not None and (late := [i for i in planned if i >= begins + SETTLED * period]):
        faults.append(f"planned again: {_steps(late)}")
    return Row(
        name,
        budget,
        max(plain.peaks, default=0),
        tuple(peaks),
        tuple(messages.warnings),
        tuple(planned),
        tuple(faults),
        tuple(sorted(said)),
    )


def _steps(numbers: Any) -> str:
    return " ".join(map(str, sorted(numbers)))
