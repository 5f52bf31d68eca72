"""Test regions with threads, generators, coroutines, interrupts and copies."""

from __future__ import annotations

import copy
import io
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from stepping import EventLog, SeenOps, policy_for, recomputed
from torch import Tensor, nn

import ac_client
from autoac.planner import Policy
from autoac.tape.runtime.policy_context import active, save_recompute_policy


def chain(x: Tensor) -> Tensor:
    return (x.sin().exp() * x).cos()


def gradient(out: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(out.sum(), x)[0]


def is_plain(out: Tensor, x: Tensor) -> bool:
    return torch.equal(gradient(out, x), gradient(chain(x), x))


pytestmark = pytest.mark.usefixtures("nothing_is_open")


class Deep(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers, self.dropout = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), dropout
        self.inside: Callable[[], None] = int  # called in the middle of forward; a copy includes it

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i == 2:
                self.inside()
            x = nn.functional.dropout(nn.functional.gelu(layer(x)).sin(), self.dropout)
        return x.exp()


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Return a policy that recomputes everything."""
    return policy_for(Deep(), torch.ones(4, 8))


def gradients_of(model: nn.Module, x: Tensor, *, dropout: bool = True) -> list[Tensor]:
    """Return the gradients of one step without accumulating them in the model."""
    if dropout:
        torch.manual_seed(1)
    return list(torch.autograd.grad(model(x).sum(), list(model.parameters())))


def test_forwards_and_backwards_of_regions_on_several_threads() -> None:
    meet = threading.Barrier(4, timeout=30)

    def run(seed: int) -> tuple[bool, list[tuple[str, str]]]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        log = EventLog()
        for _ in range(20):
            meet.wait()
            with save_recompute_policy("recompute_all", log=log):
                meet.wait()
                z = chain(x)
            meet.wait()
            if not is_plain(z, x):
                return False, []
        return True, log.events

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, range(4)))
    assert all(right for right, _ in results)
    assert all(sum(kind == "recompute" for kind, _ in events) >= 20 for _, events in results)


@pytest.mark.parametrize("given", ["policy", "budget"])
def test_forwards_of_one_planned_model_on_several_threads(given: str) -> None:
    torch.manual_seed(0)
    model = Deep(dropout=0.0)
    want = gradients_of(model, torch.ones(4, 8), dropout=False)
    if given == "policy":
        ac_client.apply(model, policy=policy_for(model, torch.ones(4, 8)))
        model.inside = threading.Barrier(3, timeout=30).wait
    else:
        ac_client.apply(model, 1.0)
        gradients_of(model, torch.ones(4, 8), dropout=False)  # the first thread plans, and the others wait

    def run(_: int) -> bool:
        found = [gradients_of(model, torch.ones(4, 8), dropout=False) for _ in range(5)]
        return all(torch.equal(a, b) for one in found for a, b in zip(one, want, strict=True))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(run, range(3)))
    report = ac_client.applied(model).report()
    assert (report.steps, report.off_path) == (15, "")
    assert (report.recomputed > 0) == (given == "policy")


@pytest.mark.parametrize("models", [1, 3])
def test_first_steps_on_several_threads_are_observed_one_at_a_time(
    models: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch has one profiler for all threads: with two sessions at once, it complains or crashes."""
    torch.manual_seed(0)
    made = [Deep(dropout=0.0) for _ in range(models)]
    want = [gradients_of(model, torch.ones(4, 8), dropout=False) for model in made]
    meet = threading.Barrier(3, timeout=30)
    for model in made:
        ac_client.apply(model, 1.0)

    def run(i: int) -> bool:
        meet.wait()
        found = [gradients_of(made[i % models], torch.ones(4, 8), dropout=False) for _ in range(5)]
        return all(torch.equal(a, b) for one in found for a, b in zip(one, want[i % models], strict=True))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(run, range(3)))
    assert "no active profiling session" not in capfd.readouterr().err
    for model in made:
        gradients_of(model, torch.ones(4, 8), dropout=False)
        gradients_of(model, torch.ones(4, 8), dropout=False)
        assert ac_client.applied(model).report().steps > 0


def test_uses_are_counted_correctly_while_other_threads_run_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    want = (x.detach().sin().exp() * 2).cos() * 2
    wrong: list[Tensor] = []

    def backward(outs: list[Tensor]) -> None:
        while outs:
            found = gradient(outs.pop(), base)
            if not torch.equal(found, want):
                wrong.append(found)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool, save_recompute_policy("recompute_all"):
            base = x.sin().exp()
            value = active.region.storages.origin(base)
            before = value.uses, value.node.used_outs
            running = []
            for _ in range(100):
                outs = [(base * 2).sin() for _ in range(10)]  # each adds a use, and backward removes it
                running.append(pool.submit(backward, outs))
                del outs
            for one in running:
                one.result()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert (value.uses, value.node.used_outs) == before


