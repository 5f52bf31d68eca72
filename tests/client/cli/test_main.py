"""The `autoac` command: what it prints where, and how it leaves."""

import io
import json
import subprocess
import sys

import pytest
from torch import nn

from ac_client.cli import main as cli
from ac_client.cli import output as console
from ac_client.cli import plan_commands as planning
from ac_client.cli.main import main
from ac_client.cli.output import CommandError, case_of
from ac_client.files import write_whole
from autoac.planner import Policy, PolicySet, Profile
from autoac.planner.formats.policy_set import Bucket

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers), (torch.randn(64, 32),), {}

def broken():
    raise OSError("no such weights")

def nothing():
    return 3
"""


def run(capsys, *argv):
    """The exit code, stdout and stderr of `autoac ARGV`."""
    with pytest.raises(SystemExit) as left:
        main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    return left.value.code, out, err


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a module `small` that makes a model."""
    (tmp_path / "small.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "small", raising=False)
    return tmp_path


@pytest.fixture
def profiled(folder, capsys):
    """The current folder, with a profile in it."""
    assert run(capsys, "profile", "small:make")[0] == cli.OK
    return folder


def gb_of(profile_file, share):
    """A budget at `share` of the way from the smallest peak to save-all's."""
    from autoac.planner import bounds, build, find_minimum_peak

    profile = Profile.from_json(profile_file.read_text())
    low, high = find_minimum_peak(profile).found, bounds(build(profile)).ceiling
    return (low + share * (high - low)) / 2**30


def test_from_a_model_to_a_policy_in_words(profiled, capsys):
    budget = gb_of(profiled / "profile.json", 0.5)
    code, out, err = run(capsys, "plan", "profile.json", "--budget-gb", budget)
    assert code == cli.OK
    assert out.startswith("Sequential: peak ")
    assert err == "planning Sequential ...\n"

    policy = Policy.from_json((profiled / "policy.json").read_text())
    assert "recompute" in policy.decisions.values()
    code, out, err = run(capsys, "explain", "policy.json")
    assert code == cli.OK
    assert "The peak is" in out
    assert err == ""


def test_a_plan_is_drawn_as_a_page(profiled, capsys):
    budget = gb_of(profiled / "profile.json", 0.5)
    assert run(capsys, "plan", "profile.json", "--budget-gb", budget)[0] == cli.OK
    argv = ["explain", "policy.json", "--profile", "profile.json", "--html", "page.html"]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (cli.OK, "")
    assert out.endswith("picture: page.html\n")
    page = (profiled / "page.html").read_text()
    assert "<title>Sequential: memory over one training step</title>" in page
    peak = Policy.from_json((profiled / "policy.json").read_text()).predicted.peak_bytes
    assert '"live_bytes":[' in page
    assert str(peak) in page
    code, out, _ = run(
        capsys, "explain", "profile.json", "--budget-gb", budget, "--html", "other.html", "--json"
    )
    assert json.loads(out)["html"] == "other.html"
    assert (profiled / "other.html").exists()
    code, _, err = run(capsys, "explain", "policy.json", "--html", "third.html")
    assert code == cli.USAGE
    assert "bytes are in the profile" in err


def test_a_plan_obeys_the_constraints_on_the_command_line(profiled, capsys):
    argv = [
        "plan",
        "profile.json",
        "--budget-gb",
        "1",
        "--forward-budget-gb",
        "0.5",
        "--extra-static-gb",
        "0.25",
    ]
    argv += ["--pin-recompute", "2", "--pin-save", "7/aten.gelu", "--pin-save", "4", "--gradients", "present"]
    code, out, err = run(capsys, *argv, "--json")
    assert (code, err) == (cli.OK, "planning Sequential ...\n")
    told = json.loads(out)
    assert told["constraints"]["pin_save"] == ["7/aten.gelu", "4"]
    assert told["constraints"]["forward_budget_bytes"] == 2**29
    assert told["recomputed"] > 0
    assert 2**28 < told["predicted"]["peak_bytes"] < 2**29
    policy = Policy.from_json((profiled / "policy.json").read_text())
    assert policy.decisions["2/aten.mul.Tensor#0"] == "recompute"
    assert policy.decisions["4/aten.gelu.default#0"] == policy.decisions["7/aten.gelu.default#0"] == "save"
    code, out, _ = run(
        capsys, "explain", "policy.json", "--profile", "profile.json", "--tensor", "2/aten.mul.Tensor"
    )
    assert code == cli.OK
    assert "That is what its pin asks for" in out


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--pin-save", "10.mlp"], cli.ERROR, "pin_save '10.mlp' stands for nothing among"),
        (["--pin-save", "1", "--pin-recompute", "1/*"], cli.ERROR, "1/aten.gelu.default#0 cannot obey both"),
        (["--pin-save", ""], cli.USAGE, "pin_save"),
        (["--forward-budget-gb", "0"], cli.USAGE, "must be a positive number of GiB, got 0.0"),
        (["--forward-budget-gb", "1e300"], cli.USAGE, "did you pass bytes?"),
        (["--extra-static-gb", "-1"], cli.USAGE, "--extra-static-gb must be a number of GiB from 0"),
        (["--gradients", "maybe"], cli.USAGE, "--gradients"),
        (["--forward-budget-gb", "0.00001"], cli.ERROR, "without that a plan with a peak of"),
    ],
)
def test_constraints_that_cannot_be_met_are_one_line(profiled, capsys, options, code, words):
    left, out, err = run(capsys, "plan", "profile.json", "--budget-gb", "1", *options)
    assert (left, out) == (code, "")
    assert words in err.splitlines()[-1]


