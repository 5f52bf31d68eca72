"""`fit` finds the sizes that a scan over all sizes by profiles of their own finds."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stepping import SeenOps
from torch import nn

import ac_client
from ac_client import Constraints, Fit, InfeasibleBudget, InvalidBudget, SolverOutOfTime, timed_sizes
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.model_loader import TrainingSetup
from ac_client.timed_sizes import LEAST_TURNS, MOST_TURNS, PlannedSize, times_in_turns
from autoac.planner import InvalidLimit, Plan, Profile, bounds, build, find_minimum_peak, plan, plan_with_host
from autoac.profiler import DATASHEETS, CannotFake, Device, profile

MIB_IN_GB = 1 / 1024
fit = partial(ac_client.fit, accumulates=False)
ADDING = Constraints(gradients="present")
ROWS = 4096  # of one sample


def layers(size: int) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and `size` samples, on the meta device."""
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(255, 255), nn.GELU())))
        return model, torch.empty(size * ROWS, 255)


def profile_of(size: int) -> Profile:
    model, batch = layers(size)
    return profile(model, batch, on=DATASHEETS["h100"])


@pytest.fixture(autouse=True)
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take as many turns as for long steps."""
    monkeypatch.setattr(timed_sizes, "ENOUGH_S", 0.0)


@pytest.fixture(scope="module")
def found() -> Fit:
    return fit(layers, 600 * MIB_IN_GB, on="h100")


def test_largest_and_fastest_are_those_of_a_scan_over_all_sizes(found: Fit) -> None:
    speeds = {}
    for size in range(1, 40):
        try:
            planned = plan(profile_of(size), budget_bytes=found.budget_bytes)
        except InfeasibleBudget:
            break
        speeds[size] = size / (planned.step_us + planned.extra_us) * 1e6
    assert found.largest == max(speeds)
    assert speeds[found.fastest] >= 0.99 * max(speeds.values())
    assert found.proven_from == found.largest + 1


def test_rows_are_within_the_budget_and_have_the_peaks_of_their_size(found: Fit) -> None:
    for row in found.rows:
        real = bounds(build(profile_of(row.size)))
        assert row.save_all_peak_bytes == found.peak_bytes(row.size) == real.ceiling
        assert row.peak_bytes <= found.budget_bytes
    assert found.row(found.all_saved).plan.recompute_set == frozenset()
    assert found.peak_bytes(found.all_saved + 1) > found.budget_bytes


def test_sizes_are_multiples_and_end_at_the_largest_to_consider() -> None:
    found = fit(layers, 600 * MIB_IN_GB, on="h100", multiple=2, most=9)
    assert all(row.size % 2 == 0 for row in found.rows)
    assert (found.largest, found.proven_from) == (8, None)


def test_a_budget_beyond_all_sizes_is_no_proof_that_a_larger_one_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["ac_client.fit"], "MOST_MULTIPLES", 8)
    found = fit(layers, 64.0, on="h100")
    assert (found.largest, found.most, found.proven_from) == (8, 8, None)


def test_the_largest_size_is_split_where_micro_batches_are_faster(found: Fit) -> None:
    """Two halves run all kernels twice and recompute nothing; their gradients exist beforehand."""
    assert found.split.size == found.largest
    count = found.split.count
    half = plan(profile_of(found.largest // count), budget_bytes=found.budget_bytes, constraints=ADDING)
    split_us = count * (half.step_us + half.extra_us)
    assert found.split.share == pytest.approx(split_us / found.row(found.largest).step_us, rel=0.01)
    assert found.split.share < 1
    roomy = fit(layers, 600 * MIB_IN_GB, on="h100", most=2)
    assert roomy.largest == roomy.all_saved
    assert roomy.split is None


def heavy(size: int, **more: Any) -> dict[str, Any]:
    with torch.device("meta"):
        model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.GELU())))
        rows = torch.empty(size * 512, 1024)
    return {"model": model, "args": (rows,), "optimizer": torch.optim.AdamW(model.parameters()), **more}


def test_a_size_must_fit_with_gradients_from_before_unless_there_are_none() -> None:
    unknown = ac_client.fit(heavy, 0.25, on="h100")
    adding = ac_client.fit(partial(heavy, accumulates=4), 0.25, on="h100")
    assert adding.largest == unknown.largest == unknown.largest_accumulating < unknown.largest_cleared
    assert fit(heavy, 0.25, on="h100").largest == unknown.largest_cleared
    assert unknown.row(unknown.largest).peak_bytes <= unknown.budget_bytes
    with pytest.raises(InfeasibleBudget):
        plan(unknown.profile_of(unknown.largest + 1), budget_bytes=unknown.budget_bytes, constraints=ADDING)
    assert adding.optimizer_us == unknown.optimizer_us / 4 > 0
    row = adding.row(adding.fastest)
    assert row.per_second == pytest.approx(1e6 * row.size / (row.step_us + adding.optimizer_us))


def test_a_model_that_runs_other_ops_from_step_to_step_is_profiled_at_each_size(found: Fit) -> None:
    steps = itertools.count()

    def changing(size: int) -> tuple[nn.Module, torch.Tensor]:
        model, batch = layers(size)
        return (nn.Sequential(nn.Tanh(), model) if next(steps) < 3 else model), batch

    again = fit(changing, 600 * MIB_IN_GB, on="h100")
    assert (again.largest, again.all_saved) == (found.largest, found.all_saved)


def test_a_size_that_changes_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="steps of the sizes 2, 3, 5 all take"):
        fit(lambda _: layers(2), 600 * MIB_IN_GB, on="h100")


@pytest.mark.parametrize(("enough_s", "turns"), [(0.0, LEAST_TURNS), (1e9, MOST_TURNS)])
def test_long_steps_take_fewer_turns(monkeypatch: pytest.MonkeyPatch, enough_s: float, turns: int) -> None:
    monkeypatch.setattr(timed_sizes, "ENOUGH_S", enough_s)
    model, rows = real(2)
    policy = plan(profile(model, rows), budget_bytes=3 << 20).policy()
    [times] = times_in_turns(lambda _: TrainingSetup(model, (rows,)), [PlannedSize(2, policy)], None)
    assert len(times) == turns


def test_packed_sequences_are_admitted_up_to_the_largest_size(found: Fit) -> None:
    assert found.admits([1] * found.largest)
    assert not found.admits([found.largest, 1])


def test_training_starts_under_the_policies_of_fit() -> None:
    cpu = Device("a CPU", {}, 1e11, 1e10, 2**34, device_type="cpu", allocator_rounding=1)
    found = fit(layers, 150 * MIB_IN_GB, on=cpu)
    assert len(found.policies.buckets) == len({found.fastest, found.largest})
    assert found.row(found.largest).plan.recompute_set

    def made() -> tuple[nn.Module, torch.Tensor]:
        return layers(1)[0].to_empty(device="cpu"), torch.ones(found.largest * ROWS, 255)

    assert peak_of_first_step(made, found.policies) <= found.budget_bytes


def peak_of_first_step(make: Callable[[], tuple[nn.Module, torch.Tensor]], policy: Any) -> int:
    """Return the peak of a step under a policy, with the model and the batch."""
    with AllocatorTimeline() as timeline:
        model, rows = make()
        ac_client.apply(model, policy=policy, strict=True)
        timeline.mark("step")
        out = model(rows)
        torch.autograd.backward(out, torch.ones_like(out))
    return timeline.peak_since("step")


def real(size: int) -> tuple[nn.Module, torch.Tensor]:
    """Return real layers and `size` samples; a batch norm's statistics must stay as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(63, 63), nn.BatchNorm1d(63), nn.GELU()))
    )
    return model, torch.ones(size * 256, 63)


