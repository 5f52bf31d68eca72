"""Report on stored plans for the pages, from policies and their profiles: bytes in, bytes out. Pure."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from autoac.planner.as_planned import as_planned
from autoac.planner.formats.policy import Policy
from autoac.planner.formats.profile import Profile
from autoac.planner.plan import Plan
from autoac.planner.report.policy_diff import diff_rows
from autoac.planner.report.timeline import picture

LEVEL = 6  # of gzip: a quarter of the size, within hundredths of a second


def pair(profile: bytes | None, policy: bytes) -> bytes:
    """Return the JSON object with both published forms; None: the profile was deleted."""
    return b'{"profile": ' + (profile or b"null") + b', "policy": ' + policy + b"}"


def draw(body: bytes) -> bytes:
    """Return what the page of a policy draws: the data of `planner.report.timeline`, as gzipped JSON.

    Args:
        body: a `pair` with a profile.

    Raises:
        OtherProfile: the policy was made from another profile.
        MalformedProfile: the profile is not valid.
    """
    plan, policy = _read(json.loads(body))
    assert isinstance(plan, Plan)
    text = json.dumps(picture(plan, policy=policy).data(), separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), LEVEL, mtime=0)


def compare(body: bytes) -> bytes:
    """Return the decisions that differ in two policies, as JSON; bytes are known with both profiles.

    Args:
        body: a list of two `pair`s.

    Raises:
        OtherProfile, MalformedProfile: as `draw`.
    """
    (before, _), (after, _) = map(_read, json.loads(body))
    held = isinstance(before, Plan) and isinstance(after, Plan)
    return json.dumps({"held": held, "rows": [asdict(row) for row in diff_rows(before, after)]}).encode()


def _read(data: Mapping[str, Any]) -> tuple[Plan | Policy, Policy]:
    policy = Policy.model_validate(data["policy"])
    if data["profile"] is None:
        return policy, policy
    return as_planned(policy, Profile.from_data(data["profile"])), policy


REPORTS: dict[str, Callable[[bytes], bytes]] = {"draw": draw, "compare": compare}
"""The functions that a child process makes reports with, by the verb that names them."""
