"""What a client asks for, and the answer to it: bytes in, bytes out. Pure, no server in it.

A request is read twice: `take` checks it and splits it into a profile, which is stored, and options, which
make a job; `answer` solves the body that `job_body` puts together again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Protocol, Self

import zstandard
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from autoac.api.errors import MalformedRequest, NotJson
from autoac.planner.errors import InvalidBudget, MalformedProfile
from autoac.planner.formats.base import MAX_INT, Count, complaints
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.policy import Policy
from autoac.planner.formats.profile import Profile
from autoac.planner.frontier import Frontier, find_frontier
from autoac.planner.minimum_peak import MinimumPeak, find_minimum_peak
from autoac.planner.plan import DEFAULT_GAP, DEFAULT_TIME_LIMIT_S, plan
from autoac.planner.solver.highs import OnProgress
from autoac.planner.solver.time_limit import Clock
from autoac.planner.units import GIB, bytes_from_gb

DEFAULT_POINTS = 16


class Kind(StrEnum):
    """What a body asks for."""

    PROFILE = "profile"  # to keep it
    POLICY = "policy"
    FRONTIER = "frontier"
    FLOOR = "floor"


class SolveRequest(BaseModel):
    """What every body that asks for a solve has."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)  # true is not a number of bytes

    # from_data, and not pydantic's own reading: its errors tell a wrong version from a malformed profile.
    profile: Annotated[Profile, PlainValidator(Profile.from_data, json_schema_input_type=Profile)] | None = (
        Field(None, description="One training step. Or profile_digest.")
    )
    profile_digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        None, description="Of a profile that the service has, in place of the profile."
    )
    gap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    time_limit_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="For the solver, in seconds. The service caps it."
    )
    constraints: Constraints | None = Field(None, description="What must hold beside the budget.")

    @model_validator(mode="after")
    def _one_profile(self) -> Self:
        if (self.profile is None) == (self.profile_digest is None):
            raise MalformedRequest(["give one of profile and profile_digest"])
        return self

    def options(self, most_seconds: float) -> dict[str, Any]:
        """All but the profile, said in one way: two requests that mean the same have the same options."""
        constraints = self.constraints if self.constraints != Constraints() else None
        return {
            "gap": DEFAULT_GAP if self.gap is None else self.gap,
            "time_limit_s": min(self.time_limit_s or DEFAULT_TIME_LIMIT_S, most_seconds),
            "constraints": None if constraints is None else constraints.model_dump(mode="json"),
        }


class PolicyRequest(SolveRequest):
    """The body of `POST /v1/policies`."""

    budget_gb: float | None = Field(
        None, description="Most bytes live on the device over the whole step, in GiB."
    )
    budget_bytes: int | None = Field(None, description="The same in bytes. One of the two must be given.")
    headroom_gb: Annotated[float, Field(ge=0, le=MAX_INT / GIB, allow_inf_nan=False)] | None = None
    headroom_bytes: Count | None = None

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        budgets = [b for b in (self.budget_gb, self.budget_bytes) if b is not None]
        if len(budgets) != 1:
            raise InvalidBudget("give one of budget_gb and budget_bytes")
        nbytes = budgets[0] * (1 if self.budget_gb is None else GIB)
        if not 1 <= nbytes <= MAX_INT:  # false for nan too
            raise InvalidBudget(f"a budget is at least 1 and at most {MAX_INT} bytes")
        if self.headroom_gb is not None and self.headroom_bytes is not None:
            raise MalformedRequest(["give at most one of headroom_gb and headroom_bytes"])
        return self

    @property
    def budget(self) -> int:
        """The budget in bytes."""
        return bytes_from_gb(self.budget_gb) if self.budget_gb is not None else self.budget_bytes or 0

    @property
    def headroom(self) -> int:
        """The headroom in bytes; rounded up, so that it is never less than was asked for."""
        if self.headroom_gb is not None:
            return math.ceil(self.headroom_gb * GIB)
        return self.headroom_bytes or 0

    def options(self, most_seconds: float) -> dict[str, Any]:
        both = {"budget_bytes": self.budget, "headroom_bytes": self.headroom}
        return super().options(most_seconds) | both


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
    """A profile that was checked, as it is stored."""

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
        """Raises: MalformedProfile: a name holds what no database stores as text."""
        for name, value in (("model", profile.model), ("device_name", profile.environment.device_name)):
            if "\0" in value:
                raise MalformedProfile([f"{name}: has a character NUL in it"])
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
    """A request that was checked: a profile or the digest of one, and what is wanted of it."""

    kind: Kind
    profile: ParsedProfile | None
    profile_digest: str
    options: dict[str, Any]

    @property
    def request_key(self) -> str:
        """The same for requests that mean the same."""
        return request_key(self.kind, self.profile_digest, self.options)


