"""The `autoac` command. docs/cli.md is its page.

Results go to stdout, or with `--json` one JSON object; progress and errors go to stderr. Nothing heavy is
imported before a command needs it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ac_client.console import (
    CommandError,
    deliver,
    format_of,
    header,
    load_case,
    not_negative,
    plain,
    progress_of,
    read,
    write_whole,
)
from ac_client.regenerate import command as regenerating

if TYPE_CHECKING:
    from autoac.planner import Constraints, Policy, PolicySet, Stages

OK, ERROR, USAGE, INTERRUPTED = 0, 1, 2, 130

_EXIT_CODES = "Exit codes: 0 fine, 1 error, 2 wrong usage, 130 interrupted."

app = typer.Typer(
    name="autoac",
    help="Plan which tensors a PyTorch training step saves and which it recomputes, for a memory budget.\n\n"
    + _EXIT_CODES,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, also for an error.")]

ProfileFile = Annotated[Path, typer.Argument(metavar="PROFILE", help="As `autoac profile` wrote it.")]
Gap = Annotated[float, typer.Option(help="Stop a plan once proven to be within this fraction of the best.")]
TimeLimit = Annotated[float, typer.Option("--time-limit", help="Seconds for each plan.")]

# Constraints, of every command that plans.
PinSave = Annotated[
    list[str] | None,
    typer.Option(
        "--pin-save",
        metavar="PATTERN",
        help="Ops that are never run again: a key, a module (h.*.attn), or ops in one (h.*/aten.mm). May be "
        "given several times, as every option with a PATTERN.",
    ),
]
PinRecompute = Annotated[
    list[str] | None,
    typer.Option("--pin-recompute", metavar="PATTERN", help="Ops whose outputs are never saved."),
]
RecomputeOnly = Annotated[
    list[str] | None,
    typer.Option(
        "--recompute-only", metavar="PATTERN", help="What may be run again at all; the rest is saved."
    ),
]
FsdpUnit = Annotated[
    list[str] | None,
    typer.Option("--fsdp-unit", metavar="PATTERN", help="Modules whose inputs from elsewhere are saved."),
]
LiftDeciding = Annotated[
    bool, typer.Option("--lift-deciding", help="Let values that decide (top-k, comparisons) be run again.")
]
ForwardBudget = Annotated[
    float | None, typer.Option("--forward-budget-gb", help="GiB that the device may hold in forward.")
]
ExtraStatic = Annotated[
    float,
    typer.Option("--extra-static-gb", help="GiB that are taken over the whole step, beside the profile."),
]


class GradientsBefore(StrEnum):
    """Whether gradients exist before the step."""

    PRESENT = "present"
    ABSENT = "absent"


GradientsOption = Annotated[
    GradientsBefore | None,
    typer.Option("--gradients", help="Whether gradients exist before the step; by default as profiled."),
]


# --- commands -------------------------------------------------------------------------------------------


@app.callback(epilog=_EXIT_CODES, invoke_without_command=True)
def _common(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from, not just its one line.")
    ] = False,
) -> None:
    _state.traceback = traceback
    if version:
        from importlib.metadata import version as version_of

        print(version_of("autoac"))
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        raise typer.BadParameter("missing command", context, param_hint="COMMAND")


@app.command(epilog=_EXIT_CODES)
def demo(
    page: Annotated[
        Path, typer.Option("--page", help="Where to write the HTML page with the memory timelines.")
    ] = Path("demo-report.html"),
    pairs: Annotated[int, typer.Option(min=1, help="Timed pairs of steps in each row.")] = 7,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Train GPT-2 under memory budgets, beside what people do today. Takes about five minutes.

    Every row of the table is measured in a process of its own. Exit code 1 if a row of ours breaks its
    budget or has other gradients than plain training.
    """
    from ac_client.demo import demo as rows
    from ac_client.demo.page import render_page

    with progress_of() as progress:
        result = rows.run(
            pairs=pairs, on_row=lambda name, i, n: progress.at(f"row {i} of {n}: {name}", i - 1, n)
        )
    write_whole(page, render_page(result))
    if as_json:
        print(json.dumps(result.data() | {"page": str(page)}, indent=1))
    else:
        from rich.console import Console

        from ac_client.demo.table import markdown as as_markdown
        from ac_client.demo.table import render

        if markdown:
            print(as_markdown(result))
        else:
            console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
            console.print(render(result))
            print(f"\nmemory timelines: {page}")
    if result.failed:
        raise typer.Exit(ERROR)


