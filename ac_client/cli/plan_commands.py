"""The commands `profile`, `plan` and `frontier`: from a model to policies."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ac_client.cli.options import (
    Autocast,
    Gap,
    HostBudget,
    Json,
    PinRecompute,
    PinSave,
    ProfileFile,
    Ranks,
    TimeLimit,
    among_ranks,
    constraints_of,
    dimensions_of,
)
from ac_client.cli.output import check_output, deliver, policy_header, read_profile, say, show_progress

if TYPE_CHECKING:
    from autoac.planner import Plan

OutputFile = Annotated[Path, typer.Option("-o", "--output", help="File to write; - for stdout.")]


def profile(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Returns (model, batch), (model, args, kwargs), (model, args, kwargs, loss), or a dict with "
            "keys model, args, kwargs, loss, optimizer, accumulates. MODULE may lie in the current folder.",
        ),
    ],
    output: OutputFile = Path("profile.json"),
    on: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="Estimate for an absent device: h100, h200, a100, ..."),
    ] = None,
    cudnn: Annotated[
        int | None,
        typer.Option(metavar="VERSION", help="With --on: cuDNN there; 91002 is 9.10.2, 0 is none."),
    ] = None,
    ranks: Ranks = None,
    rank: Annotated[int, typer.Option(min=0, metavar="R", help="With --ranks: the one to profile.")] = 0,
    autocast: Annotated[
        Autocast | None, typer.Option(help="Run the step under autocast to this type.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Profile torch.compile(model). Not with --on.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Profile one training step of a model.

    FUNCTION returns the model and its batch. The step does not need memory for saved tensors. With --ranks,
    nothing needs memory: FUNCTION runs as on one of N ranks, on the CPU and on tensors without contents.
    """
    import torch

    from ac_client.model_loader import call_function, load_function, setup_from
    from autoac.profiler import DATASHEETS

    module_name, _, function_name = function.partition(":")
    if not (module_name and function_name):
        raise typer.BadParameter(
            f"must have the form MODULE:FUNCTION, got {function!r}", param_hint="MODULE:FUNCTION"
        )
    if on is not None and on not in DATASHEETS:
        raise typer.BadParameter(f"must be one of {', '.join(DATASHEETS)}, got {on!r}", param_hint="--on")
    if cudnn is not None and on is None:
        raise typer.BadParameter("must be left out without --on", param_hint="--cudnn")
    dimensions = dimensions_of(ranks, on)
    check_output(output)
    build = load_function(function, os.getcwd())
    device = DATASHEETS[on] if on is not None else None
    if device is not None and cudnn is not None:
        device = replace(device, cudnn=cudnn)
    with among_ranks(dimensions, rank) as mesh, show_progress(f"profiling {function}"):
        setup = setup_from(call_function(build, function, *mesh), function)
        dtype = getattr(torch, autocast) if autocast is not None else None
        observed = setup.observe(device, dtype, compiled=compiled)
    deliver(
        output,
        observed.to_json() + "\n",
        {
            "profile": str(output),
            "digest": observed.digest,
            "fingerprint": observed.fingerprint,
            "model": observed.model,
            "ops": len(observed.ops),
            "saved_tensors": len(observed.saved),
            "notes": list(observed.notes),
        },
        "\n  ".join(
            [
                f"{observed.model}: {len(observed.ops)} ops, {len(observed.saved)} saved tensors -> {output}",
                *observed.notes,
            ]
        ),
        as_json,
    )


def plan(
    profile_file: ProfileFile,
    budget_gb: Annotated[
        float,
        typer.Option("--budget-gb", help="GiB that may be live on the device at any moment of the step."),
    ],
    output: OutputFile = Path("policy.json"),
    pin_save: PinSave = None,
    pin_recompute: PinRecompute = None,
    host_budget_gb: HostBudget = 0.0,
    gap: Gap = 0.01,
    time_limit_s: TimeLimit = math.inf,
    as_json: Json = False,
) -> None:
    """Plan a profile for a memory budget.

    Finds the save set that fits the budget with the least recompute time, and writes it as a policy.
    """
    from autoac.planner import plan_with_host
    from autoac.planner.budget import budget_in_bytes
    from autoac.planner.units import format_bytes, format_us

    check_output(output)
    observed = read_profile(profile_file)
    constraints = constraints_of(pin_save, pin_recompute, host_budget_gb, observed)
    with show_progress(f"planning {observed.model}") as progress:
        planned = plan_with_host(
            observed,
            budget_bytes=budget_in_bytes(budget_gb),
            constraints=constraints,
            gap=gap,
            time_limit_s=time_limit_s,
            clock=time.monotonic,
            progress=progress.solving,
        )
    policy = planned.policy()
    deliver(
        output,
        policy.to_json(),
        {"policy": str(output)} | policy_header(policy),
        f"{policy.model}: peak {format_bytes(planned.peak)} of {format_bytes(policy.budget_bytes)}, "
        f"{format_us(planned.recompute_us)} of recompute, {_moved(planned)}gap {planned.gap:.1%}"
        f"{_early_stop(planned)} -> {output}",
        as_json,
    )


def _moved(planned: Plan) -> str:
    from autoac.planner.units import format_bytes, format_us

    if not planned.moves:
        return ""
    return f"{format_bytes(planned.moved_bytes)} moved to the host, {format_us(planned.stall_us)} of stalls, "


def frontier_command(
    profile_file: ProfileFile,
    points: Annotated[int, typer.Option(min=2, help="Number of budgets, both ends included.")] = 16,
    gap: Gap = 0.01,
    time_limit_s: TimeLimit = math.inf,
    as_json: Json = False,
) -> None:
    """Show the extra time for many budgets.

    Plans for budgets from the smallest peak to the peak with nothing recomputed.
    """
    from autoac.planner import find_frontier, frontier_in_words

    observed = read_profile(profile_file)
    with show_progress(f"planning {observed.model}, {points} budgets") as progress:
        frontier = find_frontier(
            observed,
            points=points,
            gap=gap,
            time_limit_s=time_limit_s,
            clock=time.monotonic,
            progress=progress.solving,
        )
    if not as_json:
        say(frontier_in_words(frontier))
        return
    minimum = {"floor_found_bytes": frontier.floor.found, "floor_proven_bytes": frontier.floor.proven}
    print(json.dumps(minimum | {"plans": frontier.data()}, indent=1))


def _early_stop(planned: Plan) -> str:
    """Name the limit that stopped the solver, if one did."""
    from autoac.planner import Stopped

    return "" if planned.stopped is Stopped.OPTIMAL else f", stopped early: {planned.stopped}"
