"""Test what a profile records of a step, and that gradients, buffers and generators are then as before."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from awkward_modules import ConvNet
from blocks import Body
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Profile, build, find_minimum_peak, plan, simulate
from autoac.planner.memory.fragments import loop_log
from autoac.profiler import NothingToProfile, ProfilerBusy, observe, profile
from autoac.tape.capture.saved_tensor_recorder import UNPACKED
from benchmarks.models.modules import Recurrent, Routed, Transformer


class Two(nn.Module):
    """relu(x @ w) @ v, so that every number can be seen by eye: 8 rows, widths 4, 16 and 2."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.w) @ self.v


X = torch.randn(8, 4)


def test_profile_of_two_matmuls_lists_ops_storages_and_saved_tensors() -> None:
    found = profile(Two(), X, loss=torch.sum)
    assert found.keys() == [
        "./aten.mm.default#0",
        "./aten.relu.default#0",
        "./aten.mm.default#1",
        "./aten.sum.default#0",
    ]
    assert found.storages.nbytes == (8 * 16 * 4, 8 * 16 * 4, 8 * 2 * 4, 4)
    assert found.ops.reads.rows() == [(), (0,), (1,), (2,)]
    # Autograd saves relu's output twice: for relu itself, and for the second matmul.
    assert found.saved.value == (1, 1)
    assert found.ops.flops == (2 * 8 * 4 * 16, 0, 2 * 8 * 16 * 2, 0)
    assert found.static.parameters == (4 * 16 + 16 * 2) * 4
    assert found.static.inputs == 8 * 4 * 4
    assert found.gradient_nbytes == found.static.parameters
    # Python holds the first matmul's output until relu has run, and the model's output to the end.
    assert found.storages.released[0] == 2
    assert found.storages.released[2] == len(found.ops) + len(found.backward)


SHAPES = {Transformer: (2, 8, 32), ConvNet: (4, 3, 8, 8), Recurrent: (2, 5, 8), Routed: (12, 16)}


