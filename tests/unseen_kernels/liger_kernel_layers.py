"""Train with Liger's kernels under Triton's interpreter; exit with 1 if a way of ours changes a gradient."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed.tensor

torch.cuda.device = lambda *_: contextlib.nullcontext()  # Liger enters it, also for tensors of the CPU

from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # noqa: E402
from liger_kernel.ops.swiglu import LigerSiLUMulFunction  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402

from unseen_kernels.four_ways import compare_four_ways  # noqa: E402

WIDTH = 32
NONE_RUNS = 77  # the status of a skipped test: the interpreter cannot run these kernels


class LigerBlock(nn.Module):
    def __init__(self, *, rms_norm: bool) -> None:
        super().__init__()
        self.weight, self.rms_norm = nn.Parameter(torch.rand(WIDTH) + 0.5), rms_norm
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.rms_norm:
            h = LigerRMSNormFunction.apply(x, self.weight, 1e-6, 0.0, "llama", False)
        else:
            h = F.rms_norm(x, (WIDTH,), self.weight)
        return x + self.down(LigerSiLUMulFunction.apply(self.gate(h), self.up(h)))


def runs(rms_norm: bool) -> bool:
    """Return True if the kernels run here: Liger's norm asks for the number of a GPU's multiprocessors."""
    try:
        LigerBlock(rms_norm=rms_norm)(torch.ones(8, WIDTH)).sum().backward()
    except (AssertionError, RuntimeError, InterpreterError) as error:
        print(f"rms_norm={rms_norm}: {type(error).__name__}: {error}")
        return False
    return True


if __name__ == "__main__":
    x = torch.linspace(-2, 2, 8 * WIDTH).view(8, WIDTH)
    ran = [norm for norm in (False, True) if runs(norm)]
    if not ran:
        raise SystemExit(NONE_RUNS)
    for norm in ran:
        compare_four_ways(
            lambda norm=norm: nn.Sequential(*(LigerBlock(rms_norm=norm) for _ in range(2))), lambda _: x
        )
