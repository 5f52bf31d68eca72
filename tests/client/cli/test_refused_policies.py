"""`autoac explain` refuses what is not a policy, and policies that contradict themselves."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from client.cli.command import run

from ac_client.cli.exit_codes import ERROR, OK
from autoac.planner import Constraints, Policy, PolicySet

POLICY_FILE = Path(__file__).parents[3] / "examples" / "regenerate" / "policies" / "decoder-4gib.json"

POLICY = json.loads(POLICY_FILE.read_bytes()) | {
    "constraints": Constraints(pin_save=("**",), forward_budget_bytes=1).model_dump(mode="json")
}
KEY = next(iter(POLICY["decisions"]))


def changed(path, value):
    """Return POLICY with another value at a path such as "predicted|gap"."""
    data = inner = copy.deepcopy(POLICY)
    *outer, last = path.split("|")
    for key in outer:
        inner = inner[key]
    inner[last] = value
    return data


@pytest.fixture
def refused(tmp_path, capsys):
    """Return a function that explains a file with this text or data, and returns the error, or ""."""

    def explain(content):
        path = tmp_path / "p.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        code, out, err = run(capsys, "explain", path)
        assert (code, bool(out)) == ((ERROR, False) if err else (OK, True))
        assert err.startswith(f"autoac: {path}: ") or not err
        return err.removeprefix(f"autoac: {path}: ")

    return explain


@pytest.mark.parametrize("data", [POLICY, changed("corrected_by_bytes", -5)])
def test_valid_policy_is_explained(refused, data):
    assert refused(data) == ""


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "autoac.plan"),
        ("version", 2),
        ("model", 3),
        ("model", "x" * 5000),
        ("modle", "x"),
        ("inputs", "x"),
        ("budget_bytes", 2**60),
        ("tools", {"a": 1}),
        ("predicted", []),
        ("predicted|gap", 1.5),
        ("predicted|gaps", 1),
        ("predicted|step_us", -1),
        ("constraints", None),
        ("constraints|pin_save", [""]),
        ("constraints|gradients", "some"),
        ("constraints|pins", []),
        ("decisions", []),
        (f"decisions|{KEY}", "keep"),
    ],
)
def test_problem_of_a_field_names_the_field(refused, path, value):
    assert path.replace("|", ".").partition("#")[0] in refused(changed(path, value))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON: Expecting"),
        ("[" * 200000, "not JSON: nested too deeply"),
        ("[]", "must be a policy, as `autoac plan` writes it, got JSON that is not an object"),
        ('{"format": ["autoac.policy"]}', "format: "),
        ('{"a": 1, "a": 2}', 'key "a" occurs twice'),
        ('{"format": "autoac.policy", "budget_bytes": NaN}', "NaN is not a JSON number"),
    ],
)
def test_file_that_is_not_a_policy_is_refused(refused, text, words):
    assert words in refused(text)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("budget_bytes", 1, "predicted.peak_bytes is {}, over budget_bytes, 1"),
        (
            "predicted|recompute_bound_us",
            9e9,
            "predicted.recompute_bound_us is 9000000000.0, over recompute_us",
        ),
        ("decisions|aten.mm", "save", 'a key must have the form MODULE/OP#N, got "aten.mm"'),
    ],
)
def test_policy_that_contradicts_itself_is_refused(refused, path, value, words):
    assert words.format(POLICY["predicted"]["peak_bytes"]) in refused(changed(path, value))


def test_policies_of_a_policy_set_are_checked(refused):
    policy = Policy.from_json(json.dumps(POLICY))
    policies = PolicySet(buckets=({"shape": {"0": "int64[2]"}, "policy": policy},))
    data = json.loads(policies.to_json())
    assert refused(data) == ""
    data["buckets"][0]["policy"]["budget_bytes"] = 1
    assert "buckets[0].policy.predicted.peak_bytes is " in refused(data)
    data["buckets"][0]["policy"]["stopped"] = 1
    data["buckets"][0]["shape"] = 3
    found = refused(data)
    assert "buckets.0.shape" in found
    assert "buckets.0.policy.stopped" in found


def test_explain_of_a_policy_loads_no_torch():
    code = (
        "import sys; from ac_client.cli.main import main\n"
        f"try: main(['explain', {str(POLICY_FILE)!r}])\n"
        "except SystemExit as exited: assert exited.code == 0\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    loaded = done.stdout.splitlines()[-1].split()
    assert "autoac.planner" in loaded
    assert not {"torch", "autoac.profiler"} & {*loaded}


def test_policy_can_be_read_from_stdin():
    for policy, code, words in ((POLICY, OK, ""), (changed("version", 3), ERROR, "stdin: ")):
        argv = [sys.executable, "-m", "ac_client.cli.main", "explain", "-"]
        done = subprocess.run(argv, input=json.dumps(policy), capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert words in done.stderr


@pytest.mark.parametrize("argv", [["explain", "--json", str(POLICY_FILE)], ["db", "upgrade"]])
def test_closed_stdout_is_not_a_traceback(argv, tmp_path):
    """As in `autoac explain --json ... | head -1`."""
    environment = os.environ | {"AUTOAC_DATABASE_URL": f"sqlite:///{tmp_path / 'service.sqlite3'}"}
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ac_client.cli.main", *argv],
            env=environment,
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")
