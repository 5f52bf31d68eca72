"""`autoac regenerate` writes the policies that autoac.toml lists; `--check` says which are out of date."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from client.cli.command import run

from ac_client.cli.exit_codes import ERROR, OK
from ac_client.regenerate.config import Config, ModelTable
from autoac.planner import Constraints, Policy
from autoac.profiler import DATASHEETS

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()

def make():
    print("building")
    return Net(), torch.zeros(4096, 256)

def trained():
    model = Net()
    adam = torch.optim.Adam(model.parameters())
    return {"model": model, "args": (torch.zeros(4096, 256),), "optimizer": adam}

def broken():
    raise OSError("no such weights")
"""
TOML = """
[models.net]
entry = "nets:make"
device = "h100"
budgets_gb = [0.08, 0.06]
"""
SMALL, LARGE = "net-0.06gib.json", "net-0.08gib.json"


def autoac(capsys, *argv):
    """Run `autoac regenerate ARGV`; return its exit code, stdout and stderr."""
    return run(capsys, "regenerate", *argv)


def model(folder, text=MODEL):
    """Write the module with the model, so that the next import reads it again."""
    (folder / "nets.py").write_text(text)
    sys.modules.pop("nets", None)
    importlib.invalidate_caches()


@pytest.fixture(autouse=True)
def no_workspaces(monkeypatch):
    """Leave out cuBLAS's workspaces, which are larger than these models."""
    for name in ("h100", "a100"):
        monkeypatch.setitem(DATASHEETS, name, dataclasses.replace(DATASHEETS[name], workspace_nbytes=0))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write `autoac.toml` and the module with its model into the current folder."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    model(tmp_path)
    (tmp_path / "autoac.toml").write_text(TOML)
    yield tmp_path
    sys.modules.pop("nets", None)


PLANNED: dict[str, bytes] = {}  # policies of TOML, planned once for all tests


@pytest.fixture
def fresh(folder, capsys):
    """Write the policies as well."""
    if not PLANNED:
        assert autoac(capsys)[0] == OK
        PLANNED.update(texts(folder))
    (folder / "policies").mkdir(exist_ok=True)
    for name, text in PLANNED.items():
        (folder / "policies" / name).write_bytes(text)
    return folder


def texts(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "policies").iterdir())}


