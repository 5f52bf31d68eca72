"""The `autoac` command. docs/cli.md is its page.

Results go to stdout, or with `--json` one JSON object; progress and errors go to stderr. Nothing heavy is
imported before a command needs it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.progress import TaskID
    from torch import nn

    from autoac.planner import Policy, Progress

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


class CommandError(Exception):
    """What the user should read, in one line."""


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

    with _progress() as progress:
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
            help="Returns (model, args, kwargs), (model, args, kwargs, loss), or a dict with these keys. "
            "The current folder is searched for MODULE first.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write; - for stdout.")] = Path(
        "profile.json"
    ),
    as_json: Json = False,
) -> None:
    """Profile one training step of the model that FUNCTION returns, without the memory that it would need."""
    case = _load_case(function)
    from autoac.profiler import profile as profile_step

    with _progress(f"profiling {type(case.model).__name__}"):
        observed = profile_step(case.model, *case.args, loss=case.loss, **case.kwargs)
    _deliver(
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
    profile_file: Annotated[Path, typer.Argument(metavar="PROFILE", help="As `autoac profile` wrote it.")],
    budget_gb: Annotated[
        float, typer.Option("--budget-gb", help="GiB that the device may hold at any moment of the step.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write; - for stdout.")] = Path(
        "policy.json"
    ),
    headroom_gb: Annotated[float, typer.Option(help="GiB of the budget to leave unused.")] = 0.0,
    gap: Annotated[
        float, typer.Option(help="Stop once proven to be within this fraction of the best.")
    ] = 0.01,
    time_limit_s: Annotated[float, typer.Option("--time-limit", help="Seconds for the solver.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Find the save set that fits in the budget at the least recompute time, and write it as a policy."""
    from autoac.planner import Profile
    from autoac.planner import plan as plan_profile
    from autoac.planner.units import bytes_from_gb, format_bytes, format_us

    observed = Profile.from_json(_read(profile_file))
    if not 0 <= headroom_gb < float("inf"):
        raise typer.BadParameter("must not be negative", param_hint="--headroom-gb")
    with _progress(f"planning {observed.model}") as progress:
        made = plan_profile(
            observed,
            budget_gb=budget_gb,
            headroom_bytes=bytes_from_gb(headroom_gb),
            gap=gap,
            time_limit_s=time_limit_s,
            progress=progress.solving,
        )
    policy = made.policy()
    _deliver(
        output,
        policy.to_json(),
        {"policy": str(output)} | _header(policy),
        f"{policy.model}: peak {format_bytes(made.peak)} of {format_bytes(policy.budget_bytes)}, "
        f"{format_us(made.recompute_us)} of recompute, gap {made.gap:.1%} -> {output}",
        as_json,
    )


@app.command(epilog=_EXIT_CODES)
def explain(
    policy_file: Annotated[Path, typer.Argument(metavar="POLICY", help="As `autoac plan` wrote it.")],
    as_json: Json = False,
) -> None:
    """Say in words what a policy keeps, what it recomputes, and what that costs."""
    from autoac.planner import Policy
    from autoac.planner import explain as in_words

    policy = Policy.from_json(_read(policy_file))
    if as_json:
        print(json.dumps(_header(policy) | {"text": in_words(policy)}, indent=1))
    else:
        print(in_words(policy))


@app.command(epilog=_EXIT_CODES)
def serve(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; a token is needed for other than loopback.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")] = None,
) -> None:
    """Run the planning service. What is not given comes from the environment, AUTOAC_HOST and so on."""
    from autoac import api

    try:
        api.serve(host=host, port=port)
    except (api.InvalidSettings, api.RefusedToListen) as error:
        raise CommandError(str(error)) from error
    except SystemExit as left:  # uvicorn leaves so when it cannot listen, and has said why
        raise typer.Exit(ERROR if left.code else OK) from None


# --- reading and writing --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """What is profiled."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Any] | None = None


