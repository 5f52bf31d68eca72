"""`autoac validate`: check policies, policy sets and locks by their formats alone.

The command imports `autoac.planner.formats` and the lock, neither torch nor a solver, so that a commit hook
can run it. In addition to the formats, it finds traces of a merge or an edit: a key that occurs twice, a peak
over the budget, a text that differs from the one that its lock was written with. With `--profile` it also
builds the plan's graph and checks the plan's numbers against their definitions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ac_client.cli.exit_codes import ERROR
from ac_client.cli.options import Json
from ac_client.cli.output import read, read_profile, say

if TYPE_CHECKING:
    from autoac.planner import Policy, Profile

MAX_PROBLEMS = 8  # printed for one file


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A checked policy file, with all that is wrong in it."""

    file: str
    kind: str  # "autoac.policy" and so on; "" if unknown
    problems: list[str]


def validate(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Policies, policy sets, locks; - for stdin.")
    ],
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", help="Also check that each policy is a correct plan of this profile."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check policy files without loading torch. The pre-commit hook runs this command."""
    profile = None if profile_file is None else read_profile(profile_file)
    checked = [check_file(file, profile) for file in files]
    invalid = [one for one in checked if one.problems]
    if as_json:
        print(json.dumps({"valid": not invalid, "files": [asdict(one) for one in checked]}, indent=1))
    else:
        for one in invalid:
            for problem in one.problems[:MAX_PROBLEMS]:
                say(f"{one.file}: {problem}", file=sys.stderr)
            if len(one.problems) > MAX_PROBLEMS:
                say(f"{one.file}: and {len(one.problems) - MAX_PROBLEMS} more", file=sys.stderr)
        if invalid:
            print(
                f"autoac: {len(invalid)} of {len(files)} files invalid; write valid ones with "
                "`autoac regenerate` or `autoac plan`",
                file=sys.stderr,
            )
    if invalid:
        raise typer.Exit(ERROR)


def check_file(file: Path, profile: Profile | None = None) -> CheckedFile:
    """List the problems of one file; `-` is stdin. Check a policy against the profile it was planned from."""
    from autoac.planner.formats.base import read_json

    try:
        text = read(file)
    except OSError as error:
        return CheckedFile(str(file), "", [str(error.strerror)])
    try:
        data = read_json(text)
    except ValueError as error:
        return CheckedFile(str(file), "", [f"not JSON: {error}"])
    kind = data.get("format") if isinstance(data, dict) else None
    problems = list(_format_problems(kind, text, profile))
    if not problems and str(file) != "-":  # stdin has no lock next to it
        problems = list(_lock_problems(file, text, data))
    return CheckedFile(str(file), kind if isinstance(kind, str) else "", problems)


def _format_problems(kind: object, text: bytes, profile: Profile | None) -> Iterator[str]:
    """List what the file's own format finds, and numbers of a policy that contradict each other."""
    from ac_client.regenerate.lock import FORMAT as LOCK
    from ac_client.regenerate.lock import Lock, UnreadableLock
    from autoac.planner.errors import MalformedPolicy, UnknownVersion
    from autoac.planner.formats.policy import FORMAT as POLICY
    from autoac.planner.formats.policy import Policy
    from autoac.planner.formats.policy_set import SET_FORMAT, PolicySet

    try:
        if kind == POLICY:
            policy = Policy.from_json(text)
            yield from _contradictions(policy)
            if profile is not None:
                yield from _plan_problems(policy, profile)
        elif kind == SET_FORMAT:
            for i, bucket in enumerate(PolicySet.from_json(text).buckets):
                yield from (f"buckets[{i}].policy.{line}" for line in _contradictions(bucket.policy))
        elif kind == LOCK:
            Lock.from_json(text)
        else:
            known = f"{POLICY!r}, {SET_FORMAT!r} or {LOCK!r}"
            yield f"format must be {known}, got {'nothing' if kind is None else repr(kind)[:80]}"
    except MalformedPolicy as error:
        yield from error.problems
    except (UnknownVersion, UnreadableLock) as error:
        yield str(error)


def _contradictions(policy: Policy) -> Iterator[str]:
    from autoac.planner.formats.op_key import OpKey

    predicted = policy.predicted
    if predicted.peak_bytes > policy.budget_bytes:
        yield f"predicted.peak_bytes is {predicted.peak_bytes}, over budget_bytes, {policy.budget_bytes}"
    extra_us = predicted.recompute_us + predicted.stall_us
    if predicted.recompute_bound_us > extra_us * (1 + 1e-9):
        also = " and stall_us" if policy.moves else ""
        yield (
            f"predicted.recompute_bound_us is {predicted.recompute_bound_us}, over recompute_us{also}, "
            f"{extra_us}, which it bounds from below"
        )
    for key in policy.decisions:
        parsed = OpKey.parse(key)
        if parsed.occurrence is None or str(parsed) != key:
            yield f"decisions: a key must have the form MODULE/OP#N, got {json.dumps(key)}"


def _plan_problems(policy: Policy, profile: Profile) -> Iterator[str]:
    """List the rules that a policy breaks as a plan of `profile`."""
    from autoac.planner import PlannerError, as_planned
    from autoac.planner.problem.moves import handling_us
    from autoac.planner.problem.validate import broken_graph_rules, broken_plan_rules

    if policy.profile_digest != profile.digest:
        yield f"profile_digest must be {profile.digest} for this profile, got {policy.profile_digest}"
        return
    try:
        plan = as_planned(policy, profile)
    except PlannerError as error:
        yield str(error)
        return
    predicted = policy.predicted
    yield from broken_graph_rules(plan.graph)
    yield from broken_plan_rules(
        plan.graph,
        save_set=plan.save_set,
        recompute_set=plan.recompute_set | plan.moved,
        peak=predicted.peak_bytes,
        budget=policy.budget_bytes,
        recompute_us=predicted.recompute_us + handling_us(plan.graph, plan.moved),
    )
    if predicted.moved_bytes != plan.moved_bytes:
        yield f"predicted.moved_bytes must be {plan.moved_bytes} for these moves, got {predicted.moved_bytes}"
    if predicted.peak_bytes != plan.peak:
        yield f"predicted.peak_bytes must be {plan.peak} for these decisions, got {predicted.peak_bytes}"


def _lock_problems(path: Path, text: bytes, data: dict[str, Any]) -> Iterator[str]:
    """Compare a policy with the locks next to it, or a lock with the policies next to it."""
    from ac_client.regenerate.lock import EDITED, FORMAT, sha256

    if data["format"] == FORMAT:
        for name in data["policies"]:
            if not (path.parent / name).is_file():
                yield f"policies[{json.dumps(name)}]: the file does not exist next to the lock"
        return
    for lock in sorted(path.parent.glob("*.lock.json")):
        try:
            digest = json.loads(lock.read_bytes())["policies"].get(path.name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # an invalid lock is reported when it is checked itself
        if digest is not None and digest != sha256(text):
            yield EDITED.format(lock.name)
