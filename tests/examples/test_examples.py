"""Run each example as a reader would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
BY_HAND = {"with_torchtitan.py"}  # needs torchtitan, and torchrun


@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.py")} - BY_HAND))
def test_example_runs_and_reports(name, tmp_path):
    run = [sys.executable, EXAMPLES / name]
    environment = os.environ | {"XDG_DATA_HOME": str(tmp_path)}  # and not this user's database
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "recompute" in done.stdout
