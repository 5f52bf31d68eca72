"""Train a sample model for a few steps: its peak, its times, and the numbers that it computed."""

from __future__ import annotations

import gc
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import ac_client
from autoac.planner import Profile
from autoac.planner.units import GIB
from autoac.profiler import DATASHEETS, Device, observe
from autoac.profiler.timing.on_device import seconds
from benchmarks.models.samples import Sample, Size

PRECISIONS = ("fp32", "bf16")
STEPS = 3  # the first is observed, the second planned; the peak is that of the last
TIMED = 3
_BY_CAPABILITY = {(8, 0): "a100", (8, 9): "rtx4090"}


@dataclass(frozen=True, slots=True)
class Case:
    """A sample model in one precision on one device."""

    sample: Sample
    precision: str  # "bf16" is autocast over float32 parameters
    size: Size
    device: torch.device

    @property
    def name(self) -> str:
        return f"{self.sample.name}, {self.precision}"

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward runs: autocast to bf16, or none for fp32."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Tensor]]:
        """Return a model, its optimizer and a batch on the device, with the same numbers in each call."""
        release_memory()
        torch.manual_seed(0)
        with self.device:  # a host takes seconds to fill a billion parameters
            model = self.sample.make(self.size).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = {name: value.to(self.device) for name, value in self.sample.batch(self.size).items()}
        return model, optimizer, batch

    def profiled(self) -> Profile:
        """Return the profile of a step on the device."""
        model, optimizer, batch = self.made()
        with self.autocast():
            return observe(model, (), batch, optimizer=optimizer)

    def faked(self, sheet: Device) -> Profile:
        """Return the profile of a fake step for the datasheet, without an optimizer."""
        model, _, batch = self.made()
        with self.autocast():
            return observe(model, (), batch, on=sheet)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers that a training computed, on the CPU: loss, gradients, buffers and generator state."""

    tensors: dict[str, Tensor]

    def distance(self, other: Numbers) -> tuple[int, float]:
        """Return how many tensors differ in any bit, and the largest relative difference of one."""
        differing, largest = 0, 0.0
        for name, mine in self.tensors.items():
            theirs = other.tensors[name]
            if torch.equal(mine, theirs):
                continue
            differing += 1
            scale = float(mine.double().norm()) or 1.0
            relative = float((mine.double() - theirs.double()).norm()) / scale
            largest = max(largest, relative if relative == relative else float("inf"))
        return differing, largest


@dataclass(frozen=True, slots=True)
class Trained:
    """Peak, times and gradients that were measured over a few steps of a case."""

    peak_bytes: int
    slack_bytes: int  # of the peak: blocks are larger than what was asked for
    numbers: Numbers
    device_ms: float  # of forward and backward, with the host ahead where that is possible
    host_ms: float  # that the host takes to launch them
    wall_ms: float  # from an idle device to an idle device
    report: ac_client.Report | None = None  # of a planned training
    reserved_bytes: int = 0  # taken from the device, fragments included
    predicted_reserved_bytes: int | None = None  # before the second step


def train(
    case: Case,
    budget_bytes: int | Literal["device"] | None = None,
    host_bytes: int = 0,
    *,
    norms_only: bool = False,
    timing: AbstractContextManager[Any] | None = None,
) -> Trained:
    """Train for a few steps. With `budget_bytes` they are planned, and may move `host_bytes` to the host.

    Args:
        case: the model and its batch.
        budget_bytes: the budget; "device" as for `apply`.
        host_bytes: the budget of the host.
        norms_only: return the norm of each tensor of the numbers, without copies to the CPU.
        timing: entered while steps are timed.

    Raises:
        InfeasibleBudget: no plan keeps the budget.
    """
    model, optimizer, batch = case.made()
    if budget_bytes is not None:
        budget_gb = budget_bytes if budget_bytes == "device" else budget_bytes / GIB
        ac_client.apply(model, budget_gb, optimizer=optimizer, host_budget_gb=host_bytes / GIB or None)

    def forward_backward() -> Tensor:
        with case.autocast():
            loss: Tensor = model(**batch)
        loss.backward()
        return loss.detach()

    predicted_reserved = None
    for i in range(STEPS):
        torch.manual_seed(i)
        torch.cuda.synchronize(case.device)
        torch.cuda.reset_peak_memory_stats(case.device)
        loss = forward_backward()
        if i < STEPS - 1:
            del loss
            optimizer.step()
            torch.cuda.synchronize(case.device)  # before memory of gradients of another stream is used again
            optimizer.zero_grad()
        if i == 0 and budget_bytes is not None:
            predicted_reserved = ac_client.applied(model).report().predicted_reserved_bytes
    optimizer.step()
    reserved = torch.cuda.max_memory_reserved(case.device)
    peak = torch.cuda.max_memory_allocated(case.device)
    report = ac_client.applied(model).report() if budget_bytes is not None else None  # of these steps
    slack = peak - torch.cuda.memory_stats(case.device)["requested_bytes.all.peak"]
    found = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {"loss": loss, **dict(model.named_buffers())}
    found |= {"generator": torch.cuda.get_rng_state(case.device)}
    numbers = Numbers(
        {
            name: torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).cpu()
            if norms_only and tensor.is_floating_point()
            else tensor.detach().cpu().clone()
            for name, tensor in found.items()
        }
    )
    del loss, found
    with timing or nullcontext():
        device_s = statistics.median(
            seconds(forward_backward, case.device, optimizer.zero_grad) for _ in range(TIMED)
        )
        host_s, wall_s = zip(
            *(_host_and_wall_s(forward_backward, case.device, optimizer.zero_grad) for _ in range(TIMED)),
            strict=True,
        )
    return Trained(
        peak,
        slack,
        numbers,
        device_s * 1e3,
        statistics.median(host_s) * 1e3,
        statistics.median(wall_s) * 1e3,
        report,
        reserved,
        predicted_reserved,
    )


def _host_and_wall_s(call: Any, device: torch.device, before: Any) -> tuple[float, float]:
    """Return two times in seconds: until `call` returns, and until the device has finished its work.

    `before` runs before it and is not timed.
    """
    before()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    returned = time.perf_counter()
    torch.cuda.synchronize(device)
    return returned - began, time.perf_counter() - began


def release_memory() -> None:
    """Return memory that no tensor holds to the device."""
    gc.collect()
    torch.cuda.empty_cache()


def datasheet_like(device: torch.device) -> Device:
    """Return a datasheet with the architecture and cuDNN of `device`, and the rates of the most similar one.

    Architecture and cuDNN decide which kernels run. The rates only serve to compare run times.
    """
    name = torch.cuda.get_device_name(device).lower().replace(" ", "")
    named = next((key for key in DATASHEETS if key in name), None)  # "nvidiageforcertx4090"
    if torch.version.hip is not None:
        return DATASHEETS["mi300x"]
    capability = torch.cuda.get_device_capability(device)
    like = DATASHEETS[named or _BY_CAPABILITY.get(capability, "h100")]
    return replace(like, capability=capability, cudnn=torch.backends.cudnn.version() or 0)
