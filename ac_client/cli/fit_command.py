"""`autoac fit`: which batch sizes or lengths fit a budget, and which is the fastest."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ac_client.cli.options import Autocast, HostBudget, Json, Ranks, among_ranks, dimensions_of
from ac_client.cli.output import as_json_types, check_output, deliver, messages_of, say, show_progress

if TYPE_CHECKING:
    from ac_client import Fit, FitRow
    from autoac.planner import Plan

MOST_NAMED = 3  # modules in a row of the table


class Axis(StrEnum):
    """Name what the size counts."""

    BATCH = "batch"
    TOKENS = "tokens"


def fit_command(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Takes a size; returns the model and its batch, as for `autoac profile`. Both may be on the "
            "meta device.",
        ),
    ],
    budget_gb: Annotated[
        float,
        typer.Option("--budget-gb", help="GiB that may be live on the device at any moment of the step."),
    ],
    on: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="The device to plan for: h100, h200, a100, ... By default that of the model, on which steps "
            "of some sizes run.",
        ),
    ] = None,
    axis: Annotated[
        Axis, typer.Option(help="What the size counts, in words: samples of the batch, or tokens.")
    ] = Axis.BATCH,
    multiple: Annotated[int, typer.Option(min=1, help="Sizes are multiples of this.")] = 1,
    most: Annotated[
        int | None, typer.Option(help="The largest size to consider, such as the model's positions.")
    ] = None,
    ranks: Ranks = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=N,N...",
            help="Compare layouts of --ranks by their bytes, such as 'tp=1,2,4'. FUNCTION takes a size and a "
            "mesh, whose first dimension, dp, has the ranks that no other has.",
        ),
    ] = None,
    autocast: Annotated[
        Autocast | None, typer.Option(help="Run the step under autocast to this type.")
    ] = None,
    host_budget_gb: HostBudget = 0.0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the policies of the fastest and the largest size to this file, with which training "
            "starts planned.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the largest and the fastest batch size, or length, that fits a budget under a plan.

    With --on no device is needed: run times are estimated from the datasheet of the device.
    """
    import torch

    from ac_client import fit
    from ac_client.model_loader import load_function
    from autoac.profiler import DATASHEETS

    dimensions = dimensions_of(ranks, on)
    if on is not None and on not in DATASHEETS:
        raise typer.BadParameter(f"must be one of {', '.join(DATASHEETS)}, got {on!r}", param_hint="--on")
    if output is not None:
        check_output(output)
    make: Any = load_function(function, os.getcwd())
    dtype = getattr(torch, autocast) if autocast is not None else None
    if layouts is not None:
        if output is not None:
            raise typer.BadParameter("must be left out with --layouts", param_hint="--output")
        meshes = _layouts(dimensions, layouts, host_budget_gb)
        assert on is not None, "--ranks needs it"
        options = {"on": DATASHEETS[on], "multiple": multiple, "most": most, "autocast": dtype}
        _compare(make, budget_gb, meshes, options, as_json=as_json)
        return
    with (
        among_ranks(dimensions) as mesh,
        show_progress(f"fitting {function}") as progress,
        messages_of("ac_client.fit", progress),
    ):
        found = fit(
            wraps(make)(lambda size: make(size, *mesh)),
            budget_gb,
            on=on,
            axis=axis.value,
            multiple=multiple,
            most=most,
            autocast=dtype,
            host_budget_gb=host_budget_gb,
        )
    facts = as_json_types(found)
    del facts["profile_of"], facts["shapes"]
    lines = "\n".join(_lines(found))
    if output is not None:
        call = f'ac_client.apply(model, policy="{output}")'
        lines += f"\nThe policies of these sizes are in {output}; train with {call}."
        deliver(output, found.policies.to_json(), facts, lines, as_json)
    elif as_json:
        print(json.dumps(facts, indent=1))
    else:
        say(lines)


def _layouts(dimensions: Mapping[str, int], layouts: str, host_budget_gb: float) -> list[dict[str, int]]:
    from ac_client import layouts_of

    if "" not in dimensions or host_budget_gb:
        raise typer.BadParameter("needs --ranks N, and no --host-budget-gb", param_hint="--layouts")
    try:
        pairs = [one.split("=") for one in layouts.split()]
        return layouts_of(dimensions[""], {name: [int(n) for n in sizes.split(",")] for name, sizes in pairs})
    except ValueError as error:
        raise typer.BadParameter(f"{error}; write 'tp=1,2,4 cp=1,2'", param_hint="--layouts") from error


def _compare(
    make: Any, budget_gb: float, layouts: list[dict[str, int]], options: dict[str, Any], *, as_json: bool
) -> None:
    from ac_client import compare_layouts
    from autoac.planner.report.by_module import aligned
    from autoac.planner.units import format_bytes

    with show_progress(f"comparing {len(layouts)} layouts"):
        found = compare_layouts(make, budget_gb, layouts, **options)
    if as_json:
        print(json.dumps([as_json_types(row) for row in found], indent=1))
        return
    head = ("layout", "nothing recomputed", "smallest peak", "largest", "of all ranks")
    rows = [
        (
            " ".join(f"{name}={n}" for name, n in row.dimensions.items()),
            format_bytes(row.save_all_peak_bytes),
            format_bytes(row.smallest_peak_bytes),
            str(row.largest or "-"),
            str(row.largest_of_job or "-"),
        )
        for row in found
    ]
    say("\n".join(aligned([head, *rows])))
    say(
        f"\nPeaks are those of size {options['multiple']} on rank 0; `largest` is the largest size of a rank "
        "that has a plan within the budget. Collectives are not timed, so neither are layouts."
    )


