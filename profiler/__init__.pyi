from .environment import device_name
from .errors import (
    CannotCapture,
    CannotFake,
    CannotProfile,
    NothingToProfile,
    ProfilerBusy,
    ProfilerError,
    UnsupportedTorch,
)
from .model_device import device_of
from .observe import observe, profile
from .steps.fake_ranks import fake_ranks
from .steps.training_loop import Loop, Loss
from .timing.cache import Times
from .timing.link import link_of
from .timing.on_device import datasheet_of
from .timing.roofline import DATASHEETS, Device, KernelKind

__all__ = [
    "DATASHEETS",
    "CannotCapture",
    "CannotFake",
    "CannotProfile",
    "Device",
    "KernelKind",
    "Loop",
    "Loss",
    "NothingToProfile",
    "ProfilerBusy",
    "ProfilerError",
    "Times",
    "UnsupportedTorch",
    "datasheet_of",
    "device_name",
    "device_of",
    "fake_ranks",
    "link_of",
    "observe",
    "profile",
]
