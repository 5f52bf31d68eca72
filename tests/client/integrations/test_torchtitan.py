"""Test the one line around a config of torchtitan, on dataclasses of its form and its order of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import ac_client
from ac_client.integrations.torchtitan import planned
from tests.client.planning.test_optimizers import Container


@dataclass(kw_only=True, slots=True)
class Training:
    disable_cuda_graphs: bool = False


@dataclass(kw_only=True)
class Spec:
    post_optimizer_build_fn: Callable[..., None] | None = None


@dataclass(kw_only=True, slots=True)
class Config:
    model_spec: Spec | None = field(default_factory=Spec)
    activation_checkpoint: object | None = "selective"
    training: Training = field(default_factory=Training)


def part() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


def trained(config: Config, parts: list[nn.Module]) -> list[nn.Module]:
    """Train as torchtitan's Trainer does: the hook is called once the optimizers are built."""
    optimizers = Container([torch.optim.AdamW(part.parameters()) for part in parts])
    if config.model_spec.post_optimizer_build_fn is not None:
        config.model_spec.post_optimizer_build_fn(optimizers, parts, object())
    for _ in range(3):
        x = torch.ones(64, 32)
        for one in parts:
            x = one(x)
        x.square().mean().backward()
        optimizers.step()
        optimizers.zero_grad()
    return parts


def weights(parts: list[nn.Module]) -> list[torch.Tensor]:
    return [p.detach() for one in parts for p in one.parameters()]


@pytest.mark.parametrize("n", [1, 2])
def test_each_part_is_planned_with_its_own_optimizer(n: int) -> None:
    plain = trained(Config(), [part() for _ in range(n)])
    parts = trained(planned(Config(), 0.1), [part() for _ in range(n)])
    assert all(map(torch.equal, weights(parts), weights(plain)))
    for one in parts:
        at = ac_client.applied(one)
        state = 2 * sum(p.nbytes for p in one.parameters()) + 4 * len(list(one.parameters()))
        report = at.report()
        assert report.off_path == ""
        assert at.policy.predicted.static_bytes >= state


def test_hook_of_the_model_runs_first_and_the_config_stays() -> None:
    calls: list[int] = []
    spec = Spec(post_optimizer_build_fn=lambda optimizers, parts, dims: calls.append(len(parts)))
    config = Config(model_spec=spec)
    changed = planned(config, 0.1)
    trained(changed, [part()])
    assert calls == [1]
    assert (changed.activation_checkpoint, changed.training.disable_cuda_graphs) == (None, True)
    assert (config.activation_checkpoint, config.training.disable_cuda_graphs) == ("selective", False)
    assert config.model_spec is spec


@pytest.mark.parametrize("config", [Config(model_spec=None), Training(), {}])
def test_other_objects_are_refused(config: object) -> None:
    with pytest.raises(TypeError, match=r"must be a torchtitan Trainer\.Config"):
        planned(config, 0.1)
