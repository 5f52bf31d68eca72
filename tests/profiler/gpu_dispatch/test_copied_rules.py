"""The rules of profiler/gpu_dispatch are those of the installed torch."""

from __future__ import annotations

import torch

from autoac.profiler import gpu_dispatch


def test_rules_were_compared_with_the_installed_torch() -> None:
    """After an update, compare the sources that the files of profiler/gpu_dispatch name, of both releases."""
    assert ".".join(torch.__version__.split(".")[:2]) == gpu_dispatch.COPIED_FROM
