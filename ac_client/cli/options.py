"""Options that several commands share."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

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
    str | None,
    typer.Option(
        metavar="N|NAME=N,...",
        help="FUNCTION runs as on one of N ranks, which need not exist: it shards its model on the CPU, on "
        "tensors that take no memory. With 'dp=64,tp=8' it takes a mesh of these dimensions, too. With --on.",
    ),
]


def dimensions_of(ranks: str | None, on: str | None) -> dict[str, int]:
    """Return the sizes of a mesh by name that --ranks says; the name is empty for a number alone."""
    if ranks is None:
        return {}
    if on is None:
        raise typer.BadParameter("must be left out without --on", param_hint="--ranks")
    pairs = [part.rpartition("=") for part in ranks.split(",")]
    names = [name for name, _, _ in pairs]
    sizes = [int(size) if size.isdecimal() else 0 for _, _, size in pairs]
    is_number = names == [""]
    if min(sizes) < 1 or len(set(names)) < len(names) or not (is_number or all(map(str.isidentifier, names))):
        raise typer.BadParameter(f"must be as 512 or 'dp=64,tp=8', got {ranks!r}", param_hint="--ranks")
    return dict(zip(names, sizes, strict=True))


@contextmanager
def among_ranks(dimensions: Mapping[str, int], rank: int = 0) -> Iterator[tuple[DeviceMesh, ...]]:
    """Be rank `rank` of ranks that need not exist, and yield their mesh, if its dimensions have names."""
    from autoac.profiler import fake_ranks

    if not dimensions:
        yield ()
        return
    ranks = math.prod(dimensions.values())
    if rank >= ranks:
        raise typer.BadParameter(f"must be below --ranks {ranks}, got {rank}", param_hint="--rank")
    with fake_ranks(ranks, rank):
        if "" in dimensions:
            yield ()
            return
        from torch.distributed.device_mesh import init_device_mesh

        yield (init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions)),)


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
