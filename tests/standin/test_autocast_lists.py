"""Compare the ops of each op that autocast casts, in a fake step and on the stand-in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastTestLists

from autoac.profiler.gpu_dispatch.gpu_autocast import gpu_autocast
from autoac.profiler.gpu_dispatch.gpu_fake_kernels import GPU_FAKE_KERNELS
from autoac.profiler.gpu_dispatch.gpu_kernels import gpu_kernels
from autoac.profiler.timing.roofline import DATASHEETS
from autoac.tape.capture.fake_allocations import FakeAllocations
from autoac.tape.runtime.policy_context import save_recompute_policy
from autoac.tape.torch_facts.private import FakeTensorMode
from standin.test_op_streams import Ops

LISTS = ["torch_fp16", "torch_fp32", "torch_need_autocast_promote", "nn_fp16", "nn_fp32"]
# The stand-in has no convolution below `convolution`; of `einsum`, torch's arguments do not fit.
MISSING = {"cudnn_convolution", "cudnn_convolution_transpose", "_convolution", "einsum"}


@functools.cache
def samples_of(kind: str, device: str) -> list[Any]:
    return list(getattr(AutocastTestLists(torch.device(device)), kind, []))


@pytest.fixture(autouse=True)
def _samples_freed(gpu: ModuleType) -> Iterator[None]:
    yield
    samples_of.cache_clear()


def ops_of(kind: str, i: int, device: str) -> Any:
    name, args, *options = samples_of(kind, device)[i][:3]
    kwargs = options[0] if options and isinstance(options[0], dict) else {}
    call = getattr(torch if kind.startswith("torch") else torch._C._nn, name)
    with torch.autocast("cuda", dtype=torch.float16), Ops(device) as mode:
        out = call(*args, **kwargs)
    leaves = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
    return mode.ops, [t.dtype for t in leaves]


def fake_ops_of(kind: str, i: int) -> Any:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    memory = FakeAllocations(fakes, 1, lambda *_: 0.0, GPU_FAKE_KERNELS)
    with gpu_kernels(DATASHEETS["h100"]), gpu_autocast(), fakes, memory:
        return ops_of(kind, i, "cpu")


@pytest.mark.filterwarnings("ignore:.* deprecated:UserWarning")
@pytest.mark.parametrize("kind", LISTS)
def test_fake_step_casts_as_cuda_does(gpu: ModuleType, kind: str) -> None:
    gpu.set_cudnn(DATASHEETS["h100"].cudnn)
    differing = []
    for i, (name, *_) in enumerate(samples_of(kind, "cuda")):
        if name not in MISSING and (fake := fake_ops_of(kind, i)) != (real := ops_of(kind, i, "cuda")):
            differing += [name, f"  fake {fake}", f"  real {real}"]
    assert not differing, "\n".join(differing)


@torch.library.custom_op("autoac_standin::scores", mutates_args=())
def scores(x: torch.Tensor) -> torch.Tensor:
    return x @ x.T @ x


scores.register_autograd(lambda ctx, g: g)


@pytest.mark.usefixtures("gpu")
def test_custom_op_in_a_region_computes_under_the_autocast_of_cuda() -> None:
    x = torch.linspace(-1, 1, 64, device="cuda").view(8, 8).requires_grad_()

    def gradient(policy: str | None) -> torch.Tensor:
        region = save_recompute_policy(policy) if policy else contextlib.nullcontext()
        with torch.autocast("cuda", dtype=torch.float16), region:
            out = scores((x * 1.1).sin()).exp()
        (found,) = torch.autograd.grad(out.float().square().sum(), x)
        return torch.stack([found, out.detach().float()])

    plain = gradient(None)
    assert torch.equal(gradient("recompute_all"), plain)
    assert torch.equal(gradient("must_save_all"), plain)
