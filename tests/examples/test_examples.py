"""Run each example as a reader would."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
BY_HAND = {"with_torchtitan.py"}  # needs torchtitan, and torchrun


@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.py")} - BY_HAND))
def test_example_runs_and_reports(name):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "recompute" in done.stdout
