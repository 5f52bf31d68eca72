"""Handle what a device does only in its first backward, which later steps do not repeat."""

from __future__ import annotations

import torch


def is_first_backward_special(device: torch.device) -> bool:
    """Return True if the first backward of an op on `device` takes other time and memory than later ones.

    On a GPU, kernels are loaded and handles are created at first use. With `torch.backends.cudnn.benchmark`,
    cuDNN tries several algorithms, each with its own memory, and remembers the result by thread. Backward
    runs on a thread of its own, so no forward does any of this for it.
    """
    return device.type != "cpu"