def test_the_stages_of_a_pipeline_are_planned(profiled, capsys):
    text = (profiled / "profile.json").read_text()
    (profiled / "b.json").write_text(text)
    budget = gb_of(profiled / "profile.json", 1.5)
    argv = ["stages", "--profile", "profile.json", "b.json", "--schedule", "1f1b", "--microbatches", "8"]
    argv += ["--budget-gb", budget, "-o", "out", "--pin-recompute", "4"]
    code, out, err = run(capsys, *argv)
    assert (code, err) == (cli.OK, "planning 2 stages ...\n")
    lines = out.splitlines()
    assert lines[0].split() == ["stage", "in", "flight", "peak", "budget", "recompute", "gap", "busy", "idle"]
    assert lines[1].startswith("0 *")  # the first stage holds two and recomputes more
    assert " 2 " in lines[1]
    assert lines[2].startswith("1 ")
    assert lines[3].startswith("1f1b, 8 microbatches: a step takes ")
    assert lines[4] == "policies: out/stage-0.json to stage-1.json"
    first, second = (Policy.from_json((profiled / "out" / f"stage-{s}.json").read_text()) for s in (0, 1))
    assert (
        first.decisions["4/aten.gelu.default#0"] == second.decisions["4/aten.gelu.default#0"] == "recompute"
    )
    assert first.predicted.recompute_us >= second.predicted.recompute_us
    code, out, _ = run(capsys, *argv, "--json")
    told = json.loads(out)
    assert (told["schedule"], [s["in_flight"] for s in told["stages"]]) == ("1f1b", [2, 1])
    assert told["slowdown"] > 0


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--budget-gb", "1", "--schedule", "2f2b"], cli.ERROR, "2f2b"),
        (["--budget-gb", "0.0001"], cli.ERROR, "This is stage 0 of 2, which holds 2 microbatches"),
        (["--budget-gb", "1", "--budget-gb", "1", "--budget-gb", "1"], cli.ERROR, "3 entries for 2 stages"),
        (["--budget-gb", "1", "--profile", "profile.json"], cli.USAGE, "once before all files"),
    ],
)
def test_stages_that_cannot_be_planned_are_one_line(profiled, capsys, options, code, words):
    argv = ["stages", "--profile", "profile.json", "profile.json", "--microbatches", "4", *options]
    left, out, err = run(capsys, *argv)
    assert (left, out) == (code, "")
    assert words in err.splitlines()[-1]
    assert not (profiled / "policies").exists()


def test_a_profile_is_explained_at_a_budget(profiled, capsys):
    budget = gb_of(profiled / "profile.json", 0.5)
    argv = [
        "explain",
        "profile.json",
        "--budget-gb",
        budget,
        "--tensor",
        "0/aten.addmm.default",
        "--more-gb",
        "1",
    ]
    code, out, err = run(capsys, *argv)
    assert code == cli.OK
    assert "The peak is" in out
    assert "0/aten.addmm.default#0 is " in out
    assert "the ceiling) would save" in out
    assert err == "planning Sequential ...\n" * 2
    code, out, _ = run(capsys, *argv, "--json")
    told = json.loads(out)
    assert code == cli.OK
    assert told["tensors"][0]["key"] == "0/aten.addmm.default#0"
    assert told["more"]["gain_us"] == told["more"]["recompute_us"] > 0
    assert sum(row["kept_bytes"] for row in told["modules"]) > 0


