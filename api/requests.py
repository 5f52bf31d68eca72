"""Parse requests and answer them: bytes in, bytes out. Pure, no server in it.

A request is read twice. `parse_request` checks it and splits it into a profile, which is stored, and options,
which make a job. `answer` solves the body that `job_body` assembles from both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Protocol, Self

import zstandard
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from autoac.api.errors import MalformedRequest, NotJson
from autoac.planner.errors import InvalidBudget, MalformedProfile
from autoac.planner.formats import base
from autoac.planner.formats.base import MAX_INT, complaints
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.policy import Policy
from autoac.planner.formats.profile import Profile
from autoac.planner.frontier import Frontier, find_frontier
from autoac.planner.minimum_peak import MinimumPeak, find_minimum_peak
from autoac.planner.offload import plan_with_host
from autoac.planner.plan import DEFAULT_GAP, DEFAULT_TIME_LIMIT_S
from autoac.planner.solver.highs import OnProgress
from autoac.planner.solver.time_limit import Clock
from autoac.planner.units import GIB, bytes_from_gb

DEFAULT_POINTS = 16


class Kind(StrEnum):
    """Names what a client asks for: storing a profile, or a solve that starts from one."""

    PROFILE = "profile"  # store a profile
    POLICY = "policy"  # plan within a budget
    FRONTIER = "frontier"  # plan for several budgets: peaks and recompute times
    FLOOR = "floor"  # find the smallest peak that a plan can have


class SolveRequest(BaseModel):
    """The fields that every request for a solve has."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)  # true is not a number of bytes

    # from_data, since its errors tell an unknown version from a malformed profile; pydantic's do not.
    profile: Annotated[Profile, PlainValidator(Profile.from_data, json_schema_input_type=Profile)] | None = (
        Field(None, description="One training step. Give this or profile_digest.")
    )
    profile_digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        None, description="The digest of a stored profile."
    )
    gap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    time_limit_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Time limit of the solver in seconds. The service caps it."
    )
    constraints: Constraints | None = Field(None, description="Constraints in addition to the budget.")

    @model_validator(mode="after")
    def _one_profile(self) -> Self:
        if (self.profile is None) == (self.profile_digest is None):
            raise MalformedRequest(["give one of profile and profile_digest"])
        return self

    def options(self, most_seconds: float) -> dict[str, Any]:
        """Return everything but the profile in a normal form: equal requests have equal options."""
        constraints = self.constraints if self.constraints != Constraints() else None
        return {
            "gap": DEFAULT_GAP if self.gap is None else self.gap,
            "time_limit_s": min(self.time_limit_s or DEFAULT_TIME_LIMIT_S, most_seconds),
            "constraints": None if constraints is None else constraints.model_dump(mode="json"),
        }


class PolicyRequest(SolveRequest):
    """The body of `POST /v1/policies`."""

    budget_gb: float | None = Field(
        None, description="Upper bound of the bytes live on the device over the whole step, in GiB."
    )
    budget_bytes: int | None = Field(None, description="The same in bytes. Give exactly one of the two.")

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        budgets = [b for b in (self.budget_gb, self.budget_bytes) if b is not None]
        if len(budgets) != 1:
            raise InvalidBudget("give one of budget_gb and budget_bytes")
        if not 1 <= budgets[0] * (1 if self.budget_gb is None else GIB) <= MAX_INT:  # false for nan too
            raise InvalidBudget(f"a budget must have 1 to {MAX_INT} bytes")
        return self

    @property
    def budget(self) -> int:
        """Return the budget in bytes."""
        return bytes_from_gb(self.budget_gb) if self.budget_gb is not None else self.budget_bytes or 0

    def options(self, most_seconds: float) -> dict[str, Any]:
        return super().options(most_seconds) | {"budget_bytes": self.budget}


class FrontierRequest(SolveRequest):
    """The body of `POST /v1/frontiers`."""

    points: Annotated[int, Field(ge=2, le=64)] = DEFAULT_POINTS

    def options(self, most_seconds: float) -> dict[str, Any]:
        return super().options(most_seconds) | {"points": self.points}


class FloorRequest(SolveRequest):
    """The body of `POST /v1/floors`."""


REQUESTS: Mapping[Kind, type[SolveRequest]] = {
    Kind.POLICY: PolicyRequest,
    Kind.FRONTIER: FrontierRequest,
    Kind.FLOOR: FloorRequest,
}


