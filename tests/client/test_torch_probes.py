"""Break what a probe tries in torch: the feature is refused, and the error names the probe."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint as torchs
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._python_dispatch import TorchDispatchMode

import ac_client
from autoac.profiler import profile
from autoac.tape.checkpoints.own_checkpoints import check_taken_over
from autoac.tape.distributed import fsdp
from autoac.tape.errors import UnsupportedTorch
from autoac.tape.torch_facts import private, probes
from autoac.tape.unseen.function_calls import watch_functions


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Run the probes again, before and after."""
    for cached in (probes.check, probes.check_torch):
        cached.cache_clear()
    yield
    for cached in (probes.check, probes.check_torch):
        cached.cache_clear()


def in_a_region() -> None:
    ac_client.checkpoint(torch.sin, torch.ones(2, requires_grad=True))


def planned() -> None:
    ac_client.apply(nn.Linear(2, 2), 1.0)


def profiled() -> None:
    profile(nn.Linear(2, 2), torch.ones(1, 2))


def refused(call: Callable[[], Any], probe: Callable[[], bool]) -> UnsupportedTorch:
    with pytest.raises(UnsupportedTorch, match=f"the probe {probe.__name__} failed") as caught:
        call()
    assert caught.value.installed == torch.__version__
    return caught.value


CALLS = pytest.mark.parametrize("call", [in_a_region, planned, profiled], ids=lambda call: call.__name__)


@CALLS
def test_tensor_that_is_packed_twice_is_refused(
    call: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def enter(hooks: Any) -> None:
        def pack(tensor: Tensor) -> Any:
            hooks.pack_hook(tensor)
            return hooks.pack_hook(tensor)

        torch._C._autograd._push_saved_tensors_default_hooks(pack, hooks.unpack_hook)

    monkeypatch.setattr(torch.autograd.graph.saved_tensors_hooks, "__enter__", enter)
    refused(call, probes.saved_tensor_is_packed_once)


@CALLS
def test_mode_that_sees_nothing_in_backward_is_refused(
    call: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchDispatchMode, "__enter__", lambda mode: mode)
    monkeypatch.setattr(TorchDispatchMode, "__exit__", lambda *args: None)
    refused(call, probes.mode_sees_op_of_rerun)


@CALLS
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_dropout_that_draws_other_numbers_is_refused(call: Callable[[], None]) -> None:
    counter = itertools.count()

    def dropout(x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
        mask = (torch.arange(x.numel()) + next(counter)) % 2 == 0
        return x * mask, mask

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("native_dropout", dropout, "CPU")
        refused(call, probes.replayed_dropout_draws_same_numbers)
    finally:
        library._destroy()


@pytest.mark.parametrize("call", [in_a_region, profiled], ids=lambda call: call.__name__)
def test_function_whose_calls_nobody_sees_is_refused(
    call: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_functions()  # once in a process
    probes.check.cache_clear()
    monkeypatch.setattr(torch.autograd.Function, "apply", vars(torch._C._FunctionBase)["apply"])
    refused(call, probes.function_calls_are_seen)


KEPT = """
import torch, ac_client

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad

kept = Square.apply  # before anything is planned
x = torch.arange(3.0, requires_grad=True)
try:
    (got,) = torch.autograd.grad(ac_client.checkpoint(lambda x: kept(x.exp()).sum(), x), x)
except RuntimeError as error:
    assert "Square.apply was looked up before anything was planned" in str(error), error
    assert torch.__version__ >= "2.14"
else:
    assert torch.equal(got, torch.autograd.grad(kept(x.exp()).sum(), x)[0])
    (got,) = torch.autograd.grad(ac_client.checkpoint(lambda x: Square.apply(x.exp()).sum(), x), x)
    assert torch.equal(got, torch.autograd.grad(kept(x.exp()).sum(), x)[0])
"""


def test_function_that_was_looked_up_earlier_is_seen_or_refused() -> None:
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_that_does_not_enter_our_functions_is_refused(
    use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = torchs.checkpoint

    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs["use_reentrant"] is use_reentrant:
            return function(*args)  # through names that we do not know
        return theirs(function, *args, **kwargs)

    monkeypatch.setattr(torchs, "checkpoint", checkpoint)
    error = refused(planned, check_taken_over.__globals__["checkpoints_enter_our_functions"])
    assert error.feature == private.CHECKPOINTS
    assert "pass Constraints(take_over_checkpoints=False)" in str(error)
    ac_client.apply(
        model := nn.Linear(2, 2), 1.0, constraints=ac_client.Constraints(take_over_checkpoints=False)
    )
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("method", ["_pre_forward", "_post_forward"])
def test_fsdp_that_does_not_call_what_is_watched_is_refused(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fsdp, "_watched", [])
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
        monkeypatch.setattr(FSDPState, method, lambda *args: args)
        error = refused(lambda: ac_client.apply(model, 1.0), fsdp.fsdp_calls_what_is_watched)
        assert error.feature == private.FSDP
    finally:
        dist.destroy_process_group()
