"""Check that Profile and Policy survive JSON, and that errors name the wrong field."""

from __future__ import annotations

import functools
import json
import operator
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import graphs
import pytest
from pydantic import BaseModel

from autoac.planner import (
    InfeasibleBudget,
    InvalidBudget,
    MalformedPolicy,
    MalformedProfile,
    Policy,
    PolicySet,
    Profile,
    SolverOutOfTime,
    UnknownOp,
    UnknownVersion,
    bounds,
    build,
    plan,
)
from autoac.planner.errors import (
    ConflictingPins,
    Holding,
    InvalidLimit,
    OtherProfile,
    PlannerError,
    UnmatchedPattern,
    from_dict,
)
from autoac.planner.formats import policy
from autoac.planner.formats.base import VERSION
from autoac.planner.formats.policy_set import Bucket
from autoac.planner.plan import plan_of
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.units import bytes_from_gb, exact_bytes


def recomputing_policy() -> Policy:
    profile = graphs.gpt2(1)
    return plan(profile, budget_bytes=graphs.between(profile)).policy()


def policy_set() -> PolicySet:
    return PolicySet(buckets=(Bucket(shape={"0": "int64[1, 1]"}, policy=recomputing_policy()),))


def test_profile_round_trips_through_json_and_builds_the_same_graph() -> None:
    profile = graphs.gpt2(1)
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert (again.digest, again.fingerprint) == (profile.digest, profile.fingerprint)
    assert build(again) == build(profile)


def test_model_whose_name_has_lines_is_named_in_one_line() -> None:
    text = graphs.gpt2(1).to_json().replace("gpt2-1", r"a\nb\t\u001bc")
    found = Profile.from_json(text)
    assert found.model == r"a\nb\t\x1bc"
    assert Profile.from_json(found.to_json()) == found


def test_name_of_a_model_is_limited_once_it_is_escaped() -> None:
    text = graphs.gpt2(1).to_json()
    longest = Profile.from_json(text.replace("gpt2-1", r"\u0000" * 1024))
    assert len(longest.model) == 4096
    assert Profile.from_json(longest.to_json()) == longest
    with pytest.raises(MalformedProfile) as caught:
        Profile.from_json(text.replace("gpt2-1", r"\u0000" * 1025))
    (problem,) = caught.value.problems
    assert problem.startswith("model: ")
    assert "4096" in problem


def test_policy_has_one_decision_per_op_in_execution_order() -> None:
    profile = graphs.gpt2(1)
    assert list(recomputing_policy().decisions) == profile.keys()


def test_figures_of_many_ops_and_microbatches_that_no_device_has_are_written() -> None:
    """Peak and budget are in range: nothing is saved."""
    tape = graphs.Tape()
    saved = [tape.save(tape.op("a", [], 8, us=1e15)[0]) for _ in range(2)]
    tape.op("loss", [], 0)
    tape.step("step", saved)
    profile = tape.profile().model_copy(update={"waiting_microbatches": 2**52})
    predicted = plan_of(SearchProblem(build(profile)), profile, 100, frozenset()).policy().predicted
    assert (predicted.save_all_peak_bytes, predicted.recompute_us) == (2**53, 2e15)


def test_run_times_change_the_digest_but_not_the_fingerprint() -> None:
    profile = graphs.gpt2(1)
    ops = profile.ops.model_copy(update={"runtime_us": tuple(2 * t for t in profile.ops.runtime_us)})
    slower = profile.model_copy(update={"ops": ops})
    assert slower.digest != profile.digest
    assert slower.fingerprint == profile.fingerprint


def test_allocator_slack_changes_storage_sizes_but_not_the_fingerprint() -> None:
    profile = graphs.gpt2(1)
    count = len(profile.storages)
    assert profile.storages.slack_nbytes == (0,) * count
    storages = profile.storages.model_copy(update={"slack_nbytes": (0, *[7] * (count - 1))})
    wide = Profile.from_json(profile.model_copy(update={"storages": storages}).to_json())
    assert wide.storages.slack_nbytes == storages.slack_nbytes
    assert wide.digest != profile.digest
    assert wide.fingerprint == profile.fingerprint
    assert [s.nbytes for s in build(wide).storages] == wide.storages.block_nbytes()
    assert sum(wide.storages.block_nbytes()) == sum(profile.storages.nbytes) + 7 * (count - 1)


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(data: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for part in parents:
            data = data[part]
        data[last] = value

    return apply


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (change("model", 3), "model"),
        (change("surprise", 1), "surprise"),
        (change("ops.runtime_us", []), "must have the same length"),
        (change("values.storage", [10**6] * 3), "must have the same length"),
        (change("storages.nbytes", ["many"]), "storages.nbytes"),
        (change("ops.reads.starts", [1]), "ascend"),
        (change("static.parameters", -1), "parameters"),
        (change("static.parameters", 2**60), "parameters"),
        (change("saved.dropped", [10**9]), "must refer to rows below"),
        (change("saved.dropped", [7]), "dropped after backward step 1, which unpacks it, got moment 7"),
    ],
)
def test_error_for_a_malformed_profile_names_the_field(
    spoil: Callable[[dict[str, Any]], None], words: str
) -> None:
    data = json.loads(graphs.dropout().to_json())
    spoil(data)
    with pytest.raises(MalformedProfile, match=words):
        Profile.from_data(data)