@dataclass(frozen=True, slots=True)
class ParsedProfile:
    """A checked profile in the form that is stored."""

    digest: str
    fingerprint: str
    model: str
    device: str
    ops: int
    inputs: tuple[str, ...]
    parameter_bytes: int
    plain_bytes: int
    content: bytes = field(repr=False)  # the published form, zstd

    @classmethod
    def of(cls, profile: Profile) -> ParsedProfile:
        """Return the stored form of a profile.

        Raises:
            MalformedProfile: the device's name has a character that PostgreSQL does not store.
        """
        if "\0" in profile.environment.device_name:  # the model's name has it escaped
            raise MalformedProfile(["environment.device_name: must not contain the character NUL"])
        text = profile.to_json().encode()
        return cls(
            digest=profile.digest,
            fingerprint=profile.fingerprint,
            model=profile.model,
            device=profile.environment.device_name,
            ops=len(profile.ops),
            inputs=profile.inputs,
            parameter_bytes=profile.static.parameters,
            plain_bytes=len(text),
            content=zstandard.compress(text),
        )


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked request: a profile or the digest of one, and the options."""

    kind: Kind
    profile: ParsedProfile | None
    profile_digest: str
    options: dict[str, Any]

    @property
    def request_key(self) -> str:
        """Return a key that equal requests share."""
        return request_key(self.kind, self.profile_digest, self.options)


def request_key(kind: Kind, profile_digest: str, options: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a request's kind, profile and options."""
    text = json.dumps([kind.value, profile_digest, options], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Planned(Protocol):
    """The attributes of `autoac.planner.Plan` that the service reads."""

    def policy(self) -> Policy: ...


Planner = Callable[..., Planned]
"""`autoac.planner.plan`, or a replacement in tests."""


def read_json(body: bytes) -> Any:
    """Return the data of a decoded body.

    Raises:
        NotJson: as the ValueError of `base.read_json`, or the body is not UTF-8.
    """
    try:
        # Decoded as UTF-8 first: json.loads would guess the encoding of bytes.
        return base.read_json(str(body, "utf-8"))
    except ValueError as error:
        raise NotJson(f"the body is not JSON: {error}") from None


def read_request(kind: Kind, body: bytes) -> SolveRequest:
    """Return the request in a decoded body.

    Raises:
        NotJson, MalformedRequest: the body is not JSON, or not a valid request.
        MalformedProfile, UnknownVersion: the profile is not valid, or of another version.
        InvalidBudget: the request must have one budget, of a positive number of bytes.
    """
    data = read_json(body)
    if not isinstance(data, dict):
        members = "a profile and a budget" if kind is Kind.POLICY else "a profile"
        raise MalformedRequest([f"the body must be an object with {members}"])
    try:
        return REQUESTS[kind].model_validate(data)
    except ValidationError as error:
        raise MalformedRequest(complaints(error)) from None


def parse_request(kind: Kind, body: bytes, most_seconds: float) -> ParsedRequest:
    """Check a decoded body and split it into profile and options.

    Args:
        kind: the kind of the request.
        body: a decoded body.
        most_seconds: the longest time limit that a request may set.

    Raises what `read_request` raises.
    """
    if kind is Kind.PROFILE:
        data = read_json(body)
        if not isinstance(data, dict):
            raise MalformedProfile(["the body must be an object"])
        taken = ParsedProfile.of(Profile.from_data(data))
        return ParsedRequest(kind, taken, taken.digest, {})
    request = read_request(kind, body)
    profile = ParsedProfile.of(request.profile) if request.profile is not None else None
    digest = profile.digest if profile is not None else request.profile_digest
    assert digest is not None
    return ParsedRequest(kind, profile, digest, request.options(most_seconds))


def job_body(profile: bytes, options: Mapping[str, Any]) -> bytes:
    """Return the body for the child process: the options, and the text of a stored profile."""
    given = {name: value for name, value in options.items() if value is not None}
    return json.dumps(given)[:-1].encode() + (b", " if given else b"") + b'"profile": ' + profile + b"}"


def answer(
    kind: Kind,
    body: bytes,
    *,
    most_seconds: float,
    plan: Planner = plan_with_host,
    progress: OnProgress | None = None,
    clock: Clock | None = None,
) -> str:
    """Solve a request and return its answer as JSON. A policy has the text that the embedded planner makes.

    Args:
        kind: policy, frontier or floor.
        body: a decoded request.
        most_seconds: the longest time limit that a request may set.
        plan: the planner of policies, which tests replace.
        progress: called as the solver progresses.
        clock: the clock of the time limit.

    Raises what `read_request` and the planner raise.
    """
    request = read_request(kind, body)
    profile = request.profile
    if profile is None:
        raise MalformedRequest(["a solve needs the profile itself"])
    options = request.options(most_seconds)
    common: dict[str, Any] = {
        "gap": options["gap"],
        "time_limit_s": options["time_limit_s"],
        "constraints": request.constraints,
        "progress": progress,
        "clock": clock,
    }
    match request:
        case PolicyRequest():
            made = plan(profile, budget_bytes=request.budget, **common)
            return made.policy().to_json()
        case FrontierRequest():
            found = find_frontier(profile, points=request.points, **common)
            return json.dumps(_frontier(profile, found))
        case _:
            return json.dumps(_floor(profile, find_minimum_peak(profile, **common)))


def _head(profile: Profile, what: str) -> dict[str, Any]:
    return {
        "format": f"autoac.{what}",
        "version": 1,
        "model": profile.model,
        "fingerprint": profile.fingerprint,
        "profile_digest": profile.digest,
        "device": profile.environment.device_name,
    }


def _floor(profile: Profile, found: MinimumPeak) -> dict[str, Any]:
    peaks = {"proven_bytes": found.proven, "found_bytes": found.found, "stopped": found.stopped.value}
    return _head(profile, "floor") | peaks


def _frontier(profile: Profile, found: Frontier) -> dict[str, Any]:
    floor_of = {"proven_bytes": found.floor.proven, "found_bytes": found.floor.found}
    return _head(profile, "frontier") | {"floor": floor_of, "plans": found.data()}
