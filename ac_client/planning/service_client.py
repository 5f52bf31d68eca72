"""Asks a planning service for a policy. Imports no torch.

    RemoteError
    +-- ServiceUnavailable   not there, overloaded or broken: planning in process is the way out
    +-- ServiceRefused       there, and it said no: a wrong key, a wrong address, a body too large

What the planner itself has to say about a profile or a budget comes back as the planner's own errors.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx2
import zstandard

from autoac.planner.errors import (
    MalformedPolicy,
    PlannerError,
    UnknownVersion,
    from_dict,
)
from autoac.planner.formats.constraints import Constraints, constrained, held_back
from autoac.planner.formats.policy import Policy
from autoac.planner.formats.profile import Profile
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.plan import DEFAULT_GAP, DEFAULT_TIME_LIMIT_S
from autoac.planner.problem.graph import OpId
from autoac.planner.units import format_bytes

T = TypeVar("T")

URN = "urn:autoac:problem:"
CONNECT_S = 5.0
LOOK_S = 0.5  # between two looks at a job
PAUSES_S = (0.25, 0.5, 1.0)  # before another try; longer where the service says so
GET_S = 30.0  # for an answer that nobody has to think about
SHORTEST_S = 0.1  # for an answer, even at the end
BUSY = (429, 502, 503)  # what may be gone in a moment; 502 is a proxy's between two replicas
MOST_LOOKED_AT = 3  # stored policies, the newest first
MOST_ANSWER = 64 << 20  # bytes of an answer
FRAMING = ("content-length", "transfer-encoding")  # headers that say how an answer came
KEY = re.compile(r"[ -~]+")  # what a header may say
ALIAS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*(/[A-Za-z0-9][A-Za-z0-9._@+-]*){0,3}")
MOST_OF_AN_ALIAS = 200


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
    """The policy that the service at `url` has for this step, or makes; as good as the embedded planner's.

    A stored one is taken if it was made for the same fingerprint, device, budget, headroom, constraints and
    gap, and if the simulator finds that it fits on `profile` too: run times and temporaries are no part of
    the fingerprint. Only where there is none is the profile sent. A service that is busy or does not
    answer is asked again a few times, within `timeout_s`.

    Args:
        url: where the service is, such as "http://127.0.0.1:8421".
        profile: the step to plan.
        budget_bytes: the most bytes live on the device over the whole step.
        headroom_bytes: kept free below the budget.
        constraints: what must hold beside the budget.
        gap, time_limit_s: as for `plan`.
        token: the service's key; by default the environment's AUTOAC_TOKEN. White space around it is dropped.
        transport: what carries the request; by default the network.
        timeout_s: for all of it, the service's queue included. Connecting gets 5 s of it.

    Raises:
        ServiceUnavailable: there was no answer, or none worth having; also where the service is of another
            release and cannot read the profile, or the job was cancelled twice.
        ServiceRefused: the answer was no, or the key cannot be sent.
        InfeasibleBudget, SolverOutOfTime, InvalidBudget, InvalidConstraints: as `plan` does.
        ValueError: `url` is no http or https URL.
    """
    asked = _Asked(
        profile,
        budget_bytes,
        headroom_bytes,
        None if constraints == Constraints() else constraints,
        DEFAULT_GAP if gap is None else gap,
        DEFAULT_TIME_LIMIT_S if time_limit_s is None else time_limit_s,
    )
    with _Talk(url, token, transport, timeout_s) as talk:
        return _stored(talk, asked) or _made(talk, asked)


def named_policy(
    url: str,
    alias: str,
    *,
    token: str | None = None,
    transport: httpx2.BaseTransport | None = None,
    timeout_s: float = 30.0,
) -> Policy:
    """The policy that `alias` stands for now, such as "llama-8b@h100/production".

    Args:
        url, token, transport, timeout_s: as for `request_policy`.
        alias: its name in the service at `url`.

    Raises:
        ServiceUnavailable: there was no answer, or none worth having.
        ServiceRefused: the answer was no; also where there is no such alias.
        ValueError: `url` is no http or https URL, or `alias` cannot be a name.
    """
    if not ALIAS.fullmatch(alias) or len(alias) > MOST_OF_AN_ALIAS:
        raise ValueError(f"alias={alias!r} is no alias: pass a name such as llama-8b@h100/production")
    with _Talk(url, token, transport, timeout_s) as talk:
        response = talk.send("GET", f"/v1/named-policies/{quote(alias)}")
        if response.status_code != 200:
            raise _no(url, response)
        return _read(url, response)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a policy is wanted for."""

    profile: Profile
    budget_bytes: int
    headroom_bytes: int
    constraints: Constraints | None
    gap: float
    time_limit_s: float

    def taken(self, policy: Policy) -> bool:
        """Whether `policy` is one for this, and fits on this profile."""
        if (policy.fingerprint, policy.device, policy.budget_bytes, policy.constraints) != (
            self.profile.fingerprint,
            self.profile.environment.device_name,
            self.budget_bytes,
            self.constraints,
        ):
            return False
        return fits(policy, self.profile, self.budget_bytes, self.headroom_bytes)