def test_steps_of_this_machine_find_the_largest_size_that_really_fits() -> None:
    """Kernels have workspaces, which no fake step sees."""
    budget = 2 << 20
    found = fit(real, budget / 2**30, most=64)
    with pytest.raises(InfeasibleBudget):
        plan(profile(*real(found.largest + 1)), budget_bytes=budget)
    for size in (1, found.all_saved, found.all_saved + 1, found.largest):
        policy = plan(profile(*real(size)), budget_bytes=budget).policy()
        assert peak_of_first_step(partial(real, size), policy) <= budget
    assert 0 < found.all_saved < found.largest < 64
    assert found.proven_from == found.largest + 1
    assert not found.device.endswith("(estimated)")


class Int8(torch.optim.Optimizer):
    """Average gradients in one byte for each element."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            average = self.state[p].setdefault("average", torch.zeros_like(p, dtype=torch.int8))
            average.copy_(p.grad.clamp(-1, 1).mul_(127))
            p.sub_(average.to(p.dtype), alpha=1e-3)


class Lora(nn.Module):
    """A frozen layer, and two small ones that train."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.small = nn.Sequential(nn.Linear(63, 4, bias=False), nn.Linear(4, 63, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.small(x)  # type: ignore[no-any-return]


LOOPS = {
    "LoRA": (Lora, torch.optim.AdamW, None),
    "8 bits": (nn.Sequential, Int8, None),
    "autocast": (nn.Sequential, torch.optim.AdamW, torch.bfloat16),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_the_largest_size_of_a_loop_has_the_predicted_peak(loop: str) -> None:
    layer, optimizer_of, autocast = LOOPS[loop]

    def make(size: int) -> dict[str, Any]:
        model, rows = real(size)
        model = nn.Sequential(*(layer(m) if isinstance(m, nn.Linear) else m for m in model))
        optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad])
        return {"model": model, "args": (rows,), "optimizer": optimizer, "loss": torch.sum}

    found = fit(make, 2 / 1024, most=64, autocast=autocast)
    largest = found.row(found.largest)
    with AllocatorTimeline() as timeline:
        setup = make(found.largest)
        model = ac_client.apply(setup["model"], policy=largest.plan.policy(), strict=True)
        for _ in range(2):  # the second has the optimizer's state
            timeline.mark("step")
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                out = model(*setup["args"])
            out.sum().backward()
            del out
            setup["optimizer"].step()
            setup["optimizer"].zero_grad()
    assert found.all_saved < found.largest < 64
    assert timeline.peak_since("step") == largest.peak_bytes <= found.budget_bytes


