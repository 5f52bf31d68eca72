"""Plan a model in place by one line; refuse what cannot be planned, and leave nothing patched."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stepping import binding_budget, gradients, policy_for, scalar, seeded, smallest_found
from torch import nn
from torch.autograd import forward_ad

import ac_client
from autoac.planner import plan
from autoac.planner.errors import MOST_HOLDINGS, MalformedPolicy
from autoac.planner.units import GIB, format_bytes
from autoac.profiler import profile
from benchmarks.models.modules import Transformer

BATCH = torch.randn(4, 64, 64)


def new_model() -> Transformer:
    return seeded(Transformer, layers=3, width=64)


@pytest.fixture(scope="module")
def budget_gb() -> float:
    """Half way between the smallest feasible peak and save-all's."""
    return binding_budget(profile(new_model(), BATCH)) / GIB


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, a, b))


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_first_planned_step_logs_one_line_per_phase(caplog: pytest.LogCaptureFixture) -> None:
    model = ac_client.apply(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), 1.0)
    with caplog.at_level(logging.INFO, logger="ac_client"):
        for rows in (2, 2, 4, 4):
            model.zero_grad()
            model(torch.randn(rows, 4)).sum().backward()
    observing, planning, planned, measuring, *_ = caplog.messages
    assert observing == "Sequential: observing one step"
    assert planning == "Sequential: planning 2 ops for 1.00 GiB"
    assert planned.startswith("Sequential: planned: predicted peak ")
    assert planned.endswith(" of 1.00 GiB, 0.0% of the step recomputed (0 of 2 ops)")
    assert measuring.startswith("Sequential: on a CPU nothing compares ")
    assert caplog.text.count("on a CPU nothing compares") == 1


def test_gradients_are_those_of_the_plain_model(budget_gb: float) -> None:
    plain, planned = new_model(), new_model()
    assert ac_client.apply(planned, budget_gb) is planned
    for seed in range(3):
        assert_equal(gradients(planned, BATCH, dropout=seed), gradients(plain, BATCH, dropout=seed))
    report = ac_client.applied(planned).report()
    assert report.predicted_peak_bytes < report.save_all_peak_bytes
    assert report.steps == 2  # the first one was observed
    assert report.predicted_peak_bytes <= report.budget_bytes


def test_a_step_on_its_path_leaves_few_hooks(budget_gb: float) -> None:
    """On the root alone if all is saved; else on modules with parts, until a forward leaves its policy."""
    model, submodules = ac_client.apply(new_model(), 1.0), list(new_model().modules())[1:]
    for _ in range(3):
        gradients(model, BATCH)
    assert hooks(model) == 2
    gradients(model, torch.cat([BATCH, BATCH]))  # is observed, and its ops need the paths of modules
    assert hooks(model) == 2 * len(submodules) + 2
    tight = ac_client.apply(new_model(), budget_gb)
    for _ in range(3):
        gradients(tight, BATCH)
    assert hooks(tight) == 2 * sum(any(True for _ in m.children()) for m in tight.modules()) + 2  # the head
    tight.blocks[1].ln2.forward = lambda x: x * 2
    for _ in range(2):
        gradients(tight, BATCH)
    assert hooks(tight) == 2 * len(submodules) + 2


def test_same_policy_from_a_file_in_a_fresh_model(budget_gb: float, tmp_path: Path) -> None:
    first = ac_client.apply(new_model(), budget_gb)
    want = gradients(first, BATCH)
    policy = ac_client.applied(first).policy
    (tmp_path / "policy.json").write_text(policy.to_json())
    second = ac_client.apply(new_model(), policy=tmp_path / "policy.json")
    assert_equal(gradients(second, BATCH), want)
    assert ac_client.applied(second).policy == policy
    assert ac_client.applied(second).plan is None
    with pytest.raises(ac_client.InvalidBudget, match="plan again for less") as refused:
        ac_client.apply(new_model(), policy.predicted.peak_bytes / GIB / 2, policy=policy)
    assert format_bytes(policy.predicted.peak_bytes) in str(refused.value)


def test_file_without_a_policy_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_bytes(b"\xff\xfe\x00 weights")
    with pytest.raises(MalformedPolicy, match=r"policy\.json: not a valid policy: not JSON"):
        ac_client.apply(new_model(), policy=path)
    path.write_text('{"format": "autoac.profile", "version": 7}')
    with pytest.raises(MalformedPolicy, match=r"policy\.json: not a valid policy: .* got a profile"):
        ac_client.apply(new_model(), policy=path)


