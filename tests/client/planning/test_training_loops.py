"""Loops of other forms than one forward and one backward are planned for, or warned of at once."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from blocks import Layers, WithLoss
from stepping import measured as measured_again
from stepping import same_gradients, warnings
from torch import Tensor, nn

import ac_client
from ac_client import InfeasibleBudget, Report
from ac_client.planning import plan_batch
from autoac.planner import Plan, Policy, Profile, SolverOutOfTime, build, find_minimum_peak, simulate
from autoac.planner.units import GIB, format_bytes
from autoac.profiler import Loop, observe
from benchmarks.models.gpt2 import gpt2

ROWS, WIDTH = 128, 32

Step = Callable[[nn.Module], None]


@dataclass
class Output:
    """As of a language model."""

    loss: Tensor
    logits: Tensor


class Head(Layers):
    """Logits that are larger than all else, and a loss of them."""

    def __init__(self) -> None:
        super().__init__()
        self.append(nn.Linear(WIDTH, 1024))

    def forward(self, x: Tensor) -> Output:
        for layer in self:
            x = layer(x)
        logits = x
        return Output(nn.functional.cross_entropy(logits, logits.new_zeros(len(x), dtype=torch.long)), logits)


def batches(n: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(ROWS, WIDTH) for _ in range(n)]


def budget_for(
    model: nn.Module, part: float, optimizer: torch.optim.Optimizer | None = None, loop: Loop | None = None
) -> int:
    """So much of what saving everything takes beyond the static bytes, in that loop."""
    graph = build(observe(model, batches(), {}, optimizer=optimizer, loop=loop or Loop()))
    peak = simulate(graph, graph.everything).peak.live_bytes
    return graph.static_bytes + int(part * (peak - graph.static_bytes))


def budget_with_half_the_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the smallest peak of a step that finds no gradients, and half of theirs."""
    profile = observe(model, batches(), {}, optimizer=optimizer)
    return find_minimum_peak(profile).found + sum(p.nbytes for p in model.parameters()) // 2


def several(n: int) -> Step:
    def step(model: nn.Module) -> None:
        torch.manual_seed(2)
        torch.autograd.backward([model(x) for x in batches(n)])

    return step


def measured(model: nn.Module, step: Step) -> Report:
    model.zero_grad()
    return measured_again(model, step)


def assert_gradients_of_the_plain_model(model: nn.Module, plain: nn.Module, step: Step) -> None:
    for one in (model, plain):
        one.zero_grad()
        step(one)
    assert same_gradients(model, plain)


def test_steps_of_two_forms_that_take_turns_are_each_observed_once(caplog: pytest.LogCaptureFixture) -> None:
    def turns(model: nn.Module) -> list[int]:
        observed = []
        for _ in range(6):
            model.zero_grad()
            several(2)(model)
            several(1)(model)  # finds gradients, as a critic does in the step of its generator
            observed.append(sum("observing one step" in message for message in caplog.messages))
        return observed

    plain, model = WithLoss(), ac_client.apply(WithLoss(), budget_for(WithLoss(), 0.6, loop=Loop(2)) / GIB)
    caplog.set_level(logging.INFO)
    observed = turns(model)
    assert observed[2:] == observed[-1:] * 4
    assert sum("some steps have another form" in said for said in warnings(caplog)) <= 1
    turns(plain)
    assert same_gradients(model, plain)


def test_forwards_one_after_the_other_are_not_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    model = ac_client.apply(WithLoss(), budget_for(WithLoss(), 0.6) / GIB)
    kept = []
    for x in batches(3):
        loss = model(x)
        loss.backward()
        kept.append(loss)  # with its graph, which backward has freed
    model(batches()[0])  # dropped at once
    model(batches()[0]).backward()
    assert not warnings(caplog)


class Leaf(Layers):
    """Makes a leaf in forward, whose gradient lives as long as the graph, as wav2vec2 does."""

    def forward(self, x: Tensor) -> Tensor:
        leaf = x.repeat(1, 8).requires_grad_()
        return super().forward(leaf[:, :WIDTH]).square().mean()


