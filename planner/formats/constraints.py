"""The conditions that a user sets for a plan in addition to its budget, as pure data.

`problem/apply_constraints.py` turns a Graph and Constraints into the Graph of the constrained problem.

Patterns name ops by their keys, `model.layers.3.mlp/aten.mm.default#1`:

- a whole key matches that op alone;
- `MODULE` matches every op in the module or inside it. `*` in it is one part of the path or a piece of one,
  `**` any number of parts, `.` the whole model: `model.layers.*.mlp`;
- `MODULE/OP` matches these ops there: `aten.mm.default#1`, `aten.mm.default` or `aten.mm`, with `*` for
  anything. `*/aten.mm` matches every matmul of the model.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Final, Literal

from pydantic import Field

from autoac.planner.errors import InvalidConstraints
from autoac.planner.formats.base import Count, FrozenModel

MAX_PATTERNS = 1000  # in one field

Patterns = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...], Field(max_length=MAX_PATTERNS)
]
Gradients = Literal["as profiled", "present", "absent"]


class Constraints(FrozenModel):
    """Conditions of a plan in addition to its budget: the same in requests, in policies and in Python.

    Patterns are described in docs/constraints.md. Bytes are on the device, but for the host's budget.
    """

    pin_save: Patterns = ()  # ops that are never recomputed
    pin_recompute: Patterns = ()  # ops whose outputs are never saved
    fsdp_units: Patterns = ()  # modules; the inputs that a unit reads from outside are saved
    save_collectives: bool = True  # save what functional collectives return: no recompute communicates
    forward_budget_bytes: Annotated[int, Field(gt=0, le=2**53)] | None = None  # most bytes live in forward
    extra_static_bytes: Count = 0  # live during the whole step, and not in the profile
    headroom_bytes: Count = 0  # of the budgets, left unused
    # Of `ac_client.apply`: the budget counts what the allocator hands out, or what it takes from the GPU.
    budget_of: Literal["allocated", "reserved"] = "allocated"
    take_over_checkpoints: bool = True  # of `ac_client.apply`: the model's own checkpoints run as plain calls
    # Of the host, that outputs may be moved to. Nothing moves without the link of the profile.
    host_budget_bytes: Count = 0
    gradients: Gradients = "as profiled"  # whether gradients exist before the step

    @property
    def pins(self) -> bool:
        """Return True if the constraints decide about any op."""
        return bool(self.pin_save or self.pin_recompute or self.fsdp_units)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the constraints."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


UNCONSTRAINED: Final = Constraints()


def without_forward_budget(constraints: Constraints | None) -> Constraints:
    """Return `constraints` for a search without one budget, such as a frontier. None becomes empty ones.

    Raises:
        InvalidConstraints: forward has a budget, which is defined only together with the step's.
    """
    constraints = constraints or UNCONSTRAINED
    if constraints.forward_budget_bytes is not None:
        raise InvalidConstraints(
            f"forward_budget_bytes must be None here, got {constraints.forward_budget_bytes}: a budget "
            "of forward needs a budget of the step; leave it out, or call plan() with both budgets"
        )
    return constraints