def test_a_policy_with_its_profile_is_explained_in_bytes_without_solving(profiled, capsys):
    budget = gb_of(profiled / "profile.json", 0.5)
    assert run(capsys, "plan", "profile.json", "--budget-gb", budget)[0] == cli.OK
    code, _, err = run(capsys, "explain", "policy.json", "--table")
    assert code == cli.USAGE
    assert "--profile" in err
    code, out, err = run(capsys, "explain", "policy.json", "--table", "--profile", "profile.json")
    assert (code, err) == (cli.OK, "")
    assert "\nall  " in out


def test_a_policy_set_is_explained_bucket_by_bucket(profiled, capsys):
    budget = gb_of(profiled / "profile.json", 0.5)
    assert run(capsys, "plan", "profile.json", "--budget-gb", budget)[0] == cli.OK
    policy = Policy.from_json((profiled / "policy.json").read_text())
    shapes = ({"x": "float32[8, 4]"}, {"x": "float32[2, 4]"})
    buckets = tuple(Bucket(shape=shape, policy=policy) for shape in shapes)
    (profiled / "set.json").write_text(PolicySet(buckets=buckets).to_json())
    code, out, err = run(capsys, "explain", "set.json")
    assert (code, err) == (cli.OK, "")
    first, second = out.split("Bucket 2 of 2, for batches up to x=float32[8, 4]:")
    assert first.startswith("Bucket 1 of 2, for batches up to x=float32[2, 4]:")
    assert all("The peak is" in part for part in (first, second))
    code, out, _ = run(capsys, "explain", "set.json", "--json")
    assert [bucket["shape"] for bucket in json.loads(out)["buckets"]] == [shapes[1], shapes[0]]
    code, _, err = run(capsys, "explain", "set.json", "--table")
    assert code == cli.USAGE
    assert "policy set" in err


def test_two_policies_are_compared(profiled, capsys):
    for name, share in (("a.json", 0.2), ("b.json", 0.8)):
        budget = gb_of(profiled / "profile.json", share)
        assert run(capsys, "plan", "profile.json", "--budget-gb", budget, "-o", name)[0] == cli.OK
    code, out, err = run(capsys, "diff", "a.json", "b.json")
    assert (code, err) == (cli.OK, "")
    assert "only b.json keeps" in out
    code, out, _ = run(capsys, "diff", "a.json", "b.json", "--profile", "profile.json", "--json")
    told = json.loads(out)
    assert (code, told["same"]) == (cli.OK, False)
    assert sum(change["gained_bytes"] for change in told["changes"]) > 0
    code, out, _ = run(capsys, "diff", "a.json", "a.json", "--json")
    assert json.loads(out)["same"]


def test_a_frontier_is_a_line_for_each_plan(profiled, capsys):
    code, out, _ = run(capsys, "frontier", "profile.json", "--points", "4")
    assert code == cli.OK
    assert out.startswith("smallest peak ")
    code, said, _ = run(capsys, "frontier", "profile.json", "--points", "4", "--json")
    told = json.loads(said)
    assert len(out.splitlines()) == 2 + len(told["plans"])
    peaks = [plan["peak_bytes"] for plan in told["plans"]]
    assert peaks == sorted(peaks)
    assert peaks[0] == told["floor_found_bytes"] >= told["floor_proven_bytes"]
    assert told["plans"][-1]["recompute_us"] == 0


def test_a_profile_is_estimated_for_a_device_that_is_not_here(folder, capsys):
    code, out, _ = run(capsys, "profile", "small:make", "--on", "h100")
    assert code == cli.OK
    assert "\n  run times are estimated from the datasheet of NVIDIA H100" in out
    assert "H100" in Profile.from_json((folder / "profile.json").read_bytes()).environment.device_name
    code, _, err = run(capsys, "profile", "small:make", "--on", "abacus")
    assert code == cli.USAGE
    assert "'abacus' is none of h100, " in err