def test_graph_that_the_name_of_the_loss_keeps_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    graph = build(observe(Leaf(), batches(), {}))
    peak = simulate(graph, graph.everything).peak.live_bytes
    plain, model = Leaf(), ac_client.apply(Leaf(), (peak + 8 * batches()[0].nbytes // 2) / GIB)
    at, x = ac_client.applied(model), batches()[0]

    def step() -> None:
        nonlocal loss
        model.zero_grad()
        torch.manual_seed(2)
        loss = model(x)  # the name still holds the graph of the step before
        loss.backward()

    loss = None
    for _ in range(3):
        step()
    assert at.report().recomputed > 0
    with at.measure():
        step()
        step()
    report = at.report()
    assert report.measured_peak_bytes == report.predicted_peak_bytes <= at.budget_bytes
    assert not warnings(caplog)
    torch.manual_seed(2)
    plain(x).backward()
    assert same_gradients(model, plain)


def with_cross_entropy(model: nn.Module) -> None:
    torch.manual_seed(2)
    out = model(batches()[0])
    loss_of(out).backward()


HEAD = torch.randn(WIDTH, 1024)


def loss_of(out: Tensor) -> Tensor:
    logits = out @ HEAD
    return nn.functional.cross_entropy(logits, logits.new_zeros(len(out), dtype=torch.long))


def retaining(model: nn.Module) -> None:
    torch.manual_seed(2)
    loss = model(batches()[0])
    loss.backward(retain_graph=True)
    loss.backward()


def budget_with_cross_entropy() -> int:
    graph = build(observe(Layers(), batches(), {}, loss=loss_of))
    return simulate(graph, graph.everything).peak.live_bytes - ROWS * WIDTH * 4


# The model, its step, how many forwards it has, a budget, and what is said if earlier steps were simpler: ""
# if only an allocator that counts shows that.
FORMS: dict[str, tuple[Callable[[], nn.Module], Step, int, Callable[[], int], str]] = {
    f"{n} forwards": (
        *(WithLoss, several(n), n, partial(budget_for, WithLoss(), 0.6, loop=Loop(n))),
        "forwards wait for one backward, and the plan is for 1",
    )
    for n in (2, 4)
} | {
    "loss outside": (Layers, with_cross_entropy, 1, budget_with_cross_entropy, ""),
    "retained graph": (WithLoss, retaining, 1, partial(budget_for, WithLoss(), 0.8), "retain_graph=True"),
}


@pytest.mark.parametrize(
    ("form", "later"),
    [(form, later) for form, (*_, words) in FORMS.items() for later in {False, words != ""}],
)
def test_form_of_the_step_is_planned_for(form: str, later: bool, caplog: pytest.LogCaptureFixture) -> None:
    make, step, n, budget_of, words = FORMS[form]
    budget = budget_of()
    model = ac_client.apply(make(), budget / GIB)
    for _ in range(2 * later):
        model(batches()[0]).square().mean().backward()
        model.zero_grad()
    for _ in range(2):
        step(model)
        model.zero_grad()
    said = warnings(caplog)
    assert len(said) == later
    assert all(words in one for one in said)
    report = measured(model, step)
    assert report.stale == ""
    assert report.predicted_peak_bytes < report.save_all_peak_bytes
    assert report.measured_peak_bytes == report.predicted_peak_bytes <= budget
    assert_gradients_of_the_plain_model(model, make(), step)
    assert warnings(caplog) == said
    policy = ac_client.applied(model).policy
    assert [len(part) for part in policy.forwards] == [len(policy.decisions) // n] * n
    assert Policy.from_json(policy.to_json()) == policy


def test_gradient_penalty_is_warned_of_in_its_step(caplog: pytest.LogCaptureFixture) -> None:
    def step(model: nn.Module) -> None:
        torch.manual_seed(2)
        x = batches()[0].requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + gradient.square().mean()).backward()

    model = ac_client.apply(Layers(), budget_for(Layers(), 1.8) / GIB)
    for _ in range(2):
        step(model)
        model.zero_grad()
    (said,) = warnings(caplog)
    assert "create_graph=True" in said
    assert "cannot be kept" in said
    report = str(ac_client.applied(model).report())
    assert "the prediction is stale: a backward with create_graph=True" in report
    assert_gradients_of_the_plain_model(model, Layers(), step)


@pytest.mark.parametrize(("times", "warns"), [(1, False), (6, True)])
def test_graphs_of_meta_learning_are_warned_of_once_they_do_not_fit(
    times: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def step(model: nn.Module) -> None:
        torch.manual_seed(2)
        weights: dict[str, Tensor] = dict(model.named_parameters())
        for _ in range(times):
            loss = torch.func.functional_call(model, weights, tuple(batches()))
            made = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), made, strict=True)}
        torch.func.functional_call(model, weights, tuple(batches())).backward()

    model = ac_client.apply(WithLoss(), budget_for(WithLoss(), 6.0) / GIB)
    for _ in range(2):
        assert_gradients_of_the_plain_model(model, WithLoss(), step)
    said = warnings(caplog)
    assert len(said) == warns
    assert all("such graphs before one is freed" in one for one in said)


