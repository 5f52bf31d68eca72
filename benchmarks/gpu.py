"""Compare predicted and measured peaks, and step times, on a GPU.

    python -m benchmarks.gpu [--only gpt2] [--device cuda:0] [--steps 15] [--out FILE]

Four models with 1 to 8 GB of activations, in float32 and in bf16. For each, measure the plain step, torch's
checkpoint around every block, and torch's selective checkpoint (matrix products and attention saved); then
plan with the peak of each of the two as the budget, and measure that plan. Peaks are
`torch.cuda.max_memory_allocated` of a whole step, AdamW included; times are medians over steps, between
events of the device's stream.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn

import ac_client
from autoac.planner import InfeasibleBudget, Policy, plan
from autoac.planner.units import format_bytes
from autoac.profiler import observe
from benchmarks.models.batches import Batch, tokens
from benchmarks.models.gpt2 import gpt2
from benchmarks.results import add_out_argument, markdown_table, write_result
from benchmarks.step_timing import loss_of
from benchmarks.torch_checkpoint import BASELINES, wrap_blocks

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
    """The measurements of a device; tests replace the GPU by a counting CPU."""

    device: torch.device

    def peak_of(self, call: Callable[[], object]) -> int:
        """Return the most bytes allocated at once during `call`, including those allocated before."""

    def seconds_of(self, call: Callable[[], object]) -> float:
        """Return the seconds that `call` takes on the device."""

    def clear(self) -> None:
        """Return unused memory to the device."""


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
    """One way to run a case, measured. Bytes and seconds."""

    case: str
    precision: str
    way: str
    budget: int | None  # that was planned for
    predicted: int | None
    measured: int | None  # None: it did not run
    step_s: float | None
    note: str = ""

    @property
    def error(self) -> float | None:
        """Return the excess of the measured peak over the predicted one, as a fraction."""
        if self.predicted is None or self.measured is None:
            return None
        return self.measured / self.predicted - 1

    @property
    def is_over_budget(self) -> bool:
        return self.budget is not None and (self.measured or 0) > self.budget


class Training:
    """A model, its optimizer and its batch on the device."""

    def __init__(self, case: Case, precision: str, device: torch.device) -> None:
        torch.manual_seed(0)
        dtype = PRECISIONS[precision]
        self.model = case.make().to(device, dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        self.batch = {name: _to_device(value, device, dtype) for name, value in case.batch().items()}

    def step(self) -> None:
        out = self.model(**self.batch)
        loss_of(out).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _to_device(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


def measure_case(case: Case, precision: str, meter: Meter, steps: int) -> list[Row]:
    """Return a row for each way to run a case. One model is on the device at a time."""
    row = partial(Row, case.name, precision)
    found: list[Row] = []
    training = Training(case, precision, meter.device)
    profile = observe(training.model, (), training.batch, optimizer=training.optimizer)
    del training
    plain_plan = plan(profile, budget_bytes=1 << 50)
    peak, seconds = measure(case, precision, meter, steps, _leave_plain)
    found.append(row("plain", None, plain_plan.peak, peak, seconds))
    for baseline in BASELINES:

        def wrap(model: nn.Module, baseline: Any = baseline) -> None:
            wrap_blocks(case.blocks(model), baseline)

        try:
            peak, seconds = measure(case, precision, meter, steps, wrap)
        except (RuntimeError, NotImplementedError) as error:
            found.append(row(f"torch {baseline}", None, None, None, None, type(error).__name__))
            continue
        found.append(row(f"torch {baseline}", None, None, peak, seconds))
        try:
            one_plan = plan(profile, budget_bytes=peak)
        except InfeasibleBudget as error:
            note = f"needs {format_bytes(error.smallest_found)}" if error.smallest_found else "infeasible"
            found.append(row(f"ours, peak of {baseline}", peak, None, None, None, note))
            continue
        apply = partial(_apply_policy, policy=one_plan.policy())
        got, seconds = measure(case, precision, meter, steps, apply)
        found.append(row(f"ours, peak of {baseline}", peak, one_plan.peak, got, seconds))
    return found


def _leave_plain(_model: nn.Module) -> None:
    """Change nothing."""


def _apply_policy(model: nn.Module, policy: Policy) -> None:
    ac_client.apply(model, policy=policy, strict=True)


def measure(
    case: Case, precision: str, meter: Meter, steps: int, prepare: Callable[[nn.Module], None]
) -> tuple[int, float]:
    """Return the peak and the median time of a step."""
    meter.clear()
    training = Training(case, precision, meter.device)
    prepare(training.model)
    for _ in range(3):
        training.step()  # allocate optimizer state and workspaces, and let kernels tune themselves
    peak = meter.peak_of(training.step)
    seconds = statistics.median(meter.seconds_of(training.step) for _ in range(steps))
    del training
    meter.clear()
    return peak, seconds


HEAD = ("model", "precision", "way", "budget", "predicted", "measured", "error", "step, ms", "/ plain")


def render(rows: Sequence[Row], device_name: str) -> str:
    """Return the table as Markdown, under a summary."""
    errors = [row.error for row in rows if row.error is not None]
    close = sum(abs(error) <= 0.02 for error in errors)
    plain_s = {(row.case, row.precision): row.step_s for row in rows if row.way == "plain"}
    lines = []
    for row in rows:
        base_s = plain_s.get((row.case, row.precision))
        lines.append(
            [
                *(row.case, row.precision, row.way),
                *(_bytes(row.budget), _bytes(row.predicted), _bytes(row.measured) or row.note),
                "" if row.error is None else f"{row.error:+.2%}",
                "" if row.step_s is None else f"{row.step_s * 1e3:.1f}",
                "" if row.step_s is None or not base_s else f"{row.step_s / base_s:.3f}",
            ]
        )
    return (
        f"{device_name}, torch {torch.__version__}. {close} of {len(errors)} predicted peaks within 2 %, "
        f"{sum(row.is_over_budget for row in rows)} over budget.\n\n{markdown_table(HEAD, lines)}"
    )


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
    """Return the blocks of a transformer: its longest list of modules."""
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
    """Measure, and write the table; return 2 without a GPU, 1 if a planned step exceeded its budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=CASES, help="may be repeated")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="may be repeated")
    parser.add_argument("--device", default="cuda", help="default: the first GPU")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps")
    add_out_argument(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a GPU: torch found none", file=sys.stderr)
        return 2
    device = torch.device(options.device if ":" in options.device else f"cuda:{torch.cuda.current_device()}")
    torch.cuda.set_device(device)
    meter = CudaMeter(device)
    rows: list[Row] = []
    for name in options.only or CASES:
        for precision in options.precision or PRECISIONS:
            rows += measure_case(CASES[name], precision, meter, options.steps)
            print(f"{CASES[name].name}, {precision}: done", file=sys.stderr, flush=True)
    write_result(render(rows, torch.cuda.get_device_name(device)), options.out)
    return int(any(row.is_over_budget for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
