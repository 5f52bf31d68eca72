"""Train small models of every kind on a GPU: ops, attention kernels, peaks and gradients are as predicted.

`pytest -m gpu` runs this on the GPU of a machine that has one; elsewhere it runs on the stand-in.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import ac_client
from autoac.planner import bounds, build
from autoac.planner.units import GIB
from autoac.profiler import DATASHEETS, observe
from benchmarks.models.samples import SAMPLES, TINY, Attention
from benchmarks.sample_training import Case, Numbers, datasheet_like, release_memory, train

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
# Each model in one precision, and the parts that are most unusual in both.
CASES = [
    Case(sample, precision, TINY, CUDA)
    for sample, precisions in zip(
        SAMPLES, [("fp32",), ("bf16",), ("fp32",), ("bf16",), ("fp32", "bf16")], strict=True
    )
    for precision in precisions
]
NOISE = 4.0  # a planned step may differ from a plain one by this factor of what two plain ones differ
RECOMPUTED_STEPS = 3  # the first is observed, without a plan


class Form(NamedTuple):
    """A form of attention with eight heads of queries."""

    head: int = 64
    kv_heads: int = 8
    causal: bool = True
    dropout: float = 0.0
    masked: bool = False


ATTENTIONS = {
    "causal": Form(),
    "full": Form(causal=False),
    "dropout 0.1": Form(dropout=0.1),
    "masked": Form(causal=False, masked=True),
    "grouped": Form(kv_heads=2),
    "heads of 128": Form(head=128),
    "heads of 256": Form(head=256),
}
TOKENS = 64


def assert_as_plain(plain: Numbers, again: Numbers, planned: Numbers) -> None:
    """Compare with a second plain run: kernels that are not deterministic differ from run to run."""
    noise = plain.distance(again)[1]
    differing, distance = plain.distance(planned)
    assert distance <= NOISE * noise, f"{differing} tensors differ, by {distance}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_planned_training_has_the_ops_the_peak_and_the_numbers_that_were_predicted(
    gpu: Any, case: Case
) -> None:
    profile = case.profiled()
    assert list(case.faked(datasheet_like(CUDA)).keys()) == list(profile.keys())
    known = bounds(build(profile))
    budget = (known.floor + known.ceiling) // 2
    plain, planned = train(case), train(case, budget)
    assert plain.peak_bytes == pytest.approx(known.ceiling, rel=0.01 if real() else 0, abs=0)
    report = planned.report
    assert report.recomputed > 0
    assert report.off_path == ""
    assert planned.peak_bytes <= budget < plain.peak_bytes
    assert planned.peak_bytes == pytest.approx(report.predicted_peak_bytes, rel=0.01 if real() else 0, abs=0)
    assert_as_plain(plain.numbers, train(case).numbers, planned.numbers)
    release_memory()


def real() -> bool:
    """Return True on a GPU, whose allocator leaves up to 1 MiB of a large block unsplit."""
    return torch.cuda.get_device_name(CUDA) != "Stand-in GPU"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_runs_the_kernel_that_was_predicted_and_is_recomputed(
    gpu: Any, form: Form, dtype: torch.dtype
) -> None:
    size, groups = replace(TINY, width=8 * form.head, heads=8), 8 // form.kv_heads
    model = Attention(size, causal=form.causal, dropout=form.dropout, groups=groups).to(CUDA, dtype)
    x = torch.randn(2, TOKENS, 8 * form.head, device=CUDA, dtype=dtype)
    mask = torch.ones(TOKENS, TOKENS, device=CUDA, dtype=torch.bool)
    batch = (x, mask) if form.masked else (x,)
    assert list(observe(model, batch, {}, on=datasheet_like(CUDA)).keys()) == list(
        observe(model, batch, {}).keys()
    )

    def gradients() -> Numbers:
        found: dict[str, Tensor] = {}
        for i in range(RECOMPUTED_STEPS):
            model.zero_grad()
            torch.manual_seed(i)
            model(*batch).float().square().mean().backward()
            named = ((name, parameter.grad) for name, parameter in model.named_parameters())
            found |= {f"step {i}, {name}": grad.cpu() for name, grad in named if grad is not None}
        return Numbers(found)

    plain, again = gradients(), gradients()
    ac_client.pin(model, "must_recompute")
    at = ac_client.applied(ac_client.apply(model, torch.cuda.mem_get_info(CUDA)[0] / GIB))
    planned = gradients()
    assert at.report().recomputed > 0
    at.remove()
    assert_as_plain(plain, again, planned)


@pytest.mark.parametrize(
    ("name", "capability", "like"),
    [
        ("NVIDIA GH200 480GB", (9, 0), "h200"),
        ("NVIDIA H100 PCIe", (9, 0), "h100"),
        ("NVIDIA B200", (10, 0), "h100"),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), "rtx4090"),
    ],
)
def test_datasheet_has_the_architecture_of_the_device_and_rates_of_a_similar_one(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], like: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    found = datasheet_like(torch.device("cuda", 0))
    assert found == replace(DATASHEETS[like], capability=capability, cudnn=91002)
