"""Test that a torch that differs is refused with words, before anything of it is replaced."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from autoac.tape.errors import NEWEST_TORCH, OLDEST_TORCH

ROOT = Path(__file__).parents[2]


def run(code: str, *arguments: str) -> str:
    """Run `code` in a process of its own, which ends without an error; return its output."""
    argv = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_dependency_is_the_range_that_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (first, last), (_, newest) = OLDEST_TORCH, NEWEST_TORCH
    assert f"torch>={first}.{last},<{first}.{newest + 1}" in project["dependencies"]
    assert f"torch {first}.{last} to {first}.{newest}" in (ROOT / "README.md").read_text()


def test_torch_that_was_not_tested_is_refused_at_import() -> None:
    run(
        """
        import torch
        for torch.__version__ in ("2.10.1", "1.13.0+cpu", "2.16.0.dev20300101"):
            try:
                from ac_client.apply import apply
            except ImportError as error:
                assert type(error).__name__ == "UnsupportedTorch", type(error)
                assert f"must be 2.11 to 2.15, got {torch.__version__}" in str(error), error
            else:
                raise AssertionError("imported")
        """
    )


REFUSED = """
import json, sys, traceback
import torch, torch._dynamo, ac_client
from torch import nn
from torch._functorch._aot_autograd import graph_compile
from ac_client.measure.forked_call import run_in_child
from autoac.tape.errors import UnsupportedTorch

def case(compiles):
    second_stage = graph_compile.aot_stage2_autograd
    torch.__version__ = "2.12.1+cpu"
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    if compiles == "later":
        ac_client.apply(model, 1.0)
        model(x).sum().backward()
    if compiles == "a part":
        model[0].compile(backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
    try:
        if compiles != "later":
            ac_client.apply(model, 1.0)
        model(x).sum().backward()
    except UnsupportedTorch as error:
        assert error.installed == "2.12.1+cpu"
    else:
        raise AssertionError("planned")
    assert graph_compile.aot_stage2_autograd is second_stage
    model(x).sum().backward()  # as a plain model
    ac_client.apply(eager := nn.Linear(4, 4), 1.0)  # next to code that is compiled
    eager(x).sum().backward()
    assert graph_compile.aot_stage2_autograd is second_stage

def failure(compiles):
    try:
        case(compiles)
    except BaseException:
        return traceback.format_exc()

torch.set_num_threads(1)
print(json.dumps({compiles: run_in_child(failure, compiles) for compiles in sys.argv[1:]}))
"""
CASES = ("first", "later", "a part")


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    """Tracebacks of the cases, each in a fork of one process, because importing torch takes long."""
    return json.loads(run(REFUSED, *CASES))


@pytest.mark.parametrize("compiles", CASES)
def test_compiled_model_is_refused_before_torch_is_changed(
    compiles: str, failures: dict[str, str | None]
) -> None:
    assert failures[compiles] is None
