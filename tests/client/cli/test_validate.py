"""`autoac validate`: policy files checked by the standard library alone, by the planner's rules."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ac_client.cli import main as cli
from autoac.offline import launch, validate
from autoac.planner import PlannerError, Policy, PolicySet

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "offline" / "validate.py"

POLICY = {
    "format": "autoac.policy",
    "version": 1,
    "model": "Net",
    "fingerprint": "f",
    "profile_digest": "d",
    "inputs": ["float32[2, 3]"],
    "device": "cpu",
    "budget_bytes": 100,
    "stopped": "optimal",
    "predicted": {
        "peak_bytes": 90,
        "peak_at": "0/aten.mm.default#0, forward",
        "save_all_peak_bytes": 120,
        "static_bytes": 10,
        "recompute_us": 2.5,
        "recompute_bound_us": 2,
        "step_us": 50.0,
        "gap": 0.2,
    },
    "tools": {"autoac": "0.1.0"},
    "decisions": {"0/aten.mm.default#0": "save", "1/aten.gelu.default#0": "recompute"},
}
CONSTRAINTS = {
    "pin_save": ["0"],
    "pin_recompute": [],
    "recompute_only": [],
    "fsdp_units": [],
    "save_deciding": True,
    "forward_budget_bytes": 1,
    "extra_static_bytes": 0,
    "gradients": "as profiled",
}
GONE = object()


def changed(path, value):
    """POLICY with another value at a path such as "predicted.gap"; GONE takes the key away."""
    data = copy.deepcopy(POLICY) | {"constraints": dict(CONSTRAINTS)}
    *outer, last = path.split("|")
    inner = data
    for key in outer:
        inner = inner[key]
    if value is GONE:
        del inner[last]
    else:
        inner[last] = value
    return data


def found(tmp_path, text, name="p.json"):
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return validate.check(str(path)).problems


def planner_accepts(data):
    try:
        Policy.from_json(json.dumps(data))
    except PlannerError:
        return False
    return True


def test_the_policies_of_the_repository_are_valid():
    files = sorted(map(str, (ROOT / "policies").glob("*.json")))
    assert len(files) == 5
    for file in files:
        assert validate.check(file).problems == []


@pytest.mark.parametrize("data", [POLICY, POLICY | {"constraints": None}, changed("corrected_by_bytes", -5)])
def test_what_is_right_is_right_for_both(tmp_path, data):
    assert found(tmp_path, data) == []
    assert planner_accepts(data)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("format", "autoac.profile", 'format is "autoac.profile"; one of autoac.policy, '),
        ("version", 2, "version is 2; it should be 1"),
        ("model", 3, "model is 3; it should be text"),
        ("model", GONE, "model is missing"),
        ("model", "x" * 5000, "it should be text of at most 4096"),
        ("modle", "x", "modle is no field of it; fields are format, version, model"),
        ("inputs", "x", 'inputs is "x"; it should be a list of texts'),
        ("budget_bytes", -1, "budget_bytes is -1; it should be a whole number from 0"),
        ("budget_bytes", 1.5, "budget_bytes is 1.5"),
        ("budget_bytes", 2**60, "budget_bytes is 1152921504606846976"),
        ("corrected_by_bytes", "x", 'corrected_by_bytes is "x"'),
        ("tools", {"a": 1}, "tools is"),
        ("predicted", [], "predicted is []; it should be an object"),
        ("predicted", GONE, "predicted is missing"),
        ("predicted|gap", 1.5, "predicted.gap is 1.5; it should be a number from 0 to 1"),
        ("predicted|gap", GONE, "predicted.gap is missing"),
        ("predicted|gaps", 1, "predicted.gaps is no field of it"),
        ("predicted|step_us", -1, "predicted.step_us is -1"),
        ("constraints", 5, "constraints is 5; it should be an object"),
        ("constraints|pin_save", [""], "constraints.pin_save is"),
        ("constraints|pin_save", [3], "constraints.pin_save is [3]"),
        ("constraints|gradients", "some", 'constraints.gradients is "some"; it should be "as profiled" or'),
        ("constraints|forward_budget_bytes", 0, "constraints.forward_budget_bytes is 0"),
        ("constraints|pins", [], "constraints.pins is no field of it"),
        ("decisions", [], "decisions is []; it should be an object"),
        ("decisions|0/aten.mm.default#0", "keep", '"keep"; it should be "save" or "recompute"'),
    ],
)
def test_what_the_planner_refuses_is_told_by_its_place(tmp_path, path, value, told):
    data = changed(path, value)
    problems = found(tmp_path, data)
    assert [problem for problem in problems if told in problem], problems
    assert not planner_accepts(data)


PLACES = [*POLICY, *(f"predicted|{key}" for key in POLICY["predicted"])]
PLACES += [f"constraints|{key}" for key in CONSTRAINTS]
VALUES = [None, True, -1, 0.5, 1, "x", [], {}, ["x"], {"x": "y"}, {"x/y#0": "save"}, GONE]
# Here the check asks for more: that numbers fit together, and that a file says what it is.
STRICTER = {"format", "budget_bytes"}
STRICTER |= {f"predicted|{key}" for key in ("peak_bytes", "recompute_us", "recompute_bound_us")}


@pytest.mark.parametrize("path", PLACES)
def test_both_agree_about_any_value_in_any_place(tmp_path, path):
    for value in VALUES:
        data = changed(path, value)
        passes, accepted = not found(tmp_path, data), planner_accepts(data)
        # pydantic takes true for 1 and 1 for true; JSON that we write has neither.
        lax = value is True or (path.endswith("save_deciding") and value == 1)
        assert passes == accepted or (accepted and (lax or path in STRICTER)), (path, value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON: Expecting"),
        ("[" * 200000, "not JSON: nested too deeply"),
        ("[]", "format is missing"),
        ('{"format": ["autoac.policy"]}', 'format is ["autoac.policy"]'),
        ('{"a": 1, "a": 2}', 'key "a" is there twice'),
        ('{"format": "autoac.policy", "budget_bytes": NaN}', "NaN is no number"),
    ],
)
def test_what_is_no_policy_at_all_is_told(tmp_path, text, told):
    assert told in found(tmp_path, text)[0]


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("predicted|peak_bytes", 101, "predicted.peak_bytes is 101, over budget_bytes, 100"),
        ("predicted|recompute_bound_us", 3, "predicted.recompute_bound_us is 3, over recompute_us, 2.5"),
        ("decisions|aten.mm", "save", '"aten.mm" is no op\'s key; a key is MODULE/OP#N'),
    ],
)
def test_numbers_and_names_have_to_fit_together(tmp_path, path, value, told):
    assert told in found(tmp_path, changed(path, value))[0]


def test_a_policy_set_is_checked_with_all_its_policies(tmp_path):
    policy = Policy.from_json(json.dumps(POLICY))
    made = PolicySet(buckets=({"shape": {"0": "int64[2]"}, "policy": policy},))
    data = json.loads(made.to_json())
    assert found(tmp_path, data) == []
    data["buckets"][0]["policy"]["stopped"] = 1
    data["buckets"][0]["shape"] = 3
    problems = found(tmp_path, data)
    assert problems[0].startswith("buckets[0].shape is 3")
    assert problems[1].startswith("buckets[0].policy.stopped is 1")


def test_a_policy_that_is_not_what_its_lock_was_written_with_is_told(tmp_path):
    for path in (ROOT / "policies").glob("decoder*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    policy, lock = tmp_path / "decoder-4gib.json", tmp_path / "decoder.lock.json"
    assert validate.check(str(policy)).problems == []
    policy.write_text(policy.read_text().replace('"recompute"', '"save"', 1))
    assert validate.check(str(policy)).problems == [
        "it is not what was written with decoder.lock.json: edited by hand, or merged"
    ]
    policy.unlink()
    assert validate.check(str(lock)).problems == [
        'policies["decoder-4gib.json"]: there is no such file beside it'
    ]
    lock.write_text(lock.read_text().replace("decoder-4gib.json", "../x.json"))
    assert "it should be a file and its SHA-256" in validate.check(str(lock)).problems[0]


def test_it_loads_nothing_but_the_standard_library():
    code = "import sys; from autoac.offline import launch, validate; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    third_party = {
        "torch",
        "numpy",
        "pydantic",
        "pydantic_core",
        "typer",
        "rich",
        "click",
        "ac_client",
        "pulp",
    }
    assert not loaded & third_party
    assert {"autoac.planner", "autoac.profiler"}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("good", [True, False])
def test_the_hook_runs_as_a_script_without_anything_installed(tmp_path, good):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(POLICY if good else changed("version", 3)))
    assert os.access(SCRIPT, os.X_OK)
    done = subprocess.run(
        [sys.executable, "-I", "-S", SCRIPT, path], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == (0 if good else 1)
    assert done.stdout == ""
    assert ("version is 3; it should be 1" in done.stderr) == (not good)


def test_a_policy_can_be_piped_in():
    for policy, code, words in (
        (POLICY, 0, ""),
        (changed("version", 3), 1, "-: version is 3; it should be 1"),
    ):
        argv = [sys.executable, SCRIPT, "-"]
        done = subprocess.run(argv, input=json.dumps(policy), capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert words in done.stderr


def test_the_launcher_goes_to_the_same_checks(tmp_path, monkeypatch, capsys):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(POLICY))
    for argv, code in (
        (["validate", str(path)], 0),
        (["validate"], 2),
        (["validate", "--json", "absent"], 1),
    ):
        monkeypatch.setattr(sys, "argv", ["autoac", *argv])
        with pytest.raises(SystemExit) as left:
            launch.main()
        assert left.value.code == code
    told = json.loads(capsys.readouterr().out)
    assert told["files"][0]["problems"] == ["No such file or directory"]
    monkeypatch.setattr(sys, "argv", ["autoac", "--version"])
    with pytest.raises(SystemExit) as left:
        launch.main()
    assert left.value.code == 0


@pytest.mark.parametrize("argv", [["validate", "--json"], ["db", "upgrade"]])
def test_a_reader_that_has_gone_is_no_traceback(argv, tmp_path):
    """As in `autoac validate --json ... | head -1`."""
    program = "import sys; from autoac.offline.launch import main; sys.argv[0] = 'autoac'; main()"
    files = [str(ROOT / "policies" / "decoder-4gib.json")] if argv[0] == "validate" else []
    environment = os.environ | {"AUTOAC_DATABASE_URL": f"sqlite:///{tmp_path / 'service.sqlite3'}"}
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, *argv, *files],
            env=environment,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_it_is_among_the_commands_and_leaves_with_1_where_a_file_is_not_valid(tmp_path, capsys):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(changed("version", 3)))
    with pytest.raises(SystemExit) as left:
        cli.main(["validate", str(path), str(ROOT / "policies" / "decoder-4gib.json")])
    assert left.value.code == 1
    assert "autoac: 1 of 2 files is not valid; make it again" in capsys.readouterr().err
