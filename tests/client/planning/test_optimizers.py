"""Optimizers of all forms are counted, and the copy that the planner steps touches nothing of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stepping import smallest_found
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner.units import GIB

X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
    )


class Momentum(torch.optim.Optimizer):
    """Averages gradients. Subclasses add attributes of their own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.calls: Any = 0

    def rate(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rate = self.rate()
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.sub_(average.lerp_(p.grad, 0.1), alpha=rate * group["lr"])


class WithNumber(Momentum):
    def rate(self) -> float:
        self.calls += 1
        return 1 / self.calls


class WithTensor(Momentum):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.calls = torch.zeros(())

    def rate(self) -> float:
        return 1 / float(self.calls.add_(1))


class Settings:
    calls = 0


class WithObject(Momentum):
    """Cannot be run on fake tensors: the copy would share the object."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.settings = Settings()

    def rate(self) -> float:
        self.settings.calls += 1
        return 1 / self.settings.calls


class Wrapping(torch.optim.Optimizer):
    """Does not call `Optimizer.__init__`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(
        lambda self: self.inner.param_groups, lambda self, v: setattr(self.inner, "param_groups", v)
    )
    state = property(lambda self: self.inner.state, lambda self, v: setattr(self.inner, "state", v))

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad()


class Container(torch.optim.Optimizer):
    """Is an optimizer, and holds others, as torchtitan's `OptimizersContainer`."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Averaging(Container):
    """Has a state of its own, from its second step on."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"] if self.optimizers[0].state else ():
            self.state[p].setdefault("slow", p.detach().clone())


