"""The GitHub action and the pre-commit hook run commands that exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from client.cli.command import run

from ac_client.cli.exit_codes import ERROR, OK

ROOT = Path(__file__).parents[3]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
PYTHON_STUB = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done >> "$CALLS"
"""


def called(step, tmp_path, **inputs):
    """Return the arguments with which a step's script runs Python."""
    stub = tmp_path / "python"
    stub.write_text(PYTHON_STUB)
    stub.chmod(0o755)
    calls = tmp_path / "calls"
    calls.write_text("")
    env = {"PATH": os.environ["PATH"], "CALLS": str(calls), "RUNNER_TEMP": str(tmp_path)}
    subprocess.run(
        ["bash", "-c", step["run"]], env=env | inputs | {"PYTHON": str(stub)}, check=True, timeout=60
    )
    return calls.read_text().splitlines()


def step_of(name):
    return next(step for step in ACTION["runs"]["steps"] if step["name"] == name)


def test_action_uses_exactly_its_declared_inputs():
    assert ACTION["runs"]["using"] == "composite"
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text()))
    assert used == set(ACTION["inputs"])
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]  # inputs are environment variables, never part of a script


def test_install_step_pins_torch_and_passes_requirements_to_pip(tmp_path):
    step = step_of("Install autoac")
    frozen = tmp_path / "my versions.txt"
    frozen.write_text(
        "anyio==4.9.0\nautoac @ git+https://github.com/OWNER/autoac@42e9b84\nautoac==0.1.0\nautoac-tool==1\n"
        "-e git+https://github.com/OWNER/model@1#egg=model\n# Editable install (model==1)\n-e /srv/model\n"
        "torch==2.13.0+cu130\ntorchvision==0.28.0+cu130\nmine @ file:///a+b.whl\n"
    )
    inputs = {
        "AUTOAC_SOURCE": "/a b",
        "TORCH": "2.13.0",
        "TORCH_INDEX": "https://index",
        "CONSTRAINTS": str(frozen),
        "REQUIREMENTS": "-r requirements.txt",
    }
    pips = " ".join(called(step, tmp_path, **inputs)).split("-m pip install ")[1:]
    assert pips == [
        "--no-deps torch==2.13.0 --index-url https://index ",
        "torch==2.13.0 /a b --extra-index-url https://index "
        f"-c {tmp_path / 'constraints.txt'} -r requirements.txt",
    ]
    assert (tmp_path / "constraints.txt").read_text().splitlines() == [
        "anyio==4.9.0",
        "autoac-tool==1",
        "# Editable install (model==1)",
        "torchvision==0.28.0",  # of whichever build the index has
        "mine @ file:///a+b.whl",
    ]
    pips = " ".join(called(step, tmp_path, **inputs | {"TORCH_INDEX": "", "CONSTRAINTS": ""}))
    assert "index-url" not in pips
    assert "-c " not in pips


def test_action_installs_the_pinned_torch_from_a_cpu_index(tmp_path):
    defaults = {name.upper().replace("-", "_"): i["default"] for name, i in ACTION["inputs"].items()}
    step = step_of("Install autoac")
    words = called(step, tmp_path, **defaults | {"AUTOAC_SOURCE": str(ROOT)})
    pin = re.search(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    assert words.count(pin) == 2
    assert words[words.index("--index-url") + 1].endswith("/cpu")
    assert set(step["env"]) <= {*defaults, "AUTOAC_SOURCE"}


@pytest.mark.parametrize("check", ["true", "false"])
def test_regenerate_step_runs_an_existing_command_with_known_options(check, tmp_path, capsys):
    words = called(step_of("autoac regenerate"), tmp_path, CONFIG="my models.toml", CHECK=check)
    assert words[:2] == ["-m", "ac_client.cli.main"]
    assert ("--check" in words) == (check == "true")
    code, _, err = run(capsys, *words[2:])  # all options are known; only the file is missing
    assert code == ERROR
    assert "my models.toml: no such file" in err


def test_hook_refuses_each_invalid_policy_of_the_repository(tmp_path):
    (hook,) = HOOKS
    assert (hook["id"], hook["language"]) == ("autoac-policies", "system")
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples/regenerate/policies").iterdir())
    assert files
    assert all(re.search(hook["files"], file) for file in files)
    bad = tmp_path / "my policy.json"
    bad.write_text("{}")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for given, code in ((files, 0), ([bad, *files], 1)):
        done = subprocess.run(
            [*shlex.split(hook["entry"]), *given],
            cwd=ROOT,
            env={"PATH": path},
            check=False,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (code, "")
        assert [line.partition(":")[2].split(":")[0].strip() for line in done.stderr.splitlines()] == (
            [str(bad)] if code else []
        )


def test_make_targets_run_existing_commands(capsys):
    makefile = (ROOT / "Makefile").read_text()
    lines = re.findall(r"^\t\$\(BIN\)/autoac (.+)$", makefile, re.MULTILINE)
    assert {line.split()[0] for line in lines} == {"demo", "regenerate"}
    for line in lines:
        assert run(capsys, *line.split(), "--help")[0] == OK
