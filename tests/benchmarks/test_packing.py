"""Check dropout with masks as bits, next to torch's dropout and under a plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoac.planner import Plan, build
from autoac.planner.plan import plan_of
from autoac.planner.solver.start.search_problem import Problem
from autoac.planner.solver.variables import Options
from benchmarks.models.batches import ModelAndBatch
from benchmarks.packing.packed_dropout import pack_masks
from benchmarks.packing.steps import NONE, Row, drawn_again, peak_of, planned, profiled, time_steps
from benchmarks.packing.upper_bound import kind_of


class Blocks(nn.Module):
    """Linear layers with a dropout after each; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.p = 0.1

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = functional.dropout(layer(x).tanh(), self.p, self.training)
        return {"loss": x.square().mean()}


def blocks() -> ModelAndBatch:
    torch.manual_seed(0)
    return Blocks(), {"x": torch.randn(37, 24)}


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.7])
def test_masks_as_bits_change_no_bit_of_a_step(dtype: torch.dtype, p: float) -> None:
    steps = []
    for packs in (False, True):
        model, batch = blocks()
        model = model.to(dtype)
        model.p = p
        if packs:
            calls = pack_masks(model)
        x = batch["x"].to(dtype).requires_grad_()
        saved: list[Tensor] = []
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        ):
            loss = model(x)["loss"]
        loss.backward()
        gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
        steps.append([bits_of(t) for t in (loss, torch.get_rng_state(), *gradients)])
    assert all(map(torch.equal, *steps))
    assert calls.count == 4
    assert sum(t.dtype is torch.uint8 and len(t) == 37 * 24 // 8 for t in saved) == 4
    assert functional.dropout is not calls


def test_infinite_and_negative_elements_stay_as_torch_has_them() -> None:
    x = torch.tensor([float("inf"), -float("inf"), -1.0, -0.0, float("nan")] * 5)
    outs = []
    for module in (nn.Dropout(0.5), nn.Dropout(0.5)):
        if outs:
            pack_masks(module)
        torch.manual_seed(0)
        outs.append(bits_of(module(x)))
    assert torch.equal(*outs)


def test_peaks_of_planned_steps_with_bits_are_as_predicted() -> None:
    def recomputing_all(masks: frozenset[int]) -> Plan:
        taken = profiled(blocks, masks)
        return plan_of(Problem(build(taken), Options(use_groups=False)), taken, 1 << 40, frozenset())

    without = recomputing_all(NONE)
    masks = drawn_again(without)
    assert masks == {0, 1, 2, 3}
    packed = recomputing_all(masks - {1})
    row = Row("blocks", 0, 4, planned(without, NONE), planned(packed, masks - {1}))
    for subject in (row.without, row.packed):
        subject.measured = peak_of(blocks, subject)
    time_steps(blocks, row, rounds=1)
    assert row.without.holds
    assert row.packed.holds
    assert row.packed.predicted != row.without.predicted


def test_the_kinds_of_saved_tensors() -> None:
    mask = functional.dropout(torch.ones(64), 0.5)
    tensors = [mask, mask.bool(), mask.long(), torch.randn(64), torch.zeros(8, dtype=torch.uint8)]
    assert [kind_of(tensor) for tensor in tensors] == ["masks", "bool", "integers", "other", "other"]
