"""The table that an executor loads: a decision for each op, in execution order, as pure data.

A Policy is JSON with a header and one line for each op, so that a person can read it and a diff is small.
policy.schema.json is its JSON Schema; `make schema` writes it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from autoac.planner.errors import MalformedPolicy
from autoac.planner.formats.base import MAX_INT, Count, FrozenModel, Index, Microseconds, Name, Title, read
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.op_key import with_shared_names
from autoac.planner.formats.profile import Environment, Profile

FORMAT: Final = "autoac.policy"
VERSION: Final = 1
VERSION_WITH_USE_GROUPS: Final = 2
VERSION_WITH_MOVES: Final = 4  # 3 was another format
VERSION_WITH_NEEDED: Final = 5

SAVE: Final = "save"
OFFLOAD: Final = "offload"
THE_END: Final = "the end"
Decision = Annotated[str, Field(pattern=r"^(save|offload|recompute(@[2-9]|@[1-9][0-9])?)$")]
"""recompute@2: backward recomputes the op twice, once for each of its use groups."""
Bytes = Annotated[int, Field(ge=-MAX_INT, le=MAX_INT)]  # may be negative


class MovePoints(FrozenModel):
    """Where the outputs of an op that moves to the host leave the device's memory, and come back."""

    free: Name  # the op before which they are freed; THE_END of forward
    fetch: Name  # the op of which backward then first unpacks an output


class Predicted(FrozenModel):
    """The figures that the planner predicts for a step under this policy."""

    peak_bytes: Count
    peak_at: Name  # "layers.17.mlp/aten.mm.default#2, forward"
    save_all_peak_bytes: Count  # the peak with nothing recomputed
    static_bytes: Count
    recompute_us: Microseconds
    recompute_bound_us: Microseconds  # proven: no plan within the budget recomputes less
    step_us: Microseconds  # forward and backward with nothing recomputed
    gap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]  # (extra - bound) / extra; see stall_us
    # With moves, the extra time is that of recomputes and of stalls, and so is the bound.
    stall_us: Annotated[Microseconds, Field(exclude_if=lambda us: us == 0)] = 0.0  # compute waits for copies
    moved_bytes: Annotated[Count, Field(exclude_if=lambda nbytes: nbytes == 0)] = 0  # to the host
    # Of a pipeline's stage: the microbatch at work, and those that wait for their backward.
    microbatches: Annotated[Count, Field(ge=1, exclude_if=lambda n: n == 1)] = 1


class Policy(FrozenModel):
    """The decisions of a plan, with its predictions, in the format that is stored, sent and carried out."""

    format: Literal["autoac.policy"] = FORMAT
    version: Literal[1, 2, 4, 5] = VERSION  # 2 with use groups, 4 with moves, 5 with needed_until
    model: Title
    fingerprint: Name  # of the profile: the same model, shapes and kind of device
    profile_digest: Name
    inputs: tuple[Name, ...]
    device: Name
    budget_bytes: Count
    corrected_by_bytes: Bytes = 0  # taken off the budget when planning again, after measuring a peak
    stopped: Name  # why the solver stopped
    predicted: Predicted
    tools: dict[str, Name]  # versions of what made it, and the torch, cuDNN and ranks that it was planned for
    constraints: Constraints | None = None  # of the plan; left out if there are none
    # Several forwards that run before one backward: how many decisions there are up to the end of each.
    forward_ends: tuple[Index, ...] = ()  # left out where there is one forward
    # By key of a recomputed op, in the order of backward: the op up to which its outputs are used, for each
    # run. NOTE [ Use groups ] in problem/use_groups.py. Left out, with version 1, if no op has use groups.
    use_groups: dict[Name, tuple[Name, ...]] = Field(default_factory=dict)
    # By key of an op that moves to the host: NOTE [ Moves ] in problem/moves.py. Left out if nothing moves.
    moves: dict[Name, MovePoints] = Field(default_factory=dict)
    # By key of a recomputed or moved op whose outputs a backward inside of forward unpacks: the op before
    # which forward lets go of them, or THE_END. Left out if there are none.
    needed_until: dict[Name, Name] = Field(default_factory=dict)
    decisions: dict[Name, Decision]  # by op key, in execution order

    def to_json(self) -> str:
        """Return the published form: one decision to a line, the same text for the same policy."""
        return json.dumps(self.data(), indent=1) + "\n"

    def data(self) -> dict[str, Any]:
        """Return the published form as a dict, without the fields that do not apply."""
        left_out = {"constraints"} if self.constraints is None else set()
        optional = ("corrected_by_bytes", "forward_ends", "use_groups", "moves", "needed_until")
        left_out |= {name for name in optional if not getattr(self, name)}
        return self.model_dump(mode="json", exclude=left_out)

    @property
    def forwards(self) -> tuple[dict[str, Decision], ...]:
        """Return the decisions of each forward before one backward. A loss belongs to the last forward."""
        if not self.forward_ends:
            return (self.decisions,)
        items = list(self.decisions.items())
        ends = (*self.forward_ends[:-1], len(items))
        return tuple(dict(items[begin:end]) for begin, end in itertools.pairwise((0, *ends)))

    @field_validator("decisions")
    @classmethod
    def _kernels_share_names(cls, decisions: dict[str, Decision]) -> dict[str, Decision]:
        return dict(zip(with_shared_names(decisions), decisions.values(), strict=True))

    @model_validator(mode="after")
    def _forward_ends_ascend(self) -> Self:
        ends = (*self.forward_ends, len(self.decisions))
        if any(a > b for a, b in itertools.pairwise(ends)):
            raise ValueError("forward_ends must ascend, up to the number of decisions")
        return self

    @property
    def recomputed(self) -> int:
        """Return the number of ops that backward recomputes."""
        return sum(decision not in (SAVE, OFFLOAD) for decision in self.decisions.values())

    @model_validator(mode="after")
    def _use_groups_are_of_decisions(self) -> Self:
        if self.version != (version := version_for(self.use_groups, self.moves, self.needed_until)):
            raise ValueError(
                f"version must be {version} for these use_groups, moves and needed_until, got {self.version}"
            )
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
        return self

    @model_validator(mode="after")
    def _moves_are_of_decisions(self) -> Self:
        if self.moves.keys() != {key for key, decided in self.decisions.items() if decided == OFFLOAD}:
            raise ValueError("moves must have exactly the ops whose decision is offload")
        position = {key: i for i, key in enumerate(self.decisions)}
        for key, points in self.moves.items():
            if not position[key] < position.get(points.free, len(position)):
                raise ValueError(f"{key} must be freed before a later op, got {points.free}")
            if points.fetch not in position:
                raise ValueError(
                    f"{key} must be fetched where an op of the policy is unpacked, got {points.fetch}"
                )
        return self

    @model_validator(mode="after")
    def _needed_ops_are_recomputed(self) -> Self:
        position = {key: i for i, key in enumerate(self.decisions)}
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


def version_for(
    use_groups: Collection[str], moves: Collection[str] = (), needed_until: Collection[str] = ()
) -> int:
    """Return the oldest format version that has these parts, so that older clients can read the policy."""
    if needed_until:
        return VERSION_WITH_NEEDED
    if moves:
        return VERSION_WITH_MOVES
    return VERSION_WITH_USE_GROUPS if use_groups else VERSION


def json_schema() -> str:
    """Return the JSON Schema of policies, the text of policy.schema.json."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Policy.model_json_schema()
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