@app.command(epilog=_EXIT_CODES)
def profile(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Returns (model, batch), (model, args, kwargs), (model, args, kwargs, loss), or a dict with "
            "the keys model, args, kwargs, loss, optimizer. The current folder is searched for MODULE first.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write; - for stdout.")] = Path(
        "profile.json"
    ),
    on: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="Estimate for a device that is not here: h100, h200, a100, ..."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Profile one training step of the model that FUNCTION returns, without the memory that it would need."""
    from autoac.profiler import DATASHEETS, observe

    if on is not None and on not in DATASHEETS:
        raise typer.BadParameter(f"{on!r} is none of {', '.join(DATASHEETS)}", param_hint="--on")
    case = load_case(function)
    device = DATASHEETS[on] if on is not None else None
    with progress_of(f"profiling {type(case.model).__name__}"):
        observed = observe(
            case.model, case.args, case.kwargs, loss=case.loss, optimizer=case.optimizer, on=device
        )
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
        f"{observed.model}: {len(observed.ops)} ops, {len(observed.saved)} saved tensors -> {output}",
        as_json,
    )


@app.command(epilog=_EXIT_CODES)
def plan(
    profile_file: ProfileFile,
    budget_gb: Annotated[
        float, typer.Option("--budget-gb", help="GiB that the device may hold at any moment of the step.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write; - for stdout.")] = Path(
        "policy.json"
    ),
    headroom_gb: Annotated[float, typer.Option(help="GiB of the budget to leave unused.")] = 0.0,
    pin_save: PinSave = None,
    pin_recompute: PinRecompute = None,
    recompute_only: RecomputeOnly = None,
    fsdp_units: FsdpUnit = None,
    lift_deciding: LiftDeciding = False,
    forward_budget_gb: ForwardBudget = None,
    extra_static_gb: ExtraStatic = 0.0,
    gradients: GradientsOption = None,
    gap: Gap = 0.01,
    time_limit_s: TimeLimit = 60.0,
    as_json: Json = False,
) -> None:
    """Find the save set that fits in the budget at the least recompute time, and write it as a policy."""
    from autoac.planner import Profile
    from autoac.planner import plan as plan_profile
    from autoac.planner.units import bytes_from_gb, format_bytes, format_us

    observed = Profile.from_json(read(profile_file))
    not_negative(headroom_gb, "--headroom-gb")
    constraints = _constraints(
        pin_save,
        pin_recompute,
        recompute_only,
        fsdp_units,
        lift_deciding=lift_deciding,
        forward_budget_gb=forward_budget_gb,
        extra_static_gb=extra_static_gb,
        gradients=gradients,
    )
    with progress_of(f"planning {observed.model}") as progress:
        made = plan_profile(
            observed,
            budget_gb=budget_gb,
            headroom_bytes=bytes_from_gb(headroom_gb),
            constraints=constraints,
            gap=gap,
            time_limit_s=time_limit_s,
            progress=progress.solving,
        )
    policy = made.policy()
    deliver(
        output,
        policy.to_json(),
        {"policy": str(output)} | header(policy),
        f"{policy.model}: peak {format_bytes(made.peak)} of {format_bytes(policy.budget_bytes)}, "
        f"{format_us(made.recompute_us)} of recompute, gap {made.gap:.1%} -> {output}",
        as_json,
    )


@app.command(epilog=_EXIT_CODES)
def stages(
    profile_files: Annotated[
        list[Path],
        typer.Option(
            "--profile",
            help="One for each stage, the first first: the step of one microbatch on one of its chunks. "
            "More may follow as plain arguments.",
        ),
    ],
    budget_gb: Annotated[
        list[float],
        typer.Option(
            "--budget-gb",
            help="GiB that each device may hold; one for all, or once for each stage.",
        ),
    ],
    n_microbatches: Annotated[int, typer.Option("--microbatches", min=1, help="In one step.")],
    more_profiles: Annotated[
        list[Path] | None, typer.Argument(metavar="[PROFILE]...", help="The further stages' profiles.")
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-h2 or zb-v.")
    ] = "1f1b",
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to write stage-0.json, stage-1.json, ... to.")
    ] = Path("policies"),
    chunks: Annotated[
        int | None, typer.Option(min=1, help="Of the model for each stage, where the schedule has several.")
    ] = None,
    weight_half_gb: Annotated[
        list[float] | None,
        typer.Option(
            help="GiB that a microbatch holds between the halves of a split backward; once for each stage."
        ),
    ] = None,
    headroom_gb: Annotated[float, typer.Option(help="GiB of each budget to leave unused.")] = 0.0,
    pin_save: PinSave = None,
    pin_recompute: PinRecompute = None,
    recompute_only: RecomputeOnly = None,
    fsdp_units: FsdpUnit = None,
    lift_deciding: LiftDeciding = False,
    forward_budget_gb: ForwardBudget = None,
    extra_static_gb: ExtraStatic = 0.0,
    gap: Gap = 0.01,
    time_limit_s: TimeLimit = 60.0,
    as_json: Json = False,
) -> None:
    """Plan every stage of a pipeline within its device's budget; the slowest stage decides.

    Prints a line for each stage and writes a policy for each. A pattern has to stand for something in every
    stage.
    """
    from autoac.planner import InfeasibleBudget, Profile, plan_stages
    from autoac.planner.units import bytes_from_gb

    if more_profiles and len(profile_files) > 1:
        raise typer.BadParameter(
            "give --profile once before all files, or once before each", param_hint="--profile"
        )
    paths = [*profile_files, *(more_profiles or [])]
    not_negative(headroom_gb, "--headroom-gb")
    for gb in weight_half_gb or []:
        not_negative(gb, "--weight-half-gb")
    observed = [Profile.from_json(read(path)) for path in paths]
    constraints = _constraints(
        pin_save,
        pin_recompute,
        recompute_only,
        fsdp_units,
        lift_deciding=lift_deciding,
        forward_budget_gb=forward_budget_gb,
        extra_static_gb=extra_static_gb,
        gradients=None,
    )
    with progress_of(f"planning {len(paths)} stages"):
        try:
            made = plan_stages(
                observed,
                schedule,
                n_microbatches=n_microbatches,
                budget_gb=budget_gb[0] if len(budget_gb) == 1 else budget_gb,
                chunks=chunks,
                weight_half_bytes=[bytes_from_gb(gb) for gb in weight_half_gb] if weight_half_gb else None,
                headroom_bytes=bytes_from_gb(headroom_gb),
                constraints=constraints,
                gap=gap,
                time_limit_s=time_limit_s,
            )
        except InfeasibleBudget as error:
            where = " ".join(getattr(error, "__notes__", []))
            raise CommandError(f"{one_line(error)}. {where}") from error
    files = [output / f"stage-{s}.json" for s in range(len(paths))]
    policies = [stage.plan.policy() for stage in made.stages]
    output.mkdir(parents=True, exist_ok=True)
    for path, policy in zip(files, policies, strict=True):
        write_whole(path, policy.to_json())
    if as_json:
        told = [
            {"policy": str(path), "in_flight": stage.in_flight, "busy_us": busy, "bubble_us": bubble}
            | header(policy)
            for path, stage, policy, busy, bubble in zip(
                files, made.stages, policies, made.times.busy_us, made.times.bubble_us, strict=True
            )
        ]
        whole = {
            "schedule": made.schedule.value,
            "microbatches": made.n_microbatches,
            "step_us": made.times.step_us,
            "plain_step_us": made.plain.step_us,
            "slowdown": made.slowdown,
            "bottleneck": made.times.bottleneck,
        }
        print(json.dumps(whole | {"stages": told}, indent=1))
    else:
        print("\n".join([*_stage_table(made), f"policies: {files[0]} to {files[-1].name}"]))


@app.command(epilog=_EXIT_CODES)
def explain(
    subject: Annotated[
        Path,
        typer.Argument(
            metavar="POLICY|SET|PROFILE",
            help="A policy, a policy set, or a profile, which is planned first.",
        ),
    ],
    budget_gb: Annotated[
        float | None, typer.Option("--budget-gb", help="Of a PROFILE: GiB that the device may hold.")
    ] = None,
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", help="Of a POLICY: the profile that it was planned from, for bytes."),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor",
            help="Key of an op, or the end of one: why it is kept or not, and what the other decision "
            "would do. May be given several times.",
        ),
    ] = None,
    more_gb: Annotated[
        float | None, typer.Option("--more-gb", help="Say what so many GiB more would buy. Plans again.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Bytes and times by module as a table.")] = False,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write a page that draws memory over the step, with what is live when."),
    ] = None,
    time_limit_s: TimeLimit = 60.0,
    as_json: Json = False,
) -> None:
    """Say in words what a policy keeps, what it recomputes, and what that costs."""
    from autoac.planner import (
        Graph,
        Plan,
        Policy,
        PolicySet,
        Profile,
        as_planned,
        more,
        more_in_words,
        picture,
        why,
    )
    from autoac.planner import explain as in_words
    from autoac.planner import plan as plan_profile
    from autoac.planner import why_in_words as why_text
    from autoac.planner.modules import by_module, decided
    from autoac.planner.policy_set import SET_FORMAT
    from autoac.planner.units import bytes_from_gb

    if more_gb is not None and not 0 < more_gb < float("inf"):
        raise typer.BadParameter("must be positive", param_hint="--more-gb")

    def within(profile: Profile | Graph, budget: int) -> Plan:
        name = profile.model if isinstance(profile, Profile) else "the graph"
        with progress_of(f"planning {name}") as progress:
            return plan_profile(
                profile,
                budget_bytes=budget,
                constraints=made.constraints if made else None,
                time_limit_s=time_limit_s,
                progress=progress.solving,
            )

    text = read(subject)
    made: Plan | None = None
    if format_of(text) == SET_FORMAT:
        options = (profile_file, budget_gb, tensors, more_gb, html)
        if table or any(given is not None for given in options):
            raise typer.BadParameter("a policy set is explained by itself; a policy of it takes options")
        _explain_set(PolicySet.from_json(text), as_json=as_json)
        return
    if format_of(text) == "autoac.profile":
        if budget_gb is None:
            raise typer.BadParameter("a profile is explained at a budget: pass one", param_hint="--budget-gb")
        made = within(Profile.from_json(text), bytes_from_gb(budget_gb))
        policy = made.policy()
    else:
        policy = Policy.from_json(text)
        if profile_file is not None:
            made = as_planned(policy, Profile.from_json(read(profile_file)))
    if made is None and (tensors or more_gb is not None or table or html is not None):
        raise typer.BadParameter(
            "bytes are in the profile, not in the policy: pass it", param_hint="--profile"
        )
    answer: dict[str, Any] = header(policy)
    words = [in_words(made, table=table) if made else in_words(policy)]
    if made is not None:
        answer["modules"] = plain(by_module(decided(made.graph, made.save_set)))
        answer["tensors"] = []
        for key in tensors or []:
            reason = why(made, key)
            words.append(why_text(reason))
            answer["tensors"].append(plain(reason) | {"fits": reason.fits})
        if more_gb is not None:
            bought = more(made, bytes_from_gb(more_gb), planning=within)
            words.append(more_in_words(bought))
            answer["more"] = plain(bought) | {"gain_us": bought.gain_us}
        if html is not None:
            from autoac.pages import timeline_page

            write_whole(html, timeline_page(picture(made, policy=policy).data()))
            words.append(f"picture: {html}")
            answer["html"] = str(html)
    if as_json:
        print(json.dumps(answer | {"text": "\n\n".join(words)}, indent=1))
    else:
        print("\n\n".join(words))


def _explain_set(policies: PolicySet, *, as_json: bool) -> None:
    """Say of each policy, the smallest batch first, which batches it serves and what it does."""
    from autoac.planner import explain as in_words
    from autoac.planner.policy_set import Extent, shape_in_words

    buckets = sorted(policies.buckets, key=lambda bucket: Extent.of(bucket.shape).elements)
    told = [
        f"Bucket {number} of {len(buckets)}, for batches up to {shape_in_words(bucket.shape)}:\n"
        + in_words(bucket.policy)
        for number, bucket in enumerate(buckets, 1)
    ]
    text = "\n\n".join(told) or "The policy set is empty."
    if as_json:
        heads = [{"shape": bucket.shape} | header(bucket.policy) for bucket in buckets]
        print(json.dumps({"buckets": heads, "text": text}, indent=1))
    else:
        print(text)


@app.command(epilog=_EXIT_CODES)
def frontier(
    profile_file: ProfileFile,
    points: Annotated[int, typer.Option(min=2, help="Budgets, both ends included.")] = 16,
    gap: Gap = 0.01,
    time_limit_s: TimeLimit = 60.0,
    as_json: Json = False,
) -> None:
    """Show what memory buys: plans from the smallest peak to the peak with nothing recomputed."""
    from autoac.planner import Profile, frontier_in_words
    from autoac.planner import frontier as frontier_of

    observed = Profile.from_json(read(profile_file))
    with progress_of(f"planning {observed.model}, {points} budgets") as progress:
        made = frontier_of(
            observed, points=points, gap=gap, time_limit_s=time_limit_s, progress=progress.solving
        )
    if not as_json:
        print(frontier_in_words(made))
        return
    kinks = [kink.plan.peak for kink in made.kinks]
    plans = [
        {
            "peak_bytes": plan.peak,
            "recompute_us": plan.recompute_us,
            "gap": plan.gap,
            "step_us": plan.step_us,
            "kink": plan.peak in kinks,
        }
        for plan in made.plans
    ]
    proven = {"floor_found_bytes": made.floor.found, "floor_proven_bytes": made.floor.proven}
    print(json.dumps(proven | {"plans": plans}, indent=1))


@app.command(epilog=_EXIT_CODES)
def diff(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A policy, as `autoac plan` wrote it.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="The policy to compare with.")],
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", help="The profile of both: compares what is really held, with bytes."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what one policy keeps and another does not, by module, and what that costs."""
    from autoac.planner import Plan, Policy, Profile, as_planned, difference, difference_in_words

    policies = [Policy.from_json(read(path)) for path in (first, second)]
    subjects: list[Plan | Policy] = list(policies)
    if profile_file is not None:
        observed = Profile.from_json(read(profile_file))
        subjects = [as_planned(policy, observed) for policy in policies]
    found = difference(subjects[0], subjects[1])
    text = difference_in_words(found, str(first), str(second))
    if as_json:
        print(json.dumps(plain(found) | {"same": found.same, "text": text}, indent=1))
    else:
        print(text)