def test_references_to_missing_rows_and_to_later_ops_are_rejected() -> None:
    data = json.loads(graphs.dropout().to_json())
    for path, value in (("values", 99), ("saved", 99)):
        spoiled = json.loads(json.dumps(data))
        column = "op" if path == "values" else "value"
        spoiled[path][column][0] = value
        with pytest.raises(MalformedProfile, match="got row 99"):
            Profile.from_data(spoiled)
    data["ops"]["reads"]["items"][0] = 3
    with pytest.raises(MalformedProfile, match="must read values that earlier ops write, got value 3"):
        Profile.from_data(data)


def test_op_that_writes_over_a_version_without_reading_it_is_rejected() -> None:
    tape = graphs.Tape()
    (x,) = tape.op("x", [], 4)
    tape.op("relu_", [], into=x)
    data = json.loads(tape.profile().to_json())
    assert Profile.from_data(data).ops.reads.rows() == [(), (0,)]
    data["ops"]["reads"] = {"starts": [0, 0, 0], "items": []}
    with pytest.raises(MalformedProfile, match="op 1 must read value 0, which it writes over with value 1"):
        Profile.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("file", "error"),
    [(Profile, MalformedProfile), (Policy, MalformedPolicy), (PolicySet, (MalformedPolicy, UnknownVersion))],
)
def test_text_that_is_not_a_file_of_ours_is_rejected(file: Any, error: Any) -> None:
    wrong = '{"format": "autoac.policy", "version": 7, "buckets": [], "decisions": {"a": "maybe"}}'
    for text in ("", "{", "[]", "null", "3", '"x"', "[" * 100_000, b"\xff\xfe", wrong):
        with pytest.raises(error):
            file.from_json(text)


@pytest.mark.parametrize(
    ("file", "command"),
    [
        (graphs.dropout, "profile the model again with `autoac profile`"),
        (recomputing_policy, "plan again with `autoac plan`"),
        (policy_set, "plan again with `autoac fit -o`"),
    ],
)
@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1, None])
def test_another_version_is_an_error_that_says_what_to_run(
    file: Callable[[], Profile | Policy | PolicySet], command: str, version: int | None
) -> None:
    made = file()
    data = json.loads(made.to_json()) | {"version": version, "surprise": 1}
    with pytest.raises(UnknownVersion) as caught:
        type(made).from_json(json.dumps(data))
    assert str(caught.value) == f"{made.format} must be version {VERSION}, got {version}: {command}"


@pytest.mark.parametrize("file", [graphs.dropout, recomputing_policy, policy_set])
def test_every_field_is_written_and_required(file: Callable[[], Profile | Policy | PolicySet]) -> None:
    made = file()
    for *parents, field in fields_of(made):
        data = json.loads(made.to_json())
        del functools.reduce(operator.getitem, parents, data)[field]
        with pytest.raises((MalformedProfile, MalformedPolicy, UnknownVersion)):
            type(made).from_json(json.dumps(data))


