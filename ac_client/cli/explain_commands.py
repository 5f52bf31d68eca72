"""The commands `explain` and `diff`: describe a policy in words, numbers and pictures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ac_client.cli.options import Json
from ac_client.cli.output import (
    as_json_types,
    format_of,
    named_as_given,
    policy_header,
    policy_of,
    policy_set_of,
    read,
    read_policy,
    read_profile,
    say,
)
from ac_client.files import check_writable, write_whole

if TYPE_CHECKING:
    from autoac.planner import Policy, PolicySet


def explain(
    subject: Annotated[Path, typer.Argument(metavar="POLICY|SET", help="A policy, or a policy set.")],
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", help="The profile that the policy was planned from, which has the bytes."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write a page that draws memory over the step, and what is live at each moment."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain what a policy saves and recomputes.

    Says in words what each module saves and recomputes, and what that costs.
    """
    from autoac.planner import PolicySet
    from autoac.planner import explain as summary

    if html is not None:
        check_writable(html)
    found = _read_policies(subject)
    if profile_file is None and html is not None:
        raise typer.BadParameter(
            "must be given: a policy has no bytes, its profile has", param_hint="--profile"
        )
    if isinstance(found, PolicySet):
        if profile_file is not None:
            raise typer.BadParameter(
                "must be left out for a policy set; explain one of its policies instead",
                param_hint="--profile",
            )
        facts, text = _set_facts(found)
    elif profile_file is None:
        facts, text = policy_header(found), summary(found)
    else:
        facts, text = _facts_with_bytes(found, profile_file, html)
    if as_json:
        print(json.dumps(facts | {"text": text}, indent=1))
    else:
        say(text)


def _read_policies(path: Path) -> Policy | PolicySet:
    from autoac.planner.formats.policy_set import SET_FORMAT

    text = read(path)
    with named_as_given(path):
        return policy_set_of(text) if format_of(text) == SET_FORMAT else policy_of(text)


def _facts_with_bytes(policy: Policy, profile_file: Path, html: Path | None) -> tuple[dict[str, Any], str]:
    """Describe a policy with the bytes of its profile, and write the page if there is a file for it."""
    from autoac.planner import as_planned, picture
    from autoac.planner import explain as summary
    from autoac.planner.report.by_module import by_module, op_decisions
    from autoac.planner.report.page import timeline_page

    plan = as_planned(policy, read_profile(profile_file))
    rows = by_module(op_decisions(plan.graph, plan.save_set, plan.moved))
    facts, text = policy_header(policy) | {"modules": as_json_types(rows)}, summary(plan)
    if html is None:
        return facts, text
    write_whole(html, timeline_page(picture(plan, policy=policy).data()))
    return facts | {"html": str(html)}, f"{text}\n\npicture: {html}"


def _set_facts(policies: PolicySet) -> tuple[dict[str, Any], str]:
    """Describe each policy and the batches that it serves, the smallest batch first."""
    from autoac.planner import explain as summary
    from autoac.planner.formats.policy_set import Extent, shape_in_words

    buckets = sorted(policies.buckets, key=lambda bucket: Extent.of(bucket.shape).elements)
    words = [
        f"Bucket {number} of {len(buckets)}, for batches up to {shape_in_words(bucket.shape)}:\n"
        + summary(bucket.policy)
        for number, bucket in enumerate(buckets, 1)
    ]
    heads = [{"shape": bucket.shape} | policy_header(bucket.policy) for bucket in buckets]
    return {"buckets": heads}, "\n\n".join(words) or "The policy set is empty."


def diff(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A policy written by `autoac plan`.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="The policy to compare with.")],
    profile_file: Annotated[
        Path | None,
        typer.Option("--profile", help="The profile of both: compare what is really held, with bytes."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two policies: a table of the decisions that differ."""
    from autoac.planner import as_planned, diff_as_table, diff_rows

    before, after = read_policy(first), read_policy(second)
    if profile_file is None:
        rows = diff_rows(before, after)
    else:
        profile = read_profile(profile_file)
        rows = diff_rows(as_planned(before, profile), as_planned(after, profile))
    if as_json:
        sides = {"before": policy_header(before), "after": policy_header(after)}
        print(json.dumps(sides | {"same": not rows, "rows": [asdict(row) for row in rows]}, indent=1))
        return
    lines = [*_peaks_and_times({str(first): before, str(second): after})]
    lines += ["", *diff_as_table(rows, str(first), str(second))] if rows else ["All decisions are the same."]
    say("\n".join(lines))


def _peaks_and_times(policies: dict[str, Policy]) -> list[str]:
    """Return a table of what the policies predict."""
    from autoac.planner.report.by_module import aligned
    from autoac.planner.units import format_bytes, format_us

    rows = [("policy", "model", "budget", "peak", "recompute")]
    for name, policy in policies.items():
        predicted = policy.predicted
        sizes = (format_bytes(policy.budget_bytes), format_bytes(predicted.peak_bytes))
        rows.append((name, policy.model, *sizes, format_us(predicted.recompute_us)))
    return list(aligned(rows, words=2))
