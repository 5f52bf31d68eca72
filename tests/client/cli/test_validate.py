"""`autoac validate`: formats, contradictions inside a file, and locks."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ac_client.cli.exit_codes import ERROR, OK, USAGE
from ac_client.cli.main import main
from ac_client.cli.validate_command import check_file
from autoac.planner import Policy, PolicySet

POLICIES = Path(__file__).parents[3] / "examples" / "regenerate" / "policies"

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
    """Return POLICY with another value at a path such as "predicted|gap"; GONE removes the key."""
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


def problems(tmp_path, text, name="p.json"):
    """Return the problems of a file with this text, or with this data as JSON."""
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return check_file(path).problems


def test_policies_of_the_repository_are_valid():
    files = sorted(POLICIES.glob("*.json"))
    assert len(files) == 5
    for file in files:
        assert check_file(file).problems == []


@pytest.mark.parametrize("data", [POLICY, POLICY | {"constraints": None}, changed("corrected_by_bytes", -5)])
def test_valid_policy_has_no_problems(tmp_path, data):
    assert problems(tmp_path, data) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "autoac.profile"),
        ("format", GONE),
        ("version", 2),
        ("model", 3),
        ("model", GONE),
        ("model", "x" * 5000),
        ("modle", "x"),
        ("inputs", "x"),
        ("budget_bytes", -1),
        ("budget_bytes", 1.5),
        ("budget_bytes", 2**60),
        ("corrected_by_bytes", "x"),
        ("tools", {"a": 1}),
        ("predicted", []),
        ("predicted", GONE),
        ("predicted|gap", 1.5),
        ("predicted|gap", GONE),
        ("predicted|gaps", 1),
        ("predicted|step_us", -1),
        ("constraints", 5),
        ("constraints|pin_save", [""]),
        ("constraints|pin_save", [3]),
        ("constraints|gradients", "some"),
        ("constraints|forward_budget_bytes", 0),
        ("constraints|pins", []),
        ("decisions", []),
        ("decisions|0/aten.mm.default#0", "keep"),
    ],
)
def test_problem_of_a_field_names_the_field(tmp_path, path, value):
    found = problems(tmp_path, changed(path, value))
    assert found
    assert path.replace("|", ".").partition("#")[0] in found[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON: Expecting"),
        ("[" * 200000, "not JSON: nested too deeply"),
        ("[]", "format must be 'autoac.policy', 'autoac.policy-set' or 'autoac.lock', got nothing"),
        ('{"format": ["autoac.policy"]}', "got ['autoac.policy']"),
        ('{"a": 1, "a": 2}', 'key "a" occurs twice'),
        ('{"format": "autoac.policy", "budget_bytes": NaN}', "NaN is not a JSON number"),
    ],
)
def test_file_that_is_not_a_policy_is_reported(tmp_path, text, words):
    assert words in problems(tmp_path, text)[0]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("predicted|peak_bytes", 101, "predicted.peak_bytes is 101, over budget_bytes, 100"),
        ("predicted|recompute_bound_us", 3, "predicted.recompute_bound_us is 3.0, over recompute_us, 2.5"),
        ("decisions|aten.mm", "save", 'a key must have the form MODULE/OP#N, got "aten.mm"'),
    ],
)
def test_contradiction_inside_a_policy_is_reported(tmp_path, path, value, words):
    assert words in problems(tmp_path, changed(path, value))[0]


def test_policies_of_a_policy_set_are_checked(tmp_path):
    policy = Policy.from_json(json.dumps(POLICY))
    policies = PolicySet(buckets=({"shape": {"0": "int64[2]"}, "policy": policy},))
    data = json.loads(policies.to_json())
    assert problems(tmp_path, data) == []
    data["buckets"][0]["policy"]["budget_bytes"] = 1
    assert problems(tmp_path, data) == ["buckets[0].policy.predicted.peak_bytes is 90, over budget_bytes, 1"]
    data["buckets"][0]["policy"]["stopped"] = 1
    data["buckets"][0]["shape"] = 3
    found = problems(tmp_path, data)
    assert found[0].startswith("buckets.0.shape")
    assert found[1].startswith("buckets.0.policy.stopped")


def test_policy_must_be_the_text_that_its_lock_was_written_with(tmp_path):
    for path in POLICIES.glob("decoder*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    policy, lock = tmp_path / "decoder-4gib.json", tmp_path / "decoder.lock.json"
    assert check_file(policy).problems == []
    policy.write_text(policy.read_text().replace('"recompute"', '"save"', 1))
    (problem,) = check_file(policy).problems
    assert "decoder.lock.json" in problem
    policy.unlink()
    (problem,) = check_file(lock).problems
    assert "decoder-4gib.json" in problem
    lock.write_text(lock.read_text().replace("decoder-4gib.json", "../x.json"))
    assert "../x.json" in check_file(lock).problems[0]


def test_validate_loads_neither_torch_nor_a_solver():
    code = (
        "import sys; from pathlib import Path; from ac_client.cli.validate_command import check_file\n"
        f"assert not check_file(Path({str(POLICIES / 'decoder.lock.json')!r})).problems\n"
        f"assert not check_file(Path({str(POLICIES / 'decoder-4gib.json')!r})).problems\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "pulp", "highspy"}
    assert "autoac.profiler" not in done.stdout.split()


def test_policy_can_be_read_from_stdin():
    for policy, code, words in ((POLICY, OK, ""), (changed("version", 3), ERROR, "-: ")):
        argv = [sys.executable, "-m", "ac_client.cli.main", "validate", "-"]
        done = subprocess.run(argv, input=json.dumps(policy), capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert words in done.stderr


def test_exit_code_is_1_if_a_file_is_invalid(tmp_path, capsys):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(changed("version", 3)))
    valid = str(POLICIES / "decoder-4gib.json")
    for argv, code in (([valid], OK), ([], USAGE), ([str(path), valid], ERROR), (["absent"], ERROR)):
        with pytest.raises(SystemExit) as exited:
            main(["validate", *argv])
        assert exited.value.code == code
    assert "autoac: 1 of 2 files invalid" in capsys.readouterr().err


def test_json_lists_the_problems_of_each_file(capsys):
    with pytest.raises(SystemExit):
        main(["validate", "--json", "absent"])
    data = json.loads(capsys.readouterr().out)
    assert not data["valid"]
    assert data["files"][0]["problems"] == ["No such file or directory"]


@pytest.mark.parametrize("argv", [["validate", "--json"], ["db", "upgrade"]])
def test_closed_stdout_is_not_a_traceback(argv, tmp_path):
    """As in `autoac validate --json ... | head -1`."""
    files = [str(POLICIES / "decoder-4gib.json")] if argv[0] == "validate" else []
    environment = os.environ | {"AUTOAC_DATABASE_URL": f"sqlite:///{tmp_path / 'service.sqlite3'}"}
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ac_client.cli.main", *argv, *files],
            env=environment,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
