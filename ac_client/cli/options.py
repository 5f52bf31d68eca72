"""Options that several commands share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from autoac.planner import Constraints, Profile


class Gradients(StrEnum):
    """Tell whether gradients exist before the step."""

    PRESENT = "present"
    ABSENT = "absent"


class Autocast(StrEnum):
    """Name the type that a step is cast to."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


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
        "--time-limit",
        show_default=False,
        help="Seconds for each plan. By default only the solver's work is limited, which gives the same plan "
        "on a busy machine.",
    ),
]

Ranks = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="FUNCTION runs as on one of N ranks, which need not exist: it makes meshes and shards its model "
        "on the CPU, on tensors that take no memory. With --on.",
    ),
]


def among_ranks(ranks: int | None, rank: int = 0) -> AbstractContextManager[None]:
    """Return what to be inside of for rank `rank` of `ranks`; nothing special for None."""
    from autoac.profiler import fake_ranks

    if ranks is not None and rank >= ranks:
        raise typer.BadParameter(f"must be below --ranks {ranks}, got {rank}", param_hint="--rank")
    return fake_ranks(ranks, rank) if ranks is not None else nullcontext()


HostBudget = Annotated[
    float,
    typer.Option(
        "--host-budget-gb",
        metavar="GB",
        help="GiB of the host that saved tensors may be moved to, where the link makes that faster than to "
        "recompute them. The profile must have the link.",
    ),
]


def with_host_budget(constraints: Constraints, host_budget_gb: float, profile: Profile) -> Constraints:
    """Return `constraints` with the budget of the host, which needs the link of `profile`."""
    from autoac.planner.budget import headroom_in_bytes

    host_bytes = headroom_in_bytes(host_budget_gb, "--host-budget-gb")
    if host_bytes and profile.link is None:
        raise typer.BadParameter(
            "must be left out, since the profile has no link: profile the model on its GPU, or with --on",
            param_hint="--host-budget-gb",
        )
    return constraints.model_copy(update={"host_budget_bytes": host_bytes})


@dataclass(frozen=True, slots=True)
class PlanningOptions:
    """Options of every command that writes plans: what they must obey, and when to stop."""

    headroom_gb: Annotated[float, typer.Option(help="GiB of the budget to leave unused.")] = 0.0
    pin_save: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Ops that are always saved: a key, a module (h.*.attn), or ops in one (h.*/aten.mm). Like "
            "every option with a PATTERN, may be given several times.",
        ),
    ] = None
    pin_recompute: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Ops whose outputs are never saved.")
    ] = None
    recompute_only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Ops that may be recomputed; all others are saved."),
    ] = None
    fsdp_units: Annotated[
        list[str] | None,
        typer.Option(
            "--fsdp-unit", metavar="PATTERN", help="Modules whose inputs from other modules are saved."
        ),
    ] = None
    lift_deciding: Annotated[
        bool,
        typer.Option("--lift-deciding", help="Allow recomputing outputs that decide (top-k, comparisons)."),
    ] = False
    lift_collectives: Annotated[
        bool,
        typer.Option("--lift-collectives", help="Allow recomputes that communicate, alike on all ranks."),
    ] = False
    forward_budget_gb: Annotated[
        float | None, typer.Option(help="GiB that may be live on the device in forward.")
    ] = None
    extra_static_gb: Annotated[
        float, typer.Option(help="GiB that are live over the whole step and not in the profile.")
    ] = 0.0
    gap: Gap = 0.01
    time_limit_s: TimeLimit = math.inf

    @property
    def headroom_bytes(self) -> int:
        """Return `--headroom-gb` in bytes."""
        from autoac.planner.budget import headroom_in_bytes

        return headroom_in_bytes(self.headroom_gb, "--headroom-gb")

    def constraints(self, gradients: Gradients | None = None) -> Constraints:
        """Return the constraints; `gradients` says if gradients exist before the step."""
        from pydantic import ValidationError

        from autoac.planner import Constraints
        from autoac.planner.budget import budget_in_bytes, headroom_in_bytes
        from autoac.planner.formats.base import complaints

        forward = self.forward_budget_gb
        try:
            return Constraints(
                pin_save=tuple(self.pin_save or ()),
                pin_recompute=tuple(self.pin_recompute or ()),
                recompute_only=tuple(self.recompute_only or ()),
                fsdp_units=tuple(self.fsdp_units or ()),
                save_deciding=not self.lift_deciding,
                save_collectives=not self.lift_collectives,
                forward_budget_bytes=(
                    None if forward is None else budget_in_bytes(forward, "--forward-budget-gb")
                ),
                extra_static_bytes=headroom_in_bytes(self.extra_static_gb, "--extra-static-gb"),
                gradients=gradients.value if gradients is not None else "as profiled",
            )
        except ValidationError as error:
            raise typer.BadParameter("; ".join(complaints(error))) from None


def spread_options(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer each field of a command's `options` as a parameter; the command gets them as one value."""
    signature = inspect.signature(command, eval_str=True)
    kind = signature.parameters["options"].annotation
    hints = get_type_hints(kind, include_extras=True)
    spread = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hint)
        for field, hint in zip(fields(kind), hints.values(), strict=True)
    ]

    @wraps(command)
    def run(**values: Any) -> None:
        command(options=kind(**{field.name: values.pop(field.name) for field in fields(kind)}), **values)

    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        parameters += spread if parameter.name == "options" else own
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run
