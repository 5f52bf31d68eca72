"""Compare the ops of a fake step for a GPU with those of the stand-in: names, sizes, types, strides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from autoac.profiler import CannotFake
from autoac.profiler.gpu_dispatch.gpu_fake_kernels import GPU_FAKE_KERNELS
from autoac.profiler.gpu_dispatch.gpu_kernels import gpu_kernels
from autoac.profiler.timing.roofline import CUDNN_OF_WHEELS, DATASHEETS, Device
from autoac.tape.capture.fake_allocations import FakeAllocations
from autoac.tape.torch_facts.op_facts import facts_of
from autoac.tape.torch_facts.op_signature import outputs_of
from autoac.tape.torch_facts.private import FakeTensorMode, TorchDispatchMode
from standin.op_calls import ATTENTION, CALLS, CTC_LOSS, Case

Op = tuple[Any, ...]


class Ops(TorchDispatchMode):
    """List ops, without views, with the sizes, types and strides of their outputs."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.ops: list[Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not facts_of(func).view:
            outputs = [t for t in outputs_of(out) if t.numel() and t.device.type == self._device_type]
            self.ops.append((str(func), *map(_form, outputs)))
        return out


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return size, type and the strides that matter."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tuple(tensor.shape), tensor.dtype, *strides


def ops_of(case: Case, device: str) -> list[Op]:
    """Run a call forward and backward on `device`; return its ops."""
    call, operands = case
    tensors = [operand.made(device) for operand in operands]
    with Ops(device) as mode:
        out = call(*tensors)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.ones_like(out))
    return mode.ops


def fake_ops_of(case: Case, device: Device) -> list[Op]:
    """Return the ops of a call in a fake step for `device`."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    memory = FakeAllocations(fakes, 1, lambda *_: 0.0, GPU_FAKE_KERNELS)
    with gpu_kernels(device), fakes, memory:
        return ops_of(case, "cpu")


def differing(cases: Mapping[str, Case], device: Device) -> str:
    """Return the cases whose ops in a fake step are not those of the stand-in, with both."""
    lines = []
    for name, case in cases.items():
        fake, real = fake_ops_of(case, device), ops_of(case, "cuda")
        if fake != real:
            lines += [name, *(f"  fake {op}" for op in fake), *(f"  real {op}" for op in real)]
    return "\n".join(lines)


@pytest.fixture
def claim(gpu: ModuleType) -> Any:
    """Return a function that makes the stand-in claim a device and a version of cuDNN."""

    def claim(capability: tuple[int, int], cudnn: int) -> Device:
        torch.ops.standin.set_capability(*capability)
        gpu.set_cudnn(cudnn)
        return replace(DATASHEETS["h100"], capability=capability, cudnn=cudnn)

    return claim


@pytest.mark.parametrize("cudnn", [CUDNN_OF_WHEELS, 0])
def test_calls_run_the_same_ops(claim: Any, cudnn: int) -> None:
    device = claim((9, 0), cudnn)
    assert not differing(CALLS, device)


def test_call_whose_sizes_depend_on_values_is_refused_in_a_fake_step() -> None:
    with pytest.raises(CannotFake, match=r"aten\._ctc_loss.*Profile the model on its own device"):
        fake_ops_of(CTC_LOSS, DATASHEETS["h100"])


@pytest.mark.parametrize(
    ("capability", "cudnn"),
    [
        ((9, 0), CUDNN_OF_WHEELS),
        ((9, 0), 91002),
        ((10, 0), CUDNN_OF_WHEELS),
        ((8, 0), CUDNN_OF_WHEELS),
        ((8, 9), CUDNN_OF_WHEELS),
        ((9, 0), 0),
    ],
)
def test_attention_runs_the_same_ops(claim: Any, capability: tuple[int, int], cudnn: int) -> None:
    device = claim(capability, cudnn)
    assert not differing(ATTENTION, device)


@contextlib.contextmanager
def only(*kernels: str) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([getattr(SDPBackend, f"{kernel}") for kernel in kernels]):
        yield


@pytest.mark.parametrize("kernel", ["MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_attention_follows_sdpa_kernel(claim: Any, kernel: str) -> None:
    device = claim((8, 0), CUDNN_OF_WHEELS)
    case = ATTENTION["f16"]
    with only(kernel):
        assert fake_ops_of(case, device) == ops_of(case, "cuda")
