"""Run a training step plainly and under a policy, and compare all results."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from programs import same
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import Graph, Policy, Profile, build, find_minimum_peak, plan, schedule, simulate
from autoac.planner.formats.op_key import OpKey, name_in_keys
from autoac.planner.memory.schedule import Compute, Recompute
from autoac.planner.problem.graph import SaveSet
from autoac.profiler import profile
from autoac.tape.capture.allocations import AllocationRecord
from autoac.tape.errors import COMPILED_SINCE
from autoac.tape.runtime import replay
from autoac.tape.runtime.nodes import Node, live_versions
from autoac.tape.torch_facts import minor_version

M = TypeVar("M", bound=nn.Module)

COMPILES = minor_version() >= COMPILED_SINCE
needs_compiled_plans = pytest.mark.skipif(not COMPILES, reason="compiled models are refused under this torch")


class EventLog:
    """The compute and recompute events of a run, in order, as `planner/memory/schedule.py` defines them."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []  # (kind, name of the op in keys)

    def __call__(self, kind: str, name: str) -> None:
        self.events.append((kind, name_in_keys(name)))


@dataclass
class Outcome:
    """The results of a training step."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    input_gradients: list[Tensor | None]
    buffers: dict[str, Tensor]
    generator: Tensor
    log: EventLog
    peak: int | None  # bytes, from the allocator's record; None if not measured

    def recomputed(self) -> list[str]:
        return recomputed(self.log)


def scalar(out: Any) -> Tensor:
    """Return a scalar that depends on every differentiable output of a model."""
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
    if isinstance(loss, Tensor) and not loss.dim():
        return loss
    leaves = tree_leaves(list(out.values()) if isinstance(out, dict) else out)
    floats = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack(
        [(t.float() * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in floats]
    ).sum()


def functions_of(namespace: Mapping[str, Any], first: str) -> list[Callable[..., Any]]:
    """Return a module's own public functions whose first parameter is called `first`: its cases."""
    functions = [f for f in namespace.values() if inspect.isfunction(f) and not f.__name__.startswith("_")]
    own = [f for f in functions if f.__module__ == namespace["__name__"]]
    return [f for f in own if next(iter(inspect.signature(f).parameters), "") == first]


def seed(number: int) -> None:
    """Seed the CPU alone. `torch.manual_seed` formats the stack for each accelerator that is not in use."""
    torch.default_generator.manual_seed(number)


def seeded(make: Callable[..., M], *args: Any, **kwargs: Any) -> M:
    """Return a new model, with the same weights in each call."""
    seed(0)
    return make(*args, **kwargs)