def _lines(found: Fit) -> Iterator[str]:
    from autoac.planner.formats.profile import ESTIMATED
    from autoac.planner.report.by_module import aligned
    from autoac.planner.units import format_bytes, format_us

    unit = f"{'samples' if found.axis == 'batch' else 'tokens'}/s"
    is_timed = any(row.measured for row in found.rows)
    rows: list[tuple[str, ...]] = [(found.axis, "nothing recomputed", "planned", "extra time", unit, "")]
    for row in found.rows:
        cells = (
            str(row.size),
            format_bytes(row.save_all_peak_bytes),
            format_bytes(row.peak_bytes),
            f"{row.share:.1%}" if row.extra_us else "-",
            _speed(row, is_timed),
            " ".join(name for name in ("fastest", "largest") if getattr(found, name) == row.size),
        )
        rows.append(cells)
    yield from aligned(rows)
    yield ""
    yield from _answers(found, unit)
    yield from _limits(found)
    name = found.device.removesuffix(ESTIMATED)
    source = "those of steps that ran on" if name == found.device else "estimated from the datasheet of"
    steps = f"with {format_us(found.optimizer_us)} of" if found.optimizer_us else "without"
    environment = found.profile_of(found.largest).environment
    yield (
        f"Run times are {source} {name}, {steps} the optimizer's step; parameters are {environment.dtype}, "
        f"autocast is {environment.autocast}."
    )
    if is_timed:
        yield (
            "Speeds with a range are those of planned steps in turns: the median, and the middle half. "
            "Those with ~ are from one step of that size, whose ops were timed: less certain."
        )
    others = [str(row.size) for row in found.rows if row.size not in found.profiled]
    if others:
        yield f"Joined from the profiles of a few sizes: {', '.join(others)}."


def _rate(per_second: float) -> str:
    return f"{per_second:,.{2 if per_second < 100 else 0}f}"


def _speed(row: FitRow, is_timed: bool) -> str:
    if (found := row.measured) is not None:
        return f"{_rate(found.median)} ({_rate(found.low)} to {_rate(found.high)})"
    return f"{'~' if is_timed else ''}{_rate(row.per_second)}"


def _answers(found: Fit, unit: str) -> Iterator[str]:
    fastest, largest = found.row(found.fastest), found.row(found.largest)
    if found.equals:
        names = ", ".join(map(str, found.equals))
        yield f"The measurements cannot tell {names} from the fastest, {found.fastest}."
    if found.fastest != found.largest and found.largest not in found.equals:
        less = 1 - found.per_second(found.largest) / found.per_second(found.fastest)
        yield f"The largest size, {found.largest}, makes {less:.1%} fewer {unit} than {found.fastest}."
    if (split := found.split) is not None:
        parts = f"{split.count} micro-batches of {split.size // split.count}"
        more = 1 / split.share - 1
        yield f"{parts}, with their gradients added, make {more:.1%} more {unit} than one of {split.size}."
    yield from dict.fromkeys(f"{row.size}: {_recomputed(row.plan)}." for row in (fastest, largest))
    yield (
        f"If no gradients exist before a forward, {found.largest_cleared} fits; if they do, as where "
        f"micro-batches add up, {found.largest_accumulating or 'no size'} does."
    )
    after = found.largest + found.multiple
    if found.most is not None and after > found.most:
        yield f"No size above {found.most} was considered."
    elif found.proven_from is None:
        yield f"The search ended at {found.largest}: it found no larger size that fits."
    elif found.proven_from <= after:
        yield f"The next size, {after}, is proven not to fit."
    else:
        yield f"No plan was found for {after}; that none exists is proven from {found.proven_from} on."


def _recomputed(plan: Plan) -> str:
    from autoac.planner.report.by_module import by_module, op_decisions
    from autoac.planner.units import format_bytes

    moved = f", and {format_bytes(plan.moved_bytes)} move to the host" if plan.moves else ""
    if not plan.recompute_set:
        return f"nothing is recomputed{moved}"
    rows = [row for row in by_module(op_decisions(plan.graph, plan.save_set)) if row.recomputes]
    words = {"": "no module", ".": "the model itself"}
    names = ", ".join(words.get(row.name, row.name) for row in rows[:MOST_NAMED])
    more = f" and {len(rows) - MOST_NAMED} more modules" if len(rows) > MOST_NAMED else ""
    return f"recomputes {len(plan.recompute_set)} ops, of {names}{more}{moved}"


def _limits(found: Fit) -> Iterator[str]:
    """Say what takes the budget at the largest size."""
    from autoac.planner.units import format_bytes

    plan = found.row(found.largest).plan
    assert plan.profile is not None
    static, created = plan.profile.static, plan.profile.gradient_nbytes
    rest = static.total - static.gradients
    gradients = static.gradients + (created if plan.constraints.gradients == "present" else 0)
    held = {
        "parameters": static.parameters + static.buffers,
        "gradients": gradients,
        "optimizer": static.optimizer_state,
        "batch and workspaces": static.inputs + static.workspaces,
        "saved tensors, temporaries and new gradients": plan.peak - rest - gradients,
    }
    words = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in held.items() if nbytes)
    yield (
        f"At {found.largest}, {format_bytes(plan.peak)} of {format_bytes(found.budget_bytes)} are live at "
        f"{plan.peak_at}: {words}."
    )
