"""Format an Outcome as text, as JSON, and as annotations of GitHub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ac_client.regenerate.outcome import PolicyResult, RegenerateOutcome, StepNumbers, Verdict
from ac_client.regenerate.step_changes import ChangedLayer
from autoac.planner import difference_in_words
from autoac.planner.units import format_bytes, format_us

MAX_LINES = 12  # of one list


def as_text(outcome: RegenerateOutcome) -> str:
    """Describe each policy, then count the verdicts."""
    lines: list[str] = []
    for result, before in zip(outcome.results, (None, *outcome.results), strict=False):
        lines.append(f"{result.file}: {result.verdict}")
        lines += [f"  {line}" for line in _details(result, before)]
    lines += _stale_lines(outcome)
    return "\n".join([*lines, last_line(outcome)])


def as_data(outcome: RegenerateOutcome) -> dict[str, Any]:
    """Return the outcome as one JSON object, in bytes and microseconds."""
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
                "layers": [asdict(layer) for layer in result.layers],
                "stored": result.stored and asdict(result.stored),
                "stored_now": result.carried and asdict(result.carried),
                "planned": result.planned and asdict(result.planned),
                "changes": result.difference and [asdict(change) for change in result.difference.changes],
                "notes": list(result.notes),
                "error": result.error or None,
                "text": "\n".join(_details(result)),
            }
            for result in outcome.results
        ],
        "stale": [str(path) for path in outcome.stale],
        "pruned": outcome.prune and not outcome.check,
    }


def as_annotations(outcome: RegenerateOutcome) -> str:
    """Return workflow commands, which GitHub shows at the files that they name."""
    lines = []
    for result in outcome.results:
        body = "\n".join(_details(result))
        match result.verdict:
            case Verdict.DRIFTED:
                lines.append(
                    annotation("error", result.file, "policy out of date", f"{body}\n{_advice(outcome)}")
                )
            case Verdict.FAILED:
                lines.append(annotation("error", outcome.config, f"no policy for {result.model}", body))
            case Verdict.WRITTEN:
                lines.append(annotation("notice", result.file, "policy written", body))
            case Verdict.UNCHANGED if result.notes:
                lines.append(annotation("notice", result.file, "policy unchanged", body))
            case Verdict.UNCHANGED:
                pass
    for path in outcome.stale:
        kind = "error" if outcome.check and outcome.prune else "warning"
        lines.append(
            annotation(kind, path, "no longer listed", f"{outcome.config} lists no policy for this file")
        )
    return "\n".join([*lines, last_line(outcome)])


def last_line(outcome: RegenerateOutcome) -> str:
    """Count the verdicts, and say what to do next."""
    counts = dict.fromkeys(Verdict, 0)
    for result in outcome.results:
        counts[result.verdict] += 1
    n = len(outcome.results)
    parts = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    text = f"{n} {'policy' if n == 1 else 'policies'}: {', '.join(parts)}."
    return f"{text} {_advice(outcome)}" if outcome.drifted else text


def _advice(outcome: RegenerateOutcome) -> str:
    config = "" if outcome.config == Path("autoac.toml") else f" --config {outcome.config}"
    prune = " --prune" if outcome.prune else ""
    return f"Run `autoac regenerate{config}{prune}` and commit {outcome.folder}."


def _stale_lines(outcome: RegenerateOutcome) -> list[str]:
    if not outcome.stale:
        return []
    names = ", ".join(path.name for path in outcome.stale)
    if outcome.prune:
        return [f"no longer listed, {'would be removed' if outcome.check else 'removed'}: {names}"]
    return [f"no longer listed (--prune removes them): {names}"]


def _details(result: PolicyResult, before: PolicyResult | None = None) -> Iterator[str]:
    """Describe one policy except for its verdict; leave out changes of the model that `before` describes."""
    layers, described = result.layers, set[str]()
    if before is not None and before.model == result.model and before.layers == layers:
        layers, described = (), set(before.reasons) if layers else described
        if described & set(result.reasons):
            yield f"the model changed as described for {before.file.name}"
    yield from (reason for reason in result.reasons if reason not in described)
    for layer in layers[:MAX_LINES]:
        yield from _layer(layer)
    if len(layers) > MAX_LINES:
        yield f"and {len(layers) - MAX_LINES} more layers"
    if result.error:
        yield f"error: {result.error}"
    if result.stored is not None and result.planned is not None:
        yield f"stored policy, as planned: {_in_words(result.stored)}"
    if result.carried is not None and result.carried.peak_bytes > result.limit_bytes:
        over = format_bytes(result.carried.peak_bytes - result.limit_bytes)
        yield f"stored policy, on the model now: {over} over the budget"
    if result.difference is not None:
        yield from difference_in_words(result.difference, "stored policy", "new plan").splitlines()
    elif result.planned is not None:
        yield f"planned now: {_in_words(result.planned)}"
    yield from result.notes


def _in_words(numbers: StepNumbers) -> str:
    share = numbers.recompute_us / numbers.step_us if numbers.step_us else 0.0
    return (
        f"peak {format_bytes(numbers.peak_bytes)}, {format_us(numbers.recompute_us)} of recompute"
        f" in a step of {format_us(numbers.step_us)} ({share:.1%})"
    )


def _layer(layer: ChangedLayer) -> Iterator[str]:
    several = f" ({len(layer.modules)} modules)" if len(layer.modules) > 1 else ""
    yield f"{layer.name or '(outside all modules)'}{several} changed:"
    for label, ops in (("new", layer.new), ("gone", layer.gone)):
        if ops:
            more = f" and {len(ops) - MAX_LINES} more" if len(ops) > MAX_LINES else ""
            yield f"  {label}: {', '.join(ops[:MAX_LINES])}{more}"
    for line in layer.other[:MAX_LINES]:
        yield f"  {line}"


def annotation(kind: str, file: Path, title: str, body: str) -> str:
    """Return a workflow command. Source: docs.github.com, "Workflow commands for GitHub Actions"."""
    root = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
    path = os.path.relpath(file, root)
    return f"::{kind} file={_property(path)},title={_property(title)}::{_escaped(body)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