def gradients(model: nn.Module, *args: Any, dropout: int = 1, **kwargs: Any) -> list[Tensor]:
    """Run a step, and return its gradients; `dropout` seeds the generator."""
    model.zero_grad()
    seed(dropout)
    scalar(model(*args, **kwargs)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def outcome(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    """Run a step; return what it leaves: gradients, buffers, and what the generator draws next."""
    found = gradients(model, *args, **kwargs)
    return [*found, *(buffer.clone() for buffer in model.buffers()), torch.rand(4)]


def trained(
    model: nn.Module,
    batch: Callable[[int], Tensor],
    steps: int = 3,
    call: Callable[[Tensor], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Tensor]:
    """Return the gradients of some steps, each with the seed of its number.

    Args:
        batch: return the batch of a step.
        call: what to call in place of the model.
        optimizer: steps after each backward, if given.
    """
    found = []
    for number in range(steps):
        model.zero_grad()
        seed(number)
        (call or model)(batch(number)).square().mean().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if optimizer is not None:
            optimizer.step()
    return found


def measured(model: nn.Module, step: Callable[[nn.Module], Any]) -> ac_client.Report:
    """Return the report on a planned model after a measured step; no gradients are freed before."""
    at = ac_client.applied(model)
    with at.measure():
        step(model)
    return at.report()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return all warnings but that a step without a plan went over the budget, as it does in small models."""
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in said if "was observed, without a plan" not in message]


def same_gradients(model: nn.Module, other: nn.Module) -> bool:
    """Return True if the parameters of two models have equal gradients, bit for bit."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(a.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)


def allocated_peak(run: Callable[[], Any]) -> int:
    """Return the most bytes that the CPU's allocator holds while `run` runs, without those from before."""
    with AllocationRecord(torch.device("cpu")) as record:
        run()
    return max(accumulate(change.nbytes for change in record.changes))


def peak_of(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Return the peak of what a step from no gradients allocates."""
    model.zero_grad()
    return allocated_peak(lambda: scalar(model(*args, **kwargs)).backward())


def peaks(found: Profile | Graph) -> tuple[int, int]:
    """Return the smallest peak found, and that of saving everything."""
    graph = found if isinstance(found, Graph) else build(found)
    smallest = find_minimum_peak(found, time_limit_s=10).found
    return smallest, simulate(graph, graph.everything).peak.live_bytes


def binding_budget(found: Profile | Graph, share: float = 0.5) -> int:
    """Return the bytes at `share` of the way from the smallest peak found to that of saving everything."""
    smallest, everything = peaks(found)
    return round(smallest + share * (everything - smallest))


def recomputed(log: EventLog) -> list[str]:
    """Return the ops that backward recomputed, in order."""
    return [name for kind, name in log.events if kind == "recompute"]


def expected_log(graph: Graph, save_set: SaveSet) -> list[tuple[str, str]]:
    """Return the events that the runtime must log for a step under `save_set`."""
    events: list[tuple[str, str]] = []
    for event in schedule(graph, save_set):
        if isinstance(event, Compute | Recompute):
            op = OpKey.parse(graph.ops[event.op].name).op
            events.append((type(event).__name__.lower(), op))
    return events


def policy_for(
    model: nn.Module, *args: Any, decide: Callable[[str], str] = lambda key: "recompute"
) -> Policy:
    """Return a policy for a step of `model`, with the decision of `decide` for the key of each op."""
    policy = plan(profile(model, *args), budget_gb=1).policy()
    return policy.model_copy(update={"decisions": {key: decide(key) for key in policy.decisions}})


def smallest_found(train: Callable[[], Any]) -> int:
    """Return the smallest peak found that the error of a training with too small a budget names, in bytes."""
    with pytest.raises(ac_client.InfeasibleBudget) as refused:
        train()
    assert refused.value.smallest_found is not None
    return refused.value.smallest_found


class SeenOps(TorchDispatchMode):
    """Collect the names of the ops that run under the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def ran(self) -> Counter[str]:
        """Count how often each op ran, by its name without namespace and overload."""
        return Counter(op.split(".")[1] for op in self.ops)


def timed_by_flops(found: Profile) -> Profile:
    """Replace run times by FLOPs, so that every machine makes the same plan."""
    times = tuple(1 + flops / 1000 for flops in found.ops.flops)
    return found.model_copy(update={"ops": found.ops.model_copy(update={"runtime_us": times})})


def step(
    make: Callable[[], nn.Module],
    *args: Any,
    policy: Any = None,
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    backward: Callable[[Tensor], None] = lambda loss: loss.backward(),
    standing: int | None = None,
    **kwargs: Any,
) -> Outcome:
    """Run one training step of a new model.

    Args:
        make: return the model.
        args, kwargs: the batch.
        policy: None for the plain step; a Policy runs through `apply`, anything else in a region.
        around: return the context of forward.
        backward: run backward from the loss.
        standing: bytes live before the step; if given, the peak is measured.
    """
    seed(0)
    model = make()
    for t in tree_leaves((args, kwargs)):
        if isinstance(t, Tensor):
            t.grad = None
    seed(1)
    log = EventLog()
    logging = functools.partial(ac_client.save_recompute_policy, log=log)
    region: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if isinstance(policy, Policy):
        ac_client.apply(model, policy=policy, strict=True)
        region = mock.patch("ac_client.planning.planned_forward.save_recompute_policy", logging)
    elif policy is not None:
        region = logging(policy)
    timeline = AllocatorTimeline(base=standing) if standing is not None else None
    with timeline or contextlib.nullcontext():
        with around(), region:
            out = model(*args, **kwargs)
        backward(scalar(out))
    return Outcome(
        [t.detach().clone() for t in tree_leaves(out) if isinstance(t, Tensor)],
        {name: p.grad for name, p in model.named_parameters()},
        [t.grad for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)],
        {name: b.clone() for name, b in model.named_buffers()},
        torch.get_rng_state(),
        log,
        timeline.peak_bytes if timeline is not None else None,
    )


def assert_same(plain: Outcome, planned: Outcome) -> None:
    """Assert that outputs, gradients, buffers and the generator state are equal, bit for bit."""

    def all_same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
        return len(a) == len(b) and all(map(same, a, b))

    assert all_same(plain.outputs, planned.outputs), "outputs differ"
    assert plain.gradients.keys() == planned.gradients.keys()
    for name, gradient in plain.gradients.items():
        assert same(gradient, planned.gradients[name]), f"gradient of {name} differs"
    assert all_same(plain.input_gradients, planned.input_gradients), "gradients of inputs differ"
    for name, buffer in plain.buffers.items():
        assert same(buffer, planned.buffers[name]), f"buffer {name} differs"
    assert torch.equal(plain.generator, planned.generator), "generator states differ"


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Assert that the body leaves no storage, version or node alive, without a garbage collection.

    What exists before is frozen, and stays so: `gc.get_objects` then returns only what the body leaves.
    """

    ours = {f"autoac.tape.runtime.{name}" for name in ("nodes", "saved_handles", "replay")}

    def alive() -> int:
        types = map(type, gc.get_objects())
        return sum(t is torch.UntypedStorage or t.__module__ in ours for t in types)

    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
        assert not alive(), f"{alive()} storages, versions or nodes are left"
    finally:
        gc.enable()


def region_on(model: nn.Module) -> Callable[..., None]:
    """Run a step of `model` in a region; return a function that runs another, perhaps without backward."""
    x = torch.linspace(-1, 2, 16).view(4, 4).requires_grad_()
    for t in (x, *model.parameters()):
        t.grad = torch.zeros_like(t)

    def once(*, backward: bool = True) -> None:
        with ac_client.save_recompute_policy("recompute_all"):
            out = model(x)
        if backward:
            sum(t.sum() for t in tree_leaves(out) if t.requires_grad).backward()  # type: ignore[union-attr]

    once()
    return once


class ThirdStep:
    """The allocator's peak over the third step of a training, above what stands."""

    peak = 0
    timeline: AllocatorTimeline | None = None

    def begin(self, step: int) -> None:
        if step == 2:
            self.timeline = AllocatorTimeline()
            self.timeline.__enter__()

    def end(self) -> None:
        if self.timeline is not None:
            self.timeline.__exit__(None, None, None)
            self.peak, self.timeline = self.timeline.peak_bytes, None


class Replays:
    """Count the storages that replays made, that are alive, and that were alive at most at once."""

    made = alive = most = 0

    def born(self, storage: torch.UntypedStorage) -> None:
        self.made += 1
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(storage, self.died)

    def died(self) -> None:
        self.alive -= 1


@contextlib.contextmanager
def replays() -> Iterator[Replays]:
    """Count the storages that replays make, without a mode or a profiler."""
    seen = Replays()
    original = replay._replay

    def watched(node: Node, running: replay.Pass, *rest: Any) -> None:
        original(node, running, *rest)
        for version in live_versions(node):
            tensor = running.cache.get(version.serial)
            if tensor is not None:
                seen.born(tensor.untyped_storage())

    with mock.patch.object(replay, "_replay", watched):
        yield seen