def _load_case(name: str) -> Case:
    """Call the function that `MODULE:FUNCTION` names and read what it returns."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise typer.BadParameter(f"{name!r} is not MODULE:FUNCTION", param_hint="MODULE:FUNCTION")
    sys.path.insert(0, os.getcwd())
    try:
        function: Any = importlib.import_module(module_name)
        for part in function_name.split("."):
            function = getattr(function, part)
        returned = function()
    except Exception as error:  # anything that the user's module does
        raise CommandError(f"{name}: {type(error).__name__}: {error}") from error
    return case_of(returned, name)


def case_of(returned: Any, name: str) -> Case:
    """The case from what the user's function returned.

    Raises:
        CommandError: it is none of the forms that `autoac profile` takes.
    """
    from torch import nn

    fields = ("model", "args", "kwargs", "loss")
    match returned:
        case Mapping() if "model" in returned and set(returned) <= set(fields):
            case = Case(**returned)
        case (model, args, kwargs):
            case = Case(model, args, kwargs)
        case (model, args, kwargs, loss):
            case = Case(model, args, kwargs, loss)
        case _:
            raise CommandError(
                f"{name} returned {type(returned).__name__}; it should return (model, args, kwargs), "
                "(model, args, kwargs, loss), or a dict with these keys"
            )
    if not isinstance(case.model, nn.Module):
        raise CommandError(
            f"{name} returned a model of type {type(case.model).__name__}, not torch.nn.Module"
        )
    if not isinstance(case.args, tuple | list) or not isinstance(case.kwargs, Mapping):
        raise CommandError(f"{name} returned args or kwargs that are no tuple and dict")
    return Case(case.model, tuple(case.args), case.kwargs, case.loss)


def _read(path: Path) -> bytes:
    if str(path) == "-":
        return sys.stdin.buffer.read()
    return path.read_bytes()


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`: all of it, or, if that fails, nothing."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _deliver(output: Path, text: str, facts: dict[str, Any], line: str, as_json: bool) -> None:
    """Write the result; then say so on stdout, which is taken if the result itself goes there."""
    if str(output) == "-":
        sys.stdout.write(text)
        return
    write_whole(output, text)
    print(json.dumps(facts, indent=1) if as_json else line)


def _header(policy: Policy) -> dict[str, Any]:
    again = sum(decision == "recompute" for decision in policy.decisions.values())
    head: dict[str, Any] = policy.model_dump(mode="json", exclude={"decisions"})
    return head | {"ops": len(policy.decisions), "recomputed": again}


# --- progress -------------------------------------------------------------------------------------------


class _Lines:
    """Progress where nobody watches: a line on stderr when something begins."""

    def __init__(self, what: str) -> None:
        if what:
            print(f"{what} ...", file=sys.stderr, flush=True)

    def at(self, what: str, done: int, total: int) -> None:
        print(what, file=sys.stderr, flush=True)

    def solving(self, progress: Progress) -> None:
        pass


class _Bar:
    """Progress on a terminal: one bar on stderr, which goes away."""

    def __init__(self, bar: Any, task: TaskID, what: str) -> None:
        self._bar, self._task, self._what = bar, task, what

    def at(self, what: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=what, completed=done, total=total)

    def solving(self, progress: Progress) -> None:
        gap = f", gap {progress.gap:.1%}" if progress.gap < 10 else ""
        self._bar.update(self._task, description=self._what + gap)


@contextmanager
def _progress(what: str = "") -> Iterator[_Lines | _Bar]:
    if not sys.stderr.isatty():
        yield _Lines(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, bar.add_task(what, total=None), what)


# --- errors ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _State:
    traceback: bool = False


_state = _State()


def one_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    from autoac.planner.errors import InfeasibleBudget, PlannerError
    from autoac.planner.units import format_bytes, gb_from_bytes

    match error:
        case InfeasibleBudget():
            text = f"no plan fits in {format_bytes(error.budget)}: the step needs at least "
            text += f"{format_bytes(error.proven_floor)}"
            smallest = error.smallest_found
            if smallest is not None:
                gb = -(-gb_from_bytes(smallest) * 1000 // 1) / 1000
                text += f" (proven); a plan exists for --budget-gb {max(gb, gb_from_bytes(smallest)):.6g}"
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