def fields_of(model: BaseModel, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Return the paths of the fields of a file. The version of a set is that of its policies."""
    for name, value in model:
        if not (path and name in ("format", "version")):
            yield (*path, name)
        if isinstance(value, BaseModel):
            yield from fields_of(value, (*path, name))
        elif name == "buckets":
            yield from fields_of(value[0], (*path, name, 0))


def differentiating_profile() -> Profile:
    """Return a profile in which a backward inside of forward unpacks all saved tensors until the last op."""
    profile = graphs.gpt2(1)
    needed = (len(profile.ops) - 1,) * len(profile.saved)
    return profile.model_copy(update={"saved": profile.saved.model_copy(update={"needed_until": needed})})


def test_policy_says_until_when_forward_holds_what_a_backward_inside_of_it_unpacks() -> None:
    profile = differentiating_profile()
    assert Profile.from_json(profile.to_json()) == profile
    made = plan(profile, budget_bytes=graphs.between(profile)).policy()
    assert Policy.from_json(made.to_json()) == made
    keys = profile.keys()
    saved = {keys[profile.values.op[v]] for v in profile.saved.value}
    recomputed = {key for key, decision in made.decisions.items() if decision.startswith("recompute")}
    assert made.needed_until == dict.fromkeys((saved & recomputed) - {keys[-1]}, keys[-1])


def moved(free: str, fetch: str) -> Callable[[dict[str, str]], dict[str, Any]]:
    return lambda op: {
        "moves": {op["save"]: {"free": op.get(free, free), "fetch": op.get(fetch, fetch)}},
        "decisions": {op["save"]: "offload"},
    }


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (lambda op: {"needed_until": {op["save"]: op["last"]}}, "must have ops that are recomputed or moved"),
        (lambda op: {"needed_until": {op["recompute"]: op["first"]}}, "must be needed until a later op"),
        (lambda op: moved("last", "last")(op) | {"decisions": {}}, "must have exactly the ops"),
        (moved("save", "last"), "must be freed before a later op"),
        (
            moved(policy.THE_END, "./aten.other.default#0"),
            "must be fetched where an op of the policy is unpacked",
        ),
    ],
)
def test_policy_that_contradicts_itself_is_rejected(
    changes: Callable[[dict[str, str]], dict[str, Any]], problem: str
) -> None:
    policy = json.loads(recomputing_policy().to_json())
    keys = list(policy["decisions"])
    decided = {decision: key for key, decision in policy["decisions"].items()}
    for field, change in changes(decided | {"first": keys[0], "last": keys[-1]}).items():
        policy[field] |= change
    with pytest.raises(MalformedPolicy, match=problem):
        Policy.from_json(json.dumps(policy))


@pytest.mark.parametrize(
    "error",
    [
        MalformedProfile(["a", "b"]),
        MalformedPolicy(["a"]),
        UnknownVersion("autoac.profile", 7, 1),
        InvalidBudget("no"),
        UnknownOp(7, 3),
        InfeasibleBudget(10, 20, 30, "here", [Holding(5, "x", "saved")]),
        InfeasibleBudget(10, 20, None, "here", []),
        SolverOutOfTime(10, 2.0),
        InfeasibleBudget(10, 20, 30, "here", [Holding(5, "x", "saved")], None, ["pins"]),
        SolverOutOfTime(10, 2.0, 5, 20),
        SolverOutOfTime(10, None, 5, 20),
        InvalidLimit("gap", -1, "from 0 to 1"),
        OtherProfile("a", "b", "key"),
        UnmatchedPattern("pin_save", "x", ("y",), 3),
        ConflictingPins("op", "one", "other"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickle_and_json(error: PlannerError) -> None:
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
    decoded = from_dict(json.loads(json.dumps(error.to_dict())))
    assert type(decoded) is type(error)
    assert str(decoded) == str(error)
    assert vars(decoded) == vars(error)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"kind": "no-such-error"},
        {"kind": "unknown-op"},
        {"kind": "infeasible-budget", "budget_bytes": "10", "proven_floor_bytes": None},
        {"kind": "infeasible-budget", "live": [{"name": "x"}]},
    ],
)
def test_data_that_is_not_an_error_decodes_to_none(data: dict[str, object]) -> None:
    assert from_dict(data) is None


def test_committed_policy_schema_matches_the_model() -> None:
    path = Path(policy.__file__).with_name("policy.schema.json")
    assert path.read_text() == policy.json_schema(), "run `make schema`"


def test_save_set_is_not_part_of_an_encoded_error() -> None:
    error = InfeasibleBudget(10, 20, 30, "here", [], frozenset({0}))
    assert "save_set" not in error.to_dict()


def test_error_for_an_infeasible_budget_advises_a_budget_that_fits() -> None:
    graph = build(graphs.gpt2(2))
    known = bounds(graph)
    with pytest.raises(InfeasibleBudget) as caught:
        plan(graph, budget_bytes=known.floor // 2, time_limit_s=5)
    error = caught.value
    text = str(error)
    assert f"No plan fits in {exact_bytes(known.floor // 2)}: the step needs at least" in text
    assert "not planned" in text
    advised = float(text.split("budget_gb=")[1].split()[0])
    assert bytes_from_gb(advised) >= error.smallest_found
    assert plan(graph, budget_gb=advised, time_limit_s=20).peak <= bytes_from_gb(advised)


@pytest.mark.parametrize("nbytes", [16, 345_784, 347_187, 5_000_000_000, 2**50])
def test_advised_budget_is_sufficient_and_at_most_ten_percent_too_large(nbytes: int) -> None:
    error = InfeasibleBudget(nbytes // 2, nbytes, nbytes, "backward", ())
    advised = float(str(error).split("budget_gb=")[1].split()[0])
    assert nbytes <= bytes_from_gb(advised) <= nbytes * 1.1
    assert f"{nbytes:,} B" in str(error) or f"{nbytes} B" in str(error)


def test_error_of_the_base_class_is_published_with_its_text() -> None:
    assert PlannerError("no such thing").to_dict() == {"kind": "planner-error", "detail": "no such thing"}


def test_other_keys_of_a_problem_document_are_no_fields_of_the_error() -> None:
    error = InfeasibleBudget(10, 11, None, "a/aten.mm.default#0, forward", (Holding(8, "a", "saved"),))
    read = from_dict(error.to_dict() | {"status": 422})
    assert isinstance(read, InfeasibleBudget)
    assert read.live == error.live
