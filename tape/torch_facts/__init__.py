"""Collect the facts about torch that the profiler and the client share."""

import torch

from autoac.tape.errors import NEWEST_TORCH, OLDEST_TORCH, UnsupportedTorch


def minor_version() -> tuple[int, int]:
    """Return the first two numbers of the version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


if not OLDEST_TORCH <= minor_version() <= NEWEST_TORCH:
    raise UnsupportedTorch(torch.__version__, "autoac uses private names of torch, and was tested with these")
try:
    from autoac.tape.torch_facts import private as private
except (AttributeError, ImportError) as error:
    raise UnsupportedTorch(
        torch.__version__, f"it lacks a private name that autoac reads ({error})"
    ) from error
