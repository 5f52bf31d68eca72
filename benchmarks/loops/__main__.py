"""Train 31 loops as people write them, planned at two budgets, and compare with plain.

    python -m benchmarks.loops [--on cpu|standin] [--only NAME ...] [--shares 0.6 0.1]
                               [--above minimum|static]

Each loop runs plainly first, then with a budget that nothing fits, whose error gives the smallest peak, then
at shares of the way from that (with `--above static`: from the bytes between steps and the gradients) to
plain's peak.
Each step's peak is the device's: of the stand-in's counter, or on a CPU, for the last two steps, of an
allocator's record. Reported for each run:

- *weights*: equal to plain's after five steps, bit for bit;
- *over*: steps above the budget, with a warning in that step (said) or without one (not said);
- *warnings* of measured steps, which are false where no step was over; *observed* steps after the third.

Contents are not compared: that takes up to 2 MiB in the first step of each plan, half of what these models
hold.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


class OnCpu:
    """Peaks of steps on a CPU, from the allocator's record above what is alive when the step begins.

    No other record may run while a step is observed, so only steps after the third are measured.
    """

    device = "cpu"

    def __init__(self) -> None:
        self._peaks: list[int] = []
        self.rest = 0  # bytes before the last step
        self._timeline: Any = None
        self._alive: list[Any] = []  # weak references: they note what is released of the time before
        gc.collect()
        self._others = set(self._storages())  # of runs before

    def _storages(self) -> dict[int, Any]:
        """Return the storages of all tensors that Python knows, by address."""
        import torch

        from autoac.tape.torch_facts.storage_table import has_storage

        tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        tensors += [one.grad for one in tensors if one.is_leaf and one.grad is not None]
        storages = [one.untyped_storage() for one in tensors if one.device.type == "cpu" and has_storage(one)]
        return {storage._cdata: storage for storage in storages}

    def begin(self) -> None:
        from ac_client.measure.memory_timeline import AllocatorTimeline

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
        import torch

        self._cuda, self._peaks = torch.cuda, list[int]()
        self.rest = 0  # bytes before the last step
        gc.collect()
        self._before = torch.cuda.memory_allocated()
        assert not self._before, f"{self._before} bytes of an earlier run are on the device"

    def begin(self) -> None:
        self._cuda.reset_peak_memory_stats()
        self.rest = self._cuda.memory_allocated() - self._before

    def end(self) -> None:
        self._peaks.append(self._cuda.max_memory_allocated() - self._before)

    def peaks(self) -> list[int]:
        return self._peaks


class Messages(logging.Handler):
    """Keep what is logged and warned in each step."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.warnings: dict[int, list[str]] = {}
        self.observed: list[int] = []
        self.step = -1

    def said_by(self, step: int) -> bool:
        """Return True if a warning of this step, or an earlier one that lasts, says that it may be over."""
        before = [text for n, texts in self.warnings.items() for text in texts if n < step]
        lasts = ("cannot be kept", "later steps", "the first steps may go over")
        observed = any("an observed step" in text for text in self.warnings.get(step + 1, ()))
        return (
            observed
            or bool(self.warnings.get(step))
            or any(words in text for text in before for words in lasts)
        )

    def claims(self, measured: Collection[int]) -> list[str]:
        """Return the warnings of `measured` steps that say more than what may happen, or what is assumed."""
        hedged = ("may go over", "The plan is for a loop that drops them")
        texts = [text for step in measured for text in self.warnings.get(step, ())]
        return [text for text in texts if not any(hedge in text for hedge in hedged)]

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            self.warnings.setdefault(self.step, []).append(text)
        elif "observing one step" in text:
            self.observed.append(self.step)


