"""Imports point one way: ac_client -> profiler -> planner <- api, and only the ends touch torch.

`pages` knows none of them.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


def loaded_by(module: str) -> set[str]:
    """What a child process finds in `sys.modules` after importing `module`."""
    code = f"import {module}, sys; print('\\n'.join(sys.modules))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return set(child.stdout.split())


@pytest.mark.parametrize("module", ["autoac.planner", "autoac.planner.report.page", "autoac.api"])
def test_planner_and_service_import_no_torch(module: str) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    assert not {name for name in loaded if name.split(".")[0] in ("torch", "transformers")}


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("autoac.planner", {"autoac.api", "autoac.profiler", "autoac.planner.report.page", "ac_client"}),
        ("autoac.planner.report.page", {"autoac.api", "autoac.profiler", "autoac.planner", "ac_client"}),
        ("autoac.api", {"autoac.profiler", "ac_client"}),
        ("autoac.profiler", {"autoac.api", "autoac.planner.report.page", "ac_client"}),
        ("ac_client", {"autoac.api"}),
        ("ac_client.integrations.loop", {"transformers", "accelerate", "lightning", "pytorch_lightning"}),
    ],
)
def test_imports_point_one_way(module: str, others: set[str]) -> None:
    assert not loaded_by(module) & others