@pytest.mark.parametrize("later", [False, True])
def test_optimizer_that_was_not_passed_is_counted_once_it_steps(
    later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = WithLoss(), WithLoss()
    adam = torch.optim.AdamW(model.parameters())
    budget = budget_for(plain, 0.6, torch.optim.AdamW(plain.parameters()))
    ac_client.apply(model, budget / GIB)

    def step(model: nn.Module) -> None:
        several(1)(model)
        adam.step()
        adam.zero_grad()

    for _ in range(2 * later):
        several(1)(model)
        model.zero_grad()
    step(model)
    step(model)
    assert not warnings(caplog)
    report = measured(model, step)
    assert report.measured_peak_bytes == report.predicted_peak_bytes <= budget
    static = ac_client.applied(model).policy.predicted.static_bytes
    assert static > 3 * sum(p.nbytes for p in plain.parameters())


def test_gradients_that_the_loop_frees_between_forward_and_backward_do_not_count_in_backward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    frees = True

    def step(model: nn.Module) -> None:
        torch.manual_seed(2)
        loss = model(batches()[0])
        if frees:
            model.zero_grad()
        loss.backward()

    plain, model = WithLoss(), WithLoss()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    budget = budget_with_half_the_gradients(plain, sgd)
    at = ac_client.applied(ac_client.apply(model, budget / GIB, optimizer=sgd))
    for _ in range(4):
        step(model)
        sgd.step()
    assert not warnings(caplog)
    report = measured_again(model, step)
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget
    assert_gradients_of_the_plain_model(model, plain, step)
    frees = False
    step(model)
    assert "are held in backward" in warnings(caplog)[0]
    for _ in range(2):
        step(model)
    assert "cannot be kept" in warnings(caplog)[1]
    assert at.report().predicted_peak_bytes > budget


def test_gradients_that_backward_finds_are_planned_for_without_another_profile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, model, step = WithLoss(), WithLoss(), several(1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    budget = budget_with_half_the_gradients(plain, sgd)
    ac_client.apply(model, budget / GIB, optimizer=sgd)
    caplog.set_level(logging.INFO)
    for _ in range(6):
        step(model)
        sgd.step()
        sgd.zero_grad(set_to_none=False)
    (said,) = warnings(caplog)
    assert "cannot be kept" in said
    assert "gradients exist before the step" in said
    assert sum("observing one step" in message for message in caplog.messages) == 1
    report = measured_again(model, step)
    assert report.measured_peak_bytes == report.predicted_peak_bytes > budget
    assert_gradients_of_the_plain_model(model, plain, step)


def test_gradients_count_in_an_accumulation_in_which_no_two_batches_have_one_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, model = WithLoss(), WithLoss()
    lengths = iter(range(256, 128, -8))

    def step(model: nn.Module) -> None:
        for _ in range(2):
            model(torch.randn(next(lengths), 32)).backward()

    profile = observe(plain, (torch.randn(256, 32),), {})
    budget = find_minimum_peak(profile).found + 2 * sum(p.nbytes for p in plain.parameters())
    caplog.set_level(logging.INFO)
    ac_client.apply(model, budget / GIB)
    step(model)
    model.zero_grad()
    step(model)
    assert "gradients exist before the step" in caplog.text
    assert sum("observing one step" in message for message in caplog.messages) == 1
    report = measured_again(model, step)
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget


def test_optimizer_that_is_replaced_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    model = WithLoss()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    ac_client.apply(model, 1.0, optimizer=optimizer)

    def train(steps: int) -> int:
        for _ in range(steps):
            several(1)(model)
            optimizer.step()
            optimizer.zero_grad()
        return ac_client.applied(model).policy.predicted.static_bytes

    with_adam = train(2)
    replaced = weakref.ref(optimizer)
    optimizer = torch.optim.AdamW(model.parameters())
    assert replaced() is None
    assert train(2) == with_adam
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert train(2) == with_adam - 2 * sum(p.nbytes + 2 for p in model.parameters())
    assert not warnings(caplog)


def test_optimizer_that_only_the_call_of_apply_named_is_counted() -> None:
    model = WithLoss()
    ac_client.apply(model, 1.0, optimizer=torch.optim.AdamW(model.parameters()))
    several(1)(model)
    static = ac_client.applied(model).policy.predicted.static_bytes
    assert static > 3 * sum(p.nbytes for p in model.parameters())


def test_optimizer_whose_state_cannot_be_known_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Unknown(torch.optim.AdamW):
        """Reads the address of what it updates, as a kernel of its own does."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.numpy()
            return super().step(closure)

    model = WithLoss()
    optimizer = Unknown(model.parameters())
    ac_client.apply(model, 1.0, optimizer=optimizer)
    for _ in range(2):
        several(1)(model)
    (said,) = warnings(caplog)
    assert "Unknown" in said
    assert "headroom_bytes" in said


def test_optimizer_of_another_model_is_not_adopted() -> None:
    model, other = ac_client.apply(WithLoss(), 1.0), WithLoss()
    adam = torch.optim.AdamW(other.parameters())
    for _ in range(2):
        for one in (model, other):
            several(1)(one)
        adam.step()
        model.zero_grad()
    static = sum(p.nbytes for p in model.parameters()) + batches()[0].nbytes
    assert ac_client.applied(model).policy.predicted.static_bytes == static


def test_another_dtype_is_planned_for() -> None:
    batch = batches()[0].to(torch.float32)  # is counted in the plan, so it lives throughout, as in a loop

    def step(model: nn.Module) -> None:
        torch.manual_seed(2)
        model(batch).backward()

    class Casts(WithLoss):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(next(self.parameters()).dtype))

    budget = budget_for(Casts(), 1.2)
    model = ac_client.apply(Casts(), budget / GIB)
    step(model)
    assert ac_client.applied(model).report().recomputed == 0
    model.zero_grad()
    model.double()
    step(model)
    report = measured(model, step)
    assert report.predicted_peak_bytes < report.save_all_peak_bytes
    assert report.measured_peak_bytes == report.predicted_peak_bytes <= budget


def test_refused_budget_names_the_other_models_on_the_device() -> None:
    other, model = ac_client.apply(Layers(), 1.0), ac_client.apply(WithLoss(), 1e-6)
    several(1)(model)
    with pytest.raises(InfeasibleBudget) as raised:
        several(1)(model)
    notes = "\n".join(raised.value.__notes__)
    assert f"Layers holds {format_bytes(sum(p.nbytes for p in other.parameters()))}" in notes
    assert "names of the last step" not in notes


def test_refused_budget_names_what_the_loop_keeps_of_the_last_step() -> None:
    model, x = ac_client.apply(Layers(), 1e-6), torch.randn(64, 32)
    (out := model(x)).sum().backward()
    with pytest.raises(InfeasibleBudget) as raised:
        model(x)
    assert f"names of the last step hold {format_bytes(out.nbytes)}" in "\n".join(raised.value.__notes__)


def test_planned_model_that_does_not_train_takes_no_room() -> None:
    idle = ac_client.apply(WithLoss(), 1.0)
    several(1)(idle)
    model = ac_client.apply(WithLoss(), 1.0)
    several(1)(model)
    peaks = [ac_client.applied(one).policy.predicted.peak_bytes for one in (idle, model)]
    assert peaks[0] == peaks[1]


class Skips(nn.Module):
    """Layers of which some are left out, as with stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layers() for _ in range(3)])
        self.runs = [0]

    def forward(self, x: Tensor) -> Tensor:
        for i in self.runs:
            x = self.layers[i](x)
        return x.square().mean()