class Run:
    """One run of a loop: an Env, and what was found."""

    def __init__(self, loop: Callable[[Any], None], meter: Any, budget: int | None, steps: int = 5) -> None:
        import numpy
        import torch

        import ac_client
        from autoac.planner.units import GIB

        self._apply, self._gib = ac_client.apply, GIB
        self._budget, self._steps, self._n, self._kept = budget, steps, 0, list[Any]()
        self.device, self._meter, self.messages = meter.device, meter, Messages()
        self.error: Exception | None = None
        log = logging.getLogger("ac_client")
        log.setLevel(logging.INFO)
        log.propagate = False
        log.handlers = [self.messages]
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                loop(self)
            except Exception as error:
                if not type(error).__module__.startswith("autoac.planner"):
                    raise
                self.error = error.with_traceback(None)  # whose frames hold the model
        self.weights = [  # as bytes, since tensors of this run would count in those that follow
            tensor.detach().cpu().numpy().tobytes() for m in self._kept for tensor in m.state_dict().values()
        ]
        trained = [p for m in self._kept for p in m.parameters() if p.requires_grad]
        self.gradient_nbytes = sum(p.nbytes for p in trained)
        del trained
        self._kept.clear()
        self.peaks = meter.peaks()
        gc.collect()

    def plan(self, model: Any) -> None:
        if self._budget is not None:
            self._apply(model, self._budget / self._gib)  # without hints: of the optimizer, of the loss

    def keep(self, *modules: Any) -> None:
        self._kept += modules

    def steps(self) -> range:
        return range(self._steps)

    @contextmanager
    def step(self) -> Iterator[None]:
        import torch

        torch.manual_seed(1000 + self._n)
        self.messages.step = self._n
        self._meter.begin()
        try:
            yield
        finally:
            self._meter.end()
        self._n += 1


def examine(
    name: str,
    loop: Callable[[Any], None],
    meter: Callable[[], Any],
    shares: list[float],
    above: str = "minimum",
) -> bool:
    of_plain = meter()
    plain = Run(loop, of_plain, None)
    most, least = max(plain.peaks), of_plain.rest + plain.gradient_nbytes
    if above == "minimum":
        refused = Run(loop, meter(), 1)
        least = getattr(refused.error, "smallest_found", None)
    if least is None:
        print(f"{name}: no smallest peak: {refused.error!r}", flush=True)
        return False
    good = True
    for share in shares:
        budget = int(least + share * max(0, most - least))
        begun = time.monotonic()
        run = Run(loop, meter(), budget)
        if run.error is not None:
            print(f"{name} {share}: refused at {budget:,}: {run.error}"[:300], flush=True)
            good = False
            continue
        equal = run.weights == plain.weights
        over = [i for i, peak in enumerate(run.peaks) if peak > budget]
        said = [i for i in over if run.messages.said_by(i)]
        measured = [i for i, peak in enumerate(run.peaks) if peak]
        false = len(run.messages.claims(measured)) if not over else 0
        late = [i for i in run.messages.observed if i > 2]
        fine = equal and over == said and not false and not late
        good &= fine
        ratios = " ".join(f"{peak / budget:.3f}" for peak in run.peaks)
        print(
            f"{'ok  ' if fine else 'FAIL'} {name} {share}: weights {'equal' if equal else 'DIFFER'}; "
            f"budget {budget:,}; peaks/budget {ratios}; over {over}, said {said}; false warnings {false}; "
            f"late observed {late}; plain {most / budget:.3f}; {time.monotonic() - begun:.1f} s",
            flush=True,
        )
        if not fine:
            for step, texts in run.messages.warnings.items():
                for text in texts:
                    print(f"       step {step}: {text[:220]}", flush=True)
    return good


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--on", choices=("cpu", "standin"), default="cpu")
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.6, 0.1])
    parser.add_argument("--above", choices=("minimum", "static"), default="minimum")
    options = parser.parse_args()
    if options.on == "standin":
        sys.path.insert(0, str(HERE.parents[2] / "tests"))
        from standin import cuda  # type: ignore[import-not-found]
        from standin.library import library  # type: ignore[import-not-found]

        cuda.load(library())
    import torch

    from autoac.tape.unseen.fingerprints import Comparison
    from benchmarks.loops.written_loops import LARGE, LOOPS

    Comparison.enabled = False

    torch.set_num_threads(1)
    meter = OnCpu if options.on == "cpu" else OnStandin
    bad = []
    for name, loop in LOOPS.items():
        if name not in options.only if options.only else name in LARGE:
            continue
        try:
            if not examine(name, loop, meter, options.shares, options.above):
                bad.append(name)
        except Exception as error:  # noqa: BLE001 - of whatever the loop does
            print(f"FAIL {name}: {type(error).__name__}: {error}"[:400], flush=True)
            bad.append(name)
    print(f"{len(bad)} loops fail: {', '.join(bad)}" if bad else "all loops pass")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
