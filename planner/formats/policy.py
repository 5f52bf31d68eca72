"""The table that an executor loads: a decision for each op, in execution order, as pure data.

A Policy is JSON with a header and one line for each op, so that a person can read it and a diff is small.
policy.schema.json is its JSON Schema; `make schema` writes it.
"""

from __future__ import annotations

import itertools
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic.json_schema import GenerateJsonSchema

from autoac.planner.errors import MalformedPolicy
from autoac.planner.formats.base import (
    MAX_INT,
    VERSION,
    Count,
    FrozenModel,
    Index,
    Name,
    Title,
    read,
)
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.profile import Environment, Profile

FORMAT: Final = "autoac.policy"

SAVE: Final = "save"
OFFLOAD: Final = "offload"
THE_END: Final = "the end"
Decision = Annotated[str, Field(pattern=r"^(save|offload|recompute(@[2-9]|@[1-9][0-9])?)$")]
"""recompute@2: backward recomputes the op twice, once for each of its use groups."""
Bytes = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]  # may be negative
TotalMicroseconds = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]  # of many ops


class MovePoints(FrozenModel):
    """Where the outputs of an op that moves to the host leave the device's memory, and come back."""

    free: Name  # the op before which they are freed; THE_END of forward
    fetch: Name  # the op of which backward then first unpacks an output


class Predicted(FrozenModel):
    """The figures that the planner predicts for a step under this policy."""

    peak_bytes: Count
    peak_at: Name  # "layers.17.mlp/aten.mm.default#2, forward"
    save_all_peak_bytes: Count  # the peak with nothing recomputed; 2**53 if it is more
    static_bytes: Count
    recompute_us: TotalMicroseconds
    recompute_bound_us: TotalMicroseconds  # proven: no plan within the budget recomputes less
    step_us: TotalMicroseconds  # forward and backward with nothing recomputed
    gap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]  # (extra - bound) / extra; see stall_us
    # With moves, the extra time is that of recomputes and of stalls, and so is the bound.
    stall_us: TotalMicroseconds  # compute waits for copies
    moved_bytes: Count  # to the host
    # Of a pipeline's stage: the microbatch at work, and those that wait for their backward.
    microbatches: Annotated[Count, Field(ge=1)]