@pytest.mark.parametrize("make", SHAPES)
def test_blocks_of_a_step_add_up_to_the_peak_of_its_plans(make: type[nn.Module]) -> None:
    model = make()
    x = torch.randn(64 * SHAPES[make][0], *SHAPES[make][1:])
    found = observe(model, (x,), {}, optimizer=torch.optim.AdamW(model.parameters()))
    loose = plan(found, budget_bytes=1 << 40)
    tight = plan(found, budget_bytes=(2 * find_minimum_peak(found).found + loose.ceiling) // 3)
    for made in (loose, tight):
        assert loop_log(found, made.graph, made.save_set).most == made.peak
    assert tight.recompute_us > 0


def test_checkpoint_recompute_in_backward_changes_no_buffer() -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x.sin(), use_reentrant=False).exp()

    model = Checkpointed(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    before = copy.deepcopy(model.state_dict())
    profile(model, torch.randn(6, 4), take_over_checkpoints=False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("body", [lambda x: x.exp().sin(), lambda x: x[x[:, 0].sin() > 0].exp().sin()])
def test_checkpoint_left_to_torch_has_its_peak_in_the_profile(
    body: Callable[[Tensor], Tensor], reentrant: bool
) -> None:
    model = Body(lambda m, x: checkpoint(body, x @ m.weight, use_reentrant=reentrant).exp().sum())
    x = torch.linspace(-1, 1, 64 * 64).view(1024, 4)
    found = profile(model, x, take_over_checkpoints=False)
    graph = build(found)
    with AllocatorTimeline(base=found.static.total) as timeline:
        model(x).backward()
    assert timeline.peak_bytes == simulate(graph, graph.everything).peak.live_bytes


seen: list[bool] = []


class Bag(nn.Module):
    """A table with sparse gradients that counts the forwards which find a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(50, 8, mode="sum", sparse=True), nn.Linear(8, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        seen.append(self.table.weight.grad is not None)
        return self.head(self.table(ids, offsets).tanh()).square().mean()


@pytest.mark.parametrize("accumulates", [None, False, True])
def test_forward_runs_once_and_finds_the_gradients_that_the_step_adds_to(accumulates: bool | None) -> None:
    seen.clear()
    observe(Bag(), (torch.arange(40), torch.arange(0, 40, 4)), {}, accumulates=accumulates)
    assert seen == [bool(accumulates)]


def test_equal_steps_have_equal_fingerprints_and_profiles_survive_json() -> None:
    torch.manual_seed(0)
    model = Transformer()
    first, second = profile(model, torch.randn(2, 8, 32)), profile(model, torch.randn(2, 8, 32))
    assert first.fingerprint == second.fingerprint
    assert first.fingerprint != profile(model, torch.randn(2, 9, 32)).fingerprint
    again = Profile.from_json(first.to_json())
    assert again == first
    assert again.digest == first.digest


def test_loss_argument_is_part_of_the_step() -> None:
    model, x = Transformer(), torch.randn(2, 8, 32)
    found = profile(model, x, loss=lambda out: nn.functional.mse_loss(out["logits"], torch.zeros(2, 8, 32)))
    assert "./aten.mse_loss.default#0" in found.keys()  # noqa: SIM118 - a Profile is not a dict


def reasons_to_save(found: Profile) -> dict[str, str]:
    return {op.name: op.must_save for op in build(found).ops if op.must_save}


def test_ops_whose_outputs_decide_are_saved() -> None:
    found = profile(Routed(), torch.randn(12, 16))
    reasons = reasons_to_save(found)
    assert reasons["./aten.topk.default#0"] == "its values decide"
    assert reasons["./aten.nonzero.default#0"] == "its shape depends on data"


def test_ops_shaped_by_an_index_or_mask_may_be_recomputed() -> None:
    def picked(m: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        y = m.inner(batch[0])
        mask = y > 0
        return y[batch[1]].exp().sum() + y[mask].exp().sum() + y.masked_select(mask).exp().sum()

    found = profile(Body(picked), (torch.randn(6, 4), torch.tensor([0, 0, 3])))
    assert reasons_to_save(found) == {"./aten.gt.Scalar#0": "its values decide"}


@pytest.mark.skipif(not torch.backends.mkldnn.enabled, reason="oneDNN computes no LSTM")
def test_lstm_on_a_cpu_may_be_recomputed() -> None:
    found = profile(Recurrent(), torch.randn(2, 5, 8))
    lstms = [op for op, key in enumerate(found.keys()) if "mkldnn_rnn_layer" in key]
    assert lstms
    assert all(found.ops.must_save[op] < 0 for op in lstms)


def test_attention_is_random_only_with_dropout() -> None:
    def random_ops(dropout: float) -> list[str]:
        attention = functools.partial(nn.functional.scaled_dot_product_attention, dropout_p=dropout)
        found = profile(Body(lambda m, x: attention(*[m.inner(x)] * 3)), torch.randn(1, 2, 4, 4))
        return [key for key, flag in zip(found.keys(), found.ops.flags, strict=True) if flag & 1]

    assert random_ops(0.0) == []
    assert random_ops(0.5) != []


def test_step_without_gradients_is_refused() -> None:
    model = Two()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(NothingToProfile, match="requires a gradient"):
        profile(model, X)


def test_autocast_caches_casts_of_leaves_but_not_of_views() -> None:
    def released(x: Tensor) -> int:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = profile(Two(), x)
        assert found.keys()[:2] == ["./aten._to_copy.default#0", "./aten._to_copy.default#1"]
        return sorted(found.storages.released[:2])[0]

    leaf = torch.randn(8, 4)
    view = leaf[:]
    assert released(leaf.requires_grad_()) >= 5  # the weight's and the input's: to the end of forward
    assert released(view.requires_grad_()) < 5


@torch.library.custom_op("autoac_tests::scratch", mutates_args=())
def scratch(x: Tensor) -> Tensor:
    """Allocate 4,000 bytes, and free them before the output is allocated."""
    held = torch.empty(1000)
    del held
    return x.clone()


def test_workspace_freed_before_the_output_is_allocated_counts_once() -> None:
    x = torch.randn(10, requires_grad=True)
    found = profile(Body(lambda _, x: scratch(x.detach()) * x), x)
    assert found.ops.workspace_nbytes[0] == 4000 - x.nbytes


def test_two_profilers_cannot_run_at_once() -> None:
    with torch.profiler.profile(), pytest.raises(ProfilerBusy):
        profile(Two(), X)
    with AllocatorTimeline(), pytest.raises(ProfilerBusy):
        profile(Two(), X)


def penalty(shift: Tensor) -> nn.Module:
    """Differentiate by the argument itself, and use a leaf that belongs to neither model nor batch."""

    def body(m: Any, x: Tensor) -> Tensor:
        y = torch.exp(m.inner(x.requires_grad_() + shift)).sum()
        return torch.autograd.grad(y, x, create_graph=True)[0].square().sum()

    return Body(body)


def test_gradients_of_leaves_that_forward_makes_are_recorded() -> None:
    x, shift = torch.randn(8, 4), torch.zeros(4, requires_grad=True)
    model = penalty(shift)
    found = profile(model, x)
    parameters = sum(p.nbytes for p in model.inner.parameters())
    assert found.gradient_nbytes == parameters + x.nbytes + shift.nbytes
    assert x.grad is shift.grad is None


def test_saved_tensors_that_backward_does_not_reach_are_held_to_the_end() -> None:
    handles = build(
        profile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Keeps()), X, loss=torch.sum)
    ).saved_tensors
    reached = [h.dropped for h in handles if h.unpacked]
    unreached = [h.dropped for h in handles if not h.unpacked]
    assert reached
    assert unreached
    assert min(unreached) > max(reached)


class Keeps(nn.Module):
    """Keep a tensor that nobody differentiates, with its graph."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.exp(x * 2)
        return x


def test_backward_inside_forward_is_not_taken_for_an_unseen_write() -> None:
    found = profile(penalty(torch.zeros(4)), X)
    assert set(found.reasons) <= {UNPACKED}


def test_saved_tensors_that_become_gradients_count_on_as_such() -> None:
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x.cos())
            return x.sin().sum()

        @staticmethod
        def backward(ctx: Any, _gradient: Tensor) -> Tensor:
            return ctx.saved_tensors[0]  # type: ignore[no-any-return]

    found = profile(Body(lambda m, _: Fused.apply(m.weight)), X)
    assert found.gradient_nbytes == 4 * 4 * 4
    assert not any(op.must_save for op in build(found).ops)


def test_parameters_keep_their_attributes_in_the_profiled_forward() -> None:
    """Layers of 4 bits read a scale from their frozen weight."""
    model = Body(lambda m, x: (m.inner(x) @ m.weight * m.weight.scale).sin().sum())
    model.weight.requires_grad_(requires_grad=False).scale = 2.0  # type: ignore[attr-defined]
    assert profile(model, X).ops.runtime_us