class ScheduleFree(Momentum):
    """Has its state in attributes, from its first step on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.trained = self.param_groups[0]["params"][:1]
        self.averages: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        self.averages = self.averages or [p.clone() for p in parameters]
        for p, average in zip(parameters, self.averages, strict=True):
            p.lerp_(average.sub_(p.grad, alpha=0.1), 0.3)


class Coded(Tensor):
    """A float32 tensor that has a byte for each element, and a scale, as the state of 8-bit optimizers."""

    codes: Tensor
    scale: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Coded:
        made: Coded = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=torch.float32, device=codes.device
        )
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    def decoded(self) -> Tensor:
        return self.codes * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default, "nothing else is known"
        coded, values = args
        coded.scale.copy_(values.abs().amax() / 127)
        coded.codes.copy_(values / coded.scale)
        return coded


class Coding(Momentum):
    """Has its averages in a wrapper, which knows no op but `copy_`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if "average" not in self.state[p]:
                    codes = torch.zeros_like(p, dtype=torch.int8)
                    self.state[p]["average"] = Coded(codes, torch.ones(1))
                average = self.state[p]["average"]
                average.copy_(average.decoded().lerp_(p.grad, 0.1))
                p.sub_(average.decoded(), alpha=0.1)


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    sgd = torch.optim.SGD(parameters[8:], 0.1, momentum=0.9)
    return [torch.optim.AdamW(parameters[:8], foreach=False), sgd]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "number": lambda m: WithNumber(m.parameters()),
    "tensor": lambda m: WithTensor(m.parameters()),
    "object": lambda m: WithObject(m.parameters()),
    "state in attributes": lambda m: ScheduleFree(m.parameters()),
    "wrapping": lambda m: Wrapping(adam(m)),
    "container": lambda m: Container(halves(m)),
    "container with state": lambda m: Averaging([adam(m)]),
    "several": halves,
    "state in wrappers": lambda m: Coding(m.parameters()),
}
LATE = ("object", "container with state")


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> list[Tensor]:
    for _ in range(steps):
        model(X).square().mean().backward()
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.step()
            one.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def state_nbytes(optimizer: Any) -> int:
    parts = optimizer if isinstance(optimizer, list) else [optimizer]
    parts = [*parts, *(one for part in parts for one in getattr(part, "optimizers", ()))]
    tensors = [t for one in parts for state in one.state.values() for t in state.values()]
    states = sum(t.codes.nbytes + t.scale.nbytes if isinstance(t, Coded) else t.nbytes for t in tensors)
    attributes = [
        *(getattr(one, "averages", ()) for one in parts),
        *([one.calls] for one in parts if isinstance(one, WithTensor)),
    ]
    return states + sum(t.nbytes for tensors in attributes for t in tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_state_counts_and_steps_are_those_of_a_plain_loop(kind: str) -> None:
    plain, planned = new_model(), new_model()
    of_plain, of_planned = KINDS[kind](plain), KINDS[kind](planned)
    ac_client.apply(planned, 1.0, optimizer=of_planned)
    static = sum(p.nbytes for p in planned.parameters()) + X.nbytes
    first = train(planned, of_planned, 1)
    if kind not in LATE:
        assert ac_client.applied(planned).policy.predicted.static_bytes == static + state_nbytes(of_planned)
    assert all(map(torch.equal, first, train(plain, of_plain, 1)))
    assert all(map(torch.equal, train(planned, of_planned), train(plain, of_plain)))
    assert ac_client.applied(planned).policy.predicted.static_bytes == static + state_nbytes(of_planned)


def test_hooks_of_all_optimizers_see_no_step_of_the_copy() -> None:
    class OfBase(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = new_model()
    torch.optim.AdamW(model.parameters())  # patches the step that the subclass calls
    optimizer = OfBase(model.parameters())
    stepped: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda one, *_: stepped.append(one))
    try:
        ac_client.apply(model, 1.0, optimizer=optimizer)
        train(model, optimizer, 2)
    finally:
        handle.remove()
    assert len(stepped) == 4
    assert all(one is optimizer for one in stepped)


def test_optimizer_that_appears_later_never_stops_a_loop(caplog: pytest.LogCaptureFixture) -> None:
    def run(budget_gb: float) -> list[Tensor]:
        model = new_model()
        first, second = halves(model)[0], torch.optim.AdamW(list(model.parameters())[8:], foreach=False)
        if budget_gb:
            ac_client.apply(model, budget_gb, optimizer=first)
        for i in range(4):
            model(X[: 63 + (i > 0)]).square().mean().backward()  # a longer batch from the second step on
            for one in (first, second)[: i + 1]:
                one.step()
            model.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    smallest = smallest_found(lambda: run(1e-6))
    caplog.clear()
    assert all(map(torch.equal, run(1.02 * smallest / GIB), run(0)))
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("kind", ["state in wrappers", "new storages", "new parameters"])
def test_measured_peak_is_that_of_a_plain_loop(kind: str) -> None:
    def optimizer_of(model: nn.Module) -> Any:
        return Coding(model.parameters()) if kind == "state in wrappers" else None

    def run(model: nn.Module, optimizer: Any) -> None:
        if optimizer is not None:
            train(model, optimizer, 1)
            return
        model(X).square().mean().backward()
        for layer in model.modules():
            for name, p in list(layer.named_parameters(recurse=False)):
                new = p.detach() - 0.1 * p.grad
                if kind == "new storages":
                    p.data = new
                else:
                    setattr(layer, name, nn.Parameter(new))
        model.zero_grad()

    with AllocatorTimeline() as timeline:
        plain = new_model()
        of_plain = optimizer_of(plain)
        run(plain, of_plain)
        run(plain, of_plain)
        timeline.mark("step")
        run(plain, of_plain)
    planned = new_model()
    optimizer = optimizer_of(planned)
    ac_client.apply(planned, 1.0, optimizer=optimizer)
    run(planned, optimizer)
    run(planned, optimizer)
    with ac_client.applied(planned).measure():
        run(planned, optimizer)
    measured = ac_client.applied(planned).report().measured_peak_bytes
    assert measured - X.nbytes == pytest.approx(timeline.peak_since("step"), rel=0.001)


def train_with_state_elsewhere(kind: str, budget_gb: float) -> ac_client.Report:
    """Return the report of a training whose optimizers have their state in numpy between steps.

    Args:
        kind: words that say what the loop does.
        budget_gb: of the device.
    """
    model = new_model()
    optimizers = halves(model) if "two" in kind else [adam(model)]
    arrays: dict[Any, dict[str, Any]] = {}

    def load(optimizer: Any, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"] if arrays else ():
            optimizer.state[p] = {name: torch.tensor(value) for name, value in arrays.pop(p, {}).items()}

    def store(optimizer: Any, *_: Any) -> None:
        for p, state in optimizer.state.items():
            arrays[p] = {name: value.numpy().copy() for name, value in state.items()}
        optimizer.state.clear()

    if "late" in kind:
        ac_client.apply(model, budget_gb)
    for optimizer in optimizers if "hooks" in kind else ():
        optimizer.register_step_pre_hook(load)
        optimizer.register_step_post_hook(store)
    if "late" not in kind:
        ac_client.apply(model, budget_gb, optimizer=optimizers)

    def step(i: int) -> None:
        for _ in range(1 + ("accumulates" in kind)):
            model(torch.randn(64, 32)).square().mean().backward()
        for move in (load, None, store):
            for turn, optimizer in enumerate(optimizers):
                if move is not None and "around" in kind:
                    move(optimizer)
                elif move is None and (turn == 0 or i % 2):
                    optimizer.step()
        model.zero_grad()

    for i in range(4):
        step(i)
    for i in range(2):
        with ac_client.applied(model).measure():
            step(i)
    return ac_client.applied(model).report()


@pytest.mark.parametrize(
    "kind", ["hooks", "late hooks", "around", "accumulates, hooks", "two, hooks", "two, around", "two"]
)
def test_state_counts_where_it_is(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    needs = train_with_state_elsewhere(kind, 1.0).measured_peak_bytes or 0
    tight = train_with_state_elsewhere(kind, 1.01 * needs / GIB)
    assert tight.predicted_peak_bytes == pytest.approx(needs, abs=16)  # kernels of Adam make scalars
    assert (tight.measured_peak_bytes, tight.recomputed) == (needs, 0)
    assert not caplog.messages