def request_key(kind: Kind, profile_digest: str, options: Mapping[str, Any]) -> str:
    """SHA-256 of what is asked for."""
    text = json.dumps([kind.value, profile_digest, options], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Planned(Protocol):
    """What a planner gives: `autoac.planner.Plan`, as far as the service looks."""

    def policy(self) -> Policy: ...


Planner = Callable[..., Planned]
"""`autoac.planner.plan`, or what a test puts in its place."""

Draw = Callable[[Profile, Policy], bytes | None]
"""`drawing.draw`, or None where a policy cannot be drawn."""

Outline = Callable[[Frontier], bytes | None]
"""`drawing.outline`, or None where a frontier cannot be drawn."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solve gives."""

    text: str  # JSON
    drawing: bytes | None = field(default=None, repr=False)  # of a policy or a frontier, if it was drawn


def read_json(body: bytes) -> Any:
    """What a decoded body says.

    Raises:
        NotJson: it is not JSON, nested too deeply, has numbers that JSON does not have, or a name twice.
    """
    try:
        # As UTF-8, and not as what json.loads guesses that bytes are.
        return json.loads(str(body, "utf-8"), parse_constant=_no_such_number, object_pairs_hook=_once)
    except RecursionError:
        raise NotJson("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise NotJson("the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise NotJson(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # int() of more than 4,300 digits
        raise NotJson("the body has a number that cannot be read") from None


def read_request(kind: Kind, body: bytes) -> SolveRequest:
    """The request in a decoded body.

    Raises:
        NotJson, MalformedRequest: it is no JSON, or no request.
        MalformedProfile, UnknownVersion: its profile is none, or of another version.
        InvalidBudget: it has no budget, two, or one that is no positive number of bytes.
    """
    data = read_json(body)
    if not isinstance(data, dict):
        wanted = "a profile and a budget" if kind is Kind.POLICY else "a profile"
        raise MalformedRequest([f"the body must be an object with {wanted}"])
    try:
        return REQUESTS[kind].model_validate(data)
    except ValidationError as error:
        raise MalformedRequest(complaints(error)) from None


def parse_request(kind: Kind, body: bytes, most_seconds: float) -> ParsedRequest:
    """Check a decoded body and split it.

    Args:
        kind: what the body asks for.
        body: decoded.
        most_seconds: the longest time limit that a request may set.

    Raises:
        what `read_request` does.
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
    """The body that a child gets: options, and the text of a stored profile."""
    said = {name: value for name, value in options.items() if value is not None}
    return json.dumps(said)[:-1].encode() + (b", " if said else b"") + b'"profile": ' + profile + b"}"


def answer(
    kind: Kind,
    body: bytes,
    *,
    most_seconds: float,
    plan: Planner = plan,
    progress: OnProgress | None = None,
    clock: Clock | None = None,
    draw: Draw | None = None,
    outline: Outline | None = None,
) -> Answer:
    """What a solve gives; of a policy exactly the text of the embedded planner.

    Args:
        kind: policy, frontier or floor.
        body: a decoded request.
        most_seconds: the longest time limit that a request may set.
        plan: the planner of policies; in earnest `autoac.planner.plan`.
        progress: told how far a solve is.
        clock: on which the time limit counts.
        draw: draws a policy that was made; none: it is left undrawn.
        outline: the same for a frontier.

    Raises:
        what `read_request` does, and what the planner does.
    """
    request = read_request(kind, body)
    profile = request.profile
    if profile is None:
        raise MalformedRequest(["a solve needs the profile itself"])
    options = request.options(most_seconds)
    common: dict[str, Any] = {"gap": options["gap"], "time_limit_s": options["time_limit_s"]}
    if options["constraints"] is not None:
        common["constraints"] = request.constraints
    if progress is not None:
        common["progress"] = progress
    if clock is not None:
        common["clock"] = clock
    match request:
        case PolicyRequest():
            made = plan(profile, budget_bytes=request.budget, headroom_bytes=request.headroom, **common)
            policy = made.policy()
            return Answer(policy.to_json(), None if draw is None else draw(profile, policy))
        case FrontierRequest():
            found = find_frontier(profile, points=request.points, **common)
            text = json.dumps(_frontier(profile, found))
            return Answer(text, None if outline is None else outline(found))
        case _:
            return Answer(json.dumps(_floor(profile, find_minimum_peak(profile, **common))))


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
    kinks = [kink.plan.peak for kink in found.kinks]
    plans = [
        {
            "budget_bytes": made.budget,
            "peak_bytes": made.peak,
            "recompute_us": made.recompute_us,
            "bound_us": made.bound_us,
            "step_us": made.step_us,
            "gap": made.gap,
            "stopped": made.stopped.value,
            "kink": made.peak in kinks,
        }
        for made in found.plans
    ]
    floor_of = {"proven_bytes": found.floor.proven, "found_bytes": found.floor.found}
    return _head(profile, "frontier") | {"floor": floor_of, "plans": plans}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these members; each name may stand for one."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise NotJson("the body has an object with the same name twice")
    return made


def _no_such_number(name: str) -> float:
    raise json.JSONDecodeError(f"{name} is no JSON", "", 0)