class Policy(FrozenModel):
    """The decisions of a plan, with its predictions, in the format that is stored, sent and carried out."""

    format: Literal["autoac.policy"] = FORMAT
    version: Literal[7] = VERSION
    model: Title
    fingerprint: Name  # of the profile: the same model, shapes and kind of device
    profile_digest: Name
    inputs: tuple[Name, ...]
    device: Name
    budget_bytes: Count
    corrected_by_bytes: Bytes  # taken off the budget when planning again, after measuring a peak
    stopped: Name  # why the solver stopped
    predicted: Predicted
    tools: dict[str, Name]  # versions of what made it, and the torch, cuDNN and ranks that it was planned for
    constraints: Constraints  # of the plan
    # Several forwards that run before one backward: how many decisions there are up to the end of each.
    forward_ends: tuple[Index, ...]  # empty: there is one forward
    # By key of a recomputed op, in the order of backward: the op up to which its outputs are used, for each
    # run. NOTE [ Use groups ] in problem/use_groups.py.
    use_groups: dict[Name, tuple[Name, ...]]
    # By key of an op that moves to the host: NOTE [ Moves ] in problem/moves.py.
    moves: dict[Name, MovePoints]
    # By key of a recomputed or moved op whose outputs a backward inside of forward unpacks: the op before
    # which forward lets go of them, or THE_END.
    needed_until: dict[Name, Name]
    decisions: dict[Name, Decision]  # by op key, in execution order

    def to_json(self) -> str:
        """Return the published form: one decision to a line, the same text for the same policy."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"

    @property
    def forwards(self) -> tuple[dict[str, Decision], ...]:
        """Return the decisions of each forward before one backward. A loss belongs to the last forward."""
        if not self.forward_ends:
            return (self.decisions,)
        items = list(self.decisions.items())
        ends = (*self.forward_ends[:-1], len(items))
        return tuple(dict(items[begin:end]) for begin, end in itertools.pairwise((0, *ends)))

    @field_validator("constraints", mode="before")
    @classmethod
    def _constraints_have_every_field(cls, data: Any) -> Any:
        if isinstance(data, dict) and (
            missing := [name for name in Constraints.model_fields if name not in data]
        ):
            raise ValueError(f"must have {', '.join(missing)}")
        return data

    @property
    def recomputed(self) -> int:
        """Return the number of ops that backward recomputes."""
        return sum(decision not in (SAVE, OFFLOAD) for decision in self.decisions.values())

    @model_validator(mode="after")
    def _fields_are_of_decisions(self) -> Self:
        ends = (*self.forward_ends, len(self.decisions))
        if any(a > b for a, b in itertools.pairwise(ends)):
            raise ValueError("forward_ends must ascend, up to the number of decisions")
        position = {key: i for i, key in enumerate(self.decisions)}
        for key, latest in self.use_groups.items():
            decided = self.decisions.get(key, "save")
            if decided != f"recompute@{len(latest)}" and (decided, len(latest)) != ("recompute", 1):
                raise ValueError(f"use_groups of {key} must be one for each recompute, got {len(latest)}")
            places = [position.get(name, -1) for name in latest]
            if min(places) < position[key] or any(a <= b for a, b in itertools.pairwise(places)):
                raise ValueError(f"use_groups of {key} must be that op or later ones, the latest first")
        if any("@" in decided and key not in self.use_groups for key, decided in self.decisions.items()):
            raise ValueError("each op that is recomputed several times must have use_groups")
        if self.moves.keys() != {key for key, decided in self.decisions.items() if decided == OFFLOAD}:
            raise ValueError("moves must have exactly the ops whose decision is offload")
        for key, points in self.moves.items():
            if not position[key] < position.get(points.free, len(position)):
                raise ValueError(f"{key} must be freed before a later op, got {points.free}")
            if points.fetch not in position:
                raise ValueError(
                    f"{key} must be fetched where an op of the policy is unpacked, got {points.fetch}"
                )
        for key, until in self.needed_until.items():
            if self.decisions.get(key, SAVE) == SAVE:
                raise ValueError(f"needed_until must have ops that are recomputed or moved, got {key}")
            if until != THE_END and not position[key] < position.get(until, -1):
                raise ValueError(f"{key} must be needed until a later op, got {until}")
        return self

    @classmethod
    def from_json(cls, text: str | bytes) -> Policy:
        """Return the Policy that `text` holds in the published form; text from a stranger is safe to read.

        Raises:
            UnknownVersion, MalformedPolicy: as for `read`.
        """
        return read(cls, text, MalformedPolicy)


class _EveryFieldRequired(GenerateJsonSchema):
    """Write the schema of files: defaults are for Python and for requests."""

    def field_is_required(self, *_: Any, **__: Any) -> bool:
        return True


def json_schema() -> str:
    """Return the JSON Schema of policies, the text of policy.schema.json."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Policy.model_json_schema(
        schema_generator=_EveryFieldRequired
    )
    return json.dumps(schema, indent=1) + "\n"


def tool_versions() -> dict[str, str]:
    """Return the versions of the packages that make a policy."""
    versions = {}
    for name in ("autoac", "pulp", "highspy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "unknown"
    return versions


def planned_for(environment: Environment) -> dict[str, str]:
    """Return the versions of the libraries that chose the ops of the profiled step, and several ranks."""
    cudnn = {"cudnn": cudnn_text(environment.cudnn)} if environment.cudnn else {}
    ranks = {"ranks": environment.ranks} if environment.ranks != "1" else {}
    return {"torch": environment.torch} | cudnn | ranks


def cudnn_text(version: int) -> str:
    """Return a version of cuDNN as people write it.

    >>> cudnn_text(92000)
    '9.20.0'
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def decisions(profile: Profile, save_set: frozenset[int]) -> dict[str, Decision]:
    """Return the decisions of a save set, by op key, in execution order."""
    return {key: "save" if op in save_set else "recompute" for op, key in enumerate(profile.keys())}
