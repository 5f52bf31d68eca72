"""Collect the facts about torch that the profiler and the client share."""

import torch

from autoac.tape.errors import OLDEST_TORCH, UnsupportedTorch


def minor_version() -> tuple[int, int]:
    """Return the first two numbers of the version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


if minor_version() < OLDEST_TORCH:
    raise UnsupportedTorch(torch.__version__, "it is too old")
try:
    from autoac.tape.torch_facts import private as private
except UnsupportedTorch:
    raise
except (AttributeError, ImportError) as error:
    raise UnsupportedTorch(
        torch.__version__, f"it lacks a private name that autoac reads ({error})"
    ) from error
