"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autoac.planner import Constraints, Profile


class Autocast(StrEnum):
    """Name the type that a step is cast to."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, also for an error.")]

ProfileFile = Annotated[
    Path, typer.Argument(metavar="PROFILE", help="A profile written by `autoac profile`.")
]
Gap = Annotated[
    float, typer.Option(help="Stop once no plan can save more than this fraction of the extra time.")
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

Patterns = list[str] | None
PinSave = Annotated[
    Patterns,
    typer.Option(
        metavar="PATTERN",
        help="Ops that are always saved: a key, a module (h.*.attn), or ops in one (h.*/aten.mm). May be "
        "given several times.",
    ),
]
PinRecompute = Annotated[
    Patterns, typer.Option(metavar="PATTERN", help="Ops whose outputs are never saved. Also several times.")
]


def constraints_of(
    pin_save: Patterns, pin_recompute: Patterns, host_budget_gb: float, profile: Profile
) -> Constraints:
    """Return the constraints that the options say. The budget of the host needs the link of `profile`."""
    from pydantic import ValidationError

    from autoac.planner import Constraints
    from autoac.planner.budget import amount_in_bytes
    from autoac.planner.formats.base import complaints

    host_bytes = amount_in_bytes(host_budget_gb, "--host-budget-gb")
    if host_bytes and profile.link is None:
        raise typer.BadParameter(
            "must be left out, since the profile has no link: profile the model on its GPU, or with --on",
            param_hint="--host-budget-gb",
        )
    try:
        return Constraints(
            pin_save=tuple(pin_save or ()),
            pin_recompute=tuple(pin_recompute or ()),
            host_budget_bytes=host_bytes,
        )
    except ValidationError as error:
        raise typer.BadParameter("; ".join(complaints(error))) from None
