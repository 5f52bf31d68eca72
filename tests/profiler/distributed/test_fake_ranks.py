"""Test that one rank of many is profiled without memory, and without the others."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_setups import WIDTH, Attention, Words, Wrap, sharded, tensor_parallel
from stepping import seeded
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ac_client.cli.main import main
from autoac.planner import Profile, bounds, build
from autoac.profiler import DATASHEETS, CannotFake, CannotProfile, fake_ranks, observe, profile
from autoac.tape.distributed.fsdp import watch_sharding

RANKS = 8


class Projection(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x))


def words() -> Words:
    """Return a model without attention and RMS norms: a fake step does not know what they allocate inside."""
    model = seeded(Words)
    model.norm = nn.LayerNorm(WIDTH)
    for block in model.blocks:
        block.n1, block.attn, block.n2 = nn.LayerNorm(WIDTH), Projection(), nn.LayerNorm(WIDTH)
    return model


WAYS: dict[str, Wrap] = {
    "fully sharded": sharded(),
    "kept gathered": sharded(reshard_after_forward=False),
    "in another precision": sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64)),
    "replicas of shards": sharded(2, RANKS // 2),
    "tensor parallel": tensor_parallel(),
    "sequence parallel": tensor_parallel(sequence=True),
    "sharded and sequence parallel": tensor_parallel(sequence=True, also_sharded=True),
}
IDS = torch.ones(4, 32, dtype=torch.long)


def loss(logits: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten())


@contextmanager
def ranks_that_send_nothing() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def profiled(wrap: Wrap, on: torch.device | None = None) -> Profile:
    model = wrap(words())
    watch_sharding()
    optimizer = torch.optim.AdamW(model.parameters())
    return observe(model, (IDS,), {}, loss=loss, optimizer=optimizer, on=on)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("way", WAYS)
def test_a_fake_rank_holds_what_a_real_one_does(way: str, one_thread: None) -> None:
    with ranks_that_send_nothing():
        real = profiled(WAYS[way])
    with fake_ranks(RANKS):
        fake = profiled(WAYS[way], torch.device("cpu"))
    assert fake.keys() == real.keys()
    assert fake.static == real.static
    assert (fake.gradient_nbytes, fake.kept_nbytes) == (real.gradient_nbytes, real.kept_nbytes)
    assert fake.storages == real.storages
    assert fake.saved == real.saved
    assert fake.backward.name == real.backward.name
    assert bounds(build(fake)) == bounds(build(real))  # the least peak, and that of saving everything


def test_a_fake_rank_takes_no_memory_and_leaves_nothing() -> None:
    def large() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(2**17, 2**17, bias=False) for _ in range(4)))  # 64 GiB each
        for layer in model:
            fully_shard(layer)
        return fully_shard(model)

    with fake_ranks(512, rank=511):
        model = large()
        found = profile(model, torch.ones(1, 2**17), loss=torch.sum, on=DATASHEETS["h100"])
        assert all(parameter.grad is None for parameter in model.parameters())
    assert found.static.parameters == 4 * 2**36 // 512
    assert not dist.is_initialized()
    assert "resize_" not in vars(torch.UntypedStorage)
    assert torch.ones(2).tolist() == [1, 1]


def test_values_that_a_model_looks_at_are_known_while_it_is_built() -> None:
    with fake_ranks(2):
        assert torch.arange(3).tolist() == [0, 1, 2]
        with pytest.raises(CannotFake):
            torch.ones(3).tolist()


def test_a_rank_must_be_one_of_the_ranks_and_alone() -> None:
    with (
        pytest.raises(ValueError, match="rank must be at least 0 and below world_size=4, got 4"),
        fake_ranks(4, 4),
    ):
        pass
    with (
        ranks_that_send_nothing(),
        pytest.raises(RuntimeError, match="a process group of 8 ranks exists"),
        fake_ranks(4),
    ):
        pass


def test_a_sharded_model_with_memory_is_not_copied(one_thread: None) -> None:
    with ranks_that_send_nothing(), pytest.raises(CannotProfile, match="fake_ranks"):
        profile(sharded()(Words()), IDS, loss=loss, on=DATASHEETS["h100"])


def test_gradients_that_exist_before_a_step_of_a_fake_rank_are_left_to_the_plan() -> None:
    with fake_ranks(RANKS):
        model = sharded()(Words())
        with pytest.raises(CannotProfile, match=r"Constraints\(gradients='present'\)"):
            observe(model, (IDS,), {}, loss=loss, on=DATASHEETS["h100"], accumulates=True)


SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def build():
    print("rank", dist.get_rank(), "of", dist.get_world_size())
    model = fully_shard(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()))
    return {"model": model, "args": (torch.ones(8, 1024),), "loss": torch.sum}


def laid(mesh):
    print("rank", dist.get_rank(), "at", list(mesh.get_coordinate()), "of", ", ".join(mesh.mesh_dim_names))
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh())
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel()})
    return {"model": fully_shard(model, mesh=mesh["data"]), "args": (torch.ones(8, 1024),), "loss": torch.sum}
"""


def run_profile(folder: Path, monkeypatch: pytest.MonkeyPatch, *argv: str) -> object:
    """Return the exit code of the command."""
    (folder / "cluster.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "cluster", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["profile", *argv])
    return ended.value.code


@pytest.mark.parametrize(
    ("function", "ranks", "printed", "sharded_by"),
    [
        ("cluster:build", "64", "rank 3 of 64", 64),
        ("cluster:laid", "data=4,tensor=2", "rank 3 at [1, 1] of data, tensor", 8),
    ],
)
def test_the_command_profiles_one_rank_of_many(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    function: str,
    ranks: str,
    printed: str,
    sharded_by: int,
) -> None:
    argv = (function, "--on", "h100", "--ranks", ranks, "--rank", "3", "-o", "p.json")
    assert not run_profile(tmp_path, monkeypatch, *argv)
    assert printed in capsys.readouterr().out
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["static"]["parameters"] == 4 * 1024 * 1024 // sharded_by + 512
    assert run_profile(tmp_path, monkeypatch, function, "--ranks", ranks) == 2
    assert "must be left out without --on" in capsys.readouterr().err
