"""Tensor parallelism: the ops below DTensors are recomputed, and the smallest peak is below checkpoint's."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from rank_setups import Facts, facts_of
from stepping import recomputed
from torch.testing._internal.two_tensor import TwoTensor

from autoac.tape.runtime.policy_context import save_recompute_policy
from autoac.tape.runtime.replay import EventLog

ON_TWO = ["TP", "TP, sequence", "TP, loss", "TP, dropout", "TP, uneven shards", "TP, functions"]
ON_FOUR = ["FSDP2 over TP 2x2"]

BySetup = dict[str, list[Facts]]


def facts_on(backend: str, stores: pytest.TempPathFactory) -> BySetup:
    folder = stores.mktemp(backend)
    return facts_of(ON_TWO, folder / "2", backend) | facts_of(ON_FOUR, folder / "4", backend)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> BySetup:
    return facts_on("gloo", tmp_path_factory)


@pytest.fixture(scope="module")
def on_fake_ranks(tmp_path_factory: pytest.TempPathFactory) -> BySetup:
    """Return facts of ranks on which nothing is freed late, as gloo's threads may."""
    return facts_on("fake", tmp_path_factory)


@pytest.mark.parametrize("setup", ON_TWO + ON_FOUR)
def test_tensor_parallel_model_has_the_gradients_of_the_plain_one(setup: str, on_ranks: BySetup) -> None:
    for facts in on_ranks[setup]:
        assert facts["equal"]
        assert facts["recomputed"] > 0
        assert facts["off path"] == ""
        assert facts["collectives"][0] == facts["collectives"][1]


@pytest.mark.parametrize("setup", ON_TWO + ON_FOUR)
def test_tensor_parallel_model_is_recomputed_below_its_dtensors(setup: str, on_fake_ranks: BySetup) -> None:
    for facts in on_fake_ranks[setup]:
        assert facts["smallest"] < facts["checkpoint"] < 0.7 * facts["plain"]
        assert facts["off"] == 0


def test_sharded_stages_of_a_pipeline_are_planned_for_forwards_in_flight(tmp_path: Path) -> None:
    for facts in facts_of(["FSDP2, 1F1B"], tmp_path / "store", "gloo")["FSDP2, 1F1B"]:
        assert facts["equal"]
        assert facts["recomputed"] > 0
        assert facts["collectives"][0] == facts["collectives"][1]
        assert facts["smallest"] < facts["checkpoint"]
        assert facts["off"] <= 0


def test_wrapper_of_several_tensors_is_recomputed() -> None:
    def gradient(log: EventLog | None) -> TwoTensor:
        inside = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(2)]
        x = TwoTensor(*inside).requires_grad_()
        with nullcontext() if log is None else save_recompute_policy("recompute_all", log=log):
            y = (x.tanh() * 2).sin().exp()
        y.sum().backward()
        assert isinstance(x.grad, TwoTensor)
        return x.grad

    log = EventLog()
    plain, ours = gradient(None), gradient(log)
    assert torch.equal(plain.a, ours.a)
    assert torch.equal(plain.b, ours.b)
    assert sum("tanh" in name for name in recomputed(log)) == 2
