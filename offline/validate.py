#!/usr/bin/env python3
"""Checks policy files, offline and in a blink: what `autoac validate` and the pre-commit hook run.

Imports nothing but the standard library, so that it also runs as a script, from a clone, in any Python 3:

    python3 offline/validate.py policies/*.json

The rules are those of `planner/formats/policy.py`, written a second time without pydantic, which would take
longer to load than a commit should wait; tests/client/cli/test_validate.py holds the two against each
other. Beyond them it finds what a merge or a hand leaves behind: a key twice, a peak over the budget, a
text that is not the one that the lock beside it was written with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

OK, INVALID = 0, 1
MAX_INT = 2**53
MAX_NAME = 4096
MOST = 8  # problems told of one file
STDIN = "-"

_KEY = re.compile(r".*/[^/]+#\d+", re.DOTALL)  # "layers.3.mlp/aten.mm.default#1"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Checked(NamedTuple):
    """What was found in one file."""

    file: str
    kind: str  # "autoac.policy" and so on; "" where it cannot be told
    problems: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Check the files that `argv` names; the exit code."""
    parser = argparse.ArgumentParser(
        prog="autoac validate",
        description="Check policy files, policy sets and locks, without loading torch.",
        epilog="Exit codes: 0 all are valid, 1 one is not, 2 wrong usage.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="- for stdin")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    given = parser.parse_args(argv)
    return run(given.files, as_json=given.json)


def run(files: Sequence[str], *, as_json: bool = False) -> int:
    """Check `files` and tell; the exit code."""
    checked = [check(file) for file in files]
    bad = [one for one in checked if one.problems]
    if as_json:
        print(json.dumps({"valid": not bad, "files": [one._asdict() for one in checked]}, indent=1))
        return INVALID if bad else OK
    for one in bad:
        for problem in one.problems[:MOST]:
            print(f"{one.file}: {problem}", file=sys.stderr)
        if len(one.problems) > MOST:
            print(f"{one.file}: and {len(one.problems) - MOST} more", file=sys.stderr)
    if bad:
        n = len(bad)
        print(
            f"autoac: {n} of {len(files)} files {'is' if n == 1 else 'are'} not valid; make "
            f"{'it' if n == 1 else 'them'} again with `autoac regenerate` or `autoac plan`",
            file=sys.stderr,
        )
    return INVALID if bad else OK


def check(file: str) -> Checked:
    """What is wrong with one file; - is stdin."""
    try:
        text = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
    except OSError as error:
        return Checked(file, "", [str(error.strerror)])
    try:
        data = json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return Checked(file, "", [_not_json(error)])
    kind = data.get("format") if isinstance(data, dict) else None
    rules = _FORMATS.get(kind) if isinstance(kind, str) else None
    if rules is None:
        known = ", ".join(_FORMATS)
        return Checked(file, "", [f"format is {_shown(kind)}; one of {known} can be checked"])
    problems = list(rules(data))
    if not problems and file != STDIN:  # what comes from there has nothing beside it
        problems += _by_lock(Path(file), text, data)
    return Checked(file, str(kind), problems)


class _KeyTwice(ValueError):
    pass


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _KeyTwice(f"key {_shown(twice)} is there twice: a merge that was not finished?")
    return found


def _no_constant(name: str) -> Any:
    raise _KeyTwice(f"{name} is no number here")


def _not_json(error: Exception) -> str:
    if isinstance(error, _KeyTwice):
        return str(error)
    if isinstance(error, RecursionError):
        return "not JSON: nested too deeply"
    return f"not JSON: {error}"


# --- rules ----------------------------------------------------------------------------------------------

Rule = Callable[[Any], str]
"""A value -> what it should be, or "" where it is that."""


def _text(value: Any) -> str:
    return "" if isinstance(value, str) and len(value) <= MAX_NAME else f"text of at most {MAX_NAME} letters"


def _number(lower: float, upper: float, *, whole: bool = False) -> Rule:
    kinds = (int,) if whole else (int, float)
    what = f"a {'whole ' if whole else ''}number from {lower:g} to {upper:g}"

    def rule(value: Any) -> str:
        good = isinstance(value, kinds) and not isinstance(value, bool) and lower <= value <= upper
        return "" if good else what

    return rule


def _one_of(*values: Any) -> Rule:
    what = " or ".join(json.dumps(value) for value in values)
    return lambda value: (
        "" if any(value is v or (type(value) is type(v) and value == v) for v in values) else what
    )


def _texts(value: Any) -> str:
    return "" if isinstance(value, list) and not any(map(_text, value)) else "a list of texts"


def _patterns(value: Any) -> str:
    good = isinstance(value, list) and len(value) <= 1000 and all(v and not _text(v) for v in value)
    return "" if good else "a list of at most 1000 patterns"


def _ends(value: Any) -> str:
    good = isinstance(value, list) and not any(map(_COUNT, value)) and value == sorted(value)
    return "" if good else "a list of whole numbers that ascend"


def _text_by_text(value: Any) -> str:
    good = isinstance(value, dict) and not any(_text(k) or _text(v) for k, v in value.items())
    return "" if good else "texts by name"


def _anything(value: Any) -> str:
    return ""


def _or_none(rule: Rule) -> Rule:
    def either(value: Any) -> str:
        what = rule(value) if value is not None else ""
        return f"{what}, or null" if what else ""

    return either


_COUNT = _number(0, MAX_INT, whole=True)
_US = _number(0, 1e15)

_PREDICTED: dict[str, Rule] = {
    "peak_bytes": _COUNT,
    "peak_at": _text,
    "save_all_peak_bytes": _COUNT,
    "static_bytes": _COUNT,
    "recompute_us": _US,
    "recompute_bound_us": _US,
    "step_us": _US,
    "gap": _number(0, 1),
}
_CONSTRAINTS: dict[str, Rule] = {
    "pin_save": _patterns,
    "pin_recompute": _patterns,
    "recompute_only": _patterns,
    "fsdp_units": _patterns,
    "save_deciding": _one_of(True, False),
    "forward_budget_bytes": _or_none(_number(1, MAX_INT, whole=True)),
    "extra_static_bytes": _COUNT,
    "gradients": _one_of("as profiled", "present", "absent"),
}
_POLICY: dict[str, Rule] = {
    "format": _one_of("autoac.policy"),
    "version": _one_of(1),
    "model": _text,
    "fingerprint": _text,
    "profile_digest": _text,
    "inputs": _texts,
    "device": _text,
    "budget_bytes": _COUNT,
    "corrected_by_bytes": _number(-MAX_INT, MAX_INT, whole=True),
    "stopped": _text,
    "predicted": _anything,
    "tools": _text_by_text,
    "constraints": _anything,
    "forward_ends": _ends,
    "decisions": _anything,
}
_POLICY_MAY_LACK = {"format", "corrected_by_bytes", "constraints", "forward_ends"}


def _fields(data: Any, rules: dict[str, Rule], may_lack: set[str], where: str = "") -> Iterator[str]:
    """What is wrong with the fields of an object."""
    if not isinstance(data, dict):
        yield f"{where.rstrip('.') or 'the file'} is {_shown(data)}; it should be an object"
        return
    for name in data:
        if name not in rules:
            yield f"{where}{name} is no field of it; fields are {', '.join(rules)}"
    for name, rule in rules.items():
        if name not in data:
            if name not in may_lack:
                yield f"{where}{name} is missing"
            continue
        what = rule(data[name])
        if what:
            yield f"{where}{name} is {_shown(data[name])}; it should be {what}"


def _policy(data: Any, where: str = "") -> Iterator[str]:
    found = list(_fields(data, _POLICY, _POLICY_MAY_LACK, where))
    yield from found
    if not isinstance(data, dict):
        return
    if data.get("constraints") is not None:
        yield from _fields(data["constraints"], _CONSTRAINTS, set(_CONSTRAINTS), f"{where}constraints.")
    predicted = list(_fields(data.get("predicted", {}), _PREDICTED, set(), f"{where}predicted."))
    if "predicted" in data:
        yield from predicted
    decisions = data.get("decisions", {})
    if not isinstance(decisions, dict):
        yield f"{where}decisions is {_shown(decisions)}; it should be an object"
        return
    for key, decision in decisions.items():
        if len(key) > MAX_NAME or not _KEY.fullmatch(key):
            yield f"{where}decisions: {_shown(key)} is no op's key; a key is MODULE/OP#N"
        if decision not in ("save", "recompute"):
            yield f'{where}decisions[{_shown(key)}] is {_shown(decision)}; it should be "save" or "recompute"'
    if not found and not predicted:
        yield from _numbers_agree(data, where)


def _numbers_agree(data: dict[str, Any], where: str) -> Iterator[str]:
    told, budget = data["predicted"], data["budget_bytes"]
    if (ends := data.get("forward_ends")) and ends[-1] > len(data["decisions"]):
        yield f"{where}forward_ends ends at {ends[-1]}, beyond the {len(data['decisions'])} decisions"
    if told["peak_bytes"] > budget:
        yield f"{where}predicted.peak_bytes is {told['peak_bytes']}, over budget_bytes, {budget}"
    if told["recompute_bound_us"] > told["recompute_us"] * (1 + 1e-9):
        yield (
            f"{where}predicted.recompute_bound_us is {told['recompute_bound_us']}, over recompute_us, "
            f"{told['recompute_us']}, which it bounds from below"
        )


def _policy_set(data: Any) -> Iterator[str]:
    rules = {"format": _one_of("autoac.policy-set"), "version": _one_of(1), "buckets": _anything}
    yield from _fields(data, rules, set())
    buckets = data.get("buckets", [])
    if not isinstance(buckets, list):
        yield f"buckets is {_shown(buckets)}; it should be a list"
        return
    for i, bucket in enumerate(buckets):
        yield from _fields(bucket, {"shape": _text_by_text, "policy": _anything}, set(), f"buckets[{i}].")
        if isinstance(bucket, dict) and "policy" in bucket:
            yield from _policy(bucket["policy"], f"buckets[{i}].policy.")


def _lock(data: Any) -> Iterator[str]:
    names = ("name", "device", "model", "planned_on", "fingerprint", "digest")
    rules: dict[str, Rule] = {"format": _one_of("autoac.lock"), "version": _one_of(1)}
    rules |= dict.fromkeys(names, _text)
    rules |= {"inputs": _texts, "environment": _anything, "static": _anything}
    rules |= {"gradient_nbytes": _COUNT, "optimizer_workspace_nbytes": _COUNT}
    rules |= {"asked": _anything, "policies": _text_by_text, "ops": _anything}
    yield from _fields(data, rules, {"format", "version"})


_FORMATS: dict[str, Callable[[Any], Iterator[str]]] = {
    "autoac.policy": _policy,
    "autoac.policy-set": _policy_set,
    "autoac.lock": _lock,
}


# --- locks ----------------------------------------------------------------------------------------------


def _by_lock(path: Path, text: bytes, data: dict[str, Any]) -> Iterator[str]:
    """Whether a policy is what the lock beside it says, and a lock what lies beside it."""
    if data["format"] == "autoac.lock":
        for name, digest in data["policies"].items():
            if "/" in name or "\\" in name or not _SHA256.fullmatch(digest):
                yield f"policies[{_shown(name)}] is {_shown(digest)}; it should be a file and its SHA-256"
            elif not (path.parent / name).is_file():
                yield f"policies[{_shown(name)}]: there is no such file beside it"
        return
    digest = hashlib.sha256(text).hexdigest()
    for lock in sorted(path.parent.glob("*.lock.json")):
        try:
            named = json.loads(lock.read_bytes())["policies"].get(path.name, digest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # checked when it is named itself
        if named != digest:
            yield f"it is not what was written with {lock.name}: edited by hand, or merged"


def _shown(value: Any) -> str:
    text = json.dumps(value) if value is not None else "missing"
    return text if len(text) <= 80 else text[:77] + "..."


if __name__ == "__main__":
    sys.exit(main())