def test_modules_that_the_first_batch_skipped_are_planned_once_they_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = Skips()
    whole.runs = [0, 1, 2]
    budget = budget_for(whole, 0.7)
    model = ac_client.apply(Skips(), budget / GIB)
    several(1)(model)
    assert measured(model, several(1)).recomputed == 0
    model.runs = [0, 1, 2]
    model.zero_grad()
    several(1)(model)
    assert not any(module._forward_pre_hooks for module in model.layers[0].modules())  # it ran at first
    (said,) = [message for message in warnings(caplog) if "skipped" in message]
    assert "layers.1.0, " in said
    model.zero_grad()
    several(1)(model)  # planned again
    report = measured(model, several(1))
    assert report.predicted_peak_bytes < report.save_all_peak_bytes
    assert report.measured_peak_bytes == report.predicted_peak_bytes <= budget
    assert_gradients_of_the_plain_model(model, whole, several(1))
    model.runs = [0]
    several(1)(model)
    assert ac_client.applied(model).report().buckets == 1


def test_hooks_stay_where_two_shapes_skip_different_modules() -> None:
    model = ac_client.apply(Skips(), 1.0)
    hooks = []
    for i in range(8):
        model.runs = [1 + i % 2]
        model(torch.randn(ROWS // (1 + i % 2), WIDTH)).backward()
        hooks.append([id(hook) for module in model.modules() for hook in module._forward_pre_hooks.values()])
    assert hooks[-1] == hooks[-2] == hooks[-3] != []


class Residual(nn.Module):
    """A layer with ops in place: on its input, and on what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.clone().add_(self.down(self.up(x.sin()).relu_().square()))


class Whole(torch.autograd.Function):
    """Runs a module as one op."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.module, ctx.weights = module, weights
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        return None, *torch.autograd.grad(out, (x, *ctx.weights), gradient)


class Position(nn.Module):
    """Returns its parameter and runs no op."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(WIDTH))

    def forward(self) -> Tensor:
        return self.position


class InOneOp(WithLoss):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.at = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Position()

    def forward(self, x: Tensor) -> Tensor:
        x = Whole.apply(self.block, x + self.at(), *self.block.parameters())
        for layer in list(self)[:12]:
            x = layer(x)
        return x.square().mean()


def parametrized() -> WithLoss:
    """Return a model with a list of parametrizations, which has parameters, and runs no op of its own."""
    model = WithLoss()
    nn.utils.parametrizations.weight_norm(model[3])
    return model


@pytest.mark.parametrize("make", [parametrized, InOneOp])
def test_module_that_runs_no_op_or_only_inside_of_a_function_or_of_others_is_not_skipped(
    make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = ac_client.apply(make(), budget_for(make(), 0.6) / GIB)
    caplog.set_level(logging.INFO)
    for _ in range(3):
        several(1)(model)
        model.zero_grad()
    assert not warnings(caplog)
    assert sum("observing one step" in message for message in caplog.messages) == 1
    assert_gradients_of_the_plain_model(model, make(), several(1))


def test_layers_that_the_first_batch_skipped_are_decided_like_their_siblings() -> None:
    def layers(runs: list[int]) -> Skips:
        model = Skips()
        model.layers = nn.ModuleList([Residual() for _ in range(12)])
        model.runs = runs
        return model

    some, every = list(range(0, 12, 2)), list(range(12))
    budget = budget_for(layers(some), 0.5)
    model = ac_client.apply(layers(some), budget / GIB)
    several(1)(model)
    assert ac_client.applied(model).report().recomputed > 0
    model.runs = every
    report = measured(model, several(1))  # the first step that runs them; later ones are planned again
    assert report.measured_peak_bytes < 0.95 * budget_for(layers(every), 0.5)
    plain = layers(every)
    plain.load_state_dict(model.state_dict())
    several(1)(plain)
    assert same_gradients(model, plain)


def drops(model: nn.Module) -> None:
    torch.manual_seed(2)
    model(batches()[0]).loss.backward()


def holds(model: nn.Module) -> None:
    torch.manual_seed(2)
    out = model(batches()[0])
    out.loss.backward()


@pytest.mark.parametrize("ruled_out", [True, False])
def test_budget_that_only_a_loop_that_drops_outputs_keeps_is_kept_from_the_first_step(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, ruled_out: bool
) -> None:
    """Plan for such a loop, whether the planner rules out any other or only finds no plan for it."""
    solve = plan_batch.plan

    def plan(step: Profile, **terms: Any) -> Plan:
        try:
            return solve(step, **terms)
        except InfeasibleBudget as error:
            raise SolverOutOfTime(error.budget, 600.0, error.proven_floor, error.smallest_found) from None

    if not ruled_out:
        monkeypatch.setattr(plan_batch, "plan", plan)
    held, dropped = (
        observe(Head(), batches(), {}, loop=Loop(drops=d)) for d in (frozenset(), frozenset({1}))
    )
    smallest_held, smallest_dropped = find_minimum_peak(held).proven, find_minimum_peak(dropped).found
    budget = (smallest_held + smallest_dropped) // 2
    assert smallest_dropped < budget < smallest_held
    model = ac_client.apply(Head(), budget / GIB)
    drops(model)
    first = measured(model, drops)
    assert first.measured_peak_bytes == first.predicted_peak_bytes <= budget
    assert not warnings(caplog)
    assert_gradients_of_the_plain_model(model, Head(), drops)


def test_peak_with_nothing_recomputed_is_that_of_the_loop_that_runs(caplog: pytest.LogCaptureFixture) -> None:
    held, dropped = (budget_for(Head(), 1.0, loop=Loop(drops=d)) for d in (frozenset(), frozenset({1})))
    model = ac_client.apply(Head(), 1.0)
    drops(model)
    assert ac_client.applied(model).report().save_all_peak_bytes == dropped < held
    assert measured(model, drops).save_all_peak_bytes == dropped
    model = ac_client.apply(Head(), 1.0)
    holds(model)
    assert measured(model, holds).save_all_peak_bytes == held
    assert not warnings(caplog)


@pytest.mark.parametrize("loss", [None, lambda out: out.loss], ids=["", "loss"])
def test_peaks_of_dropped_outputs_follow_from_one_profile(loss: Any) -> None:
    def loop(*dropped: int) -> Loop:
        return Loop(drops=frozenset(dropped))

    held = observe(Head(), batches(), {}, loss=loss, loop=loop())
    dropped = observe(Head(), batches(), {}, loss=loss, loop=loop(1))
    assert held.droppable_outputs == {1}
    assert held.with_dropped_outputs({1}).storages == dropped.storages != held.storages
    assert dropped.with_dropped_outputs(()).storages == held.storages


def wide() -> nn.Module:
    """Return a model whose output the loss saves, outside of it, and no name of the loop holds."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))


def cached() -> nn.Module:
    """Return a language model whose cache its loop drops, and attention needs in backward."""
    torch.manual_seed(0)
    return gpt2(layers=2, width=32, heads=4, vocabulary=64, positions=64, use_cache=True)


IDS = torch.arange(256).reshape(4, 64) % 64


@pytest.mark.parametrize(
    ("make", "batch", "loss_of"),
    [
        (wide, {"input": torch.randn(ROWS, 64)}, lambda out: out.square().mean()),
        (cached, {"input_ids": IDS, "labels": IDS}, lambda out: out.loss),
    ],
)
def test_outputs_that_autograd_saves_too_do_not_count_as_held(
    make: Callable[[], nn.Module], batch: Any, loss_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def step(model: nn.Module) -> None:
        torch.manual_seed(2)
        loss_of(model(**batch)).backward()

    whole = observe(make(), (), batch)
    held = find_minimum_peak(whole, time_limit_s=5).proven
    budget = held - ROWS * 64  # a quarter of the output
    if make is cached:
        dropping = whole.with_dropped_outputs(whole.droppable_outputs)
        budget = (find_minimum_peak(dropping, time_limit_s=5).found + held) // 2
    assert budget < held
    model = ac_client.apply(make(), budget / GIB)
    for _ in range(2):
        step(model)
        model.zero_grad()
    report = measured(model, step)
    assert report.measured_peak_bytes <= report.predicted_peak_bytes <= budget
    assert make is cached or report.measured_peak_bytes == report.predicted_peak_bytes
    assert not [message for message in warnings(caplog) if message.startswith(type(model).__name__)]
    assert_gradients_of_the_plain_model(model, make(), step)
