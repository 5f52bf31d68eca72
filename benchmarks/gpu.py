"""Predicted and measured peak, and step time, on a GPU -> docs/gpu.md.

    python -m benchmarks.gpu [--only gpt2] [--device cuda:0] [--steps 15]

Four models with 1 to 8 GB of activations, in float32 and in bf16. For each: the plain step, torch's
checkpoint around every block, and torch's selective checkpoint (matrix products and attention saved), each
measured; then a plan whose budget is the peak that each of the two reached, predicted and measured. Peaks
are `torch.cuda.max_memory_allocated` of a whole step, AdamW included; times are medians over steps,
between events of the device's stream.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn

import ac_client
from ac_client.demo.baselines import BASELINES, wrap_blocks
from ac_client.files import write_whole
from autoac.planner import InfeasibleBudget, Policy, plan
from autoac.planner.units import format_bytes
from autoac.profiler import observe
from benchmarks.models.batches import Batch, tokens
from benchmarks.models.gpt2 import gpt2

TABLE = Path(__file__).parents[1] / "docs" / "gpu.md"
STEPS = 15
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its batch, and the blocks that baselines wrap."""

    name: str
    make: Callable[[], nn.Module]  # on the CPU, in float32
    batch: Callable[[], Batch]
    blocks: Callable[[Any], Sequence[nn.Module]]


class Meter(Protocol):
    """What is asked of a device, so that the script can be run where there is none."""

    device: torch.device

    def peak_of(self, call: Callable[[], object]) -> int:
        """The most bytes handed out at once during `call`, with what was there before."""

    def seconds_of(self, call: Callable[[], object]) -> float:
        """What `call` takes on the device."""

    def clear(self) -> None:
        """Give back what nobody holds."""


