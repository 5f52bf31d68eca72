"""The GitHub action, the reusable workflow and the pre-commit hook run commands that exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ac_client.cli.exit_codes import ERROR, OK
from ac_client.cli.main import main

ROOT = Path(__file__).parents[3]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
# YAML 1.1 reads the key `on` as true.
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "regenerate.yml").read_text())
JOB = WORKFLOW["jobs"]["regenerate"]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
PYTHON_STUB = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done >> "$CALLS"
"""


def called(step, tmp_path, **inputs):
    """Return the arguments with which a step's script runs Python."""
    stub = tmp_path / "python"
    stub.write_text(PYTHON_STUB)
    stub.chmod(0o755)
    venv = tmp_path / "autoac" / "bin"
    venv.mkdir(parents=True, exist_ok=True)
    (venv / "python").unlink(missing_ok=True)
    (venv / "python").symlink_to(stub)
    calls = tmp_path / "calls"
    calls.write_text("")
    env = {"PATH": os.environ["PATH"], "CALLS": str(calls), "RUNNER_TEMP": str(tmp_path)}
    subprocess.run(
        ["bash", "-c", step["run"]], env=env | inputs | {"PYTHON": str(stub)}, check=True, timeout=60
    )
    return calls.read_text().splitlines()


def step_of(steps, name):
    return next(step for step in steps if step.get("name") == name)


def test_action_uses_exactly_its_declared_inputs():
    assert ACTION["runs"]["using"] == "composite"
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text()))
    assert used == set(ACTION["inputs"])
    for step in ACTION["runs"]["steps"]:
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]  # inputs are environment variables, never part of a script


def test_workflow_uses_exactly_its_declared_inputs():
    declared = WORKFLOW[True]["workflow_call"]["inputs"]
    used = set(
        re.findall(r"inputs\.([\w-]+)", (ROOT / ".github" / "workflows" / "regenerate.yml").read_text())
    )
    assert used == set(declared)
    assert all(given["type"] in ("string", "boolean", "number") for given in declared.values())
    assert declared["runner"]["required"]
    assert JOB["runs-on"] == "${{ inputs.runner }}"
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert all("${{" not in step.get("run", "") for step in JOB["steps"])


@pytest.mark.parametrize("steps", [ACTION["runs"]["steps"], JOB["steps"]], ids=["action", "workflow"])
def test_install_step_pins_torch_and_passes_requirements_to_pip(steps, tmp_path):
    step = step_of(steps, "Install autoac")
    frozen = tmp_path / "my versions.txt"
    frozen.write_text(
        "anyio==4.9.0\nautoac @ git+https://github.com/OWNER/autoac@42e9b84\nautoac==0.1.0\nautoac-tool==1\n"
        "-e git+https://github.com/OWNER/model@1#egg=model\n# Editable install (model==1)\n-e /srv/model\n"
        "torch==2.13.0+cu130\ntorchvision==0.28.0\n"
    )
    inputs = {
        "AUTOAC_SOURCE": "/a b",
        "AUTOAC": "/a b",
        "TORCH": "2.13.0",
        "TORCH_INDEX": "https://index",
        "CONSTRAINTS": str(frozen),
        "REQUIREMENTS": "-r requirements.txt",
    }
    pips = " ".join(called(step, tmp_path, **inputs)).split("-m pip install ")[1:]
    assert pips == [
        "--no-deps torch==2.13.0 --index-url https://index ",
        f"torch==2.13.0 /a b -c {tmp_path / 'constraints.txt'} -r requirements.txt",
    ]
    assert (tmp_path / "constraints.txt").read_text().splitlines() == [
        "anyio==4.9.0",
        "autoac-tool==1",
        "# Editable install (model==1)",
        "torchvision==0.28.0",
    ]
    pips = " ".join(called(step, tmp_path, **inputs | {"TORCH_INDEX": "", "CONSTRAINTS": ""}))
    assert "--index-url" not in pips
    assert "-c " not in pips


def test_action_installs_the_pinned_torch_from_a_cpu_index(tmp_path):
    defaults = {name.upper().replace("-", "_"): i["default"] for name, i in ACTION["inputs"].items()}
    step = step_of(ACTION["runs"]["steps"], "Install autoac")
    words = called(step, tmp_path, **defaults | {"AUTOAC_SOURCE": str(ROOT)})
    pin = re.search(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]
    assert words.count(pin) == 2
    assert words[words.index("--index-url") + 1].endswith("/cpu")
    assert set(step["env"]) <= {*defaults, "AUTOAC_SOURCE"}


def test_workflow_requires_runner_autoac_and_torch():
    declared = WORKFLOW[True]["workflow_call"]["inputs"]
    assert [name for name, given in declared.items() if given.get("required")] == [
        "runner",
        "autoac",
        "torch",
    ]


@pytest.mark.parametrize(
    ("steps", "inputs"),
    [
        (ACTION["runs"]["steps"], {"CHECK": "true", "PRUNE": "true", "ONLY": "a\nb"}),
        (ACTION["runs"]["steps"], {"CHECK": "false", "PRUNE": "false", "ONLY": ""}),
        (JOB["steps"], {"CHECK": "true", "ONLY": "a\nb"}),
        (JOB["steps"], {"CHECK": "false", "ONLY": ""}),
    ],
)
def test_regenerate_step_runs_an_existing_command_with_known_options(steps, inputs, tmp_path, capsys):
    words = called(step_of(steps, "autoac regenerate"), tmp_path, CONFIG="my models.toml", **inputs)
    assert words[:2] == ["-m", "ac_client.cli.main"]
    assert ("--check" in words) == (inputs["CHECK"] == "true")
    assert [words[i + 1] for i, word in enumerate(words) if word == "--only"] == inputs["ONLY"].split()
    with pytest.raises(SystemExit) as exited:
        main(words[2:])  # all options are known; only the file is missing
    assert exited.value.code == ERROR
    assert "my models.toml: no such file" in capsys.readouterr().err


def test_other_actions_are_pinned_to_a_commit():
    used = [step["uses"] for step in JOB["steps"] if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", name) for name in used)


def test_drifted_is_an_output():
    assert step_of(ACTION["runs"]["steps"], "autoac regenerate")["id"] == "regenerate"
    assert ACTION["outputs"]["drifted"]["value"] == "${{ steps.regenerate.outputs.drifted }}"
    assert JOB["outputs"]["drifted"] == "${{ steps.regenerate.outputs.drifted }}"
    assert (
        WORKFLOW[True]["workflow_call"]["outputs"]["drifted"]["value"]
        == "${{ jobs.regenerate.outputs.drifted }}"
    )
    assert step_of(JOB["steps"], "autoac regenerate")["id"] == "regenerate"


def test_hook_validates_the_policies_of_the_repository():
    (hook,) = HOOKS
    assert (hook["id"], hook["language"]) == ("autoac-validate", "system")
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples/regenerate/policies").iterdir())
    assert files
    assert all(re.search(hook["files"], file) for file in files)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run([*shlex.split(hook["entry"]), *files], cwd=ROOT, env={"PATH": path}, check=False)
    assert done.returncode == 0


def test_make_targets_run_existing_commands(capsys):
    makefile = (ROOT / "Makefile").read_text()
    lines = re.findall(r"^\t\$\(BIN\)/autoac (.+)$", makefile, re.MULTILINE)
    assert {line.split()[0] for line in lines} == {"demo", "regenerate", "validate"}
    for line in lines:
        with pytest.raises(SystemExit) as exited:
            main([*line.split(), "--help"])
        assert exited.value.code == OK