def edit(path, **changes):
    """Change fields of a stored policy."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def reasons(out):
    """Return the reason of each file that a check lists."""
    lines = [line.partition(": ") for line in out.splitlines()[:-1]]
    return {Path(file).name: why for file, _, why in lines}


def test_policies_within_their_budgets_are_written(folder, capsys):
    code, out, _ = autoac(capsys)
    assert (code, out) == (OK, "policies: 2 of 2 policies written\n")
    written = texts(folder)
    assert list(written) == [SMALL, LARGE]
    for name, budget in ((SMALL, 0.06), (LARGE, 0.08)):
        policy = Policy.from_json(written[name])
        assert policy.predicted.peak_bytes <= policy.budget_bytes == int(budget * 2**30)
        assert "recompute" in policy.decisions.values()
    assert "H100" in policy.device


def test_check_of_an_unchanged_model_writes_nothing(fresh, capsys):
    before = {path.name: path.stat().st_mtime_ns for path in (fresh / "policies").iterdir()}
    assert autoac(capsys, "--check")[:2] == (OK, "2 policies are up to date\n")
    assert {path.name: path.stat().st_mtime_ns for path in (fresh / "policies").iterdir()} == before


def test_another_hash_seed_writes_the_same_bytes(fresh):
    before = texts(fresh)
    for name in before:
        (fresh / "policies" / name).unlink()
    without_workspaces = (
        "import dataclasses, sys; from autoac.profiler import DATASHEETS as D; "
        "D['h100'] = dataclasses.replace(D['h100'], workspace_nbytes=0); "
        "from ac_client.cli.main import main; sys.exit(main(['regenerate']))"
    )
    subprocess.run(
        [sys.executable, "-c", without_workspaces],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        check=True,
        capture_output=True,
        timeout=300,
    )
    assert texts(fresh) == before


# --- why a policy is out of date --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("nn.GELU()", "nn.ReLU()",
         "another fingerprint: module layers.0.1 changed first, from layers.0.1/aten.gelu.default#0 to "
         "layers.0.1/aten.relu.default#0; at run time, 4 ops that this policy does not know are saved"),
        ("range(4)", "range(5)", "module layers.4.0 changed first"),
        ("range(4)", "range(3)", "module layers.3.0 changed first"),
        ("256, 512), nn.GELU(), nn.Linear(512", "256, 640), nn.GELU(), nn.Linear(640",
         "another fingerprint: the same ops, with other sizes or lifetimes"),
        ("zeros(4096, 256)", "zeros(2048, 256)",
         "its batch was float32[4096, 256], and is float32[2048, 256]"),
    ],
)  # fmt: skip
def test_changed_model_is_named_in_one_line_for_each_policy(fresh, capsys, old, new, words):
    before = texts(fresh)
    model(fresh, MODEL.replace(old, new))
    code, out, _ = autoac(capsys, "--check")
    assert code == ERROR == 1
    assert set(reasons(out)) == {SMALL, LARGE}
    assert all(words in why for why in reasons(out).values())
    assert texts(fresh) == before
    assert autoac(capsys)[0] == OK
    assert autoac(capsys, "--check")[0] == OK


def test_unknown_ops_count_as_saved_in_the_peak_of_the_same_line(fresh, capsys):
    """As at run time: all four new activations are saved, which the smaller budget has no room for."""
    model(fresh, MODEL.replace("nn.GELU()", "nn.ReLU()"))
    why = reasons(autoac(capsys, "--check")[1])[SMALL]
    assert "4 ops that this policy does not know are saved; its peak is " in why
    assert why.endswith(" now, over 61.44 MiB")


def test_policy_over_its_budget_is_out_of_date(fresh, capsys):
    path = fresh / "policies" / SMALL
    path.write_text(path.read_text().replace('"recompute"', '"save"'))
    code, out, _ = autoac(capsys, "--check")
    assert (code, list(reasons(out))) == (ERROR, [SMALL])
    assert "over 61.44 MiB" in reasons(out)[SMALL]


def test_policy_further_than_the_gap_from_the_best_is_out_of_date(fresh, capsys):
    large = json.loads((fresh / "policies" / LARGE).read_text())
    tight = json.loads((fresh / "policies" / SMALL).read_text())
    edit(fresh / "policies" / LARGE, decisions=tight["decisions"])
    code, out, _ = autoac(capsys, "--check")
    assert large["decisions"] != tight["decisions"]
    assert (code, list(reasons(out))) == (ERROR, [LARGE])
    assert "further from the best than the gap of 1.0%" in reasons(out)[LARGE]


def test_other_text_of_an_equally_good_policy_is_up_to_date(fresh, capsys):
    edit(fresh / "policies" / LARGE, tools={"autoac": "0.0.1"})
    assert autoac(capsys, "--check")[0] == OK


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "the file does not exist"),
        (lambda path: path.write_text("{"), "not a valid policy: not JSON"),
        (lambda path: path.write_bytes(b"\xff"), "not a valid policy"),
        (lambda path: edit(path, budget_bytes=2**27), "its budget is 128.00 MiB, and autoac.toml has 61.44"),
        (lambda path: edit(path, constraints=Constraints(pin_save=("layers",)).model_dump()),
         "its constraints are not those of autoac.toml"),
    ],
)  # fmt: skip
def test_file_that_is_not_the_listed_policy_is_out_of_date(fresh, capsys, spoil, words):
    before = texts(fresh)
    spoil(fresh / "policies" / SMALL)
    code, out, _ = autoac(capsys, "--check")
    assert (code, list(reasons(out))) == (ERROR, [SMALL])
    assert words in reasons(out)[SMALL]
    assert autoac(capsys)[0] == OK
    assert texts(fresh) == before


# --- what is listed ---------------------------------------------------------------------------------------


def test_settings_of_a_model_are_those_of_its_plans(folder, capsys):
    (folder / "autoac.toml").write_text(
        TOML.replace("nets:make", "nets:trained").replace("[0.08, 0.06]", "[0.1]")
        + 'autocast = "bfloat16"\nconstraints = { pin_save = ["layers.0.1"], headroom_bytes = 20_000_000 }\n'
    )
    assert autoac(capsys)[0] == OK
    policy = Policy.from_json((folder / "policies" / "net-0.1gib.json").read_text())
    assert policy.decisions["layers.0.1/aten.gelu.default#0"] == "save"
    assert policy.predicted.peak_bytes <= int(0.08 * 2**30)
    assert policy.predicted.static_bytes > 3 * 4 * 4 * 2 * 256 * 512  # parameters and Adam's state
    assert "_to_copy" in " ".join(policy.decisions)


def test_host_budget_moves_ops(folder, capsys):
    model(folder, MODEL.replace("256", "2048").replace("512", "8192").replace("nn.GELU()", "nn.Tanh()"))
    with (folder / "nets.py").open("a") as file:
        file.write(
            "def bare():\n    with torch.device('meta'):\n        return Net(), torch.empty(4096, 2048)\n"
        )
    (folder / "autoac.toml").write_text(
        '[models.net]\nentry = "nets:bare"\ndevice = "h100"\nbudgets_gb = [1.4]\n'
        f"constraints.host_budget_bytes = {2**32}\n"
    )
    assert autoac(capsys)[0] == OK
    assert Policy.from_json((folder / "policies" / "net-1.4gib.json").read_text()).moves


def test_model_that_fails_leaves_the_others(fresh, capsys):
    other = '\n[models.b]\nentry = "nets:broken"\ndevice = "h100"\nbudgets_gb = [1]\n'
    other += '\n[models.c]\nentry = "nets:make"\ndevice = "a100"\nbudgets_gb = [1]\n'
    (fresh / "autoac.toml").write_text(TOML.replace("0.08", "0.01") + other)
    code, out, err = autoac(capsys)
    assert code == ERROR
    assert "net-0.01gib.json: no plan fits in 10.24 MiB: the step needs at least" in out
    assert "b-1gib.json: nets:broken: OSError: no such weights" in out
    assert out.endswith("policies: 2 of 4 policies written\n")
    assert "building" in err  # what an entry prints is not a result
    assert [name for name in texts(fresh) if name not in PLANNED] == ["c-1gib.json"]


# --- settings ---------------------------------------------------------------------------------------------

TABLE = "[models.net]\nentry = 'nets:make'\ndevice = 'h100'\nbudgets_gb = [1]\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[models.net", "not TOML"),
        ("", "models: Field required"),
        ("policis = 'p'\n" + TABLE, "policis: Extra inputs are not permitted"),
        (TABLE + "budget_gb = 2", "models.net.budget_gb: Extra inputs are not permitted"),
        (TABLE.replace("entry = 'nets:make'\n", ""), "models.net.entry: Field required"),
        (TABLE.replace("nets:make", "nets.make"), "models.net.entry: String should match"),
        (TABLE.replace("h100", "h1000"), "models.net.device must be one of h100"),
        (TABLE.replace("h100", "h1000"), "got 'h1000'"),
        (TABLE.replace("[1]", "[]"), "models.net.budgets_gb: "),
        (TABLE.replace("[1]", "[1, -2]"), "models.net.budgets_gb.1: Input should be greater than 0"),
        (TABLE.replace("[1]", "['1']"), "models.net.budgets_gb.0: "),
        (TABLE.replace("[1]", "[nan]"), "models.net.budgets_gb.0: "),
        (TABLE + "gap = 1", "models.net.gap: Input should be less than 1"),
        (TABLE + "gap = true", "models.net.gap: "),
        (TABLE + "[models.net.constraints]\npin_sav = []", "constraints.pin_sav: Extra inputs"),
        (TABLE + "[models.net.constraints]\nextra_static_bytes = -1", "constraints.extra_static_bytes: "),
        (TABLE.replace("models.net", "models.'../net'"), "models.../net.[key]: String should match"),
    ],
)  # fmt: skip
def test_invalid_config_is_reported_by_table_and_key(folder, capsys, text, words):
    (folder / "autoac.toml").write_text(text)
    code, out, err = autoac(capsys)
    assert (code, out) == (ERROR, "")
    assert err.startswith("autoac: autoac.toml: ")
    assert words in err
    assert not (folder / "policies").exists()


def test_missing_config_says_how_to_begin(tmp_path, capsys):
    code, _, err = autoac(capsys, "--config", tmp_path / "none.toml")
    assert (code, "no such file; write one" in err) == (ERROR, True)


def test_every_key_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "regenerate.md").read_text()
    tables = (Config, ModelTable)
    assert [key for table in tables for key in table.model_fields if f"`{key}`" not in page] == []
