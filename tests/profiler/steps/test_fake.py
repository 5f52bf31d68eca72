"""Test that fake steps give the profiles of real ones, except for memory inside kernels."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import Body
from stepping import COMPILES, needs_compiled_plans
from torch import Tensor, nn
from torch.nn import functional as F

from autoac.planner import Profile, build
from autoac.planner.memory.simulate import peak_bytes
from autoac.profiler import DATASHEETS, CannotFake, profile
from autoac.profiler.timing.roofline import bytes_moved
from benchmarks.models.modules import Recurrent, Routed, Transformer
from benchmarks.models.tiny import ZOO, ZooModel
from benchmarks.observed_profile import A_CPU, IN_BACKWARD, IN_KERNELS, differing

pytestmark = pytest.mark.usefixtures("one_thread")

ELSEWHERE = {
    "Mixtral": "torch's fake grouped product takes bfloat16 only, up to torch 2.14",
    "LSTM": "torch's fake of oneDNN's LSTM has a workspace of no bytes",
    "mixture of experts": "its shapes depend on values",
}

FAKEABLE = [entry for entry in ZOO if entry.name not in ELSEWHERE]
CAST = [entry for entry in FAKEABLE if entry.name in ("GPT-2", "Mamba", "ResNet")]
"""Attention, a scan, and convolutions; tests/standin/test_fake_steps.py casts all."""


def both(entry: ZooModel, casting: Callable[[], Any] = contextlib.nullcontext) -> tuple[Profile, Profile]:
    model = entry.make().train()
    with casting():
        return profile(model, **entry.batch()), profile(model, **entry.batch(), on=A_CPU)


@functools.cache
def profiles(entry: ZooModel) -> tuple[Profile, Profile]:
    return both(entry)


@pytest.mark.parametrize("entry", FAKEABLE, ids=lambda entry: entry.name)
def test_fake_step_has_the_columns_of_a_real_one(entry: ZooModel) -> None:
    """Backward of a real step differs as in benchmarks.observed_profile, and kernels have workspaces."""
    real, fake = profiles(entry)
    assert not differing(fake, real, *IN_BACKWARD, *IN_KERNELS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_known_limits_of_fake_steps_still_hold() -> None:
    """If this fails, torch has lifted a limit: remove it from `ELSEWHERE` and docs/profiling.md."""
    entries = {entry.name: entry for entry in ZOO if entry.name in ELSEWHERE}
    with contextlib.suppress(RuntimeError):  # up to torch 2.14, whose fake kernel takes no 32 bits
        real, fake = both(entries["Mixtral"])
        assert fake.keys() == real.keys()
    with pytest.raises(CannotFake, match=r"aten\.nonzero"):
        both(entries["mixture of experts"])
    if COMPILES:
        compiled: Any = torch.compile(entries["mixture of experts"].make().train(), backend="aot_eager")
        with pytest.raises(CannotFake, match=r"aten\.nonzero"):
            profile(compiled, **entries["mixture of experts"].batch(), on=A_CPU)
    real, fake = both(entries["LSTM"])
    assert fake.keys() == real.keys()
    sizes = zip(real.storages.nbytes, fake.storages.nbytes, strict=True)
    assert {ours for of_real, ours in sizes if ours != of_real} == set(torch.backends.mkldnn.enabled * [0])


@pytest.mark.parametrize("entry", CAST, ids=lambda entry: entry.name)
def test_fake_step_applies_autocast(entry: ZooModel) -> None:
    real, fake = both(entry, functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16))
    assert fake.keys() == real.keys()
    assert fake.saved.value == real.saved.value
    assert fake.environment.autocast == "bfloat16"


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT", "T5", "Mamba"])
def test_peak_equals_the_real_one_if_kernels_allocate_little(name: str) -> None:
    peaks = []
    for found in profiles(next(entry for entry in ZOO if entry.name == name)):
        graph = build(found)
        peaks.append(peak_bytes(graph, graph.everything))
    assert peaks[1] == pytest.approx(peaks[0], rel=0.001)


@needs_compiled_plans
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute"
)
@pytest.mark.parametrize(("name", "backend"), [("GPT-2", "aot_eager"), ("ViT", "inductor")])
def test_compiled_model_has_the_ops_and_storages_of_a_real_step(name: str, backend: str) -> None:
    entry = next(entry for entry in ZOO if entry.name == name)
    model = entry.make().train()
    found = []
    for on in (None, A_CPU):
        torch.compiler.reset()
        compiled: Any = torch.compile(model, backend=backend)
        found.append(profile(compiled, **entry.batch(), on=on))
    real, fake = found
    assert fake.keys() == real.keys()
    assert (fake.ops.reads, fake.ops.flags) == (real.ops.reads, real.ops.flags)
    assert fake.ops.must_save == real.ops.must_save
    assert (fake.storages, fake.values, fake.saved) == (real.storages, real.values, real.saved)
    assert (fake.backward.name, fake.backward.unpacks) == (real.backward.name, real.backward.unpacks)
    assert (fake.static, fake.gradient_nbytes) == (real.static, real.gradient_nbytes)
    assert max(fake.ops.runtime_us) > 0


class Attention(nn.Module):
    """Attention with 4 heads of 8, and one product each for queries, keys and values."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, dropout_p=self.dropout)
        return F.dropout(out, 0.1)


def on_h100(model: nn.Module, *args: Any, **kwargs: Any) -> Profile:
    return profile(model, *args, on=DATASHEETS["h100"], **kwargs)