def test_infeasible_budget_leaves_the_model_as_it_was() -> None:
    model = ac_client.apply(new_model(), 1e-4)
    gradients(model, BATCH)
    with pytest.raises(ac_client.InfeasibleBudget, match="needs at least") as raised:
        model(BATCH)
    assert raised.value.proven_floor > raised.value.budget
    live = raised.value.live
    assert len(live) > MOST_HOLDINGS
    rest = sum(holding.nbytes for holding in live[MOST_HOLDINGS:])
    assert f"{format_bytes(rest):>10}  {len(live) - MOST_HOLDINGS} more\n" in str(raised.value)
    assert hooks(model) == 0
    with pytest.raises(ac_client.NotApplied):
        ac_client.applied(model)
    gradients(model, BATCH)


def test_applying_twice_is_an_error_also_to_a_part() -> None:
    model = ac_client.apply(new_model(), 1.0)
    with pytest.raises(ac_client.AlreadyApplied):
        ac_client.apply(model, 1.0)
    with pytest.raises(ac_client.AlreadyApplied, match=r"at 0"):
        ac_client.apply(nn.Sequential(model), 1.0)
    with pytest.raises(ac_client.AlreadyApplied, match=r"of which this is \w+"):
        ac_client.apply(next(model.children()), 1.0)
    ac_client.applied(model).remove()
    ac_client.apply(model, 1.0)


def test_model_that_checkpoints_itself_is_refused_if_it_is_not_taken_over() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = new_model()
    model.gradient_checkpointing = True
    with pytest.raises(ac_client.CheckpointingActive, match=r"gradient_checkpointing = False"):
        ac_client.apply(model, 1.0, constraints=ac_client.Constraints(take_over_checkpoints=False))
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    with pytest.raises(ac_client.CheckpointingActive):
        ac_client.apply(wrapped, 1.0, constraints=ac_client.Constraints(take_over_checkpoints=False))


def test_weights_of_functional_call_need_no_gradient(budget_gb: float) -> None:
    """The weights are not leaves here, and torch warns of their `.grad`."""

    def trained(model: nn.Module) -> list[torch.Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
        for _ in range(2):
            torch.manual_seed(1)
            weights = {name: leaf * 1.5 for name, leaf in leaves.items()}
            scalar(torch.func.functional_call(model, weights, (BATCH,))).backward()
        return [leaf.grad for leaf in leaves.values() if leaf.grad is not None]

    assert_equal(trained(ac_client.apply(new_model(), budget_gb * 2)), trained(new_model()))


def new_mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.SiLU()) for _ in range(4))))


def through_jvp(model: nn.Module) -> torch.Tensor:
    out, slope = torch.func.jvp(model, (BATCH,), (torch.ones_like(BATCH),))
    return out.square().mean() + slope.square().mean()


def through_vmap(model: nn.Module) -> torch.Tensor:
    return torch.vmap(model)(BATCH).square().mean()


def through_jacfwd(model: nn.Module) -> torch.Tensor:
    return torch.func.jacfwd(lambda t: model(BATCH * t).square().mean())(torch.ones(1)).sum()


def through_dual_weights(model: nn.Module) -> torch.Tensor:
    with forward_ad.dual_level():
        weights = {name: forward_ad.make_dual(p, p.detach()) for name, p in model.named_parameters()}
        return forward_ad.unpack_dual(torch.func.functional_call(model, weights, (BATCH,))).tangent.sum()


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # forward-mode AD calls it
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("through", [through_jvp, through_vmap, through_jacfwd, through_dual_weights])
def test_forward_inside_of_a_transform_runs_without_a_plan(
    through: Callable[[nn.Module], torch.Tensor],
    first: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, planned = new_mlp(), new_mlp()
    ac_client.apply(planned, binding_budget(profile(plain, BATCH)) / GIB)
    for model in (plain, planned):
        for i in range(3):
            (model(BATCH).sum() if i == 0 and not first else through(model)).backward()
    assert_equal([p.grad for p in planned.parameters()], [p.grad for p in plain.parameters()])
    (said,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "runs without a plan" in said


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("through", [through_jvp, through_vmap, through_jacfwd, through_dual_weights])
def test_budget_that_no_plan_keeps_is_refused_inside_of_a_transform_too(
    through: Callable[[nn.Module], torch.Tensor],
) -> None:
    model = ac_client.apply(new_mlp(), 1e-6)
    gradients(model, BATCH)
    with pytest.raises(ac_client.InfeasibleBudget):
        through(model)
    with pytest.raises(ac_client.NotApplied):
        ac_client.applied(model)
    through(model).backward()


def scripted() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Sequential(nn.Linear(64, 64), nn.Tanh()))
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), torch.jit.script(inner), nn.Linear(64, 64), nn.Tanh())


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_script_module_is_a_leaf_of_the_plan() -> None:
    refusing = ac_client.apply(scripted(), 1e-6)
    gradients(refusing, BATCH)
    plain, planned = scripted(), scripted()
    ac_client.apply(planned, 1.5 * smallest_found(lambda: refusing(BATCH)) / GIB)  # its first runs differ
    for _ in range(3):
        assert_equal(gradients(planned, BATCH), gradients(plain, BATCH))
    with pytest.raises(TypeError, match=r"nn\.Sequential\(model\)"):
        ac_client.apply(torch.jit.script(nn.Linear(2, 2)), 1.0)