def test_each_command_prints_one_json_object_when_asked(folder, capsys):
    code, out, _ = run(capsys, "profile", "small:make", "--json", "-o", "p.json")
    assert (code, json.loads(out)["model"]) == (cli.OK, "Sequential")
    code, out, _ = run(capsys, "plan", "p.json", "--budget-gb", "1", "--json")
    assert (code, json.loads(out)["recomputed"]) == (cli.OK, 0)
    code, out, _ = run(capsys, "explain", "policy.json", "--json")
    assert (code, "Nothing is recomputed." in json.loads(out)["text"]) == (cli.OK, True)


def test_a_dash_writes_the_result_itself_to_stdout(profiled, capsys):
    code, out, _ = run(capsys, "plan", "profile.json", "--budget-gb", "1", "-o", "-")
    assert code == cli.OK
    assert Policy.from_json(out).model == "Sequential"
    assert not (profiled / "policy.json").exists()


def test_the_same_profile_and_budget_give_the_same_file(profiled, capsys):
    budget = gb_of(profiled / "profile.json", 0.3)
    for name in ("a.json", "b.json"):
        assert run(capsys, "plan", "profile.json", "--budget-gb", budget, "-o", name)[0] == cli.OK
    assert (profiled / "a.json").read_bytes() == (profiled / "b.json").read_bytes()