def kinds(found: Profile) -> list[str]:
    return [key.rpartition("/")[2].partition(".default")[0] for key in found.keys()]  # noqa: SIM118


@needs_compiled_plans
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_model_runs_the_kernels_of_the_gpu() -> None:
    model, x = Attention(dropout=0.1), torch.randn(2, 16, 32)
    of_cpu: Any = torch.compile(model, backend="aot_eager")
    assert "aten.scaled_dot_product_attention" not in kinds(profile(of_cpu, x))
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="aot_eager")
    of_compiled = [kind for kind in kinds(on_h100(compiled, x)) if kind != "autoac.rng_state"]
    assert of_compiled == kinds(on_h100(model, x))
    torch.compiler.reset()
    of_cpu = torch.compile(model, backend="aot_eager")
    assert "aten.scaled_dot_product_attention" not in kinds(profile(of_cpu, x))


@needs_compiled_plans
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_model_compiled_in_place_runs_compiled_in_a_fake_step() -> None:
    x = torch.randn(2, 16, 32)
    wrapped: Any = torch.compile(Attention(), backend="aot_eager")
    found = profile(wrapped, x, on=A_CPU)
    torch.compiler.reset()
    whole, part = Attention(), nn.Sequential(Attention())
    whole.compile(backend="aot_eager")
    part[0].compile(backend="aot_eager")
    assert profile(whole, x, on=A_CPU).keys() == found.keys()
    assert profile(part, x, on=A_CPU).ops.flags == found.ops.flags


def test_fake_step_leaves_the_dispatcher_unchanged() -> None:
    x = torch.randn(2, 64, 32)
    on_h100(Attention(), x)
    out = Attention(dropout=0.1)(x)
    assert out.grad_fn.name() == "MulBackward0"  # the CPU's dropout


def test_model_on_the_meta_device_can_be_profiled() -> None:
    with torch.device("meta"):
        model = Transformer(layers=2, width=4096, heads=32)
        x = torch.empty(4, 2048, 4096)
    found = on_h100(model, x, loss=lambda out: out["logits"].sum())
    width = 4096 * 4096 * 4
    assert found.static.parameters > 2 * 12 * width
    assert found.gradient_nbytes == pytest.approx(found.static.parameters, rel=1e-3)
    assert all(parameter.grad is None and parameter.is_meta for parameter in model.parameters())


def test_sizes_are_rounded_for_the_device_and_notes_name_estimates() -> None:
    found = on_h100(Attention(), torch.empty(1, 3, 32))
    assert found.environment.device_type == "cuda"
    assert found.environment.device_name == "NVIDIA H100 SXM (estimated)"
    assert {nbytes % 512 for nbytes in found.storages.nbytes} == {0}
    assert "run times are estimated from the datasheet of NVIDIA H100 SXM" in found.notes


def test_op_that_depends_on_unknown_values_is_refused_by_name() -> None:
    with pytest.raises(CannotFake, match=r"aten\.nonzero.*not known.*Profile the model on its own device"):
        on_h100(Routed(), torch.randn(12, 16))


torch.library.define("autoac_tests::bare", "(Tensor x) -> Tensor")
torch.library.impl("autoac_tests::bare", "cpu", torch.clone)


def test_op_without_a_fake_kernel_is_refused_by_name() -> None:
    model = Body(lambda _, x: torch.ops.autoac_tests.bare(x.detach()) * x)
    with pytest.raises(CannotFake, match=r"autoac_tests\.bare.*no fake kernel"):
        on_h100(model, torch.randn(4, requires_grad=True))


def test_cudnn_op_is_refused_for_a_gpu() -> None:
    with pytest.raises(CannotFake, match="LSTMCell"):
        on_h100(Recurrent(), torch.randn(2, 5, 8))


def test_model_may_read_the_integers_of_its_batch() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return super().forward(x[:, : int(lengths.max())])

    found = on_h100(Looks(4, 4), torch.randn(2, 64, 4), torch.tensor([3, 5]))
    assert found.storages.nbytes[-1] == 512  # 2 x 5 x 4 floats, not 2 x 64 x 4


def test_op_takes_its_launch_plus_the_longer_of_arithmetic_and_moving() -> None:
    def matmul_us(rows: int, width: int) -> float:
        product = nn.Linear(width, width, bias=False)
        return profile(product, torch.empty(rows, width), on=A_CPU).ops.runtime_us[0]

    # 1 row: moving 1,000 x 1,000 floats takes longer than 2 * 10**6 operations.
    assert matmul_us(1, 1000) == 1 + (1000 * 1000 + 2 * 1000) * 4 / 1000
    # A square matrix: 2 * 10**12 / 10**6 us of arithmetic.
    assert matmul_us(10_000, 10_000) == 1 + 2e12 / 1e6


def test_element_repeated_by_stride_0_is_moved_once() -> None:
    row = torch.empty(1, 10)
    assert bytes_moved((row.expand(100, 10),), {}, torch.empty(100, 10)) == 10 * 4 + 1000 * 4


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_the_arguments_of_a_function_are_not_held_until_the_garbage_collector_runs() -> None:
    gc.disable()
    try:
        found = profile(Body(lambda m, x: Twice.apply(x @ m.weight).exp().sum()), torch.ones(8, 4), on=A_CPU)
    finally:
        gc.enable()
    total, doubled = found.storages.released[:2]
    assert total < doubled < len(found.ops)