def test_the_fastest_size_of_this_machine_is_measured_in_turns() -> None:
    found = fit(real, 2 / 1024, most=64)
    timed = {row.size: row.measured.median for row in found.rows if row.measured is not None}
    assert {found.largest, found.fastest} <= set(timed)
    assert found.all_saved in timed or found.largest % found.all_saved == 0  # in micro-batches of that size
    assert timed[found.fastest] == max(timed.values()) == found.per_second(found.fastest)
    assert set(found.equals) < set(timed)
    assert set(timed) <= set(found.profiled)
    assert found.split is None or found.split.share < 1


def test_times_in_turns_put_the_model_back() -> None:
    model, rows = real(2)
    policies = {size: plan(profile(*real(size)), budget_bytes=3 << 20).policy() for size in (2, 4)}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calls = list[int]()
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    ways = [PlannedSize(2, policies[2], 2), PlannedSize(4, policies[4])]
    taken = times_in_turns(lambda size: TrainingSetup(model, (real(size)[1],)), ways, None)
    assert [len(times) for times in taken] == [LEAST_TURNS, LEAST_TURNS]
    assert sorted(calls) == [len(rows)] * 2 * (2 * LEAST_TURNS) + [2 * len(rows)] * 2 * LEAST_TURNS
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ac_client.NotApplied):
        ac_client.applied(model)


