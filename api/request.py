"""What a client asks for, and the answer to it: bytes in, the policy's JSON out. Pure, no server in it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from autoac.api.errors import MalformedRequest, NotJson
from autoac.planner.constraints import Constraints
from autoac.planner.errors import InvalidBudget
from autoac.planner.policy import Policy
from autoac.planner.profile import MAX_INT, Count, Profile, describe
from autoac.planner.units import GIB

DEFAULT_TIME_LIMIT_S = 60.0
"""What the solver gets when the request does not say."""


class PolicyRequest(BaseModel):
    """The body of `POST /v1/policies`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # from_data, and not pydantic's own reading: its errors tell a wrong version from a malformed profile.
    profile: Annotated[Profile, PlainValidator(Profile.from_data, json_schema_input_type=Profile)]
    budget_gb: float | None = Field(
        None, description="Most bytes live on the device over the whole step, in GiB."
    )
    budget_bytes: int | None = Field(None, description="The same in bytes. One of the two must be given.")
    headroom_gb: Annotated[float, Field(ge=0, le=MAX_INT / GIB, allow_inf_nan=False)] | None = None
    headroom_bytes: Count | None = None
    gap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    time_limit_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="For the solver, in seconds. The service caps it."
    )
    constraints: Constraints | None = Field(None, description="What must hold beside the budget.")

    @model_validator(mode="after")
    def _one_budget(self) -> Self:
        budgets = [b for b in (self.budget_gb, self.budget_bytes) if b is not None]
        if len(budgets) != 1:
            raise InvalidBudget("give one of budget_gb and budget_bytes")
        nbytes = budgets[0] * (1 if self.budget_gb is None else GIB)
        if not 0 < nbytes <= MAX_INT:  # false for nan too
            raise InvalidBudget(f"a budget is more than 0 and at most {MAX_INT} bytes")
        if self.headroom_gb is not None and self.headroom_bytes is not None:
            raise MalformedRequest(["give at most one of headroom_gb and headroom_bytes"])
        return self

    @property
    def headroom(self) -> int:
        """The headroom in bytes; rounded up, so that it is never less than was asked for."""
        if self.headroom_gb is not None:
            return math.ceil(self.headroom_gb * GIB)
        return self.headroom_bytes or 0


class Planned(Protocol):
    """What a planner gives: `autoac.planner.Plan`, as far as the service looks."""

    def policy(self) -> Policy: ...


Planner = Callable[..., Planned]
"""`autoac.planner.plan`, or what a test puts in its place."""


def read_request(body: bytes) -> PolicyRequest:
    """The request in a decoded body.

    Raises:
        NotJson, MalformedRequest: it is no JSON, or no request.
        MalformedProfile, UnknownVersion: its profile is none, or of another version.
        InvalidBudget: it has no budget, two, or one that is no positive number of bytes.
    """
    try:
        data = json.loads(body, parse_constant=_no_such_number)
    except RecursionError:
        raise NotJson("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise NotJson("the body is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise NotJson(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # int() of more than 4,300 digits
        raise NotJson("the body has a number that cannot be read") from None
    if not isinstance(data, dict):
        raise MalformedRequest(["the body must be an object with a profile and a budget"])
    try:
        return PolicyRequest.model_validate(data)
    except ValidationError as error:
        raise MalformedRequest(describe(error)) from None


def answer(body: bytes, *, most_seconds: float, plan: Planner) -> str:
    """The policy's JSON, exactly as the embedded planner's would be.

    Args:
        body: a decoded request.
        most_seconds: the longest time limit that a request may set.
        plan: the planner; in earnest `autoac.planner.plan`.

    Raises:
        what `read_request` does, and what the planner does.
    """
    request = read_request(body)
    options: dict[str, Any] = {"gap": request.gap} if request.gap is not None else {}
    if request.constraints is not None:
        options["constraints"] = request.constraints
    planned = plan(
        request.profile,
        budget_gb=request.budget_gb,
        budget_bytes=request.budget_bytes,
        headroom_bytes=request.headroom,
        time_limit_s=min(request.time_limit_s or DEFAULT_TIME_LIMIT_S, most_seconds),
        **options,
    )
    return planned.policy().to_json()


def _no_such_number(name: str) -> float:
    raise json.JSONDecodeError(f"{name} is no JSON", "", 0)
