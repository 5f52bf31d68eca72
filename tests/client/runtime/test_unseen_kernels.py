"""Test that kernels which PyTorch does not dispatch change no gradient in plans, regions, checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoints import checkpoint_each
from stepping import EventLog
from torch import Tensor, nn
from unseen_kernels.layers import FUNCTIONS, KINDS, batch, network
from unseen_kernels.steps import STEPS, Run, in_a_region, in_checkpoints, loss_of, plainly
from unseen_kernels.steps import steps as taken

import ac_client
from autoac.planner import ConflictingPins, InfeasibleBudget, find_minimum_peak
from autoac.profiler import profile

pytestmark = pytest.mark.usefixtures("unseen_kernels")

ROOT = Path(__file__).parents[3]


def steps(model: nn.Module, run: Run) -> list[Tensor]:
    return taken(model, run, lambda number: (batch() + 0.1 * number).requires_grad_())


def examined_before(kind: str, net: nn.Module, run: Run) -> nn.Module:
    """Run the forwards that are profiled or examined if `kind` draws numbers that neither can restore."""
    if kind == "own noise":
        for _ in range(2):  # with gradients from the first step, the second is profiled again
            loss_of(run(net, batch().requires_grad_())).backward()
    return net


@cache
def plain_steps(kind: str) -> list[Tensor]:
    return steps(network(kind), plainly)


def assert_plain(kind: str, model: nn.Module, run: Run) -> None:
    plain = plain_steps(kind)
    ours = steps(examined_before(kind, model, run), run)
    assert len(plain) == len(ours)
    differing = [i for i, (a, b) in enumerate(zip(plain, ours, strict=True)) if not torch.equal(a, b)]
    assert not differing, f"{len(differing)} of {len(plain)} tensors differ"


@pytest.mark.parametrize("kind", KINDS)
def test_plan_that_recomputes_all_it_may_has_the_plain_gradients(kind: str) -> None:
    net = network(kind)
    ac_client.pin(net, "must_recompute")
    ac_client.apply(net, budget_gb=1.0)
    assert_plain(kind, net, plainly)
    report = ac_client.applied(net).report()
    assert report.recomputed >= 4, "the visible layers can be recomputed"
    assert not report.off_path, "the model does not run the copies that the runtime makes"


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (
            "fills empty",
            "1/aten.empty_like.default#0 and 1 more must be saved (1.00 KiB): written by a kernel",
        ),
        ("rope", "1/Rope#0 and 1 more must be saved (1.00 KiB): it writes its arguments"),
    ],
)
def test_report_lists_what_must_be_saved_for_what_pytorch_does_not_show(kind: str, line: str) -> None:
    net = network(kind)
    ac_client.apply(net, budget_gb=1.0)
    assert ac_client.applied(net).report().beyond_dispatch == ()
    loss_of(net(batch().requires_grad_())).backward()
    report = ac_client.applied(net).report()
    assert report.beyond_dispatch[0].startswith(line)
    assert f"  {line}" in str(report)


@pytest.mark.parametrize("kind", KINDS)
def test_pinned_unseen_layer_has_the_plain_gradients_or_is_refused(kind: str) -> None:
    net = network(kind)
    ac_client.pin(net[1], "must_recompute")
    ac_client.apply(net, budget_gb=1.0)
    try:
        assert_plain(kind, net, plainly)
    except ConflictingPins:
        pass


@cache
def peaks(kind: str) -> tuple[int, int]:
    """Return the smallest peak of the first profile, and that of a plan with memory to spare."""
    found = profile(network(kind), batch().requires_grad_(), loss=loss_of)
    net = network(kind)
    ac_client.apply(net, budget_gb=1.0)
    loss_of(net(batch().requires_grad_())).backward()
    smallest = find_minimum_peak(found, gap=0.05).found
    return smallest, ac_client.applied(net).policy.predicted.peak_bytes


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "own noise"])  # each profile draws
def test_budgets_have_the_plain_gradients(kind: str, share: float) -> None:
    smallest, largest = peaks(kind)
    net = network(kind)
    budget = smallest + share * (largest - smallest)
    ac_client.apply(net, budget_gb=budget / 2**30)
    try:
        assert_plain(kind, net, plainly)
    except InfeasibleBudget:
        assert share == 0.0, "the first profile has another minimum"
    except ac_client.ContentsDiffer:
        assert kind == "swiglu over saved, read before", "its backward writes over what a plan may save"


def in_one_checkpoint(net: nn.Module, x: Tensor, log: EventLog | None = None) -> Tensor:
    return ac_client.checkpoint(net, x, use_reentrant=False)


@pytest.mark.parametrize("way", [in_checkpoints, in_one_checkpoint, in_a_region])
@pytest.mark.parametrize("kind", KINDS)
def test_way_to_recompute_has_the_plain_gradients(kind: str, way: Callable[..., Tensor]) -> None:
    log = EventLog()
    assert_plain(kind, network(kind), partial(way, log=log))
    if way is not in_one_checkpoint:
        recomputed = [name for event, name in log.events if event == "recompute"]
        assert len(recomputed) >= 2 * STEPS, "the visible layers are recomputed"


@pytest.mark.parametrize("kind", ["rms norm", "swiglu", "swiglu over saved", "rope unmarked", "attention"])
def test_autocast_in_bfloat16_has_the_plain_gradients(kind: str) -> None:
    def cast(net: nn.Module, x: Tensor, how: Run) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return how(net, x)

    plain = steps(network(kind), partial(cast, how=plainly))
    pinned = network(kind)
    ac_client.pin(pinned, "must_recompute")
    ac_client.apply(pinned, budget_gb=1.0)
    for model, how in ((network(kind), checkpoint_each), (pinned, plainly)):
        assert all(map(torch.equal, plain, steps(model, partial(cast, how=how))))


# Functions that may not run twice, and those whose saved tensors autograd does not hold.
NOT_PLANNED = {"own noise", "writes an argument", "rms norm in attributes"}


@pytest.mark.parametrize("kind", sorted(FUNCTIONS.keys() - NOT_PLANNED))
def test_function_is_one_op_of_the_plan(kind: str) -> None:
    net = network(kind)
    ac_client.pin(net, "must_recompute")
    ac_client.apply(net, budget_gb=1.0)
    steps(net, plainly)
    decisions = ac_client.applied(net).policy.decisions
    inside = {key for key in decisions if key.startswith("1/") and "aten" not in key}
    assert inside, f"no Function among {sorted(decisions)}"


@pytest.mark.parametrize("library", ["triton", "liger_kernel"])
def test_real_triton_kernels_have_the_plain_gradients(library: str) -> None:
    if find_spec(library) is None or find_spec("triton") is None:
        pytest.skip(f"{library} is not installed")
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"unseen_kernels.{library}_layers"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        },
    )
    if child.returncode == 77:
        pytest.skip(f"the interpreter cannot run the kernels of {library}: {child.stdout}")
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-2000:]
