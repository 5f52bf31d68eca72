"""Ask a planning service for the policy of a step."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx2
import zstandard

from ac_client.service_client.connection import ServiceConnection, problem_of, refusal
from ac_client.service_client.errors import ServiceUnavailable
from autoac.planner import as_planned
from autoac.planner.errors import (
    InfeasibleBudget,
    InvalidBudget,
    InvalidConstraints,
    MalformedPolicy,
    OtherProfile,
    PlannerError,
    SolverOutOfTime,
    UnknownVersion,
    from_dict,
)
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.policy import Policy, Predicted
from autoac.planner.formats.profile import Profile
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.plan import DEFAULT_GAP
from autoac.planner.problem.apply_constraints import with_forward_limit

URN = "urn:autoac:problem:"
POLL_S = 0.5  # between two looks at a job
MOST_TIME_OFF = 0.1  # of the step: by how much the added time of a stored policy may be off on this profile
# That a service raises for a request of ours.
PLANNER_ERRORS = InfeasibleBudget, InvalidBudget, InvalidConstraints, SolverOutOfTime


def request_policy(
    url: str,
    profile: Profile,
    budget_bytes: int,
    *,
    constraints: Constraints | None = None,
    gap: float | None = None,
    time_limit_s: float | None = None,
    token: str | None = None,
    transport: httpx2.BaseTransport | None = None,
    timeout_s: float = 200.0,
) -> Policy:
    """Return the policy that the service at `url` has for this step, or have the service make one.

    The newest stored policy is taken if it was made for the same fingerprint, device, budget,
    constraints and gap, and if `on_profile` accepts it: run times and temporaries are not part of the
    fingerprint. It then has the predictions for `profile`. The profile is sent only if the service has no
    such policy. A service that is busy or does not answer is asked again a few times, within `timeout_s`.

    Args:
        url: address of the service, such as "http://127.0.0.1:8421".
        profile: the step to plan.
        budget_bytes: the most bytes live on the device over the whole step.
        constraints: what must hold in addition to the budget.
        gap: as for `plan`.
        time_limit_s: of the solver; by default the service's own limit.
        token: the service's key; by default the environment's AUTOAC_TOKEN. White space around it is dropped.
        transport: what carries the requests; by default the network.
        timeout_s: for everything, the service's queue included. Connecting may take 5 s of it.

    Raises:
        ServiceUnavailable: there was no usable answer; also if the service is of another release and cannot
            read the profile, or the job was cancelled twice.
        ServiceRefused: the service refused the request, or the key cannot be sent.
        InfeasibleBudget, SolverOutOfTime, InvalidBudget, InvalidConstraints: as `plan` does.
        ValueError: `url` is not an http or https URL.
    """
    rules = None if constraints == Constraints() else constraints
    options: dict[str, Any] = {"budget_bytes": budget_bytes, "gap": DEFAULT_GAP if gap is None else gap}
    if time_limit_s is not None:
        options["time_limit_s"] = time_limit_s
    with ServiceConnection(url, token, transport, timeout_s) as connection:
        stored = _stored_policy(connection, profile, options, rules)
        return stored or _new_policy(connection, profile, options, rules)


def _stored_policy(
    connection: ServiceConnection, profile: Profile, options: dict[str, Any], rules: Constraints | None
) -> Policy | None:
    """Return the newest policy that is stored for these options; None without one that serves the step."""
    response = connection.send(
        "GET",
        "/v1/policies",
        params={
            "fingerprint": profile.fingerprint,
            "device": profile.environment.device_name,
            "constraints_digest": "" if rules is None else rules.digest,
            "limit": "1",
        }
        | {name: repr(value) for name, value in options.items()},
    )
    if response.status_code == 422:  # a refusal to plan explains better what is wrong
        return None
    if response.status_code != 200:
        raise refusal(connection.url, response)
    try:
        ids = [item["id"] for item in json.loads(response.content)["items"]]
        if not all(re.fullmatch("[0-9a-f]{64}", id) for id in ids):
            raise ValueError("not the ids of policies")
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceUnavailable(f"{connection.url} gave something other than a list of policies") from error
    if not ids:
        return None
    response = connection.send("GET", f"/v1/policies/{ids[0]}")
    if response.status_code == 404:  # deleted in the meantime
        return None
    if response.status_code != 200:
        raise refusal(connection.url, response)
    policy = _policy_of(connection.url, response)
    if (policy.budget_bytes, policy.constraints) != (options["budget_bytes"], rules or Constraints()):
        return None
    return on_profile(policy, profile)


def _new_policy(
    connection: ServiceConnection, profile: Profile, options: dict[str, Any], rules: Constraints | None
) -> Policy:
    """Return the policy that the service makes from the profile."""
    more = {} if rules is None else {"constraints": rules.model_dump(mode="json")}
    body = json.dumps(options | more)[:-1] + ', "profile": ' + profile.to_json() + "}"
    headers = {"Content-Type": "application/json", "Content-Encoding": "zstd"}
    headers["Prefer"] = f"wait={max(1, int(connection.left_s * 0.9))}"
    content = zstandard.compress(body.encode())
    for _ in range(2):  # again if somebody cancelled the job, which clients may share
        response, done = connection.send("POST", "/v1/policies", content=content, headers=headers), 201
        if response.status_code == 202:
            response, done = _job_result(connection, response), 200
        if problem_of(response).get("type") != URN + "job-cancelled":
            break
    else:
        raise ServiceUnavailable(f"{connection.url} gave no policy, because the job was cancelled twice")
    if response.status_code != done:
        problem = problem_of(response)
        _refuse_other_release(connection.url, problem, profile)
        known = planner_error(problem, options["budget_bytes"])
        raise known if known is not None else refusal(connection.url, response)
    policy = _policy_of(connection.url, response)
    if policy.fingerprint != profile.fingerprint:
        raise ServiceUnavailable(f"{connection.url} gave a policy for another profile, of {policy.model}")
    return policy


def _job_result(connection: ServiceConnection, response: httpx2.Response) -> httpx2.Response:
    """Wait for a job that the service has accepted, and return its answer.

    Raises:
        ServiceUnavailable: the job was not finished in time, or the answer named no job.
    """
    job = response.headers.get("location", "")
    if not re.fullmatch("/v1/jobs/[0-9a-f]+", job):
        raise ServiceUnavailable(f"{connection.url} accepted a job and did not say which")
    while response.status_code == 202:
        if connection.left_s <= 0:
            raise ServiceUnavailable(f"{connection.url} has not finished {job} yet")
        time.sleep(POLL_S)
        response = connection.send("GET", f"{job}/result")
    return response


def _refuse_other_release(url: str, problem: dict[str, Any], profile: Profile) -> None:
    """Raise ServiceUnavailable if the service cannot read `profile`, which this release can plan."""
    match problem.get("type"):
        case "urn:autoac:problem:unknown-version":
            known = problem.get("known")
            newer = isinstance(known, int) and known > profile.version
            raise ServiceUnavailable(
                f"{url} reads version {known} of {profile.format}, and this release writes version "
                f"{profile.version}: upgrade autoac {'here' if newer else 'on the service'}"
            )
        case "urn:autoac:problem:malformed-profile":
            raise ServiceUnavailable(
                f"{url} does not read this release's profiles ({problem.get('detail')}): "
                "run the same release of autoac there"
            )


def on_profile(policy: Policy, profile: Profile) -> Policy | None:
    """Return `policy` with the predictions for a step of `profile`; None if it does not serve this step.

    The peak, by the simulator, must be within the budget. The time that the policy adds, as a share of the
    step, must be near the share that the policy states. Otherwise it was planned for other run times, and
    another plan may add much less. Without rates of a link, the time of moves is unknown.

    Args:
        policy: the policy, with its constraints.
        profile: a step with the same ops.
    """
    if policy.moves and profile.link is None:
        return None
    try:
        plan = as_planned(policy, profile)
    except OtherProfile:
        return None
    rules = policy.constraints
    within, forward = policy.budget_bytes - rules.headroom_bytes, rules.forward_budget_bytes
    graph = with_forward_limit(
        plan.graph, within, None if forward is None else forward - rules.headroom_bytes
    )
    there, here = policy.predicted, plan.policy().predicted
    if peak_bytes(graph, plan.save_set) > within or abs(_added(here) - _added(there)) > MOST_TIME_OFF:
        return None
    if policy.profile_digest == profile.digest:
        return policy
    return policy.model_copy(update={"profile_digest": profile.digest, "predicted": here})


def _added(predicted: Predicted) -> float:
    """Return the time of recomputes and stalls as a share of the step."""
    extra_us = predicted.recompute_us + predicted.stall_us
    return extra_us / predicted.step_us if predicted.step_us else 0.0


def _policy_of(url: str, response: httpx2.Response) -> Policy:
    """Return the policy in an answer.

    Raises:
        ServiceUnavailable: the answer is not a policy.
    """
    try:
        return Policy.from_json(response.content)
    except (MalformedPolicy, UnknownVersion) as error:
        raise ServiceUnavailable(f"{url} gave something other than a policy: {error}") from error


def planner_error(problem: dict[str, Any], budget: int) -> PlannerError | None:
    """Return the planner's error that a problem document describes; None if it describes another."""
    kind = str(problem.get("type")).removeprefix(URN)
    found = from_dict({"budget_bytes": budget} | problem | {"kind": kind})
    return found if isinstance(found, PLANNER_ERRORS) else None