def test_a_profile_can_be_piped_in(profiled, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((profiled / "profile.json").read_bytes())))
    assert run(capsys, "plan", "-", "--budget-gb", "1")[0] == cli.OK


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["plan", "profile.json"], cli.USAGE, "--budget-gb"),
        (["plan", "profile.json", "--budget-gb", "lots"], cli.USAGE, "--budget-gb"),
        (["plan", "profile.json", "--budget-gb", "1", "--headroom-gb", "-1"], cli.USAGE, "--headroom-gb"),
        (["plan", "profile.json", "--budget-gb", "-1"], cli.USAGE, "positive"),
        (["plan", "profile.json", "--budget-gb", "0.00001"], cli.ERROR, "a plan exists for --budget-gb 0."),
        (["plan", "absent.json", "--budget-gb", "1"], cli.ERROR, "absent.json: No such file"),
        (["plan", "small.py", "--budget-gb", "1"], cli.ERROR, "not a valid profile"),
        (["plan", "profile.json", "--budget-gb", "1", "-o", "nowhere/p.json"], cli.ERROR, "nowhere"),
        (["explain", "profile.json"], cli.USAGE, "--budget-gb"),
        (["explain", "small.py"], cli.ERROR, "not a valid policy"),
        (["explain", "profile.json", "--budget-gb", "1", "--tensor", "nope"], cli.ERROR, "'nope' names none"),
        (["explain", "profile.json", "--budget-gb", "1", "--more-gb", "0"], cli.USAGE, "--more-gb"),
        (
            ["explain", "profile.json", "--budget-gb", "1", "--profile", "profile.json"],
            cli.USAGE,
            "leave it out",
        ),
        (["explain", "planned.json", "--budget-gb", "1"], cli.USAGE, "planned.json is a policy"),
        (
            ["diff", "planned.json", "profile.json"],
            cli.ERROR,
            "profile.json: not a valid policy: it is a profile",
        ),
        (
            ["plan", "planned.json", "--budget-gb", "1"],
            cli.ERROR,
            "planned.json: not a valid profile: it is a p",
        ),
        (
            ["explain", "planned.json", "--profile", "planned.json"],
            cli.ERROR,
            "planned.json: not a valid profile",
        ),
        (
            ["frontier", "list.json"],
            cli.ERROR,
            "list.json: not a valid profile: it is no JSON object; it should",
        ),
        (["plan", "profile.json", "--budget-gb", "1", "--gap", "nan"], cli.USAGE, "gap must be from 0 to 1"),
        (["plan", "profile.json", "--budget-gb", "1", "--gap", "-1"], cli.USAGE, "from 0 to 1, not -1"),
        (["frontier", "profile.json", "--gap", "nan"], cli.USAGE, "gap must be from 0 to 1"),
        (["frontier", "profile.json", "--time-limit", "nan"], cli.USAGE, "time_limit_s must be at least 0"),
        (
            ["plan", "profile.json", "--budget-gb", "1", "--headroom-gb", "2"],
            cli.USAGE,
            "headroom of 2.00 GiB",
        ),
        (["plan", "profile.json", "--budget-gb", "1", "-o", "."], cli.ERROR, ".: Is a directory"),
        (["profile", "small"], cli.USAGE, "MODULE:FUNCTION"),
        (["profile", "absent_module:make"], cli.ERROR, "No module named 'absent_module'"),
        (["profile", "small:absent"], cli.ERROR, "absent"),
        (["profile", "small:broken"], cli.ERROR, "OSError: no such weights"),
        (["profile", "small:nothing"], cli.ERROR, "returned int"),
        (["serve", "--host", "0.0.0.0"], cli.USAGE, "AUTOAC_TOKEN"),
        (["serve", "--port", "70000"], cli.USAGE, "--port"),
        (["nonsense"], cli.USAGE, "nonsense"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_an_exit_code(argv, code, says, profiled, capsys, monkeypatch):
    run(capsys, "plan", "profile.json", "--budget-gb", "1", "-o", "planned.json")
    (profiled / "list.json").write_text("[]")
    monkeypatch.delenv("AUTOAC_TOKEN", raising=False)
    found, out, err = run(capsys, *argv)
    line = err.splitlines()[-1]
    assert (found, out) == (code, "")
    assert line.startswith("autoac: ")
    assert says in line
    assert all(other.endswith(" ...") for other in err.splitlines()[:-1])


def test_an_error_is_json_too_when_asked(profiled, capsys):
    code, out, err = run(capsys, "plan", "profile.json", "--budget-gb", "0.00001", "--json")
    assert code == cli.ERROR
    assert json.loads(out)["error"]["kind"] == "InfeasibleBudget"
    assert err.splitlines()[-1].startswith("autoac: no plan fits in")


def test_the_budget_that_an_infeasible_one_points_to_is_feasible(profiled, capsys):
    _, _, err = run(capsys, "plan", "profile.json", "--budget-gb", "0.00001")
    budget = err.split()[-1]
    assert run(capsys, "plan", "profile.json", "--budget-gb", budget)[0] == cli.OK


def test_traceback_shows_where_it_came_from(folder, capsys):
    code, _, err = run(capsys, "--traceback", "profile", "small:broken")
    assert code == cli.ERROR
    assert "Traceback" in err
    assert 'raise OSError("no such weights")' in err


def test_interrupting_leaves_with_130(folder, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "load_case", interrupted)
    assert run(capsys, "profile", "small:make")[0] == cli.INTERRUPTED


def test_help_names_the_commands_and_the_exit_codes(capsys):
    code, out, _ = run(capsys)
    assert code == cli.OK
    assert {"demo", "profile", "plan", "explain", "diff", "serve"} <= set(out.split())
    assert "0 fine, 1 error, 2 wrong usage" in " ".join(out.split())


@pytest.mark.parametrize(
    "command", ["demo", "profile", "plan", "explain", "diff", "regenerate", "validate", "serve"]
)
def test_every_command_has_help_with_its_exit_codes(command, capsys):
    code, out, _ = run(capsys, command, "--help")
    assert code == cli.OK
    assert "Exit codes" in out


def test_no_failed_write_leaves_anything_behind(tmp_path, monkeypatch):
    path = tmp_path / "policy.json"
    path.write_text("old")

    def fails(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(console.os, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_missing_is_named_with_the_file(tmp_path):
    path = tmp_path / "missing" / "policy.json"
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(path, "text")
    assert caught.value.filename == str(path)


def test_a_written_file_has_ordinary_permissions(tmp_path):
    write_whole(tmp_path / "a", "text")
    (tmp_path / "b").write_text("text")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


LAYER = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("returned", "fields"),
    [
        ((LAYER, (1,), {"a": 2}), (LAYER, (1,), {"a": 2}, None)),
        ((LAYER, [1], {}, sum), (LAYER, (1,), {}, sum)),
        ({"model": LAYER}, (LAYER, (), {}, None)),
        ({"model": LAYER, "args": (1,), "loss": sum}, (LAYER, (1,), {}, sum)),
    ],
)
def test_a_function_may_return_a_tuple_or_a_dict(returned, fields):
    case = case_of(returned, "m:f")
    assert (case.model, case.args, case.kwargs, case.loss) == fields


@pytest.mark.parametrize("returned", [LAYER, (LAYER,), {"modle": LAYER}, (LAYER, 1, {}), (1, (), {}), None])
def test_anything_else_is_explained(returned):
    with pytest.raises(CommandError, match="m:f returned"):
        case_of(returned, "m:f")


def test_the_installed_command_is_this_one(folder):
    done = subprocess.run(
        [sys.executable, "-m", "ac_client.cli.main", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip()
