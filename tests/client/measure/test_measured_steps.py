"""Test a measured peak next to the predicted one: in the report and on its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from stepping import binding_budget, seeded

import ac_client
from autoac.planner.report.timeline import BACKWARD, RECOMPUTE
from autoac.planner.units import GIB, format_bytes
from autoac.profiler import profile
from benchmarks.models.modules import Transformer

BATCH = torch.randn(4, 48, 64)


def new_model() -> Transformer:
    return seeded(Transformer, layers=3, width=64)


@pytest.fixture(scope="module")
def budget() -> int:
    return binding_budget(profile(new_model(), BATCH))


def step(model: torch.nn.Module) -> None:
    torch.manual_seed(1)
    out = list(model(BATCH).values())
    torch.autograd.backward(out, [torch.ones_like(t) for t in out])
    model.zero_grad()


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL
    )
    return json.loads(found[1])


def test_page_and_text_have_the_measured_peak_next_to_the_predicted_step(budget: int, tmp_path: Path) -> None:
    model = ac_client.apply(new_model(), budget / GIB)
    at = ac_client.applied(model)
    step(model)
    at.report(html=tmp_path / "page.html")
    assert data_of(tmp_path / "page.html")["measured_peak_bytes"] is None
    with at.measure():
        step(model)
    report = at.report(html=tmp_path / "page.html")
    data = data_of(tmp_path / "page.html")
    track = data["tracks"][0]
    assert data["measured_peak_bytes"] == report.measured_peak_bytes
    assert track["live_bytes"][track["peak"]] == report.predicted_peak_bytes
    assert data["budget_bytes"] == budget
    assert {RECOMPUTE, BACKWARD} <= set(track["kind"])
    assert sum(holding.nbytes for holding in report.live_at_peak) == report.predicted_peak_bytes
    text = str(report)
    assert f"measured {format_bytes(report.measured_peak_bytes)} (" in text
    assert f"live at the peak, {report.peak_at}:" in text
    assert "parameters, buffers, gradients, optimizer state, batch  (not planned)" in text


def test_peak_is_not_on_the_page_of_a_plan_that_was_made_after_it(budget: int, tmp_path: Path) -> None:
    model = ac_client.apply(new_model(), budget / GIB)
    at = ac_client.applied(model)
    step(model)
    first = at.policy
    beyond_budget = budget - first.predicted.peak_bytes + 200_000  # run times decide how full a plan is
    held = []

    def larger(*_: Any) -> None:
        held.append(torch.empty(beyond_budget, dtype=torch.uint8))  # did not run while profiling

    handle = model.register_forward_hook(larger)
    with at.measure():
        step(model)
    handle.remove()
    assert at.report().corrections == 1
    at.report(html=tmp_path / "page.html")
    assert data_of(tmp_path / "page.html")["measured_peak_bytes"] is None
    step(model)
    with at.measure():
        step(model)
    report = at.report(html=tmp_path / "page.html")
    data = data_of(tmp_path / "page.html")
    assert data["measured_peak_bytes"] == report.measured_peak_bytes
    assert data["corrected_by_bytes"] > 0
    assert data["budget_bytes"] == budget


def test_page_needs_a_plan_and_its_bytes(budget: int, tmp_path: Path) -> None:
    first = ac_client.apply(new_model(), budget / GIB)
    with pytest.raises(RuntimeError, match="run one training step first"):
        ac_client.applied(first).report(html=tmp_path / "page.html")
    step(first)
    policy = ac_client.applied(first).policy
    second = ac_client.apply(new_model(), policy=policy)
    step(second)
    with pytest.raises(RuntimeError, match="autoac explain POLICY --profile PROFILE --html"):
        ac_client.applied(second).report(html=tmp_path / "page.html")
    assert ac_client.applied(second).report().live_at_peak == ()
    assert list(tmp_path.iterdir()) == []


def test_report_on_a_cpu_says_how_to_measure_the_peak(budget: int) -> None:
    model = ac_client.apply(new_model(), budget / GIB)
    at = ac_client.applied(model)
    assert "peak" not in str(at.report())
    step(model)
    step(model)
    text = str(at.report())
    assert "not measured yet (on a CPU, run a step in `with ac_client.applied(model).measure():`)" in text
    assert "measured not" not in text
    with at.measure():
        step(model)
    assert "not measured yet" not in str(at.report()).partition("step:")[0]
