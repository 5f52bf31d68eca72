"""The `autoac` command: its output, its errors and its exit codes."""

import inspect
import io
import itertools
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from client.cli.command import module_in, run
from stepping import needs_compiled_plans

import ac_client
from ac_client import model_loader
from ac_client.cli import output, plan_commands
from ac_client.cli.exit_codes import ERROR, INTERRUPTED, OK, USAGE
from ac_client.cli.main import app
from autoac.planner import MalformedPolicy, Policy, PolicySet, Profile
from autoac.planner.formats.policy_set import Bucket
from autoac.planner.formats.profile import OpFlag

POLICY_FILE = str(Path(__file__).parents[3] / "examples/regenerate/policies/decoder-4gib.json")
MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers), (torch.randn(64, 32),), {}

def wide():
    layers = [m for _ in range(6) for m in (nn.Linear(2048, 2048), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(8192, 2048),), {}

def broken():
    raise OSError("no such weights")

def nothing():
    return 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write a module `small` with a model into the current folder."""
    module_in(tmp_path, "small", MODEL, monkeypatch)
    return tmp_path


PROFILE: list[bytes] = []  # of the module `small`, made once for all tests


@pytest.fixture
def profiled(folder, capsys):
    """Write a profile of the module `small` into the current folder."""
    if not PROFILE:
        code, _, err = run(capsys, "profile", "small:make")
        assert code == OK, err
        PROFILE.append((folder / "profile.json").read_bytes())
    (folder / "profile.json").write_bytes(PROFILE[0])
    return folder


def gb_of(profile_file, share):
    """Return a budget in GiB at `share` of the way from the smallest peak to the save-all peak."""
    from autoac.planner import bounds, build, find_minimum_peak

    profile = Profile.from_json(profile_file.read_text())
    low, high = find_minimum_peak(profile).found, bounds(build(profile)).ceiling
    return (low + share * (high - low)) / 2**30


def test_plans_of_a_busy_machine_are_the_same(profiled, capsys, monkeypatch):
    budget = gb_of(profiled / "profile.json", 0.3)
    commands = f"plan profile.json --budget-gb {budget} --json", "frontier profile.json --points 3 --json"
    idle = [run(capsys, *command.split()) for command in commands]
    busy = SimpleNamespace(monotonic=itertools.count(0, 10**6).__next__)  # eleven days between two looks
    monkeypatch.setattr(plan_commands, "time", busy)
    assert [run(capsys, *command.split()) for command in commands] == idle
    assert {code for code, _, _ in idle} == {OK}


@pytest.fixture
def planned(profiled, capsys):
    """Write a plan for that profile as well, halfway between its peaks."""
    code, out, err = run(capsys, "plan", "profile.json", "--budget-gb", gb_of(profiled / "profile.json", 0.5))
    assert (code, err) == (OK, "planning Sequential ...\n")
    assert out.startswith("Sequential: peak ")
    return profiled


def test_explain_describes_a_policy_and_its_bytes_with_a_profile(planned, capsys):
    assert "recompute" in Policy.from_json((planned / "policy.json").read_text()).decisions.values()
    code, out, err = run(capsys, "explain", "policy.json")
    assert (code, "The peak is" in out, err) == (OK, True, "")
    argv = ["explain", "policy.json", "--profile", "profile.json"]
    code, out, err = run(capsys, *argv)
    assert (code, "while these are live:" in out, err) == (OK, True, "")
    data = json.loads(run(capsys, *argv, "--json")[1])
    assert sum(row["kept_bytes"] for row in data["modules"]) > 0
    assert data["text"] + "\n" == out


def test_explain_draws_a_plan_as_a_page(planned, capsys):
    argv = ["explain", "policy.json", "--profile", "profile.json", "--html", "page.html"]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (OK, "")
    assert out.endswith("picture: page.html\n")
    page = (planned / "page.html").read_text()
    assert "<title>Sequential: memory over one training step</title>" in page
    peak = Policy.from_json((planned / "policy.json").read_text()).predicted.peak_bytes
    assert '"live_bytes":[' in page
    assert str(peak) in page
    code, out, _ = run(capsys, *argv[:-1], "other.html", "--json")
    assert json.loads(out)["html"] == "other.html"
    assert (planned / "other.html").read_text() == page
    code, _, err = run(capsys, "explain", "policy.json", "--html", "third.html")
    assert code == USAGE
    assert "a policy has no bytes" in err


def test_plan_obeys_constraint_options(profiled, capsys):
    argv = ["plan", "profile.json", "--budget-gb", "1"]
    argv += ["--pin-recompute", "2", "--pin-save", "7/aten.gelu", "--pin-save", "4"]
    code, out, err = run(capsys, *argv, "--json")
    assert (code, err) == (OK, "planning Sequential ...\n")
    data = json.loads(out)
    assert data["constraints"]["pin_save"] == ["7/aten.gelu", "4"]
    assert data["recomputed"] > 0
    policy = Policy.from_json((profiled / "policy.json").read_text())
    assert policy.decisions["2/aten.mul.Tensor#0"] == "recompute"
    assert policy.decisions["4/aten.gelu.default#0"] == policy.decisions["7/aten.gelu.default#0"] == "save"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--pin-save", "10.mlp"], ERROR, "pin_save '10.mlp' matches none of"),
        (["--pin-save", "1", "--pin-recompute", "1/*"], ERROR, "1/aten.gelu.default#0 cannot obey both"),
        (["--pin-save", ""], USAGE, "pin_save"),
        (["--host-budget-gb", "1e300"], USAGE, "did you pass bytes?"),
        (["--host-budget-gb", "-1"], USAGE, "--host-budget-gb must be a number of GiB from 0"),
    ],
)
def test_impossible_constraints_are_a_one_line_error(profiled, capsys, options, code, words):
    exit_code, out, err = run(capsys, "plan", "profile.json", "--budget-gb", "1", *options)
    assert (exit_code, out) == (code, "")
    assert words in err.splitlines()[-1]


def test_host_budget_moves_tensors_over_the_link_of_the_profile(folder, capsys):
    run(capsys, "profile", "small:wide", "--on", "h100", "-o", "step.json")
    needed = gb_of(folder / "step.json", 0.1)
    code, out, _ = run(capsys, "plan", "step.json", "--budget-gb", needed, "--host-budget-gb", 1)
    assert code == OK
    assert "moved to the host, 0 us of stalls" in out
    policy = Policy.from_json(Path("policy.json").read_text())
    assert policy.moves
    assert policy.predicted.moved_bytes > 0
    code, out, _ = run(capsys, "explain", "policy.json", "--profile", "step.json")
    assert f"Outputs of {len(policy.moves)} ops" in out
    assert "to the host and back" in out


def test_host_budget_needs_a_link(profiled, capsys):
    code, _, err = run(capsys, "plan", "profile.json", "--budget-gb", 1, "--host-budget-gb", 1)
    assert code == USAGE
    assert "the profile has no link" in err


def test_explain_describes_each_bucket_of_a_policy_set(planned, capsys):
    policy = Policy.from_json((planned / "policy.json").read_text())
    shapes = ({"x": "float32[8, 4]"}, {"x": "float32[2, 4]"})
    buckets = tuple(Bucket(shape=shape, policy=policy) for shape in shapes)
    (planned / "set.json").write_text(PolicySet(buckets=buckets).to_json())
    code, out, err = run(capsys, "explain", "set.json")
    assert (code, err) == (OK, "")
    first, second = out.split("Bucket 2 of 2, for batches up to x=float32[8, 4]:")
    assert first.startswith("Bucket 1 of 2, for batches up to x=float32[2, 4]:")
    assert all("The peak is" in part for part in (first, second))
    code, out, _ = run(capsys, "explain", "set.json", "--json")
    assert [bucket["shape"] for bucket in json.loads(out)["buckets"]] == [shapes[1], shapes[0]]
    code, _, err = run(capsys, "explain", "set.json", "--profile", "profile.json")
    assert code == USAGE
    assert "policy set" in err


def test_diff_is_a_table_of_the_decisions_that_differ(profiled, capsys):
    for name, share in (("a.json", 0.2), ("b.json", 0.8)):
        budget = gb_of(profiled / "profile.json", share)
        assert run(capsys, "plan", "profile.json", "--budget-gb", budget, "-o", name)[0] == OK
    code, out, err = run(capsys, "diff", "a.json", "b.json")
    assert (code, err) == (OK, "")
    head, first, second, _, columns, *rows = out.splitlines()
    assert head.split() == ["policy", "model", "budget", "peak", "recompute"]
    assert (first.split()[0], second.split()[0]) == ("a.json", "b.json")
    assert columns.split() == ["module", "op", "a.json", "b.json"]
    assert all("recomputed" in row for row in rows)
    code, out, _ = run(capsys, "diff", "a.json", "b.json", "--profile", "profile.json", "--json")
    data = json.loads(out)
    assert (code, data["same"]) == (OK, False)
    assert sum(row["held_bytes"] for row in data["rows"]) > 0
    spent = [data[side]["predicted"]["recompute_us"] for side in ("before", "after")]
    assert sum(row["recompute_us"] for row in data["rows"]) == pytest.approx(spent[1] - spent[0])
    assert "All decisions are the same." in run(capsys, "diff", "a.json", "a.json")[1]
    assert json.loads(run(capsys, "diff", "a.json", "a.json", "--json")[1])["same"]


def test_frontier_prints_a_line_for_each_plan(profiled, capsys, monkeypatch):
    monkeypatch.setattr(output, "SILENCE_S", 0.0)
    code, out, err = run(capsys, "frontier", "profile.json", "--points", "4")
    assert code == OK
    assert any("4 budgets, point 2 of 4" in line for line in err.splitlines())
    assert out.startswith("smallest peak ")
    code, said, _ = run(capsys, "frontier", "profile.json", "--points", "4", "--json")
    data = json.loads(said)
    assert len(out.splitlines()) == 2 + len(data["plans"])
    peaks = [plan["peak_bytes"] for plan in data["plans"]]
    assert peaks == sorted(peaks)
    assert peaks[0] == data["floor_found_bytes"] >= data["floor_proven_bytes"]
    assert data["plans"][-1]["recompute_us"] == 0


def test_profile_is_estimated_for_an_absent_device(folder, capsys):
    code, out, _ = run(capsys, "profile", "small:make", "--on", "h100")
    assert code == OK
    assert "\n  run times are estimated from the datasheet of NVIDIA H100" in out
    assert "H100" in Profile.from_json((folder / "profile.json").read_bytes()).environment.device_name
    code, _, err = run(capsys, "profile", "small:make", "--on", "abacus")
    assert code == USAGE
    assert "must be one of h100, " in err
    assert "got 'abacus'" in err


@needs_compiled_plans
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_model_is_profiled_on_its_own_device_and_for_an_absent_one(folder, capsys):
    code, _, _ = run(capsys, "profile", "small:make", "--compiled")
    assert code == OK
    found = Profile.from_json((folder / "profile.json").read_bytes())
    assert any(flags & OpFlag.COMPILED for flags in found.ops.flags)
    code, out, _ = run(capsys, "profile", "small:make", "--compiled", "--on", "h100")
    assert (code, "estimated from the datasheet of NVIDIA H100" in out) == (OK, True)
    assert Profile.from_json((folder / "profile.json").read_bytes()).keys() == found.keys()


def test_output_dash_writes_the_result_to_stdout(profiled, capsys):
    code, out, _ = run(capsys, "plan", "profile.json", "--budget-gb", "1", "-o", "-")
    assert code == OK
    assert Policy.from_json(out).model == "Sequential"
    assert not (profiled / "policy.json").exists()


def test_profile_can_be_read_from_stdin(profiled, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((profiled / "profile.json").read_bytes())))
    assert run(capsys, "plan", "-", "--budget-gb", "1")[0] == OK


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["plan", "profile.json"], USAGE, "--budget-gb"),
        (["plan", "profile.json", "--budget-gb", "lots"], USAGE, "--budget-gb"),
        (["plan", "profile.json", "--budget-gb", "0.00001"], ERROR, "a plan exists for 0."),
        (["plan", "absent.json", "--budget-gb", "1"], ERROR, "absent.json: No such file"),
        (["plan", "small.py", "--budget-gb", "1"], ERROR, "not a valid profile"),
        (["explain", "profile.json"], ERROR, "got a profile"),
        (["explain", "plan.json", "--html", "x.html"], USAGE, "--profile"),
        (["plan", "plan.json", "--budget-gb", "1"], ERROR, "got a policy"),
        (["explain", "plan.json", "--profile", "plan.json"], ERROR, "plan.json: not a valid profile"),
        (["frontier", "list.json"], ERROR, "list.json: not a valid profile: must be a profile"),
        (["plan", "profile.json", "--budget-gb", "1", "--gap", "-1"], USAGE, "from 0 to 1, got -1"),
        (["frontier", "profile.json", "--time-limit", "nan"], USAGE, "time_limit_s must be at least 0"),
        (["plan", "profile.json", "--budget-gb", "1", "-o", "."], ERROR, ".: Is a directory"),
        # Missing folders are found before the work: an infeasible budget or a missing module would say so.
        (
            ["plan", "profile.json", "--budget-gb", "1e-5", "-o", "no/x.json"],
            ERROR,
            "no/x.json: No such file",
        ),
        (["profile", "absent_module:make", "-o", "no/x.json"], ERROR, "no/x.json: No such file"),
        (["explain", "absent.json", "--html", "no/x.html"], ERROR, "no/x.html: No such file"),
        (["demo", "--page", "no/x.html"], ERROR, "no/x.html: No such file"),
        (["doctor", "--gpu", "--out", "no/x.md"], ERROR, "no/x.md: No such file"),
        (["profile", "small"], USAGE, "MODULE:FUNCTION"),
        (["profile", "absent_module:make"], ERROR, "No module named 'absent_module'"),
        (["profile", "small:absent"], ERROR, "absent"),
        (["profile", "small:broken"], ERROR, "OSError: no such weights"),
        (["profile", "small:nothing"], ERROR, "returned int"),
        (["serve", "--host", "0.0.0.0"], USAGE, "AUTOAC_TOKEN"),
        (["serve", "--port", "70000"], USAGE, "--port"),
        (["nonsense"], USAGE, "nonsense"),
    ],
)
def test_error_is_one_line_on_stderr_and_an_exit_code(argv, code, says, profiled, capsys, monkeypatch):
    shutil.copy(POLICY_FILE, profiled / "plan.json")
    (profiled / "list.json").write_text("[]")
    monkeypatch.delenv("AUTOAC_TOKEN", raising=False)
    monkeypatch.setenv("AUTOAC_DATABASE_URL", f"sqlite:///{profiled}/no-keys.sqlite3")
    found, out, err = run(capsys, *argv)
    line = err.splitlines()[-1]
    assert (found, out) == (code, "")
    assert line.startswith("autoac: ")
    assert says in line
    assert all(other.endswith(" ...") for other in err.splitlines()[:-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_doctor_without_a_gpu_says_so(folder, capsys):
    code, _, err = run(capsys, "doctor", "--gpu")
    assert code == ERROR
    assert "doctor --gpu needs a GPU, got none: torch" in err
    assert not Path("autoac-gpu-report.md").exists()


def test_demo_names_its_extra(folder, capsys, monkeypatch):
    monkeypatch.setattr("ac_client.cli.demo.find_spec", lambda name: None)
    code, _, err = run(capsys, "demo")
    assert code == ERROR
    assert "install autoac with its extra `demo`" in err


def test_json_option_prints_errors_as_json(profiled, capsys):
    code, out, err = run(capsys, "plan", "profile.json", "--budget-gb", "0.00001", "--json")
    assert code == ERROR
    assert json.loads(out)["error"]["kind"] == "InfeasibleBudget"
    assert err.splitlines()[-1].startswith("autoac: no plan fits in")


def test_traceback_option_prints_the_traceback(folder, capsys):
    code, _, err = run(capsys, "--traceback", "profile", "small:broken")
    assert code == ERROR
    assert "Traceback" in err
    assert 'raise OSError("no such weights")' in err


def test_interrupt_exits_with_130(folder, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(model_loader, "load_function", interrupt)
    assert run(capsys, "profile", "small:make")[0] == INTERRUPTED


def test_help_lists_commands_and_exit_codes(capsys):
    code, out, _ = run(capsys)
    assert code == OK
    assert {"demo", "profile", "plan", "explain", "diff", "serve"} <= set(out.split())
    assert "0 success, 1 error, 2 wrong usage" in " ".join(out.split())


@pytest.mark.parametrize("command", ["demo", "profile", "plan", "explain", "diff", "regenerate", "serve"])
def test_help_of_every_command_lists_its_exit_codes(command, capsys):
    code, out, _ = run(capsys, command, "--help")
    assert code == OK
    assert "Exit codes" in out


def test_import_of_the_command_line_is_light():
    heavy = {"torch", "numpy", "pydantic", "rich", "sqlalchemy", "fastapi", "autoac.planner.plan"}
    code = f"import sys, ac_client.cli.main; print(*{heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == []


def test_commands_have_at_most_35_option_names():
    def names(command):
        options = [option for option in command.params if option.param_type_name == "option"]
        own = {name for option in options for name in option.opts}
        return own.union(*map(names, getattr(command, "commands", {}).values()))

    found = names(typer.main.get_command(app)) | {"--help"}
    assert {"--budget-gb", "-o", "--days"} < found
    assert len(found) <= 35, sorted(found)


def test_apply_has_ten_parameters():
    assert list(inspect.signature(ac_client.apply).parameters) == [
        *("model", "budget_gb", "optimizer", "policy", "service"),
        *("host_budget_gb", "constraints", "strict", "group", "verify"),
    ]


STEERING = "\x1b[31mNet\x9b2J\x07"


def test_names_from_files_cannot_steer_the_terminal(folder, capsys, caplog):
    data = json.loads(Path(POLICY_FILE).read_bytes())
    (first, *_) = data["decisions"]
    data |= {"model": STEERING, "device": STEERING}
    data["decisions"] = {STEERING + key if key == first else key: d for key, d in data["decisions"].items()}
    (folder / "steering.json").write_text(json.dumps(data))
    (folder / "other.json").write_text(json.dumps(data | {"model": "\x1b]0;title\x07"}))
    (folder / "field.json").write_text(json.dumps(data | {STEERING: 1}))
    (folder / "set.json").write_text(json.dumps({"format": "autoac.policy-set", "version": 7, STEERING: 1}))
    (folder / f"{STEERING}.json").write_text("{")
    (folder / "\x1b[1m.toml").write_text("[models.")
    for argv in (
        ["explain", "steering.json"],
        ["diff", "steering.json", "other.json"],
        ["diff", "steering.json", POLICY_FILE],
        ["explain", "field.json"],
        ["explain", "set.json"],
        ["explain", f"absent{STEERING}"],
        ["explain", f"{STEERING}.json"],
        [STEERING],
        ["plan", f"absent{STEERING}", "--budget-gb", "1"],
        ["regenerate", "--config", "\x1b[1m.toml"],
    ):
        _, out, err = run(capsys, *argv)
        said = out + err
        assert said, argv
        assert not {"\x1b", "\x9b", "\x07"} & set(said), argv
        assert "\\x1b" in said, argv
    logging.getLogger("ac_client").warning("%s: planned", STEERING)
    assert caplog.messages == [r"\x1b[31mNet\x9b2J\x07: planned"]
    with pytest.raises(MalformedPolicy) as raised:
        Policy.from_json(json.dumps(data | {STEERING: 1}))
    assert r"\x1b[31m" in str(raised.value)
    assert "\x1b" not in str(raised.value)
