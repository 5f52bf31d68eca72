"""`autoac regenerate` plans policies again if something changed, and only then."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ac_client import model_loader
from ac_client.cli.exit_codes import DRIFT, ERROR, OK, USAGE
from ac_client.cli.main import main
from ac_client.regenerate import drift
from ac_client.regenerate.config import Config, ConstraintsTable, ModelTable, read
from ac_client.regenerate.lock import Lock
from ac_client.regenerate.model_source import ModelSource
from autoac.planner import Policy
from autoac.profiler import DATASHEETS, CannotFake
from autoac.profiler.timing.cache import processor

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
    return Net(), torch.zeros(4096, 256)

def bare():
    print("building")
    return Net()

def trained():
    model = Net()
    adam = torch.optim.Adam(model.parameters())
    return {"model": model, "args": (torch.zeros(4096, 256),), "optimizer": adam}

def broken():
    raise OSError("no such weights")
"""
FROZEN = """
    net = Net()
    net.layers[1][0].bias.requires_grad_(False)
    return net, torch"""
TOML = """
[models.net]
entry = "nets:make"
device = "h100"
budgets_gb = [0.08, 0.06]
"""
MB = 2**20


def autoac(capsys, *argv):
    """Run `autoac regenerate ARGV`; return its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as exited:
        main(["regenerate", *map(str, argv)])
    out, err = capsys.readouterr()
    return exited.value.code, out, err


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


PLANNED: dict[str, dict[str, bytes]] = {}  # policies by the text of autoac.toml, planned once for all tests


def planned(folder, capsys, toml):
    """Write `toml` and its policies into `folder`."""
    (folder / "autoac.toml").write_text(toml)
    if toml not in PLANNED:
        assert autoac(capsys)[0] == OK
        PLANNED[toml] = texts(folder)
    (folder / "policies").mkdir(exist_ok=True)
    for name, text in PLANNED[toml].items():
        (folder / "policies" / name).write_bytes(text)
    return folder


@pytest.fixture
def fresh(folder, capsys):
    """Write the policies as well."""
    return planned(folder, capsys, TOML)


def texts(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "policies").iterdir())}


def policies_of(out):
    return {policy["file"]: policy for policy in json.loads(out)["policies"]}


# --- nothing changed --------------------------------------------------------------------------------------


def test_policies_within_their_budgets_are_written_with_a_lock(folder, capsys):
    code, out, _ = autoac(capsys)
    assert (code, out.splitlines()[-1]) == (OK, "2 policies: 2 written.")
    written = texts(folder)
    assert list(written) == ["net-0.06gib.json", "net-0.08gib.json", "net.lock.json"]
    for name, budget in (("net-0.06gib.json", 0.06), ("net-0.08gib.json", 0.08)):
        policy = Policy.from_json(written[name])
        assert policy.predicted.peak_bytes <= policy.budget_bytes == int(budget * 2**30)
        assert "recompute" in policy.decisions.values()
    assert "H100" in policy.device


def test_check_of_an_unchanged_model_plans_and_writes_nothing(fresh, capsys, monkeypatch):
    monkeypatch.setattr(drift, "plan_with_host", lambda *args, **kwargs: pytest.fail("planned"))
    before = {path.name: path.stat().st_mtime_ns for path in (fresh / "policies").iterdir()}
    for argv in (["--check"], ["--check"], []):
        code, out, _ = autoac(capsys, *argv)
        assert (code, out.splitlines()[-1]) == (OK, "2 policies: 2 unchanged.")
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


def test_force_finds_the_same_plan(fresh, capsys):
    before = texts(fresh)
    code, out, _ = autoac(capsys, "--force", "--check")
    assert (code, out.count("planned again, with the same result")) == (OK, 2)
    assert autoac(capsys, "--force")[0] == OK
    assert texts(fresh) == before


def test_identity_does_not_name_the_build_of_torch(folder):
    identity = ModelSource("net", config_of(folder).models["net"], folder).identity
    assert "+" not in identity.environment.torch


# --- something changed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("nn.GELU()", "nn.ReLU()", ["layers.0-3.1 (4 modules) changed:", "new: relu", "gone: gelu"]),
        ("range(4)", "range(5)", ["layers.4.0,2 (2 modules) changed:", "new: addmm.default"]),
        ("256, 512), nn.GELU(), nn.Linear(512", "256, 640), nn.GELU(), nn.Linear(640",
         ["layers.0-3.0 (4 modules) changed:", "addmm.default allocates 10.00 MiB, was 8.00 MiB"]),
        ("zeros(4096, 256)", "zeros(2048, 256)", ["the batch is float32[2048, 256], was float32[4096, 256]"]),
    ],
)  # fmt: skip
def test_changed_layer_is_reported_by_name(fresh, capsys, old, new, lines):
    before = texts(fresh)
    model(fresh, MODEL.replace(old, new))
    code, out, _ = autoac(capsys, "--check")
    assert code == DRIFT == 2
    assert [line for line in lines if line not in out] == []
    assert "\n  new plan       " in out
    assert texts(fresh) == before
    assert autoac(capsys)[0] == OK
    assert texts(fresh) != before
    assert autoac(capsys, "--check")[0] == OK


def test_only_the_changed_layer_is_reported(fresh, capsys):
    changed = "    net = Net()\n    net.layers[2][1] = nn.ReLU()\n    return net, torch"
    model(fresh, MODEL.replace("    return Net(), torch", changed))
    code, out, _ = autoac(capsys, "--check", "--output-format", "json")
    assert code == DRIFT
    for policy in policies_of(out).values():
        assert [layer["name"] for layer in policy["layers"]] == ["layers.2.1"]
        assert (policy["layers"][0]["new"], policy["layers"][0]["gone"]) == (
            ["relu.default"],
            ["gelu.default"],
        )


def test_advice_names_another_config_file(fresh, capsys):
    (fresh / "autoac.toml").rename(fresh / "other.toml")
    model(fresh, MODEL.replace("nn.GELU()", "nn.ReLU()"))
    out = autoac(capsys, "--check", "--config", "other.toml")[1]
    assert "Run `autoac regenerate --config other.toml` and commit policies." in out


def test_frozen_parameter_is_drift_even_if_all_ops_are_equal(fresh, capsys):
    was = Lock.from_json((fresh / "policies" / "net.lock.json").read_text())
    model(fresh, MODEL.replace("    return Net(), torch", FROZEN))
    code, out, _ = autoac(capsys, "--check")
    assert code == DRIFT
    assert "gradients of the step: " in out
    assert autoac(capsys)[0] == OK
    now = Lock.from_json((fresh / "policies" / "net.lock.json").read_text())
    assert (was.fingerprint, was.gradient_nbytes - 2048) == (now.fingerprint, now.gradient_nbytes)


def test_drift_reports_peak_time_and_saved_ops_before_and_after(fresh, capsys):
    model(fresh, MODEL.replace("nn.GELU()", "nn.ReLU()"))
    code, out, _ = autoac(capsys, "--check", "--output-format", "json")
    assert (code, json.loads(out)["drifted"]) == (DRIFT, True)
    result = policies_of(out)["policies/net-0.06gib.json"]
    stored = Policy.from_json((fresh / result["file"]).read_text())
    assert result["stored"]["peak_bytes"] == stored.predicted.peak_bytes
    assert result["stored"]["recompute_us"] == stored.predicted.recompute_us
    assert result["planned"]["peak_bytes"] <= stored.budget_bytes < result["stored_now"]["peak_bytes"]
    assert "over the budget" in result["text"]
    assert result["changes"]
    known = set(stored.decisions)
    for change in result["changes"]:  # relu was never saved before, so it is never reported as lost
        assert not [op for op in change["lost"] if f"{change['modules'][0]}/aten.{op}#0" not in known]
    assert autoac(capsys)[0] == OK
    written = Policy.from_json((fresh / result["file"]).read_text())
    assert written.predicted.peak_bytes == result["planned"]["peak_bytes"]


def test_changed_setting_is_reported_by_key(fresh, capsys):
    (fresh / "autoac.toml").write_text(TOML + 'gap = 0.02\nconstraints = { pin_save = ["layers.0.1"] }\n')
    code, out, _ = autoac(capsys, "--check")
    assert code == DRIFT
    assert "gap is 0.02 in autoac.toml, was 0.01" in out
    assert "constraints is {'pin_save': ['layers.0.1']} in autoac.toml, was not set" in out
    assert autoac(capsys)[0] == OK
    policy = Policy.from_json((fresh / "policies" / "net-0.06gib.json").read_text())
    assert policy.decisions["layers.0.1/aten.gelu.default#0"] == "save"
    assert autoac(capsys, "--check")[0] == OK


def test_host_budget_moves_ops_and_is_a_setting(folder, capsys):
    wide = MODEL.replace("256", "2048").replace("512", "8192").replace("nn.GELU()", "nn.Tanh()")
    model(folder, wide)
    toml = (
        '[models.net]\nentry = "nets:bare"\nmeta = true\ninputs = ["float32[4096, 2048]"]\n'
        'device = "h100"\nbudgets_gb = [1.4]\nconstraints.host_budget_gb = HOST\n'
    )
    (folder / "autoac.toml").write_text(toml.replace("HOST", "4"))
    assert autoac(capsys)[0] == OK
    policy = Policy.from_json((folder / "policies" / "net-1.4gib.json").read_text())
    assert policy.constraints.host_budget_bytes == 4 * 2**30
    assert policy.moves
    path = folder / "policies" / "net.lock.json"
    path.write_text(Lock.from_json(path.read_text()).model_copy(update={"digest": "0" * 64}).to_json())
    code, out, _ = autoac(capsys, "--check")  # judged by a new plan
    assert (code, out.count("unchanged\n")) == (OK, 1)
    (folder / "autoac.toml").write_text(toml.replace("HOST", "1e-6"))
    code, out, _ = autoac(capsys, "--check")
    assert (code, "nothing moves to the host: no moves were found" in out) == (DRIFT, True)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "the file does not exist"),
        (lambda path: path.write_text("{"), "not a valid policy: not JSON"),
        (lambda path: path.write_bytes(b"\xff"), "not a valid policy"),
        (
            lambda path: path.write_text(path.read_text().replace('"recompute"', '"save"', 1)),
            "edited by hand, or merged",
        ),
    ],
)
def test_edited_policy_has_drifted(fresh, capsys, spoil, words):
    before = texts(fresh)
    spoil(fresh / "policies" / "net-0.06gib.json")
    code, out, _ = autoac(capsys, "--check")
    assert code == DRIFT
    assert words in out
    assert "policies/net-0.08gib.json: unchanged" in out
    assert autoac(capsys)[0] == OK
    assert texts(fresh) == before


def test_next_run_notices_an_interrupted_one(fresh, capsys, monkeypatch):
    before = texts(fresh)
    model(fresh, MODEL.replace("nn.GELU()", "nn.ReLU()"))
    write = drift.write_whole

    def fail_at_the_lock(path, text):
        if path.name.endswith("lock.json"):
            raise OSError(28, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(drift, "write_whole", fail_at_the_lock)
    code, _, err = autoac(capsys)
    assert (code, "No space left" in err) == (ERROR, True)
    assert list(texts(fresh)) == list(before)
    assert all(Policy.from_json(text) for name, text in texts(fresh).items() if "lock" not in name)
    monkeypatch.setattr(drift, "write_whole", write)
    model(fresh)
    code, out, _ = autoac(capsys, "--check")
    assert (code, "edited by hand" in out) == (DRIFT, True)
    assert autoac(capsys)[0] == OK
    assert texts(fresh) == before


def test_new_run_times_are_judged_by_a_new_plan(fresh, capsys):
    path = fresh / "policies" / "net.lock.json"
    before = texts(fresh)
    path.write_text(Lock.from_json(path.read_text()).model_copy(update={"digest": "0" * 64}).to_json())
    code, out, _ = autoac(capsys, "--check")
    assert (code, out.count("unchanged\n")) == (OK, 2)
    assert autoac(capsys)[0] == OK
    assert texts(fresh) == before


def test_policy_beyond_its_gap_has_drifted(fresh, capsys, monkeypatch):
    slow = DATASHEETS["h100"]
    fields = {name: getattr(slow, name) for name in slow.__slots__} | {"bytes_per_s": slow.bytes_per_s / 50}
    monkeypatch.setitem(DATASHEETS, "h100", type(slow)(**fields))
    code, out, _ = autoac(capsys, "--check", "--output-format", "json")
    judged = policies_of(out)
    for one in judged.values():
        spent = one["stored_now"]["recompute_us"]
        late = one["planned"] and spent - one["planned"]["recompute_us"] > 0.01 * spent
        assert (one["verdict"] == "drifted") == bool(late)
    assert code == (DRIFT if any(one["verdict"] == "drifted" for one in judged.values()) else OK)


# --- what is listed ---------------------------------------------------------------------------------------


def test_stale_files_are_reported_and_pruned_on_request(fresh, capsys):
    (fresh / "policies" / "mine.json").write_text("{}")
    (fresh / "autoac.toml").write_text(
        TOML.replace("[0.08, 0.06]", "[0.06]").replace("models.net", "models.new")
    )
    code, out, _ = autoac(capsys)
    assert code == OK
    gone = "net-0.06gib.json, net-0.08gib.json, net.lock.json"
    assert f"no longer listed (--prune removes them): {gone}" in out
    assert (autoac(capsys, "--check")[0], autoac(capsys, "--check", "--prune")[0]) == (OK, DRIFT)
    assert {*gone.split(", ")} < {*texts(fresh)}
    code, out, _ = autoac(capsys, "--prune")
    assert (code, f"no longer listed, removed: {gone}" in out) == (OK, True)
    assert list(texts(fresh)) == ["mine.json", "new-0.06gib.json", "new.lock.json"]
    assert autoac(capsys, "--check", "--prune")[0] == OK


def test_file_of_an_unlisted_budget_stays_reported(fresh, capsys):
    (fresh / "autoac.toml").write_text(TOML.replace("[0.08, 0.06]", "[0.06]"))
    for _ in range(2):
        assert "no longer listed (--prune removes them): net-0.08gib.json" in autoac(capsys)[1]
    assert autoac(capsys, "--prune")[0] == OK
    assert list(texts(fresh)) == ["net-0.06gib.json", "net.lock.json"]
    assert "no longer" not in autoac(capsys, "--check", "--prune")[1]


def test_prune_removes_nothing_outside_the_folder(fresh, capsys):
    (fresh / "keep.json").write_text("{}")
    path = fresh / "policies" / "old.lock.json"
    text = (fresh / "policies" / "net.lock.json").read_text().replace('"name": "net"', '"name": "old"')
    path.write_text(text.replace("net-0.08gib.json", "../keep.json"))
    assert autoac(capsys, "--prune")[0] == OK
    path.write_text(text.replace("net-0.08gib.json", "mine.json"))
    (fresh / "policies" / "mine.json").write_text("{}")
    assert autoac(capsys, "--prune")[0] == OK
    assert (fresh / "keep.json").exists()
    assert (fresh / "policies" / "mine.json").exists()


def test_failed_model_is_not_written_and_others_are(fresh, capsys):
    before = texts(fresh)
    model(fresh, MODEL.replace("nn.GELU()", "nn.ReLU()"))
    other = '\n[models.b]\nentry = "nets:broken"\ndevice = "h100"\nbudgets_gb = [1]\n'
    other += '\n[models.c]\nentry = "nets:make"\ndevice = "a100"\nbudgets_gb = [1]\n'
    (fresh / "autoac.toml").write_text(TOML.replace("0.06", "0.01") + other)
    code, out, _ = autoac(capsys)
    assert code == ERROR
    assert "no plan of net fits in 0.01 GiB" in out
    assert "change budgets_gb of [models.net]" in out
    assert "layers.0-3.1 (4 modules) changed:" in out
    assert "not written, since another budget of this model failed" in out
    assert "nets:broken: OSError: no such weights" in out
    assert "policies/c-1gib.json: written" in out
    now = texts(fresh)
    assert {name: now[name] for name in before} == before
    assert [name for name in now if name not in before] == ["c-1gib.json", "c.lock.json"]


def test_suggested_smallest_budget_is_feasible(folder, capsys):
    (folder / "autoac.toml").write_text(TOML.replace("[0.08, 0.06]", "[0.01]"))
    _, out, _ = autoac(capsys)
    least = out.partition("the smallest budget is ")[2].partition(":")[0]
    (folder / "autoac.toml").write_text(TOML.replace("[0.08, 0.06]", f"[{least}]"))
    assert autoac(capsys)[0] == OK


def test_only_option_loads_only_the_named_models(fresh, capsys):
    other = '\n[models.b]\nentry = "nets:broken"\ndevice = "h100"\nbudgets_gb = [1]\n'
    (fresh / "autoac.toml").write_text(TOML + other)
    assert autoac(capsys, "--only", "net", "--check")[0] == OK
    code, _, err = autoac(capsys, "--only", "c")
    assert (code, "must be one of net, b, got 'c'" in err) == (USAGE, True)


# --- entries ----------------------------------------------------------------------------------------------


def config_of(folder):
    return read(folder / "autoac.toml", tuple(DATASHEETS))


@pytest.mark.parametrize("inputs", ['["float32[4096, 256]"]', '{ x = "float32[4096, 256]" }'])
def test_entry_may_return_only_the_model_if_the_file_has_the_batch(folder, capsys, inputs):
    text = TOML.replace("nets:make", "nets:bare")
    (folder / "autoac.toml").write_text(text + f"meta = true\ninputs = {inputs}\n")
    code, out, err = autoac(capsys, "--output-format", "json")
    assert (code, json.loads(out)["failed"]) == (OK, False)  # what the entry prints is not on stdout
    assert "building" in err
    policy = Policy.from_json((folder / "policies" / "net-0.06gib.json").read_text())
    assert policy.inputs == ("float32[4096, 256]",)
    (folder / "autoac.toml").write_text(text)
    assert "nets:bare returned a model without a batch; return (model, batch)" in autoac(capsys)[1]


def test_optimizer_of_an_entry_is_counted(folder):
    plain = ModelSource("net", config_of(folder).models["net"], folder).identity
    (folder / "autoac.toml").write_text(TOML.replace("nets:make", "nets:trained"))
    adam = ModelSource("net", config_of(folder).models["net"], folder).identity
    assert plain.static.optimizer_state == 0
    assert adam.static.optimizer_state >= 2 * adam.static.parameters


def test_autocast_works_for_an_absent_device(folder):
    (folder / "autoac.toml").write_text(TOML + 'autocast = "bfloat16"\n')
    identity = ModelSource("net", config_of(folder).models["net"], folder).identity
    assert identity.environment.autocast == "bfloat16"


# --- the local device -------------------------------------------------------------------------------------


@pytest.fixture
def local(folder, capsys):
    """Write policies that were planned from a measurement of the local device."""
    return planned(folder, capsys, TOML.replace('"h100"', '"local"'))


def test_check_of_an_unchanged_local_model_measures_nothing(local, capsys, monkeypatch):
    monkeypatch.setattr(ModelSource, "profile", property(lambda self: pytest.fail("measured")))
    assert Lock.from_json((local / "policies" / "net.lock.json").read_text()).planned_on == processor()
    for _ in range(2):
        assert autoac(capsys, "--check")[0] == OK


def test_measure_option_judges_by_new_times(local, capsys, monkeypatch):
    devices = []
    observe = model_loader.observe
    monkeypatch.setattr(
        model_loader,
        "observe",
        lambda *args, on, **kwargs: devices.append(on) or observe(*args, on=on, **kwargs),
    )
    monkeypatch.setattr(drift, "NOISE", 1e9)
    code, out, _ = autoac(capsys, "--check", "--measure")
    assert (code, None in devices, out.count("unchanged\n")) == (OK, True, 2)
    monkeypatch.setattr(drift, "NOISE", -1e9)
    monkeypatch.setattr(drift._ModelRun, "_why_replace", lambda *args, **kwargs: ["faster"])
    assert autoac(capsys, "--check", "--measure")[0] == DRIFT


def test_policy_is_replaced_if_it_is_over_its_budget_or_slower_than_the_noise(folder, capsys):
    from dataclasses import replace

    from autoac.planner import plan

    table = config_of(folder).models["net"]
    step = ModelSource("net", table, folder).identity
    made = plan(step, budget_gb=0.06)
    judge = drift._ModelRun("net", table, folder, folder, drift.RunOptions(), print, None)._why_replace
    assert judge(made, made, measured=False) == []
    assert "over" in judge(replace(made, peak=made.budget + 1), made, measured=True)[0]
    slower = replace(made, recompute_us=made.recompute_us + 0.04 * made.step_us)
    assert judge(slower, made, measured=True) == []
    assert "a new plan takes" in judge(slower, made, measured=False)[0]
    slower = replace(made, recompute_us=made.recompute_us + 0.06 * made.step_us)
    assert "a new plan takes" in judge(slower, made, measured=True)[0]


def test_policies_of_another_device_are_checked_but_not_replaced(local, capsys):
    path = local / "policies" / "net.lock.json"
    here = f'"planned_on": "{processor()}"'
    assert here in path.read_text()
    path.write_text(path.read_text().replace(here, '"planned_on": "NVIDIA H100"'))
    assert autoac(capsys, "--check")[0] == OK
    model(local, MODEL.replace("nn.GELU()", "nn.ReLU()"))
    code, out, _ = autoac(capsys, "--check")
    assert code == DRIFT
    assert "layers.0-3.1 (4 modules) changed:" in out
    assert f"policies of net are for NVIDIA H100, and this machine has {processor()}" in out
    code, out, _ = autoac(capsys)
    assert (code, f"pass --force to plan for {processor()}" in out) == (ERROR, True)
    assert autoac(capsys, "--force")[0] == OK
    assert Lock.from_json(path.read_text()).planned_on == processor()


def test_policies_that_an_earlier_release_planned_on_a_cpu_are_of_any(local, capsys):
    path = local / "policies" / "net.lock.json"
    path.write_text(path.read_text().replace(f'"planned_on": "{processor()}"', '"planned_on": "cpu"'))
    model(local, MODEL.replace("nn.GELU()", "nn.ReLU()"))
    assert autoac(capsys)[0] == OK
    assert Lock.from_json(path.read_text()).planned_on == processor()


def test_model_without_a_fake_step_is_identified_on_the_local_device(local, capsys, monkeypatch):
    observe = model_loader.observe

    def no_fakes(*args, on=None, **kwargs):
        if on is not None:
            raise CannotFake("aten.nonzero.default", "its output's shape depends on values")
        return observe(*args, on=on, **kwargs)

    monkeypatch.setattr(model_loader, "observe", no_fakes)
    assert autoac(capsys)[0] == OK
    assert Lock.from_json((local / "policies" / "net.lock.json").read_text()).environment.device_name == "cpu"
    assert autoac(capsys, "--check")[0] == OK
    (local / "autoac.toml").write_text(TOML)
    code, out, _ = autoac(capsys)
    assert (code, 'set device = "local" in [models.net]' in out) == (ERROR, True)


# --- output -----------------------------------------------------------------------------------------------


def test_github_format_annotates_each_file_and_writes_a_summary(fresh, capsys, monkeypatch):
    summary = fresh / "summary.md"
    outputs = fresh / "outputs"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("GITHUB_OUTPUT", str(outputs))
    code, out, _ = autoac(capsys, "--check", "--output-format", "github")
    assert (code, out) == (OK, "2 policies: 2 unchanged.\n")
    model(fresh, MODEL.replace("nn.GELU()", "nn.ReLU()"))
    code, out, _ = autoac(capsys, "--check", "--output-format", "github")
    assert code == DRIFT
    lines = out.splitlines()
    assert len(lines) == 3  # newlines and percent signs are escaped
    assert lines[0].startswith("::error file=policies/net-0.08gib.json,title=policy out of date::")
    assert lines[1].startswith("::error file=policies/net-0.06gib.json,title=policy out of date::")
    assert "%0A" in lines[0]
    assert "layers.0-3.1 (4 modules) changed:" in lines[0]
    assert "```text\npolicies/net-0.08gib.json: drifted\n" in summary.read_text()
    assert outputs.read_text() == "drifted=false\ndrifted=true\n"


def test_changes_of_a_model_are_described_once(fresh, capsys):
    model(fresh, MODEL.replace("nn.GELU()", "nn.ReLU()"))
    out = autoac(capsys, "--check")[1]
    assert out.count("layers.0-3.1 (4 modules) changed:") == 1
    assert out.count("the model changed as described for net-0.08gib.json") == 1


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
        (TABLE.replace("h100", "h1000"), "models.net.device: must be one of local, h100"),
        (TABLE.replace("h100", "h1000"), "got 'h1000'"),
        (TABLE.replace("[1]", "[]"), "models.net.budgets_gb: "),
        (TABLE.replace("[1]", "[1, -2]"), "models.net.budgets_gb.1: Input should be greater than 0"),
        (TABLE.replace("[1]", "['1']"), "models.net.budgets_gb.0: "),
        (TABLE.replace("[1]", "[nan]"), "models.net.budgets_gb.0: "),
        (TABLE.replace("[1]", "[1, 1.0]"), "models.net: budgets_gb lists 1 twice"),
        (TABLE + "headroom_gb = 1", "headroom_gb = 1 leaves nothing of the budget of 1 GiB"),
        (TABLE + "gap = 1", "models.net.gap: Input should be less than 1"),
        (TABLE + "gap = true", "models.net.gap: "),
        (TABLE + "inputs = ['in64[2]']", "an input must be a type and a shape"),
        (TABLE + "meta = true", "give the batch here: inputs = "),
        (TABLE.replace("h100", "local") + "meta = true\ninputs = ['int64[2]']", "cannot run on device"),
        (TABLE + "[models.net.constraints]\npin_sav = []", "constraints.pin_sav: Extra inputs"),
        (TABLE + "[models.net.constraints]\nextra_static_gb = -1", "constraints.extra_static_gb: "),
        (TABLE.replace("models.net", "models.'../net'"), "'../net' becomes part of file names"),
        (TABLE + TABLE.replace("models.net", "models.NET"), "'net' and 'NET' are one file name"),
        ("policies = '../out'\n" + TABLE, "policies: must be a folder of its own, in the folder"),
        ("policies = '/out'\n" + TABLE, "policies: must be a folder"),
    ],
)  # fmt: skip
def test_invalid_config_is_reported_by_table_and_key(folder, capsys, text, words):
    (folder / "autoac.toml").write_text(text)
    code, out, err = autoac(capsys)
    assert (code, out) == (ERROR, "")
    assert err.startswith("autoac: autoac.toml: ")
    assert words in err
    assert not (folder / "policies").exists()


def test_invalid_config_is_annotated(folder, capsys):
    (folder / "autoac.toml").write_text("# first\n" + TABLE + "gap = 1\n")
    _, out, _ = autoac(capsys, "--output-format", "github")
    assert out.startswith("::error file=autoac.toml,title=invalid settings::models.net.gap: Input should be")


def test_missing_config_says_how_to_begin(tmp_path, capsys):
    code, _, err = autoac(capsys, "--config", tmp_path / "none.toml")
    assert (code, "no such file; write one" in err) == (ERROR, True)


def test_every_key_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "regenerate.md").read_text()
    tables = (Config, ModelTable, ConstraintsTable)
    assert [key for table in tables for key in table.model_fields if f"`{key}`" not in page] == []