class _Talk:
    """A conversation with a service: where, as whom, and until when."""

    def __init__(
        self, url: str, token: str | None, transport: httpx2.BaseTransport | None, timeout_s: float
    ) -> None:
        self.url = url
        self._base = policies_url(url)
        self._until = time.monotonic() + timeout_s
        self._client = httpx2.Client(transport=transport)
        self._headers = {"Accept-Encoding": "identity"} | _authorization(token)

    def __enter__(self) -> Self:
        self._client.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._client.__exit__(*error)

    @property
    def left_s(self) -> float:
        """Seconds until it must be over."""
        return self._until - time.monotonic()

    def send(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, str] | None = None,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> httpx2.Response:
        """The answer; of the last try where the service is busy. Asking twice does nothing twice.

        Raises:
            ServiceUnavailable: there was none.
        """
        place = self._base.copy_with(path=self._base.path.removesuffix("/v1/policies") + path)
        for pause_s in (*PAUSES_S, None):
            left = max(self.left_s if content is not None else min(self.left_s, GET_S), SHORTEST_S)
            request = self._client.build_request(
                method,
                place,
                params=params,
                content=content,
                headers=self._headers | (headers or {}),
                timeout=httpx2.Timeout(left, connect=min(CONNECT_S, left)),
            )
            try:
                response = _within(left, partial(self._answer, request))
            except TimeoutError:
                raise ServiceUnavailable(f"{self.url} did not answer within {left:.1f} s") from None
            except (httpx2.NetworkError, httpx2.ConnectTimeout, httpx2.RemoteProtocolError) as error:
                if pause_s is None or pause_s > self.left_s:
                    raise _no_answer(self.url, error) from error
            except httpx2.TransportError as error:  # it had its time
                raise _no_answer(self.url, error) from error
            else:
                pause_s = None if pause_s is None else max(pause_s, _retry_after_s(response))
                if response.status_code not in BUSY or pause_s is None or pause_s > self.left_s:
                    return response
            # Clients that were turned away together must not come back together.
            time.sleep(pause_s * random.uniform(1.0, 1.25))
        raise AssertionError("the last try returns or raises")

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request and return the whole answer.

        Raises:
            ServiceUnavailable: it is too large, or compressed, which would hide its size.
        """
        response = self._client.send(request, stream=True)
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ServiceUnavailable(f"{self.url} compressed its answer, which nobody asked for")
            content = bytearray()
            for piece in response.iter_bytes():
                content += piece
                if len(content) > MOST_ANSWER:
                    raise ServiceUnavailable(
                        f"{self.url} answered with more than {format_bytes(MOST_ANSWER)}"
                    )
        finally:
            response.close()
        headers = [(k, v) for k, v in response.headers.multi_items() if k not in FRAMING]
        return httpx2.Response(response.status_code, headers=headers, content=bytes(content))


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` gives, from a thread: httpx2's own limits begin again with every byte that comes.

    Raises:
        TimeoutError: it takes longer. The thread is left behind, until the client is closed.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  (raised below)
            done.set_exception(error)

    threading.Thread(target=run, name="autoac request", daemon=True).start()
    return done.result(seconds)


def _authorization(token: str | None) -> dict[str, str]:
    """Return the header with the key, which no error quotes.

    Raises:
        ServiceRefused: the key has characters that a header cannot have.
    """
    key = (token or os.environ.get("AUTOAC_TOKEN") or "").strip()
    if not key:
        return {}
    if not KEY.fullmatch(key):
        where = "the argument token" if token else "the environment variable AUTOAC_TOKEN"
        at = next(i for i, letter in enumerate(key) if not KEY.fullmatch(letter))
        raise ServiceRefused(
            f"{where} must be a key of printable ASCII characters, got another at position {at}; "
            "`autoac keys create NAME` makes a key"
        )
    return {"Authorization": f"Bearer {key}"}


def _stored(talk: _Talk, asked: _Asked) -> Policy | None:
    """A policy that the service has for this; None if it has none that is taken."""
    rules = asked.constraints
    response = talk.send(
        "GET",
        "/v1/policies",
        params={
            "fingerprint": asked.profile.fingerprint,
            "device": asked.profile.environment.device_name,
            "budget_bytes": str(asked.budget_bytes),
            "headroom_bytes": str(asked.headroom_bytes),
            "gap": repr(asked.gap),
            "time_limit_s": repr(asked.time_limit_s),
            "constraints_digest": "" if rules is None else rules.digest,
            "limit": str(MOST_LOOKED_AT),
        },
    )
    if response.status_code == 422:  # what it does not take here it refuses better where it is asked to plan
        return None
    if response.status_code != 200:
        raise _no(talk.url, response)
    for id in _ids(talk.url, response):
        response = talk.send("GET", f"/v1/policies/{id}")
        if response.status_code == 404:  # deleted in the meantime
            continue
        if response.status_code != 200:
            raise _no(talk.url, response)
        policy = _read(talk.url, response)
        if asked.taken(policy):
            return policy
    return None


def _ids(url: str, response: httpx2.Response) -> list[str]:
    """The ids of a page of policies."""
    try:
        ids = [item["id"] for item in json.loads(response.content)["items"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceUnavailable(f"{url} gave what is no list of policies") from error
    if not all(isinstance(id, str) and re.fullmatch("[0-9a-f]{64}", id) for id in ids):
        raise ServiceUnavailable(f"{url} gave what is no list of policies")
    return ids[:MOST_LOOKED_AT]


def _made(talk: _Talk, asked: _Asked) -> Policy:
    """The policy that the service makes from the profile."""
    profile = asked.profile
    options: dict[str, Any] = {
        "budget_bytes": asked.budget_bytes,
        "headroom_bytes": asked.headroom_bytes,
        "gap": asked.gap,
        "time_limit_s": asked.time_limit_s,
    }
    if asked.constraints is not None:
        options["constraints"] = asked.constraints.model_dump(mode="json")
    body = json.dumps(options)[:-1] + ', "profile": ' + profile.to_json() + "}"
    headers = {"Content-Type": "application/json", "Content-Encoding": "zstd"}
    headers["Prefer"] = f"wait={max(1, int(talk.left_s * 0.9))}"
    content = zstandard.compress(body.encode())
    for _ in range(2):  # again where somebody cancelled the job, which others may share
        response, done = talk.send("POST", "/v1/policies", content=content, headers=headers), 201
        if response.status_code == 202:
            response, done = _result(talk, response), 200
        if _problem(response).get("type") != URN + "job-cancelled":
            break
    else:
        raise ServiceUnavailable(f"{talk.url}: the job was cancelled, twice")
    if response.status_code != done:
        problem = _problem(response)
        _refuse_other_release(talk.url, problem, profile)
        known = planner_error(problem, asked.budget_bytes)
        raise known if known is not None else _no(talk.url, response)
    policy = _read(talk.url, response)
    if policy.fingerprint != profile.fingerprint:
        raise ServiceUnavailable(f"{talk.url} gave a policy for another profile, of {policy.model}")
    return policy


def _result(talk: _Talk, response: httpx2.Response) -> httpx2.Response:
    """What became of a job that the service has accepted.

    Raises:
        ServiceUnavailable: it was not finished in time, or the answer named no job.
    """
    job = response.headers.get("location", "")
    if not re.fullmatch("/v1/jobs/[0-9a-f]+", job):
        raise ServiceUnavailable(f"{talk.url} accepted a job and did not say which")
    while response.status_code == 202:
        if talk.left_s <= 0:
            raise ServiceUnavailable(f"{talk.url} has not finished {job} yet")
        time.sleep(LOOK_S)
        response = talk.send("GET", f"{job}/result")
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


def fits(policy: Policy, profile: Profile, budget_bytes: int, headroom_bytes: int) -> bool:
    """Whether a step of `profile` under `policy` stays within the budget, by the simulator.

    Args:
        policy: with the constraints that it was made under.
        profile: a step with the same ops.
        budget_bytes, headroom_bytes: as for `plan`.
    """
    if list(policy.decisions) != profile.keys():
        return False
    rules = policy.constraints or Constraints()
    within = budget_bytes - headroom_bytes
    forward = rules.forward_budget_bytes
    graph = held_back(
        constrained(profile, rules), within, None if forward is None else forward - headroom_bytes
    )
    saved = frozenset(OpId(i) for i, said in enumerate(policy.decisions.values()) if said == "save")
    return peak_bytes(graph, saved) <= within


def _retry_after_s(response: httpx2.Response) -> float:
    """Seconds of a Retry-After header; 0 where there is none that says seconds."""
    said = response.headers.get("retry-after", "")
    return float(said) if re.fullmatch("[0-9]{1,6}", said) else 0.0


def _no_answer(url: str, error: Exception) -> ServiceUnavailable:
    return ServiceUnavailable(f"{url} did not answer: {error or type(error).__name__}")


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


def _read(url: str, response: httpx2.Response) -> Policy:
    """Raises: ServiceUnavailable: the answer is no policy."""
    try:
        return Policy.from_json(response.content)
    except (MalformedPolicy, UnknownVersion) as error:
        raise ServiceUnavailable(f"{url} gave what is no policy here: {error}") from error


def _no(url: str, response: httpx2.Response) -> RemoteError:
    """The error for an answer that is none of those hoped for. A service that is busy may have time later."""
    status = response.status_code
    said = f"{url} answered {status}: {_problem(response).get('detail') or response.reason_phrase}"
    if status == 401:
        said += ". It takes its key from the environment variable AUTOAC_TOKEN"
    refused = 400 <= status < 500 and status not in BUSY
    return ServiceRefused(said) if refused else ServiceUnavailable(said)


def _problem(response: httpx2.Response) -> dict[str, Any]:
    """The problem document of an answer; empty if it has none."""
    if response.headers.get("content-type", "").partition(";")[0] != "application/problem+json":
        return {}
    try:
        problem = json.loads(response.content)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def planner_error(problem: dict[str, Any], budget: int) -> PlannerError | None:
    """Return the planner's error that a problem document describes; None if it describes another."""
    kind = str(problem.get("type")).removeprefix(URN)
    return from_dict({"budget_bytes": budget} | problem | {"kind": kind})
