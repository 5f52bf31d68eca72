"""What the `autoac` command reads and writes, and how it tells how far it is.

Results go to stdout; progress goes to stderr, as a bar where somebody watches.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from ac_client.files import named, write_whole

if TYPE_CHECKING:
    import torch
    from rich.progress import TaskID
    from torch import nn

    from autoac.planner import Policy, Profile, Progress

OK, ERROR, USAGE, INTERRUPTED = 0, 1, 2, 130
"""What the command leaves with."""


class CommandError(Exception):
    """What the user should read, in one line."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is profiled."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Any] | None = None
    optimizer: torch.optim.Optimizer | None = None


def load_function(name: str, folder: str) -> Callable[[], Any]:
    """The function that `MODULE:FUNCTION` names, MODULE being looked for in `folder` first.

    Raises:
        CommandError: it cannot be imported.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise typer.BadParameter(f"{name!r} is not MODULE:FUNCTION", param_hint="MODULE:FUNCTION")
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)
    try:
        function: Any = importlib.import_module(module_name)
        for part in function_name.split("."):
            function = getattr(function, part)
    except Exception as error:  # anything that the user's module does
        raise CommandError(f"{name}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise CommandError(
            f"{name} is of type {type(function).__name__}; name a function that returns a model"
        )
    return cast("Callable[[], Any]", function)


def load_case(name: str) -> Case:
    """Call the function that `MODULE:FUNCTION` names and read what it returns."""
    function = load_function(name, os.getcwd())
    return case_of(call(function, name), name)


def call(function: Callable[[], Any], name: str) -> Any:
    """What the user's function returns.

    Raises:
        CommandError: it raised.
    """
    try:
        return function()
    except Exception as error:  # anything that the user's function does
        raise CommandError(f"{name}: {type(error).__name__}: {error}") from error


def case_of(returned: Any, name: str) -> Case:
    """The case from what the user's function returned.

    Raises:
        CommandError: it is none of the forms that `autoac profile` takes.
    """
    import torch
    from torch import nn

    keys = ("model", "args", "kwargs", "loss", "optimizer")
    match returned:
        case Mapping() if "model" in returned and set(returned) <= set(keys):
            case = Case(**returned)
        case (model, batch):
            case = _with_batch(model, batch)
        case (model, args, kwargs):
            case = Case(model, args, kwargs)
        case (model, args, kwargs, loss):
            case = Case(model, args, kwargs, loss)
        case _:
            raise CommandError(
                f"{name} returned {type(returned).__name__}; it should return (model, batch), "
                "(model, args, kwargs), (model, args, kwargs, loss), or a dict with the keys "
                + ", ".join(keys)
            )
    if not isinstance(case.model, nn.Module):
        raise CommandError(
            f"{name} returned a model of type {type(case.model).__name__}, not torch.nn.Module"
        )
    if not isinstance(case.args, tuple | list) or not isinstance(case.kwargs, Mapping):
        raise CommandError(f"{name} returned args or kwargs that are no tuple and dict")
    if case.optimizer is not None and not isinstance(case.optimizer, torch.optim.Optimizer):
        raise CommandError(
            f"{name} returned an optimizer of type {type(case.optimizer).__name__}, not torch.optim.Optimizer"
        )
    return Case(case.model, tuple(case.args), case.kwargs, case.loss, case.optimizer)


def _with_batch(model: Any, batch: Any) -> Case:
    """A batch as training loops have it: keyword arguments, arguments, or the one argument."""
    match batch:
        case Mapping():
            return Case(model, (), batch)
        case tuple() | list():
            return Case(model, tuple(batch))
        case _:
            return Case(model, (batch,))


def read(path: Path) -> bytes:
    if str(path) == "-":
        return sys.stdin.buffer.read()
    return path.read_bytes()


def named_as_given(path: Path) -> AbstractContextManager[None]:
    """`named`, for a file or stdin."""
    return named("stdin" if str(path) == "-" else path)


def read_profile(path: Path) -> Profile:
    from autoac.planner import Profile

    text = read(path)
    with named_as_given(path):
        return Profile.from_json(text)


def read_policy(path: Path) -> Policy:
    from autoac.planner import Policy

    text = read(path)
    with named_as_given(path):
        return Policy.from_json(text)


def deliver(output: Path, text: str, facts: dict[str, Any], line: str, as_json: bool) -> None:
    """Write the result; then say so on stdout, which is taken if the result itself goes there."""
    if str(output) == "-":
        sys.stdout.write(text)
        return
    write_whole(output, text)
    print(json.dumps(facts, indent=1) if as_json else line)


def format_of(text: bytes) -> object:
    """What a file says that it is; None if it is no JSON object."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data.get("format") if isinstance(data, dict) else None


def plain(value: Any) -> Any:
    """A frozen value of the planner as JSON has it. A whole Plan is left out: it has a format of its own."""
    from autoac.planner import Plan

    match value:
        case Enum():
            return value.value
        case tuple() | list():
            return [plain(item) for item in value]
        case _ if is_dataclass(value):
            named = {field.name: getattr(value, field.name) for field in fields(value)}
            return {name: plain(item) for name, item in named.items() if not isinstance(item, Plan)}
        case _:
            return value


def header(policy: Policy) -> dict[str, Any]:
    again = sum(decision == "recompute" for decision in policy.decisions.values())
    head: dict[str, Any] = policy.model_dump(mode="json", exclude={"decisions"})
    return head | {"ops": len(policy.decisions), "recomputed": again}


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
def progress_of(what: str = "") -> Iterator[_Lines | _Bar]:
    if not sys.stderr.isatty():
        yield _Lines(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, bar.add_task(what, total=None), what)


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
