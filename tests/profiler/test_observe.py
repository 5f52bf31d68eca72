"""The peak of a plain step, cached run times, and what is as before after a step."""

from __future__ import annotations

import contextlib
import functools
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from blocks import Body
from stepping import allocated_peak
from torch import Tensor, nn

from autoac.planner import build, simulate
from autoac.planner.memory.schedule import OptimizerStep
from autoac.planner.problem.microbatch import with_gradients
from autoac.profiler import DATASHEETS, CannotProfile, Loop, Times, observe, profile
from autoac.profiler.static_memory import optimizer_bytes, optimizer_step_us
from autoac.tape.torch_facts.gradients import roots_of
from benchmarks.models.modules import Transformer
from benchmarks.models.tiny import ZOO, ZooModel

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = [entry for entry in ZOO if entry.name in ("GPT-2", "ResNet", "LSTM", "mixture of experts")]
CASTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "fp32": contextlib.nullcontext,
    "bf16 autocast": functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize(
    ("entry", "casting"),
    [(entry, "fp32") for entry in ZOO] + [(entry, "bf16 autocast") for entry in SOME],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_plain_step_has_the_predicted_peak(entry: ZooModel, casting: str) -> None:
    model, batch = entry.make().train(), entry.batch()

    def step() -> None:
        with CASTINGS[casting]():
            roots = [root for root in roots_of(model(**batch)) if root.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    with CASTINGS[casting]():
        found = profile(model, **batch)
    graph = build(found.with_dropped_outputs(found.droppable_outputs))
    before_optimizer = [
        i for i in simulate(graph, graph.everything).instants if not isinstance(i.event, OptimizerStep)
    ]
    assert allocated_peak(step) == max(i.live_bytes for i in before_optimizer) - graph.static_bytes


class UsedTwice(nn.Module):
    """An embedding whose gradients the engine adds up in place, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(128, 16), nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embed(ids)))
        return torch.tanh(self.frozen(hidden + self.embed(ids))).square().mean()


@pytest.mark.parametrize("name", ["used twice", "GPT-2", "T5"])
def test_step_that_finds_gradients_follows_from_one_that_makes_them(name: str) -> None:
    """The oracle is a step on a model that has gradients. GPT-2 ties two weights, T5 three."""
    torch.manual_seed(0)
    model: nn.Module = UsedTwice()
    batch: dict[str, Tensor] = {"ids": torch.randint(0, 128, (2, 4))}
    if entry := next((entry for entry in ZOO if entry.name == name), None):
        model, batch = entry.make().train(), entry.batch()
    found = observe(model, (), batch, accumulates=True)
    derived = with_gradients(observe(model, (), batch, accumulates=False))
    assert derived.static == found.static
    n = len(found.ops)
    draw = random.Random(0)
    graphs = build(found), build(derived)
    for share in (1.0, 0.5, 0.0):
        save_set = frozenset(op.id for op in graphs[0].ops if draw.random() < share)
        steps = [simulate(graph, save_set).instants for graph in graphs]
        for moments in (range(n), range(n, 10 * n)):
            oracle, peak = (max(i.live_bytes for i in step if i.moment in moments) for step in steps)
            assert peak == oracle


def test_device_that_no_step_can_run_on_is_refused() -> None:
    model, x = Transformer(), torch.randn(2, 8, 32)
    with pytest.raises(ValueError, match="on must be"):
        profile(model, x, on="h100")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"on must be .* got device\(type='meta'\); pass DATASHEETS"):
        profile(model, x, on=torch.device("meta"))
    with pytest.raises(CannotProfile, match="on=DATASHEETS"):
        profile(model.to("meta"), x.to("meta"))


def test_model_that_is_not_a_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got a type"):
        profile(Transformer, torch.randn(2, 8, 32))  # type: ignore[arg-type]


def test_loss_that_is_not_a_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"loss must return .* got a NoneType"):
        profile(nn.Linear(4, 4), torch.randn(2, 4), loss=lambda _out: None)  # type: ignore[arg-type, return-value]


def test_cached_times_make_the_second_profile_equal_to_the_first(tmp_path: Path) -> None:
    times = Times(tmp_path / "new" / "times.sqlite3")
    model, x = Transformer(layers=2), torch.randn(2, 8, 32)
    first = profile(model, x, times=times)
    assert profile(model, x, times=times) == first
    assert profile(Transformer(layers=2), x, times=times).digest == first.digest
    # Another batch has other ops, which are measured; those that it shares are not.
    other = profile(model, torch.randn(2, 9, 32), times=times)
    assert other.ops.runtime_us != first.ops.runtime_us
    times.path.unlink()
    assert profile(model, x, times=times).ops.runtime_us != first.ops.runtime_us


@pytest.mark.parametrize("cached", [False, True])
def test_forward_and_backward_run_once(tmp_path: Path, *, cached: bool) -> None:
    times = Times(tmp_path / "times.sqlite3") if cached else None
    calls: list[str] = []

    class Counts(Transformer):
        def forward(self, x: Tensor) -> Any:
            calls.append("forward")
            out = super().forward(x)
            out["logits"].register_hook(lambda _gradient: calls.append("backward"))
            return out

    model, x = Counts(), torch.randn(2, 8, 32)
    for _ in range(2):
        calls.clear()
        observe(model, (x,), {}, times=times)
        assert calls == ["forward", "backward"]
    calls.clear()
    observe(model, (x,), {}, loop=Loop(3))
    assert calls == ["forward"] * 3 + ["backward"] * 3


def test_environment_variable_names_the_cache_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    monkeypatch.setenv("AUTOAC_TIMES", "0")
    assert Times.of_environment() is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOAC_TIMES", "1")
    assert profile(model, x) == profile(model, x)
    with contextlib.closing(sqlite3.connect(tmp_path / "autoac" / "times.sqlite3")) as file:
        assert file.execute("select count(*) from ops").fetchone() == (1,)


def test_invalid_cache_file_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "times.sqlite3"
    path.write_text("this is not a database, and long enough to show it " * 40)
    assert profile(nn.Linear(4, 4), torch.randn(2, 4), times=path).ops
    assert caplog.text.count("measured again") == 1
    assert path.read_text().startswith("this is not a database")


@pytest.mark.parametrize("junk", [("'no json'", "'x'"), ("'[\"x\"]'", "-1.0"), ("'3'", "9e999")])
def test_invalid_times_in_the_cache_are_ignored_with_a_warning(
    tmp_path: Path, junk: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "times.sqlite3"
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    profile(model, x, times=path)
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.executescript(f"update steps set runtimes_us = {junk[0]}; update ops set runtime_us = {junk[1]}")
    found = profile(model, x, times=path)
    assert "cannot be read or written" in caplog.text
    times_us = (*found.ops.runtime_us, *found.backward.runtime_us)
    assert all(0 <= us < 1e9 for us in times_us)  # 0: less than reading the clock takes


def test_runtimes_are_medians_of_several_samples_with_their_spread() -> None:
    layers = (nn.Linear(64, 64), nn.Tanh()) * 3  # backward replays all but the last, whose output is there
    found = profile(nn.Sequential(*layers), torch.randn(256, 64))
    assert not any("one sample" in note for note in found.notes)
    assert all(us > 0 for us in found.ops.runtime_us)
    assert any(us > 0 for us in found.ops.spread_us)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Tensor:
        raise ZeroDivisionError


class Stateful(nn.Module):
    """Count calls, draw from every generator, switch the module's mode, and raise if `breaks` says so."""

    def __init__(self, breaks: str = "") -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.own = torch.Generator().manual_seed(3)
        self.calls, self.breaks, self.cache = 0, breaks, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.late = self.calls
        random.random(), numpy.random.rand()
        self.norm.eval()
        self.norm.train()
        self.training = False
        self.cache = y = self.norm(self.linear(x)) * torch.rand(4, generator=self.own) * torch.rand(4)
        if self.breaks == "forward":
            raise ZeroDivisionError
        if self.breaks == "backward":
            y = Breaks.apply(y)  # raises only with autograd, as in training
        return y


@pytest.mark.parametrize("breaks", ["", "forward", "backward"])
def test_fake_step_changes_nothing_even_if_it_raises(breaks: str) -> None:
    model, x = Stateful(breaks), torch.randn(3, 4)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    attributes = [dict(module.__dict__) for module in model.modules()]
    generators = torch.get_rng_state(), model.own.get_state(), random.getstate(), numpy.random.get_state()
    with pytest.raises(ZeroDivisionError) if breaks else contextlib.nullcontext():
        profile(model, x, on=DATASHEETS["h100"])
    assert [dict(module.__dict__) for module in model.modules()] == attributes
    check_unchanged(model, before, generators)
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("accumulates", [None, False, True])
@pytest.mark.parametrize("breaks", ["", "forward", "backward"])
def test_gradients_buffers_and_generators_are_as_before_even_if_a_step_raises(
    breaks: str, *, accumulates: bool | None
) -> None:
    model, x, fired = Stateful(breaks), torch.randn(3, 4, requires_grad=True), list[Tensor]()
    weight, bias = model.linear.weight, model.linear.bias
    weight.grad = held = torch.full((4, 4), 2.0)
    weight.register_post_accumulate_grad_hook(fired.append)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    generators = torch.get_rng_state(), model.own.get_state(), random.getstate(), numpy.random.get_state()
    with pytest.raises(ZeroDivisionError) if breaks else contextlib.nullcontext():
        observe(model, (x,), {}, accumulates=accumulates)
    check_unchanged(model, before, generators)
    assert weight.grad is held
    assert torch.equal(held, torch.full((4, 4), 2.0))
    assert x.grad is bias.grad is None
    assert all(buffers[name] is buffer for name, buffer in model.named_buffers())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not fired
    if breaks != "backward":
        model.breaks = ""
        model(x).sum().backward()
        assert fired == [weight]


def check_unchanged(model: Stateful, before: dict[str, Tensor], generators: tuple[Any, ...]) -> None:
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert torch.equal(model.own.get_state(), generators[1])
    assert random.getstate() == generators[2]
    assert numpy.array_equal(numpy.random.get_state()[1], generators[3][1])
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch._C._autograd._profiler_enabled()
    assert torch.is_grad_enabled()


def test_accumulated_gradients_count_from_the_start() -> None:
    model, x = Transformer(), torch.randn(2, 8, 32)
    declared = observe(model, (x,), {}, accumulates=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    existing = observe(model, (x,), {})
    assert declared.static.gradients == sum(p.nbytes for p in model.parameters())
    assert declared.fingerprint == existing.fingerprint
    assert declared.backward.peak_nbytes == existing.backward.peak_nbytes
    assert declared.gradient_nbytes == 0


@pytest.mark.parametrize("foreach", [False, True])
def test_factored_state_of_adafactor_counts_before_its_first_step(foreach: bool) -> None:
    model, x = Transformer(), torch.randn(2, 8, 32)
    optimizer = torch.optim.Adafactor(model.parameters(), foreach=foreach)
    found = observe(model, (x,), {}, optimizer=optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    assert found.static.optimizer_state == sum(t.nbytes for t in state)
    assert 0 < found.static.optimizer_state < found.static.parameters / 2  # a row and a column of each
    assert found.optimizer_workspace_nbytes > 0
    assert not any("could not be run" in note for note in found.notes)


@pytest.mark.parametrize(
    ("settings", "at_once", "steps_there"),
    [
        ({}, True, False),  # on a GPU torch updates all at once; step counts are on the host
        ({"foreach": False}, False, False),
        ({"fused": True}, None, True),
        ({"capturable": True}, True, True),
        ({"lr": torch.tensor(0.1)}, False, False),
    ],
)
def test_optimizer_on_a_gpu_copies_all_parameters_at_once(
    settings: dict[str, Any], at_once: bool | None, steps_there: bool
) -> None:
    """torch would update the fake tensors that stand for the parameters one by one."""
    rounded = 512
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    needs = optimizer_bytes(optimizer, torch.device("cpu"), DATASHEETS["h100"])
    one = 64 * 64 * 4
    assert needs.note == ""
    assert needs.state == 4 * (2 * one + (rounded if steps_there else 0))
    if at_once is None:
        assert needs.workspace == 0  # one kernel
    else:
        assert (needs.workspace >= 4 * one) is at_once
    assert all("foreach" not in settings or group["foreach"] is False for group in optimizer.param_groups)


def test_optimizer_on_a_cpu_updates_one_parameter_after_another() -> None:
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
    needs = optimizer_bytes(torch.optim.AdamW(model.parameters()), torch.device("cpu"))
    assert needs.state == 4 * (2 * 64 * 64 * 4 + 4)  # plus one step count per parameter
    assert 64 * 64 * 4 <= needs.workspace < 4 * 64 * 64 * 4


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool, torch.quint8])
def test_parameter_that_never_trains_takes_no_state_from_the_others(dtype: torch.dtype) -> None:
    zeros = torch.zeros(10)
    frozen = torch.quantize_per_tensor(zeros, 0.1, 0, dtype) if dtype is torch.quint8 else zeros.to(dtype)
    trained = nn.Parameter(torch.zeros(64, 64))
    parameters = [trained, nn.Parameter(frozen, requires_grad=False)]
    needs = optimizer_bytes(torch.optim.AdamW(parameters), torch.device("cpu"))
    assert needs == optimizer_bytes(torch.optim.AdamW([trained]), torch.device("cpu"))
    assert needs.note == ""


def test_parameter_that_gets_no_gradient_has_no_state() -> None:
    """An unused head, or experts without tokens. Before the first step, nothing is known of it."""
    used, unused = nn.Linear(8, 8, bias=False), nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW([*used.parameters(), *unused.parameters()])
    cpu = torch.device("cpu")
    before = optimizer_bytes(optimizer, cpu)
    used(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    alone = optimizer_bytes(torch.optim.AdamW(used.parameters()), cpu)
    assert optimizer_bytes(optimizer, cpu) == alone
    assert before.state > alone.state + 2 * unused.weight.nbytes


@torch.compile(backend="eager", fullgraph=True)
def update(parameter: Tensor, gradient: Tensor, average: Tensor) -> None:
    parameter.sub_(average.lerp_(gradient, 0.1))


class Managed(torch.optim.Optimizer):
    """Its step is compiled, as torchao's of 8 bits is, and reads an object, as that of bitsandbytes does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.manager = SimpleNamespace(steps=0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.manager.steps += 1
        for one in self.param_groups[0]["params"]:
            update(one, one.grad, self.state[one].setdefault("average", torch.zeros_like(one)))


def test_a_compiled_step_that_reads_an_object_is_run_on_a_copy() -> None:
    weight = nn.Parameter(torch.zeros(64, 64))
    optimizer, cpu = Managed([weight]), torch.device("cpu")
    assert optimizer_bytes(optimizer, cpu).state == weight.nbytes
    weight.grad = torch.ones_like(weight)
    optimizer.step()  # still compiles
    assert optimizer_step_us(optimizer, cpu) > 0
    assert optimizer.manager.steps == 1
    assert torch.equal(weight, torch.full_like(weight, -0.1))


# torch's own, when it loads decompositions for forward mode
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_zeros_without_memory_are_handled() -> None:
    def sloped(m: Any, x: Tensor) -> Tensor:
        y, slope = torch.func.jvp(lambda t: m.inner(t).tanh(), (x,), (torch.ones_like(x),))
        return y + slope

    found = profile(Body(sloped), torch.randn(3, 4))  # the parameters' tangents are such zeros
    zeros = [i for i, key in enumerate(found.keys()) if "_efficientzerotensor" in key]
    assert zeros
    assert not set(zeros) & set(found.values.op)