def test_last_turn_is_the_last_of_all_if_turns_become_slower(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, rows = real(1)
    way = PlannedSize(1, plan(profile(model, rows), budget_bytes=3 << 20).policy())
    ticks = itertools.accumulate(itertools.chain([0.1] * 13, itertools.repeat(20.0)))  # three for each turn
    monkeypatch.setattr(timed_sizes, "ENOUGH_S", 20.0)
    monkeypatch.setattr(timed_sizes, "time", SimpleNamespace(perf_counter=ticks.__next__))
    with caplog.at_level(logging.INFO, "ac_client.fit"):
        (taken,) = times_in_turns(lambda _: TrainingSetup(model, (rows,)), [way], None)
    assert len(taken) == 5
    assert caplog.messages[-1] == "turn 5 of 5, about 0 s more"


def test_a_model_in_eval_is_timed_under_its_plans() -> None:
    model, rows = real(8)
    model.eval()
    step = profile(model, rows)
    tight = plan(step, budget_bytes=find_minimum_peak(step).found)
    again = sum("gelu" in tight.graph.ops[op].name for op in tight.recompute_set)
    with SeenOps() as ops:
        times_in_turns(lambda _: TrainingSetup(model, (rows,)), [PlannedSize(8, tight.policy())], None)
    assert again > 0
    assert ops.ran["gelu"] == (4 + again) * 2 * LEAST_TURNS
    assert not model.training


def test_gradients_of_a_loss_with_parameters_are_put_back() -> None:
    model, _ = real(1)
    head = nn.Linear(63, 5)
    head.weight.grad = gradient = torch.ones_like(head.weight)
    fit(lambda size: (model, (real(size)[1],), {}, lambda out: head(out).sum()), 1 / 1024, most=8)
    assert head.weight.grad is gradient
    assert torch.equal(gradient, torch.ones_like(head.weight))
    assert head.bias.grad is None


def test_a_planned_model_is_refused_before_a_step_runs() -> None:
    model, rows = real(1)
    ac_client.apply(model, budget_gb=1.0)
    with pytest.raises(ac_client.AlreadyApplied):
        fit(lambda size: (model, rows), 1.0, most=1)
    assert ac_client.applied(model).policy is None


def test_a_function_that_finds_no_room_is_no_other_error() -> None:
    def make(size: int) -> Any:
        raise torch.OutOfMemoryError(f"no room for {size}")

    with pytest.raises(torch.OutOfMemoryError):
        fit(make, 1.0)


class Repeated(nn.Module):
    """Layers whose size is not in the shape of the batch."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, row: torch.Tensor, times: int) -> torch.Tensor:
        return self.layers(row.repeat(times, 1))


def test_sizes_with_batches_of_one_shape_get_the_policy_of_the_largest() -> None:
    def make(size: int) -> Any:
        return Repeated(layers(1)[0]), (torch.empty(1, 255, device="meta"), size * ROWS)

    found = fit(make, 600 * MIB_IN_GB, on="h100")
    assert found.fastest < found.largest
    assert [bucket.policy for bucket in found.policies.buckets] == [found.row(found.largest).plan.policy()]


def test_sizes_with_batches_of_one_shape_are_each_timed_under_their_own_plan() -> None:
    model, row = Repeated(real(8)[0]), torch.ones(1, 63)
    steps = [profile(model, row, rows) for rows in (256, 512)]
    tight = plan(steps[0], budget_bytes=find_minimum_peak(steps[0]).found)
    again = sum("gelu" in tight.graph.ops[op].name for op in tight.recompute_set)
    ways = [PlannedSize(1, tight.policy()), PlannedSize(2, plan(steps[1], budget_bytes=1 << 30).policy())]
    with SeenOps() as ops:
        times_in_turns(lambda size: TrainingSetup(model, (row, size * 256)), ways, None)
    assert again > 0
    assert ops.ran["gelu"] == (4 + again + 4) * 2 * LEAST_TURNS


def classes(size: int, *, closed_over: bool) -> dict[str, Any]:
    """Return a classifier on the meta device, whose loss reads targets."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1000))
        rows, targets = torch.empty(size * 128, 64), torch.empty(size * 128, dtype=torch.long)
    loss = nn.functional.cross_entropy
    given = (lambda out: loss(out, targets)) if closed_over else partial(loss, target=targets)
    return {"model": model, "args": (rows,), "loss": given}


def test_a_loss_may_close_over_targets_on_meta() -> None:
    found = [fit(partial(classes, closed_over=closed), 0.2, on="h100") for closed in (True, False)]
    one, other = ([(row.size, row.peak_bytes) for row in each.rows] for each in found)
    assert one == other


def test_a_loss_may_write_a_tensor_on_meta_that_it_closes_over() -> None:
    """Its memory is not of the step, as that of real tensors is not."""

    def storages(device: str) -> Any:
        model, rows = layers(1)
        total = torch.zeros(ROWS, 255, device=device)
        loss = lambda out: (out * total.add_(out.detach())).sum()  # noqa: E731
        step = profile(model, rows, loss=loss, on=DATASHEETS["h100"])
        return step.storages, step.ops

    assert storages("meta") == storages("cpu")


def test_a_loss_that_trains_a_tensor_on_meta_is_told_to_add_it_to_the_model() -> None:
    def with_head(size: int) -> dict[str, Any]:
        setup = classes(size, closed_over=True)
        head = nn.Linear(1000, 10, device="meta")
        return setup | {"loss": lambda out: head(out).sum()}

    with pytest.raises(CannotFake, match="a parameter of the model"):
        fit(with_head, 0.2, on="h100")


class Recurrent(nn.Module):
    """An LSTM, whose kernel takes memory that is on no line in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(24, 40, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0].square().mean()  # type: ignore[no-any-return]


def recurrent(size: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Recurrent(), torch.ones(size, 12, 24)


def test_sizes_whose_bytes_are_on_no_line_have_profiles_of_their_own() -> None:
    found = fit(recurrent, 0.5 / 1024, most=16)
    for size in (6, 7, 9, 11, 13):
        own = profile(*recurrent(size))
        assert found.peak_bytes(size) == bounds(build(own)).ceiling


def test_a_size_is_given_up_only_after_more_work(found: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little work finds the plans of the other tests, so here it finds none."""
    module = sys.modules["ac_client.fit"]

    def planned(*args: Any, work_limit: float, **options: Any) -> Plan:
        if work_limit == module.FIND_WORK:  # type: ignore[attr-defined]
            raise SolverOutOfTime(found.budget_bytes, None)
        return plan_with_host(*args, work_limit=work_limit, **options)

    monkeypatch.setattr(module, "plan_with_host", planned)
    again = fit(layers, 600 * MIB_IN_GB, on="h100")
    assert found.all_saved < again.largest == found.largest


def test_a_plan_of_one_size_is_tried_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    def planned(*args: Any, budget_bytes: int, **options: Any) -> Plan:
        if plans and bounds(build(args[0])).ceiling > budget_bytes:
            raise SolverOutOfTime(budget_bytes, None)
        made = plan_with_host(*args, budget_bytes=budget_bytes * 3 // 4, **options)
        plans.extend([made] if made.recompute_set else [])
        return made

    monkeypatch.setattr(sys.modules["ac_client.fit"], "plan_with_host", planned)
    found = fit(layers, 600 * MIB_IN_GB, on="h100")
    largest = found.row(found.largest).plan
    assert largest.save_set == plans[0].save_set
    assert plans[0].ceiling < largest.ceiling  # a larger size
    assert largest.peak <= found.budget_bytes


def test_more_work_is_only_for_sizes_of_which_it_may_prove_something(monkeypatch: pytest.MonkeyPatch) -> None:
    above, floors = 1.1, list[int]()  # what more work proves, as a multiple of the floor
    module: Any = sys.modules["ac_client.fit"]

    def planned(step: Profile, *, budget_bytes: int, work_limit: float, **options: Any) -> Plan:
        floor = bounds(build(step)).floor
        if work_limit < module.WORK_LIMIT and floor > 0.6 * budget_bytes:
            floors.extend([floor] if work_limit == module.LAST_WORK else [])
            if work_limit == module.LAST_WORK and floor * above > budget_bytes:
                raise InfeasibleBudget(budget_bytes, int(floor * above), None, "", ())
            raise SolverOutOfTime(budget_bytes, None, int(floor * above), budget_bytes + 1)
        return plan_with_host(step, budget_bytes=budget_bytes, work_limit=work_limit, **options)

    monkeypatch.setattr(module, "plan_with_host", planned)
    found = fit(layers, 600 * MIB_IN_GB, on="h100")
    assert found.proven_from is not None
    proven = [floor for floor in floors if floor * above > found.budget_bytes]
    assert bounds(build(found.profile_of(found.proven_from))).floor == min(proven)
    assert len(set(floors) - set(proven)) == 1


def products(size: int) -> tuple[nn.Module, torch.Tensor]:
    """Return layers that take longer to recompute than their outputs to move."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12)))
        return model, torch.empty(size * 256, 2048)


def test_moves_to_the_host_make_a_larger_size_the_fastest() -> None:
    alone = fit(products, 0.6, on="h100", most=16)
    with_host = fit(products, 0.6, on="h100", most=16, host_budget_gb=4)
    fastest = with_host.row(with_host.fastest)
    assert fastest.size > alone.fastest == alone.all_saved
    assert fastest.plan.moves
    assert fastest.peak_bytes <= with_host.budget_bytes
    assert fastest.per_second > alone.row(alone.fastest).per_second
    with pytest.raises(ValueError, match="a link to its host"):
        fit(products, 0.6, on=replace(DATASHEETS["h100"], link_bytes_per_s=0.0), host_budget_gb=4)


def test_a_budget_below_the_smallest_size_is_infeasible() -> None:
    with pytest.raises(InfeasibleBudget):
        fit(layers, 1 * MIB_IN_GB, on="h100")


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(InvalidBudget):
        fit(layers, -1.0, on="h100")
    with pytest.raises(ValueError, match="on must be"):
        fit(layers, 1.0, on="abacus")
    with pytest.raises(InvalidLimit):
        fit(layers, 1.0, on="h100", multiple=0)


class Attention(nn.Module):
    """Attention, whose time grows with the square of the tokens, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(512, 3 * 512)
        self.after = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (8, 64)).transpose(1, 2) for part in self.before(x).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.after(mixed.transpose(1, 2).flatten(2)).float().square().mean()


def attention(tokens: int) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Attention().bfloat16(), torch.empty(1, tokens, 512, dtype=torch.bfloat16)


def test_the_fastest_length_is_found_although_attention_takes_the_square_of_it() -> None:
    found = fit(attention, 0.5, on="h100", axis="tokens", multiple=512)
    speeds = {}
    for tokens in range(512, found.all_saved + 1, 512):
        model, batch = attention(tokens)
        real = profile(model, batch, on=DATASHEETS["h100"])
        speeds[tokens] = tokens / (sum(real.ops.runtime_us) + sum(real.backward.runtime_us)) * 1e6
    assert max(speeds, key=speeds.__getitem__) < found.all_saved
    assert found.row(found.fastest).per_second >= 0.99 * max(speeds.values())
