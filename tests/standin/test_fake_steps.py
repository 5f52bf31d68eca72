"""Compare fake steps for a GPU with the real ones of the stand-in, which claims to be that GPU."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ac_client
from autoac.planner import Policy, Profile, bounds, build, plan
from autoac.profiler import observe
from autoac.profiler.timing.roofline import CUDNN_OF_WHEELS, DATASHEETS
from benchmarks.models.tiny import IRREGULAR, ZOO, ZooModel
from benchmarks.observed_profile import IN_BACKWARD, IN_KERNELS, differing

# LSTM and mixture of experts cannot be faked: tests/profiler/steps/test_fake.py.
NAMES = (
    "GPT-2",
    "Llama",
    "BERT",
    "T5",
    "ViT",
    "Mamba",
    "Whisper",
    "CLIP",
    "ResNet",
    "U-Net",
    "DenseNet",
    "LSTM cells",
)
WITHOUT_CUDNN = ("Llama", "BERT", "T5", "LSTM cells")
"""Models without convolutions, whose ops in float32 do not depend on cuDNN; so is GPT-2, which stays."""


def zoo_model(name: str) -> ZooModel:
    return next(entry for entry in (*ZOO, *IRREGULAR) if entry.name == name)


def batch_on(device: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Return copies of the tensors of a batch; a tensor that is there twice stays one."""
    copies = {
        id(value): value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
        for value in batch.values()
        if isinstance(value, Tensor)
    }
    return {name: copies.get(id(value), value) for name, value in batch.items()}


def fake_and_real(
    model: nn.Module, batch: dict[str, Any], cudnn: int, dtype: torch.dtype | None
) -> tuple[Profile, Profile]:
    device = replace(DATASHEETS["h100"], cudnn=cudnn, workspace_nbytes=0)  # the stand-in has no cuBLAS
    fake = observe(model, (), batch_on("cpu", batch), on=device, autocast=dtype)
    real = observe(model.cuda(), (), batch_on("cuda", batch), autocast=dtype)
    assert fake.environment.autocast == real.environment.autocast
    return fake, real


@pytest.mark.parametrize(
    ("name", "cudnn", "dtype"),
    [
        *((name, CUDNN_OF_WHEELS, torch.bfloat16) for name in NAMES),
        *((name, CUDNN_OF_WHEELS, None) for name in WITHOUT_CUDNN),
        *((name, 0, None) for name in NAMES if name not in WITHOUT_CUDNN),
    ],
)
def test_fake_step_has_the_ops_and_bytes_of_the_real_one(
    gpu: ModuleType, name: str, cudnn: int, dtype: torch.dtype | None
) -> None:
    gpu.set_cudnn(cudnn)
    entry = zoo_model(name)
    torch.manual_seed(0)
    fake, real = fake_and_real(entry.make().train(), entry.batch(), cudnn, dtype)
    assert not differing(real, fake, *IN_BACKWARD, *IN_KERNELS)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fake_step_with_grouped_products_has_the_ops_and_bytes_of_the_real_one(
    gpu: ModuleType, dtype: torch.dtype | None
) -> None:
    gpu.set_cudnn(CUDNN_OF_WHEELS)
    entry = zoo_model("Mixtral")
    torch.manual_seed(0)
    fake, real = fake_and_real(entry.make().train(), entry.batch(), CUDNN_OF_WHEELS, dtype)
    # transformers counts tokens as floats where a model's device is a CPU.
    assert not differing(real, fake, *IN_BACKWARD, *IN_KERNELS, "ops.must_save", "reasons")


def planned(entry: ZooModel, cudnn: int, dtype: torch.dtype | None) -> Policy:
    """Return a plan for an H100 that recomputes much."""
    device = replace(DATASHEETS["h100"], cudnn=cudnn, workspace_nbytes=0)
    profile = observe(entry.make().train(), (), batch_on("cpu", entry.batch()), on=device, autocast=dtype)
    known = bounds(build(profile))
    return plan(profile, budget_bytes=(known.floor + known.ceiling) // 2).policy()


@pytest.mark.parametrize(("name", "dtype"), [("U-Net", None), ("Llama", torch.bfloat16)])
@pytest.mark.parametrize(("planned_cudnn", "cudnn"), [(CUDNN_OF_WHEELS, 0), (0, CUDNN_OF_WHEELS)])
def test_policy_survives_another_choice_of_kernels(
    gpu: ModuleType, name: str, dtype: torch.dtype | None, planned_cudnn: int, cudnn: int
) -> None:
    entry = zoo_model(name)
    policy = planned(entry, planned_cudnn, dtype)
    gpu.set_cudnn(cudnn)
    model, batch = entry.make().train().cuda(), batch_on("cuda", entry.batch())
    ac_client.apply(model, policy=policy, strict=True)  # raises if other ops run
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype is not None):
        loss = model(**batch)["loss"]
    loss.backward()
    report = ac_client.applied(model).report()
    assert report.off_path == ""
    assert report.recomputed > 0


class Casts(nn.Module):
    """A model with parts under autocasts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = self.layers[0](x).softmax(-1)
            with torch.autocast(x.device.type, enabled=False):
                x = self.layers[1](x.float())
            x = self.switched_off(x)
        with torch.autocast("cuda"):  # float16
            x = self.layers[2](x)
        return self.layers[3](x.float()).sum()

    @torch.autocast("cuda", enabled=False)
    def switched_off(self, x: Tensor) -> Tensor:
        return self.layers[3](x.float())


def test_autocasts_inside_a_model_hold_in_a_fake_step(gpu: ModuleType) -> None:
    fake, real = fake_and_real(Casts(), {"x": torch.randn(4, 16)}, 0, None)
    assert not differing(real, fake, *IN_BACKWARD, *IN_KERNELS)