class CudaMeter:
    """A GPU of this machine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def peak_of(self, call: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        call()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)

    def seconds_of(self, call: Callable[[], object]) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)
        torch.cuda.synchronize(self.device)
        began.record(stream)
        call()
        ended.record(stream)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def clear(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Row:
    """A way to run a case. Bytes and seconds."""

    case: str
    precision: str
    way: str
    budget: int | None  # that was planned for
    predicted: int | None
    measured: int | None  # None: it did not run
    step_s: float | None
    note: str = ""

    @property
    def off(self) -> float | None:
        """How far the measured peak is above the predicted one, as a part of it."""
        if self.predicted is None or self.measured is None:
            return None
        return self.measured / self.predicted - 1


class Training:
    """A model in training: one way to take a step."""

    def __init__(self, case: Case, precision: str, device: torch.device) -> None:
        torch.manual_seed(0)
        dtype = PRECISIONS[precision]
        self.model = case.make().to(device, dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.batch = {name: _placed(value, device, dtype) for name, value in case.batch().items()}

    def step(self) -> None:
        out = self.model(**self.batch)
        (out["loss"] if isinstance(out, dict) else out.loss).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _placed(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


def rows(case: Case, precision: str, meter: Meter, steps: int) -> list[Row]:
    """All ways to run a case. One model is on the device at a time."""
    row = partial(Row, case.name, precision)
    found: list[Row] = []
    training = Training(case, precision, meter.device)
    profile = observe(training.model, (), training.batch, optimizer=training.optimizer)
    del training
    plain_plan = plan(profile, budget_bytes=1 << 50)
    peak, seconds = measured(case, precision, meter, steps, _as_it_is)
    found.append(row("plain", None, plain_plan.peak, peak, seconds))
    for baseline in BASELINES:

        def wrap(model: nn.Module, baseline: Any = baseline) -> None:
            wrap_blocks(case.blocks(model), baseline)

        try:
            peak, seconds = measured(case, precision, meter, steps, wrap)
        except (RuntimeError, NotImplementedError) as error:
            found.append(row(f"torch {baseline}", None, None, None, None, type(error).__name__))
            continue
        found.append(row(f"torch {baseline}", None, None, peak, seconds))
        try:
            decided = plan(profile, budget_bytes=peak)
        except InfeasibleBudget as error:
            note = f"needs {format_bytes(error.smallest_found)}" if error.smallest_found else "infeasible"
            found.append(row(f"ours, peak of {baseline}", peak, None, None, None, note))
            continue
        apply = partial(_carry_out, policy=decided.policy())
        got, seconds = measured(case, precision, meter, steps, apply)
        found.append(row(f"ours, peak of {baseline}", peak, decided.peak, got, seconds))
    return found


def _as_it_is(_model: nn.Module) -> None:
    """Plain."""


def _carry_out(model: nn.Module, policy: Policy) -> None:
    ac_client.apply(model, policy=policy, strict=True)


def measured(
    case: Case, precision: str, meter: Meter, steps: int, prepare: Callable[[nn.Module], None]
) -> tuple[int, float]:
    """Peak and median time of a step."""
    meter.clear()
    training = Training(case, precision, meter.device)
    prepare(training.model)
    for _ in range(3):
        training.step()  # the optimizer's state, kernels' workspaces, and what they choose among come first
    peak = meter.peak_of(training.step)
    seconds = statistics.median(meter.seconds_of(training.step) for _ in range(steps))
    del training
    meter.clear()
    return peak, seconds


def render(found: Sequence[Row], device_name: str) -> str:
    """The page."""
    predicted = [row for row in found if row.off is not None]
    close = sum(abs(row.off or 0.0) <= 0.02 for row in predicted)
    over = sum(row.budget is not None and (row.measured or 0) > row.budget for row in found)
    lines = [
        "# Peaks and step times on a GPU",
        "",
        "Made by `python -m benchmarks.gpu`, not by hand.",
        "",
        f"{device_name}, torch {torch.__version__}. {close} of {len(predicted)} predicted peaks within 2 %, "
        f"{over} over budget.",
        "",
        "| model | precision | way | budget | predicted | measured | off by | step, ms | / plain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    plain = {(row.case, row.precision): row.step_s for row in found if row.way == "plain"}
    for row in found:
        base = plain.get((row.case, row.precision))
        cells = [row.case, row.precision, row.way]
        cells += [_bytes(row.budget), _bytes(row.predicted), _bytes(row.measured) or row.note]
        cells.append("" if row.off is None else f"{row.off:+.2%}")
        cells.append("" if row.step_s is None else f"{row.step_s * 1e3:.1f}")
        cells.append("" if row.step_s is None or not base else f"{row.step_s / base:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _bytes(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)


def _images(batch: int) -> Batch:
    return {"pixel_values": torch.rand(batch, 3, 224, 224), "labels": torch.arange(batch).remainder(2)}


def _llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _vit() -> Any:
    return transformers.ViTForImageClassification(transformers.ViTConfig())


def _resnet() -> Any:
    return transformers.ResNetForImageClassification(transformers.ResNetConfig())


def _layers(model: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer: its longest list of modules."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


CASES = {
    "gpt2": Case(
        "GPT-2, 4 x 512", lambda: gpt2(layers=12, width=768, heads=12), lambda: tokens(4, 512, 50254), _layers
    ),
    "llama": Case(
        "Llama, 16 layers of 1024, 2 x 1024",
        _llama,
        lambda: tokens(2, 1024, 31997),
        _layers,
    ),
    "vit": Case("ViT-B/16, 32 images", _vit, lambda: _images(32), _layers),
    "resnet": Case(
        "ResNet-50, 32 images",
        _resnet,
        lambda: _images(32),
        lambda m: [layer for stage in m.resnet.encoder.stages for layer in stage.layers],
    ),
}


def main() -> int:
    """Measure, write the table; 2 where there is no GPU, 1 if a planned step went over its budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=CASES, help="may be given again")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="may be given again")
    parser.add_argument("--device", default="cuda", help="default: the first GPU")
    parser.add_argument("--steps", type=int, default=STEPS, help="that are timed")
    parser.add_argument("--out", type=Path, default=TABLE, help="the page, written if everything was run")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no GPU here: benchmarks.gpu needs one", file=sys.stderr)
        return 2
    device = torch.device(given.device if ":" in given.device else f"cuda:{torch.cuda.current_device()}")
    torch.cuda.set_device(device)
    meter = CudaMeter(device)
    found: list[Row] = []
    for name in given.only or CASES:
        for precision in given.precision or PRECISIONS:
            found += rows(CASES[name], precision, meter, given.steps)
            print(f"{CASES[name].name}, {precision}: done", file=sys.stderr, flush=True)
    page = render(found, torch.cuda.get_device_name(device))
    if given.only or given.precision:
        print(page)
    else:
        write_whole(given.out, page)
    return int(any(row.budget is not None and (row.measured or 0) > row.budget for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