app.command(epilog=regenerating.EXIT_CODES)(regenerating.regenerate)
app.command(epilog=_EXIT_CODES)(regenerating.validate)


def _service_command(name: str, text: str) -> None:
    """A command of the service, which has its own options: `autoac.api.commands` reads them."""

    @app.command(
        name,
        help=text,
        epilog=_EXIT_CODES,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def run(context: typer.Context) -> None:
        from autoac.api.commands import main as service

        raise typer.Exit(service([name, *context.args]))


for _name, _text in {
    "serve": "Run the planning service. Settings are environment variables (docs/service.md).",
    "worker": "Solve the service's jobs from PostgreSQL, on as many machines as wanted.",
    "db": "The service's database: upgrade it, or prune what is old.",
    "keys": "The service's keys: create, list, revoke.",
    "doctor": "Look at the service's settings, database and solver, and say what to do.",
}.items():
    _service_command(_name, _text)


# --- options -------------------------------------------------------------------------------------------


def _constraints(
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
    """The constraints that the options say."""
    from pydantic import ValidationError

    from autoac.planner import Constraints
    from autoac.planner.profile import describe
    from autoac.planner.units import bytes_from_gb

    not_negative(extra_static_gb, "--extra-static-gb")
    if forward_budget_gb is not None and not 0 < forward_budget_gb < float("inf"):
        raise typer.BadParameter("must be positive", param_hint="--forward-budget-gb")
    try:
        return Constraints(
            pin_save=tuple(pin_save or ()),
            pin_recompute=tuple(pin_recompute or ()),
            recompute_only=tuple(recompute_only or ()),
            fsdp_units=tuple(fsdp_units or ()),
            save_deciding=not lift_deciding,
            forward_budget_bytes=None if forward_budget_gb is None else bytes_from_gb(forward_budget_gb),
            extra_static_bytes=bytes_from_gb(extra_static_gb),
            gradients="as profiled" if gradients is None else gradients.value,
        )
    except ValidationError as error:
        raise typer.BadParameter("; ".join(describe(error))) from None


def _stage_table(made: Stages) -> list[str]:
    """A line for each stage, and one for the whole pipeline."""
    from autoac.planner.units import format_bytes, format_us

    head = ("stage", "in flight", "peak", "budget", "recompute", "gap", "busy", "idle")
    rows = [head]
    for s, stage in enumerate(made.stages):
        plan_ = stage.plan
        rows.append(
            (
                f"{s}{' *' if s == made.times.bottleneck else ''}",
                str(stage.in_flight),
                format_bytes(plan_.peak),
                format_bytes(plan_.budget + plan_.headroom),
                format_us(plan_.recompute_us),
                f"{plan_.gap:.1%}",
                format_us(made.times.busy_us[s]),
                format_us(made.times.bubble_us[s]),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return [
        *lines,
        f"{made.schedule.value}, {made.n_microbatches} microbatches: a step takes "
        f"{format_us(made.times.step_us)}, {made.slowdown:.1%} more than with nothing recomputed. "
        "* has most to do.",
    ]


# --- errors ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    traceback: bool = False


_state = _State()


def one_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    from autoac.planner.errors import InfeasibleBudget, InfeasibleConstraints, PlannerError
    from autoac.planner.units import format_bytes, gb_from_bytes

    match error:
        case InfeasibleBudget():
            text = f"no plan fits in {format_bytes(error.budget)}: the step needs at least "
            text += f"{format_bytes(error.proven_floor)}"
            smallest = error.smallest_found
            if smallest is not None:
                gb = -(-gb_from_bytes(smallest) * 1000 // 1) / 1000
                text += f" (proven); a plan exists for --budget-gb {max(gb, gb_from_bytes(smallest)):.6g}"
            if isinstance(error, InfeasibleConstraints):
                text += ". " + " ".join(error.culprits)
        case CommandError() | PlannerError():
            text = str(error)
        case OSError() if error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        case _:
            text = f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _fail(error: BaseException, text: str, code: int, argv: list[str]) -> NoReturn:
    if _state.traceback:
        import traceback

        traceback.print_exception(error)
    if "--json" in argv:
        print(json.dumps({"error": {"kind": type(error).__name__, "message": text}}))
    print(f"autoac: {text}", file=sys.stderr)
    raise SystemExit(code)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; leaves with its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = app(argv or ["--help"], standalone_mode=False)
    except typer.TyperException as error:  # wrong usage, for the most part
        context: typer.Context | None = getattr(error, "ctx", None)
        where = f" (see {context.command_path} --help)" if context is not None else ""
        _fail(error, " ".join(error.format_message().split()) + where, error.exit_code, argv)
    except (typer.Abort, KeyboardInterrupt) as error:
        _fail(error, "interrupted", INTERRUPTED, argv)
    except Exception as error:  # noqa: BLE001 - the last line of defence: an error is one line, whatever it is
        _fail(error, one_line(error), ERROR, argv)
    raise SystemExit(code if isinstance(code, int) else OK)


if __name__ == "__main__":
    main()
