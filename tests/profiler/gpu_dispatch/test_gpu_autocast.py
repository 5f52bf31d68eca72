"""Test that autocast for a GPU holds in fake steps on a machine without one."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoac.planner import Profile
from autoac.profiler import DATASHEETS, observe, profile
from autoac.profiler.gpu_dispatch import gpu_autocast

H100 = DATASHEETS["h100"]


class Softmax(nn.Linear):
    """A product, which autocast reduces, and a softmax, which only CUDA's autocast runs in 32 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(-1)


def kinds(found: Profile) -> list[str]:
    return [found.overloads[i].split(".")[1] for i in found.ops.overload]


CAST = ["_to_copy", "_to_copy", "_to_copy", "addmm", "_to_copy", "_softmax"]


def test_autocast_is_an_argument_of_profile() -> None:
    found = profile(Softmax(16, 16), torch.randn(4, 16), on=H100, autocast=torch.bfloat16)
    assert kinds(found) == CAST
    assert found.environment.autocast == "bfloat16"
    assert not torch.is_autocast_enabled("cuda")


def test_ops_of_other_libraries_with_autocast_kernels_are_left_alone() -> None:
    with (
        torch.library._scoped_library("shop", "DEF") as shop,
        torch.library._scoped_library("shop", "IMPL") as of,
    ):
        shop.define("keep(Tensor x) -> Tensor")
        shop.impl("keep", torch.clone, "CompositeExplicitAutograd")
        of.impl("keep", torch.clone, "AutocastCUDA")
        found = profile(Softmax(16, 16), torch.randn(4, 16), on=H100, autocast=torch.bfloat16)
    assert kinds(found) == CAST


def test_autocast_on_the_cpu_uses_the_lists_of_the_cpu() -> None:
    found = profile(Softmax(16, 16), torch.randn(4, 16), autocast=torch.bfloat16)
    assert kinds(found) == CAST[:4] + CAST[5:]


def test_note_tells_that_torch_switched_autocast_off() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context = torch.autocast("cuda", dtype=torch.bfloat16)
    with context:
        found = profile(Softmax(16, 16), torch.randn(4, 16), on=H100)
    assert kinds(found) == ["addmm", "_softmax"]
    assert any(note.startswith("autocast is off") for note in found.notes)
    plain = profile(Softmax(16, 16), torch.randn(4, 16), on=H100)
    assert not any(note.startswith("autocast is off") for note in plain.notes)


class Checkpointed(Softmax):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_checkpoints_of_torch_recompute_under_the_autocast_of_forward() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    found = observe(
        Checkpointed(16, 16), (x,), {}, on=H100, autocast=torch.bfloat16, take_over_checkpoints=False
    )
    assert kinds(found) == CAST


class Asks(nn.Linear):
    """Compute in the type of autocast, as a kernel without a rule of its own does."""

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        return torch.sin(x) @ self.weight


def test_models_may_ask_for_the_autocast_of_the_device_of_a_tensor() -> None:
    found = profile(Asks(16, 16), torch.randn(4, 16), on=H100, autocast=torch.bfloat16)
    assert kinds(found)[:2] == ["_to_copy", "sin"]


def test_fake_step_leaves_autocast_unchanged() -> None:
    def state() -> tuple[object, ...]:
        asks = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype
        return *asks, torch.clear_autocast_cache, torch.get_autocast_dtype("cpu")

    before = state()
    profile(Softmax(16, 16), torch.randn(4, 16), on=H100, autocast=torch.float16)
    assert state() == before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Softmax(16, 16)(torch.randn(4, 16)).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("macro", "names"),
    [
        ("LOWER_PRECISION_FP", gpu_autocast._REDUCED),
        ("FP32_SET_OPT_DTYPE", gpu_autocast._TYPED),
        ("PROMOTE", gpu_autocast._WIDEST),
    ],
)
def test_lists_are_those_of_torch(macro: str, names: frozenset[str]) -> None:
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    found = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?)\n\n", header.read_text(), re.DOTALL)
    listed = (text.replace(" ", "").split(",") for text in re.findall(r"_\(([^()]*)\)", found[1]))
    found_names = {".".join(parts) for parts in listed}
    assert {name for name in found_names if "imname" not in name} == names  # up to 2.12, dimensions had names
