"""Collect the facts about torch that the profiler and the client share."""

import torch

from autoac.profiler.errors import UnsupportedTorch

try:
    from autoac.profiler.torch_facts import private as private
except (AttributeError, ImportError) as error:
    raise UnsupportedTorch(
        torch.__version__, f"it lacks a private name that autoac reads ({error})"
    ) from error
