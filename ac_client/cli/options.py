"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from autoac.planner import Constraints

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, also for an error.")]

ProfileFile = Annotated[
    Path, typer.Argument(metavar="PROFILE", help="A profile written by `autoac profile`.")
]
Gap = Annotated[
    float, typer.Option(help="Stop once a plan is proven to be within this fraction of the best one.")
]
TimeLimit = Annotated[
    float,
    typer.Option(
        "--time-limit", help="Seconds for each plan. A safety net: the solver's work is limited too."
    ),
]

# Constraints, of every command that plans.
PinSave = Annotated[
    list[str] | None,
    typer.Option(
        "--pin-save",
        metavar="PATTERN",
        help="Ops that are always saved: a key, a module (h.*.attn), or ops in one (h.*/aten.mm). Like every "
        "option with a PATTERN, may be given several times.",
    ),
]
PinRecompute = Annotated[
    list[str] | None,
    typer.Option("--pin-recompute", metavar="PATTERN", help="Ops whose outputs are never saved."),
]
RecomputeOnly = Annotated[
    list[str] | None,
    typer.Option(
        "--recompute-only", metavar="PATTERN", help="Ops that may be recomputed; all others are saved."
    ),
]
FsdpUnit = Annotated[
    list[str] | None,
    typer.Option("--fsdp-unit", metavar="PATTERN", help="Modules whose inputs from other modules are saved."),
]
LiftDeciding = Annotated[
    bool, typer.Option("--lift-deciding", help="Allow recomputing outputs that decide (top-k, comparisons).")
]
ForwardBudget = Annotated[
    float | None, typer.Option("--forward-budget-gb", help="GiB that may be live on the device in forward.")
]
ExtraStatic = Annotated[
    float,
    typer.Option("--extra-static-gb", help="GiB that are live over the whole step and not in the profile."),
]


class GradientsBefore(StrEnum):
    """Say if gradients exist before the step."""

    PRESENT = "present"
    ABSENT = "absent"


GradientsOption = Annotated[
    GradientsBefore | None,
    typer.Option("--gradients", help="Whether gradients exist before the step; the default is as profiled."),
]


def constraints_of(
    pin_save: list[str] | None,
    pin_recompute: list[str] | None,
    recompute_only: list[str] | None,
    fsdp_units: list[str] | None,
    *,
    lift_deciding: bool,
    forward_budget_gb: float | None,
    extra_static_gb: float,
    gradients: GradientsBefore | None,
) -> Constraints:
    """Build the constraints from the options."""
    from pydantic import ValidationError

    from autoac.planner import Constraints
    from autoac.planner.budget import budget_in_bytes, headroom_in_bytes
    from autoac.planner.formats.base import complaints

    forward_budget_bytes = (
        None if forward_budget_gb is None else budget_in_bytes(forward_budget_gb, "--forward-budget-gb")
    )
    try:
        return Constraints(
            pin_save=tuple(pin_save or ()),
            pin_recompute=tuple(pin_recompute or ()),
            recompute_only=tuple(recompute_only or ()),
            fsdp_units=tuple(fsdp_units or ()),
            save_deciding=not lift_deciding,
            forward_budget_bytes=forward_budget_bytes,
            extra_static_bytes=headroom_in_bytes(extra_static_gb, "--extra-static-gb"),
            gradients="as profiled" if gradients is None else gradients.value,
        )
    except ValidationError as error:
        raise typer.BadParameter("; ".join(complaints(error))) from None
