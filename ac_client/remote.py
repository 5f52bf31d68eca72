"""Asks a planning service for a policy. Imports no torch.

    RemoteError
    +-- ServiceUnavailable   not there, overloaded or broken: planning in process is the way out
    +-- ServiceRefused       there, and it said no: a wrong token, a wrong address, a body too large

What the planner itself has to say about a profile or a budget comes back as the planner's own errors.
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

import httpx2
import zstandard

from autoac.planner.constraints import Constraints
from autoac.planner.errors import (
    Holding,
    InfeasibleBudget,
    InfeasibleConstraints,
    InvalidBudget,
    InvalidConstraints,
    MalformedPolicy,
    MalformedProfile,
    PlannerError,
    SolverOutOfTime,
    UnknownVersion,
)
from autoac.planner.policy import Policy
from autoac.planner.profile import Profile

URN = "urn:autoac:problem:"
CONNECT_S = 5.0
LOOK_S = 0.5  # between two looks at a job


class RemoteError(Exception):
    """Base of what can go wrong with a service, beside what can go wrong in the planner."""


class ServiceUnavailable(RemoteError):
    """The service cannot be reached, is overloaded, or answers nonsense. Another try may fare better."""


class ServiceRefused(RemoteError):
    """The service understood and said no, for a reason that only a change of the call will cure."""


def request_policy(
    url: str,
    profile: Profile,
    budget_bytes: int,
    *,
    headroom_bytes: int = 0,
    constraints: Constraints | None = None,
    gap: float | None = None,
    time_limit_s: float | None = None,
    token: str | None = None,
    transport: httpx2.BaseTransport | None = None,
    timeout_s: float = 200.0,
) -> Policy:
    """The policy that the service at `url` makes; the same as the embedded planner's.

    Args:
        url: where the service is, such as "http://127.0.0.1:8421".
        profile: the step to plan.
        budget_bytes: the most bytes live on the device over the whole step.
        headroom_bytes: kept free below the budget.
        constraints: what must hold beside the budget.
        gap, time_limit_s: as for `plan`; by default the service's.
        token: the service's token; by default the environment's AUTOAC_TOKEN.
        transport: what carries the request; by default the network.
        timeout_s: for the answer, the service's queue included. Connecting gets 5 s of it.

    Raises:
        ServiceUnavailable: there was no answer, or none worth having.
        ServiceRefused: the answer was no.
        InfeasibleBudget, SolverOutOfTime, InvalidBudget, InvalidConstraints: as `plan` does.
        MalformedProfile, UnknownVersion: the service cannot read the profile.
        ValueError: `url` is no http or https URL.
    """
    address = policies_url(url)
    options: dict[str, Any] = {"budget_bytes": budget_bytes, "headroom_bytes": headroom_bytes}
    options |= {k: v for k, v in {"gap": gap, "time_limit_s": time_limit_s}.items() if v is not None}
    if constraints is not None:
        options["constraints"] = constraints.model_dump(mode="json")
    body = json.dumps(options)[:-1] + ', "profile": ' + profile.to_json() + "}"
    headers = {"Content-Type": "application/json", "Content-Encoding": "zstd"}
    headers["Prefer"] = f"wait={max(1, int(timeout_s * 0.9))}"
    token = token or os.environ.get("AUTOAC_TOKEN")
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        timeout = httpx2.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s))
        with httpx2.Client(transport=transport, timeout=timeout) as client:
            until = time.monotonic() + timeout_s
            response = client.post(address, content=zstandard.compress(body.encode()), headers=headers)
            accepted = response.status_code == 202
            if accepted:
                response = _result(client, address, response, headers.get("Authorization"), until)
    except httpx2.TransportError as error:
        raise ServiceUnavailable(f"{url} did not answer: {error or type(error).__name__}") from error
    return _policy(url, response, profile, budget_bytes, done=200 if accepted else 201)


def _result(
    client: httpx2.Client,
    address: httpx2.URL,
    response: httpx2.Response,
    authorization: str | None,
    until: float,
) -> httpx2.Response:
    """What became of a job that the service has accepted.

    Raises:
        ServiceUnavailable: it was not finished by `until`, or the answer named no job.
    """
    job = response.headers.get("location", "")
    if not re.fullmatch("/v1/jobs/[0-9a-f]+", job):
        raise ServiceUnavailable(f"{address} accepted a job and did not say which")
    url = address.copy_with(path=address.path.removesuffix("/v1/policies") + f"{job}/result")
    headers = {"Authorization": authorization} if authorization else {}
    while response.status_code == 202:
        if time.monotonic() > until:
            raise ServiceUnavailable(f"{address} has not finished {job} yet")
        time.sleep(LOOK_S)
        response = client.get(url, headers=headers)
    return response


def policies_url(url: str) -> httpx2.URL:
    """Where `url`'s service takes profiles.

    Raises:
        ValueError: `url` is no http or https URL.
    """
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"service must be a URL such as http://127.0.0.1:8421: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"service must be a URL such as http://127.0.0.1:8421, not {url!r}")
    return parsed.copy_with(path=parsed.path.rstrip("/") + "/v1/policies")


def _policy(url: str, response: httpx2.Response, profile: Profile, budget: int, *, done: int) -> Policy:
    if response.status_code == done:
        try:
            policy = Policy.from_json(response.content)
        except (MalformedPolicy, UnknownVersion) as error:
            raise ServiceUnavailable(f"{url} gave what is no policy here: {error}") from error
        if policy.fingerprint != profile.fingerprint:
            raise ServiceUnavailable(f"{url} gave a policy for another profile, of {policy.model}")
        return policy
    problem = _problem(response)
    known = planner_error(problem, profile, budget)
    if known is not None:
        raise known
    said = f"{url} answered {response.status_code}: {problem.get('detail') or response.reason_phrase}"
    raise ServiceRefused(said) if 400 <= response.status_code < 500 else ServiceUnavailable(said)


def _problem(response: httpx2.Response) -> dict[str, Any]:
    """The problem document of an answer; empty if it has none."""
    if response.headers.get("content-type", "").partition(";")[0] != "application/problem+json":
        return {}
    try:
        problem = json.loads(response.content)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def _sizes(problem: dict[str, Any]) -> tuple[int, int, int | None, str, list[Holding]]:
    """The arguments of an InfeasibleBudget."""
    return (
        problem["budget_bytes"],
        problem["proven_floor_bytes"],
        problem["smallest_found_bytes"],
        problem["peak_at"],
        [Holding(h["nbytes"], h["name"], h["why"]) for h in problem["live"]],
    )


def planner_error(problem: dict[str, Any], profile: Profile, budget: int) -> PlannerError | None:
    """The planner's error that a problem document tells of; None if it tells of none."""
    try:
        match problem.get("type", "").removeprefix(URN):
            case "malformed-profile":
                return MalformedProfile(problem["problems"])
            case "unknown-version":
                return UnknownVersion(problem["format"], profile.version, problem["known"])
            case "invalid-budget":
                return InvalidBudget(problem["detail"])
            case "invalid-constraints":
                return InvalidConstraints(problem["detail"])
            case "solver-out-of-time":
                return SolverOutOfTime(budget, float(problem["time_limit_s"]))
            case "infeasible-budget":
                return InfeasibleBudget(*_sizes(problem))
            case "infeasible-constraints":
                return InfeasibleConstraints(*_sizes(problem), problem["culprits"])
            case _:
                return None
    except (KeyError, TypeError, ValueError, AttributeError):  # not as our service writes it
        return None
