"""Ask for the versions of libraries that choose the kernels of a device."""

from __future__ import annotations

import torch


def cudnn_of(device: torch.device) -> int:
    """Return the version of cuDNN on `device`, as 92000 for 9.20.0; 0 where there is none."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.backends.cudnn.version() or 0
