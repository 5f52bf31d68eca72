"""Training that no plan runs in is noticed, and training in `eval()` is planned."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from stepping import binding_budget, same_gradients, scalar, seeded, smallest_found
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ac_client
from ac_client import applied
from autoac.planner import find_minimum_peak
from autoac.planner.units import GIB, format_bytes
from autoac.profiler import profile
from benchmarks.models.modules import Transformer

BATCH = torch.randn(4, 64, 64)


def new_model() -> Transformer:
    return seeded(Transformer, layers=2, width=64)


@pytest.fixture(scope="module")
def budget_gb() -> float:
    return binding_budget(profile(new_model().eval(), BATCH)) / GIB


def on_thread(loss: Tensor) -> None:
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def train(
    model: nn.Module,
    call: Callable[[Tensor], object],
    steps: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Tensor]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(1)
        scalar(call(BATCH)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_training_in_eval_is_planned_from_the_second_step_on(
    budget_gb: float, caplog: pytest.LogCaptureFixture
) -> None:
    plain, planned = new_model().eval(), ac_client.apply(new_model().eval(), budget_gb)
    weights = train(plain, plain, 4)
    assert all(map(torch.equal, train(planned, planned, 4), weights))
    report = applied(planned).report()
    assert report.steps == 2  # the first one is seen to train, the second is observed
    assert report.predicted_peak_bytes < report.save_all_peak_bytes
    assert report.off_path == ""
    assert sum("is trained in eval()" in message for message in caplog.messages) == 1


def test_evaluation_with_gradients_is_not_planned(budget_gb: float, caplog: pytest.LogCaptureFixture) -> None:
    model = ac_client.apply(new_model(), budget_gb * 2)
    for _ in range(3):
        train(model.train(), model, steps=1)
        model.eval()(BATCH)
    assert applied(model).report().steps == 2
    assert not caplog.messages


def test_evaluation_with_gradients_that_may_go_over_the_budget_is_named(
    budget_gb: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = ac_client.apply(new_model(), budget_gb)
    train(model, model, steps=2)
    caplog.clear()
    with torch.no_grad():
        model.eval()(BATCH)
    assert not caplog.messages
    for _ in range(2):
        model(BATCH)
    (said,) = caplog.messages
    assert "a forward in eval() runs with gradients enabled" in said
    assert format_bytes(applied(model).report().save_all_peak_bytes) in said


def test_each_mode_has_a_plan_of_its_own(budget_gb: float) -> None:
    model = ac_client.apply(new_model(), budget_gb * 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    train(model, model, 2, optimizer)
    train(model.eval(), model, 3, optimizer)
    assert applied(model).report().buckets == 2
    train(model.train(), model, 1, optimizer)
    model.eval()(BATCH)  # evaluations are not planned again
    report = applied(model).report()
    assert (report.buckets, report.steps, report.off_path) == (2, 3, "")


@pytest.mark.parametrize("way", ["forward", "list"])
def test_steps_without_a_call_of_the_model_warn_once(way: str, caplog: pytest.LogCaptureFixture) -> None:
    model: nn.Module = new_model()
    call: Callable[[Tensor], object] = model.forward
    if way == "list":
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        model, call = layers, lambda x: layers[1](layers[0](x).sin())
    ac_client.apply(model, 1e-6)
    train(model, call, steps=1)  # may be one that only makes the optimizer's state
    assert not caplog.messages
    train(model, call)
    (message,) = caplog.messages
    assert "stepped 2 times without a training forward" in message


def test_two_optimizers_over_one_forward_are_not_unplanned_steps(caplog: pytest.LogCaptureFixture) -> None:
    model = ac_client.apply(new_model(), 1.0)
    half, others = list(model.parameters())[::2], list(model.parameters())[1::2]
    optimizers = [torch.optim.SGD(some, lr=0.1) for some in (half, others)]
    stranger = torch.optim.SGD(new_model().parameters(), lr=0.1)
    for _ in range(3):
        scalar(model(BATCH)).backward()
        for optimizer in (*optimizers, stranger, stranger):
            optimizer.step()
    assert not caplog.messages


def test_tightest_plan_runs_if_none_fits_for_other_parameters(caplog: pytest.LogCaptureFixture) -> None:
    """A discriminator that is frozen trains less, and needs less; thawed, its budget is too small."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x = torch.randn(64, 64, requires_grad=True)
    model.requires_grad_(False)
    ac_client.apply(model, 1e-6)
    model(x).sum().backward()
    ac_client.apply(model, (smallest_found(lambda: model(x)) + 4096) / GIB)
    model(x).sum().backward()
    model.requires_grad_(True)
    for _ in range(3):
        model.zero_grad()
        model(x).sum().backward()
    assert sum("other parameters train than before" in message for message in caplog.messages) == 1
    smallest = find_minimum_peak(profile(model, x), time_limit_s=5).found
    assert ac_client.applied(model).report().predicted_peak_bytes <= 1.01 * smallest
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("keeps", [False, True], ids=["", "graph freed on the thread of forward"])
def test_backward_on_another_thread_is_said_at_once_and_two_steps_are_observed(
    keeps: bool, budget_gb: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ac_client")
    plain, planned = new_model(), ac_client.apply(new_model(), budget_gb)
    for i in range(6):
        assert ("another thread" in caplog.text) == (i > 1)
        for model in (plain, planned):
            torch.manual_seed(1)
            loss = scalar(model(BATCH))
            thread = threading.Thread(target=loss.backward)
            if not keeps:
                del loss
            thread.start()
            thread.join()
    assert same_gradients(planned, plain)
    assert (caplog.text.count("observing one step"), caplog.text.count("another thread")) == (2, 1)
    planned.zero_grad()
    applied(planned).plan_for(BATCH)
    on_thread(scalar(planned(BATCH)))
    assert applied(planned).report().recomputed > 0


def test_backward_of_another_model_is_not_taken_for_one_on_another_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "ac_client")
    first, second = (ac_client.apply(nn.Sequential(nn.Linear(64, 64), nn.GELU()), 1.0) for _ in range(2))
    for _ in range(4):
        sent = first(BATCH)
        received = sent.detach().requires_grad_()
        on_thread(scalar(second(received)))
        sent.backward(received.grad)
    assert sum("planned: predicted" in message for message in caplog.messages) == 1


def test_split_backward_under_a_plan_without_room_is_said_once(
    budget_gb: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = ac_client.apply(new_model(), budget_gb)
    for _ in range(3):
        with ac_client.split_backward():
            scalar(model(BATCH)).backward()
        model.zero_grad()
    assert sum("backward is split" in message for message in caplog.messages) == 1


def test_new_shape_inside_of_a_checkpoint_runs_unplanned_with_one_warning(
    budget_gb: float, caplog: pytest.LogCaptureFixture
) -> None:
    plain, planned = new_model(), ac_client.apply(new_model(), budget_gb * 2)
    train(plain, plain, 2)
    train(planned, planned, 2)
    larger = BATCH.repeat(2, 1, 1)
    for _ in range(2):
        for model in (plain, planned):
            torch.manual_seed(1)
            scalar(checkpoint(model, larger, use_reentrant=False)).backward()
    assert same_gradients(planned, plain)
    assert sum("a checkpoint around it" in message for message in caplog.messages) == 1
