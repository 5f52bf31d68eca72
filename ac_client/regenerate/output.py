"""An Outcome for a person, for a program, and for GitHub: text, JSON, annotations and a summary."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ac_client.cli.output import plain
from ac_client.regenerate.config import InvalidSettings
from ac_client.regenerate.drift import Numbers, Outcome, Result, Verdict
from ac_client.regenerate.lock import Moved
from autoac.planner import Difference
from autoac.planner.units import format_bytes, format_us

MOST = 12  # lines of one list


def as_text(outcome: Outcome) -> str:
    """What came of each policy, and of all."""
    lines: list[str] = []
    for result, before in zip(outcome.results, (None, *outcome.results), strict=False):
        lines.append(f"{result.file}: {result.verdict}")
        lines += [f"  {line}" for line in _details(result, before)]
    lines += _stale_lines(outcome)
    return "\n".join([*lines, last_line(outcome)])


def as_data(outcome: Outcome) -> dict[str, Any]:
    """The same as one JSON object. Bytes and microseconds."""
    return {
        "config": str(outcome.config),
        "check": outcome.check,
        "drifted": outcome.drifted,
        "failed": outcome.failed,
        "policies": [
            {
                "model": result.model,
                "file": str(result.file),
                "budget_gb": result.budget_gb,
                "verdict": result.verdict.value,
                "reasons": list(result.reasons),
                "layers": [plain(layer) for layer in result.layers],
                "stored": _plain(result.stored),
                "stored_now": _plain(result.carried),
                "planned": _plain(result.planned),
                "changes": [plain(change) for change in result.difference.changes]
                if result.difference is not None
                else None,
                "notes": list(result.notes),
                "error": result.error or None,
                "text": "\n".join(_details(result)),
            }
            for result in outcome.results
        ],
        "stale": [str(path) for path in outcome.stale],
        "pruned": outcome.pruned and not outcome.check,
    }


def as_annotations(outcome: Outcome) -> str:
    """Workflow commands: GitHub shows each at its file."""
    lines = []
    for result in outcome.results:
        body = "\n".join(_details(result))
        match result.verdict:
            case Verdict.DRIFTED:
                lines.append(
                    _annotation("error", result.file, "policy out of date", f"{body}\n{_advice(outcome)}")
                )
            case Verdict.FAILED:
                lines.append(_annotation("error", outcome.config, f"no policy for {result.model}", body))
            case Verdict.WRITTEN:
                lines.append(_annotation("notice", result.file, "policy written", body))
            case Verdict.UNCHANGED if result.notes:
                lines.append(_annotation("notice", result.file, "policy unchanged", body))
            case Verdict.UNCHANGED:
                pass
    for path in outcome.stale:
        kind = "error" if outcome.check and outcome.pruned else "warning"
        lines.append(
            _annotation(kind, path, "no longer listed", f"{outcome.config} lists no policy for this file")
        )
    return "\n".join([*lines, last_line(outcome)])


def problems_as_annotations(error: InvalidSettings) -> str:
    """What is wrong with the settings, each at its table."""
    return "\n".join(
        _annotation("error", Path(error.file), "invalid settings", str(problem), problem.line)
        for problem in error.problems
    )


def as_summary(outcome: Outcome) -> str:
    """Markdown for the summary of a GitHub job: a table, and what is behind each row that changed."""
    lines = [
        f"### Policies: {last_line(outcome)}",
        "",
        "| policy | budget | | peak before | after | recompute before | after |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    for result in outcome.results:
        was, now = result.stored, result.planned or result.stored
        cells = [
            f"`{result.file.name}`",
            f"{result.budget_gb:g} GiB",
            result.verdict.value,
            *(format_bytes(n.peak) if n else "" for n in (was, now)),
            *(format_us(n.recompute_us) if n else "" for n in (was, now)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for result in outcome.results:
        if result.verdict is not Verdict.UNCHANGED:
            lines += ["", f"<details><summary>{result.file.name}</summary>", "", "```text"]
            lines += [line.replace("```", "'''") for line in _details(result)]
            lines += ["```", "", "</details>"]
    stale = _stale_lines(outcome)
    if stale:
        lines += ["", *(f"- {line}" for line in stale)]
    return "\n".join(lines) + "\n"


def last_line(outcome: Outcome) -> str:
    """How many of what, and what to do next."""
    counts = dict.fromkeys(Verdict, 0)
    for result in outcome.results:
        counts[result.verdict] += 1
    n = len(outcome.results)
    parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    said = f"{n} {'policy' if n == 1 else 'policies'}: {', '.join(parts)}."
    return f"{said} {_advice(outcome)}" if outcome.drifted else said


def _advice(outcome: Outcome) -> str:
    prune = " --prune" if outcome.pruned else ""
    return f"Run `autoac regenerate{prune}` and commit {outcome.folder}."


def _stale_lines(outcome: Outcome) -> list[str]:
    if not outcome.stale:
        return []
    names = ", ".join(path.name for path in outcome.stale)
    if outcome.pruned:
        return [f"no longer listed, {'would be removed' if outcome.check else 'removed'}: {names}"]
    return [f"no longer listed (--prune removes them): {names}"]


def _details(result: Result, before: Result | None = None) -> Iterator[str]:
    """What there is to say of one policy beside its verdict, less what `before` has said of the model."""
    layers, said = result.layers, set[str]()
    if before is not None and before.model == result.model and before.layers == layers:
        layers, said = (), set(before.reasons) if layers else said
        if said & set(result.reasons):
            yield f"the model changed as told of {before.file.name}"
    yield from (reason for reason in result.reasons if reason not in said)
    for layer in layers[:MOST]:
        yield from _layer(layer)
    if len(layers) > MOST:
        yield f"and {len(layers) - MOST} more layers"
    if result.error:
        yield f"error: {result.error}"
    if result.planned is not None:
        rows = [
            ("stored policy, as it was planned", result.stored),
            ("stored policy, on the model of now", result.carried),
            ("planned now", result.planned),
        ]
        for what, numbers in rows:
            if numbers is not None:
                over = numbers.peak - result.limit
                much = f", {format_bytes(over)} over the budget" if over > 0 else ""
                yield f"{what:<34}  {_in_words(numbers)}{much}"
        if result.difference is not None:
            yield from _changes(result.difference)
    yield from result.notes


def _in_words(numbers: Numbers) -> str:
    share = numbers.recompute_us / numbers.step_us if numbers.step_us else 0.0
    return (
        f"peak {format_bytes(numbers.peak)}, {format_us(numbers.recompute_us)} of recompute"
        f" in a step of {format_us(numbers.step_us)} ({share:.1%})"
    )


def _layer(layer: Moved) -> Iterator[str]:
    several = f" ({len(layer.modules)} modules)" if len(layer.modules) > 1 else ""
    yield f"{_named(layer.name)}{several} changed:"
    for what, ops in (("new", layer.new), ("gone", layer.gone)):
        if ops:
            more = f" and {len(ops) - MOST} more" if len(ops) > MOST else ""
            yield f"  {what}: {', '.join(ops[:MOST])}{more}"
    for line in layer.other[:MOST]:
        yield f"  {line}"


def _changes(found: Difference) -> Iterator[str]:
    """What is kept now and was not, and the other way round, by layer."""
    if found.same:
        yield "the new plan keeps what the stored one keeps"
    for change in found.changes:
        several = f" ({len(change.modules)} modules)" if len(change.modules) > 1 else ""
        yield f"{_named(change.name)}{several}:"
        for what, ops, nbytes in (
            ("kept now, and was not", change.gained, change.gained_bytes),
            ("kept before, and is not", change.lost, change.lost_bytes),
        ):
            if ops:
                size = f"  ({format_bytes(nbytes)})" if nbytes else ""
                yield f"  {what}: {', '.join(ops)}{size}"


def _named(module: str) -> str:
    return module if module not in ("", ".") else "(outside all modules)"


def _plain(numbers: Numbers | None) -> dict[str, Any] | None:
    if numbers is None:
        return None
    return {
        "peak_bytes": numbers.peak,
        "recompute_us": numbers.recompute_us,
        "step_us": numbers.step_us,
    }


def _annotation(kind: str, file: Path, title: str, body: str, line: int = 0) -> str:
    """A workflow command. Source: docs.github.com, "Workflow commands for GitHub Actions"."""
    root = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
    path = os.path.relpath(file, root)
    at = f",line={line}" if line else ""
    return f"::{kind} file={_property(path)}{at},title={_property(title)}::{_escaped(body)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
