"""Test that the client works without the packages of the service, which names its extra."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from autoac.api.cli.commands import SERVICE_PACKAGES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_OTHERS = {"anyio", "filelock", "jinja2"}  # come with httpx2 and torch

# Python without the packages of the service: runs a module once for each line of arguments.
WITHOUT = f"""
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(SERVICE_PACKAGES - OF_OTHERS)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
module, *lines = sys.argv[1:]
for line in lines:
    sys.argv = [module, *line.split()]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exited:
        print(f"exit {{exited.code or 0}}", file=sys.stderr)
"""

SETUP = """
import torch

def make():
    layers = [torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 16), torch.nn.GELU()]
    return torch.nn.Sequential(*layers).train(), (torch.randn(256, 16),), {}
"""

TRAINED = """
import sys, torch, ac_client
model = ac_client.apply(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), 1.0)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
assert not {"fastapi", "sqlalchemy", "starlette", "uvicorn", "alembic"} & sys.modules.keys()
"""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!;]", requirement)[0].replace("-", "_") for requirement in requirements}


def run(folder: Path, module: str, *lines: str) -> list[str]:
    """Return what each call with a line of arguments writes to stderr, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT, module, *lines],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_extra_of_the_service_has_what_the_client_does_not_need() -> None:
    extra = names(PROJECT["optional-dependencies"]["service"])
    assert extra - {"httptools", "uvloop"} == SERVICE_PACKAGES  # uvicorn uses these two where they are
    assert not extra & names(PROJECT["dependencies"])
    assert "autoac[service]" in PROJECT["optional-dependencies"]["postgres"]


def test_training_loads_no_package_of_the_service(tmp_path: Path) -> None:
    (tmp_path / "trained.py").write_text(TRAINED)
    run(tmp_path, "trained", "")


@pytest.mark.slow
def test_commands_of_the_client_work_without_the_service(tmp_path: Path) -> None:
    (tmp_path / "setup_of_training.py").write_text(SETUP)
    commands = (
        "profile setup_of_training:make --json",
        "plan profile.json --budget-gb 1 --json",
        "explain policy.json",
    )
    said = run(tmp_path, "ac_client.cli.main", *commands)
    assert [line for line in said if line.startswith("exit")] == ["exit 0"] * 3
    assert json.loads((tmp_path / "policy.json").read_text())


@pytest.mark.parametrize("module", ["ac_client.cli.main", "autoac.api"])
def test_commands_of_the_service_name_their_extra(module: str, tmp_path: Path) -> None:
    said = run(tmp_path, module, "serve", "worker", "db upgrade", "keys list", "doctor")
    assert said[1::2] == ["exit 1"] * 5
    for line in said[::2]:
        assert line.startswith("autoac: the planning service needs ")
        assert line.endswith("; install autoac with its extra `service`")
