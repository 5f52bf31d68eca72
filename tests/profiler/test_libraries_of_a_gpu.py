"""Test what a fake step says of the libraries of its GPU: cuBLAS's workspaces, and versions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from ac_client.planning.loaded_policy import other_environment
from autoac.planner import plan
from autoac.profiler import DATASHEETS, profile
from autoac.profiler.timing.cache import processor

MIB = 1 << 20
H100 = DATASHEETS["h100"]


@pytest.mark.parametrize(("device", "mib"), [("h100", 32), ("a100", 8.125), ("rtx4090", 8.125)])
def test_workspaces_of_cublas_count_for_forward_and_backward(device: str, mib: float) -> None:
    found = profile(nn.Linear(4, 4), torch.randn(2, 4), on=DATASHEETS[device])
    assert found.static.workspaces == 2 * mib * MIB
    assert found.static.total > found.static.workspaces


def test_step_without_products_has_no_workspace() -> None:
    assert profile(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8), on=H100).static.workspaces == 0
    assert profile(nn.Linear(4, 4), torch.randn(2, 4)).static.workspaces == 0


def test_policy_names_what_it_was_planned_for_and_tells_other_versions() -> None:
    found = profile(nn.Linear(4, 4), torch.randn(2, 4), on=replace(H100, cudnn=91002))
    policy = plan(found, budget_gb=1).policy()
    assert policy.tools["torch"] == torch.__version__.partition("+")[0]
    assert policy.tools["cudnn"] == "9.10.2"
    estimated = f"device NVIDIA H100 SXM (estimated), not {processor()}"
    assert other_environment(policy, torch.device("cpu")) == estimated
    older = policy.model_copy(update={"device": "cpu", "tools": {"torch": "2.0.0"}})
    assert other_environment(older, torch.device("cpu")).startswith("torch 2.0.0, not ")
    here = plan(profile(nn.Linear(4, 4), torch.randn(2, 4)), budget_gb=1).policy()
    assert other_environment(here, torch.device("cpu")) == ""
    assert here.device == processor() != "cpu"
    elsewhere = here.model_copy(update={"device": "Another CPU"})
    assert other_environment(elsewhere, torch.device("cpu")) == f"device Another CPU, not {processor()}"
