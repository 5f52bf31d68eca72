"""Read the input files of a command, write its result, show its progress, and word its errors.

Results go to stdout. Progress goes to stderr: a bar on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ac_client.files import check_writable, named, write_whole
from autoac.planner.units import printable

if TYPE_CHECKING:
    from rich.progress import TaskID

    from autoac.planner import InfeasibleBudget, Policy, PolicySet, Profile, Progress


def say(text: str, file: TextIO | None = None) -> None:
    """Print `text`, which may have names from a file or the network; on stdout by default."""
    print(printable(text), file=file, flush=file is not None)


def read(path: Path) -> bytes:
    """Read a file, or stdin for `-`."""
    if str(path) == "-":
        return sys.stdin.buffer.read()
    return path.read_bytes()


def named_as_given(path: Path) -> AbstractContextManager[None]:
    """Prefix errors about the text of `path` with its name, or with "stdin" for `-`."""
    return named("stdin" if str(path) == "-" else path)


def read_profile(path: Path) -> Profile:
    """Read a profile from a file or stdin."""
    from autoac.planner import Profile

    text = read(path)
    with named_as_given(path):
        return Profile.from_json(text)


def read_policy(path: Path) -> Policy:
    """Read a policy from a file or stdin."""
    text = read(path)
    with named_as_given(path):
        return policy_of(text)


def policy_of(text: bytes) -> Policy:
    """Return the policy that `text` holds.

    Raises:
        UnknownVersion, MalformedPolicy: as for `Policy.from_json`; or parts of it contradict each other.
    """
    from autoac.planner import Policy

    policy = Policy.from_json(text)
    _refuse(_contradictions(policy))
    return policy


def policy_set_of(text: bytes) -> PolicySet:
    """Return the policy set that `text` holds.

    Raises:
        UnknownVersion, MalformedPolicy: as for `policy_of`.
    """
    from autoac.planner import PolicySet

    policies = PolicySet.from_json(text)
    for i, bucket in enumerate(policies.buckets):
        _refuse(f"buckets[{i}].policy.{line}" for line in _contradictions(bucket.policy))
    return policies


def _refuse(problems: Iterable[str]) -> None:
    from autoac.planner.errors import MalformedPolicy
    from autoac.planner.formats.base import MAX_COMPLAINTS

    if first := list(islice(problems, MAX_COMPLAINTS)):
        raise MalformedPolicy(first)


def _contradictions(policy: Policy) -> Iterator[str]:
    """Find traces of an edit or a merge, which the format alone cannot see."""
    from autoac.planner.formats.op_key import OpKey

    predicted = policy.predicted
    if predicted.peak_bytes > policy.budget_bytes:
        yield f"predicted.peak_bytes is {predicted.peak_bytes}, over budget_bytes, {policy.budget_bytes}"
    extra_us = predicted.recompute_us + predicted.stall_us
    if predicted.recompute_bound_us > extra_us * (1 + 1e-9):
        also = " and stall_us" if policy.moves else ""
        yield (
            f"predicted.recompute_bound_us is {predicted.recompute_bound_us}, over recompute_us{also}, "
            f"{extra_us}, which it bounds from below"
        )
    for key in policy.decisions:
        parsed = OpKey.parse(key)
        if parsed.occurrence is None or str(parsed) != key:
            yield f"decisions: a key must have the form MODULE/OP#N, got {json.dumps(key)}"


def check_output(output: Path) -> None:
    """Check that `deliver` can write the file `output`, before the work whose result goes there.

    Raises:
        OSError: the file cannot be written.
    """
    if str(output) != "-":
        check_writable(output)


def deliver(output: Path, text: str, facts: dict[str, Any], line: str, as_json: bool) -> None:
    """Write the result `text` to the file `output`, and print a short summary of it.

    If `output` is `-`, print the text and no summary.

    Args:
        facts: the summary for `--json`.
        line: the summary for a person.
    """
    if str(output) == "-":
        sys.stdout.write(text)
        return
    write_whole(output, text)
    say(json.dumps(facts, indent=1) if as_json else line)


def format_of(text: bytes) -> object:
    """Return the `format` field of a JSON text; None if the text is not a JSON object."""
    from autoac.planner.formats.base import read_json

    try:
        data = read_json(text)
    except ValueError:
        return None
    return data.get("format") if isinstance(data, dict) else None


def as_json_types(value: Any) -> Any:
    """Convert a frozen value of the planner to JSON types. Omit whole Plans, which have their own format."""
    from autoac.planner import Plan

    match value:
        case Enum():
            return value.value
        case tuple() | list():
            return [as_json_types(item) for item in value]
        case _ if is_dataclass(value):
            items = {field.name: getattr(value, field.name) for field in fields(value)}
            return {name: as_json_types(item) for name, item in items.items() if not isinstance(item, Plan)}
        case _:
            return value


def policy_header(policy: Policy) -> dict[str, Any]:
    """Return the fields of a policy as JSON types, with counts in place of its decisions."""
    recomputed = policy.recomputed
    header: dict[str, Any] = policy.model_dump(mode="json", exclude={"decisions"})
    return header | {"ops": len(policy.decisions), "recomputed": recomputed}


SILENCE_S = 10.0  # between two lines about one search


def _so_far(progress: Progress) -> str:
    """Return how far a search is, to put after the name of its task."""
    point = f", point {progress.point} of {progress.points}" if progress.point else ""
    return point + (f", gap {progress.gap:.1%}" if progress.gap < 10 else "")


class _ProgressLines:
    """Show progress in a file or a pipe: print lines on stderr when a task starts, and while it searches."""

    def __init__(self, task: str) -> None:
        self._task, self._said_at = task, time.monotonic()
        if task:
            say(f"{task} ...", file=sys.stderr)

    def start(self, task: str, done: int = 0, total: int | None = None) -> None:
        if task != self._task:
            say(task, file=sys.stderr)
        self._task, self._said_at = task, time.monotonic()

    def solving(self, progress: Progress) -> None:
        if time.monotonic() - self._said_at >= SILENCE_S:
            say(self._task + _so_far(progress), file=sys.stderr)
            self._said_at = time.monotonic()


class _ProgressBar:
    """Show progress on a terminal: one bar on stderr, which disappears at the end."""

    def __init__(self, bar: Any, bar_id: TaskID, task: str) -> None:
        self._bar, self._bar_id, self._task = bar, bar_id, printable(task)

    def start(self, task: str, done: int = 0, total: int | None = None) -> None:
        self._task = printable(task)
        self._bar.update(self._bar_id, description=self._task, completed=done, total=total)

    def solving(self, progress: Progress) -> None:
        self._bar.update(self._bar_id, description=self._task + _so_far(progress))


@contextmanager
def show_progress(task: str = "") -> Iterator[_ProgressLines | _ProgressBar]:
    """Show progress on stderr while the block runs. `task` names what is done first."""
    if not sys.stderr.isatty():
        yield _ProgressLines(task)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _ProgressBar(bar, bar.add_task(printable(task), total=None), task)


class _Starts(logging.Handler):
    """Show each message as what starts now."""

    def __init__(self, progress: _ProgressLines | _ProgressBar) -> None:
        super().__init__(logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.start(record.getMessage())


@contextmanager
def messages_of(name: str, progress: _ProgressLines | _ProgressBar) -> Iterator[None]:
    """Show what the logger `name` says inside of the block as progress, and nowhere else."""
    log, handler = logging.getLogger(name), _Starts(progress)
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


def one_line(error: BaseException) -> str:
    """Word an error in one line: its cause, and the next step where there is one."""
    import typer

    from autoac.api.cli.commands import WrongUsage, missing_package
    from autoac.planner.errors import InfeasibleBudget, PlannerError

    match error:
        case _ if isinstance(error, WrongUsage):
            text = str(error.format_message())
            context: typer.Context | None = getattr(error, "ctx", None)
            text += f" (see {context.command_path} --help)" if context is not None else ""
        case typer.Abort() | KeyboardInterrupt():
            text = "interrupted"
        case InfeasibleBudget():
            text = _infeasible(error)
        case PlannerError():
            text = str(error)
        case ModuleNotFoundError() if (missing := missing_package(error)) is not None:
            text = missing
        case OSError() if error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        case _:
            from ac_client.errors import CommandError

            text = str(error) if isinstance(error, CommandError) else f"{type(error).__name__}: {error}"
    return printable(" ".join(text.split()))


def _infeasible(error: InfeasibleBudget) -> str:
    from autoac.planner.units import ceil_gb, format_bytes

    text = f"no plan fits in {format_bytes(error.budget)}: "
    text += f"the step needs at least {format_bytes(error.proven_floor)}"
    smallest = error.smallest_found
    if smallest is not None:
        text += f" (proven); a plan exists for {ceil_gb(smallest)} GiB"
    return ". ".join([text, *error.constraints])