def suspended(x: Tensor, policy: str, log: EventLog | None = None) -> Iterator[Tensor]:
    with save_recompute_policy(policy, log=log):
        y = x.sin().exp()
        yield y
        yield (y * x).cos()


@pytest.mark.parametrize("between", ["plain code", "another region", "another generator"])
@pytest.mark.parametrize("leaves_first", ["the generator", "the other"])
def test_generator_that_suspends_inside_a_region(between: str, leaves_first: str) -> None:
    x, log = torch.randn(4, requires_grad=True), EventLog()
    outs = []
    mine = suspended(x, "recompute_all", log)
    next(mine)
    other: Any = None
    if between == "plain code":
        outs.append(chain(x))
    elif between == "another region":
        other = save_recompute_policy("must_save_all")
        other.__enter__()
        outs.append(chain(x))
    else:
        other = suspended(x, "recompute_all")
        next(other)

    def finish_mine() -> None:
        outs.append(next(mine))
        mine.close()

    def finish_other() -> None:
        if isinstance(other, save_recompute_policy):
            outs.append(chain(x))
            other.__exit__(None, None, None)
        elif other is not None:
            outs.append(next(other))
            other.close()

    for finish in [finish_mine, finish_other][:: 1 if leaves_first == "the generator" else -1]:
        finish()
    assert active.region is None
    assert all(is_plain(z, x) for z in outs)
    assert recomputed(log)


def test_leaving_a_region_on_another_thread_is_an_error_and_heals() -> None:
    x = torch.randn(4, requires_grad=True)
    mine = suspended(x, "recompute_all")
    next(mine)
    z = next(mine)
    raised: list[BaseException] = []

    def close() -> None:
        try:
            mine.close()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert "left on the thread that entered it" in str(raised[0])
    between = chain(x)  # the region saves all ops from here on
    log = EventLog()
    with save_recompute_policy("recompute_all"):
        after = chain(x)
    assert active.region is None
    assert all(is_plain(t, x) for t in (z, between, after))
    with save_recompute_policy("recompute_all", log=log):
        again = chain(x)
    assert is_plain(again, x)
    assert recomputed(log)


def test_leaving_a_region_before_an_inner_mode_is_an_error_and_heals() -> None:
    region, mode = save_recompute_policy("recompute_all"), SeenOps()
    region.__enter__()
    mode.__enter__()
    with pytest.raises(RuntimeError, match="after the dispatch modes"):
        region.__exit__(None, None, None)
    mode.__exit__(None, None, None)
    with save_recompute_policy("recompute_all"):
        pass
    assert active.region is None


def test_entering_one_policy_object_twice_is_an_error() -> None:
    one = save_recompute_policy("recompute_all")
    with one, pytest.raises(RuntimeError, match="already entered"):
        one.__enter__()
    with one:
        assert active.region is not None


@pytest.mark.parametrize("next_call", ["training", "evaluation", "remove"])
def test_next_call_of_a_planned_model_ends_an_interrupted_forward(policy: Policy, next_call: str) -> None:
    torch.manual_seed(0)
    model = Deep()
    x = torch.ones(4, 8)
    want = gradients_of(model, x)
    ac_client.apply(model, policy=policy)

    def interrupt() -> None:
        raise KeyboardInterrupt

    model.inside = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(x)
    model.inside = int
    match next_call:
        case "training":
            assert all(map(torch.equal, gradients_of(model, x), want))
        case "evaluation":
            model.eval()
            model(x)
        case "remove":
            ac_client.applied(model).remove()
    assert active.region is None
    model.train()
    assert all(map(torch.equal, gradients_of(model, x), want))


def through_torch_save(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_torch_save], ids=["deepcopy", "torch.save"])
def test_copy_of_a_planned_model_is_plain_and_may_be_planned(
    policy: Policy, copied: Callable[[nn.Module], nn.Module]
) -> None:
    torch.manual_seed(0)
    model, x = Deep(), torch.ones(4, 8)
    ac_client.apply(model, policy=policy)
    want = gradients_of(model, x)
    twin = copied(model)
    with pytest.raises(ac_client.NotApplied):
        ac_client.applied(twin)
    assert all(map(torch.equal, gradients_of(twin, x), want))
    assert ac_client.applied(model).report().steps == 1
    ac_client.apply(twin, policy=policy)
    assert all(map(torch.equal, gradients_of(twin, x), want))
    assert ac_client.applied(twin).report().recomputed > 0


def test_region_entered_by_hand_and_never_left_ends_with_its_object() -> None:
    def entered_and_lost() -> None:
        save = save_recompute_policy("must_save_all")
        save.__enter__()
        raise ValueError

    with pytest.raises(ValueError), save_recompute_policy("recompute_all"):  # noqa: PT011
        entered_and_lost()
    assert active.region is None