@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_apply_that_fails_at_a_hook_leaves_the_model_as_it_was(at: int, kind: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no hooks here")

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module = [model, model[0], model[1]][at]
    setattr(module, kind, refuse)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no hooks here"):
            ac_client.apply(model, 1.0)
        assert hooks(model) == 0
        with pytest.raises(ac_client.NotApplied):
            ac_client.applied(model)
    delattr(module, kind)
    ac_client.apply(model, 1.0)


def test_policy_of_a_step_with_less_static_bytes_warns(
    budget_gb: float, caplog: pytest.LogCaptureFixture
) -> None:
    policy = plan(profile(new_model(), BATCH), budget_bytes=int(budget_gb * GIB)).policy()
    for optimizes in (False, True):
        model = new_model()
        adam = torch.optim.AdamW(model.parameters()) if optimizes else None
        ac_client.apply(model, policy=policy, optimizer=adam)
        gradients(model, BATCH)
        said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == optimizes
    assert "the policy was planned for" in said[0]


def test_report_without_a_budget_says_so(budget_gb: float) -> None:
    found = plan(profile(new_model(), BATCH), budget_bytes=GIB)
    model = ac_client.apply(new_model(), policy=found.policy())
    model(BATCH)
    assert str(ac_client.applied(model).report()).startswith("Transformer: a policy and no budget, 1 planned")


def test_remove_leaves_the_model_as_it_was(budget_gb: float) -> None:
    model = new_model()
    state = dict(model.__dict__)
    ac_client.apply(model, budget_gb)
    gradients(model, BATCH)
    done = ac_client.applied(model)
    done.remove()
    done.remove()
    assert hooks(model) == 0
    assert model.__dict__.keys() == state.keys()
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("strict", [False, True])
def test_code_after_an_interrupted_forward_is_not_part_of_it(
    strict: bool, budget_gb: float, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = new_model(), ac_client.apply(new_model(), budget_gb, strict=strict)
    want = gradients(plain, BATCH)
    gradients(model, BATCH)
    model.zero_grad()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), model.blocks[1].register_forward_hook(interrupt):
        model(BATCH)
    assert torch._C._len_torch_dispatch_stack() == 1
    x = torch.randn(3, requires_grad=True)
    (torch.randn(3) * x.exp()).sum().backward()  # a line of the user's own
    model.blocks[2](torch.randn(4, 64, 64)).sum().backward()
    assert ac_client.applied(model).report().off_path == ""
    assert not caplog.messages
    assert_equal(gradients(model, BATCH), want)
    assert torch._C._len_torch_dispatch_stack() == 0


class Cell(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = x.sin()
        return x


class Looping(nn.Module):
    """Calls one module several times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.cell = Cell()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        for _ in range(4):
            x = self.cell(x)
        return x.exp().exp().sum()


def test_module_called_in_a_loop_stays_on_the_path() -> None:
    x = torch.randn(4, 8)
    policy = policy_for(Looping(), x, decide=lambda key: "save" if key.startswith("cell") else "recompute")
    model = ac_client.apply(Looping(), policy=policy)
    for _ in range(3):
        model(x).backward()
        assert ac_client.applied(model).report().off_path == ""
    assert ac_client.applied(model).report().recorded < 40  # the cell's ops ran without the mode


def test_another_batch_shape_is_right_and_reported_if_its_ops_differ(
    budget_gb: float, caplog: pytest.LogCaptureFixture
) -> None:
    policy = plan(profile(new_model(), BATCH), budget_gb=budget_gb).policy()
    plain, planned = new_model(), ac_client.apply(new_model(), policy=policy)
    gradients(planned, BATCH)
    short, scale = torch.randn(2, 16, 64), {"by": torch.ones(64)}
    with caplog.at_level(logging.WARNING):
        for model in (plain, planned):
            model.zero_grad()
            torch.manual_seed(2)
            scalar(model(short, scale=scale)).backward()
    assert_equal([p.grad for p in planned.parameters()], [p.grad for p in plain.parameters()])
    assert "aten.mul.Tensor" in ac_client.applied(planned).report().off_path
    assert sum("left its policy" in message for message in caplog.messages) == 1
    assert "left its policy" in ac_client.applied(planned).report().stale
    gradients(planned, BATCH)
    report = ac_client.applied(planned).report()
    assert (report.off_path, report.stale) == ("", ""), "the last step has followed"


def test_input_that_an_op_made_is_followed(budget_gb: float) -> None:
    model = ac_client.apply(new_model(), budget_gb, strict=True)
    for _ in range(2):
        x = BATCH.clone().requires_grad_() * 2
        scalar(model(x)).backward()


def test_strict_raises_where_the_ops_differ(budget_gb: float) -> None:
    policy = plan(profile(new_model(), BATCH), budget_gb=budget_gb).policy()
    model = ac_client.apply(new_model(), policy=policy, strict=True)
    gradients(model, BATCH)
    with pytest.raises(ac_client.LeftThePath, match=r"found aten.mul.Tensor"):
        model(BATCH, scale={"by": torch.ones(64)})
    gradients(model, BATCH)


def test_gradients_that_stay_between_microbatches_are_planned_for(budget_gb: float) -> None:
    plain, planned = new_model(), new_model()
    ac_client.apply(planned, budget_gb)
    policies = []
    for model in (plain, planned):
        for seed in range(4):
            torch.manual_seed(seed)
            scalar(model(BATCH)).backward()  # adds to the gradients of the one before
            if model is planned:
                policies.append(ac_client.applied(planned).policy)
    assert_equal([p.grad for p in plain.parameters()], [p.grad for p in planned.parameters()])
    first, second, *others = policies
    size = sum(p.nbytes for p in planned.parameters())
    assert second.predicted.static_bytes - first.predicted.static_bytes == pytest.approx(size, rel=0.01)
    assert second.predicted.peak_bytes <= budget_gb * GIB
    assert all(policy is second for policy in others)
    planned.zero_grad()
    scalar(planned(BATCH)).backward()
    assert ac_client.applied(planned).policy is second  # a first microbatch needs less


@pytest.mark.parametrize("left_out", [0, 1, 2], ids=["first", "middle", "last"])
def test_layer_that_is_taken_out_is_reported_and_right(budget_gb: float, left_out: int) -> None:
    """Layers are built alike, so each op of the next one is the op that the policy has for this one."""
    plain, planned = new_model(), ac_client.apply(new_model(), budget_gb)
    gradients(planned, BATCH)
    for model in (plain, planned):
        del model.blocks[left_out]
    # The paths of what comes behind it stay as they were.
    assert_equal(gradients(planned, BATCH), gradients(plain, BATCH))
    assert ac_client.applied(planned).report().off_path.startswith(f"expected blocks.{left_out}")


def test_strict_raises_where_a_layer_is_left_out(budget_gb: float) -> None:
    model = ac_client.apply(new_model(), budget_gb, strict=True)
    gradients(model, BATCH)
    head, model.head = model.head, nn.Identity()
    head.zero_grad()  # else gradients exist before the step, and it is planned again as it is now
    with pytest.raises(ac_client.LeftThePath, match=r"expected head/.*, found the end of forward"):
        gradients(model, BATCH)
    assert torch._C._len_torch_dispatch_stack() == 0
    model.head = head
    gradients(model, BATCH)


def test_model_that_loads_the_packages_at_first_use_is_freed() -> None:
    """Libraries keep errors of their own imports, whose frames lead to the caller."""
    script = """
        import gc, weakref
        import torch
        import ac_client

        def train():
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
            ac_client.apply(model, 1)
            model(torch.randn(4, 8)).sum().backward()
            return weakref.ref(model)

        model = train()
        gc.collect()
        assert model() is None, gc.get_referrers(model())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
