"""`explain` and `diff`: what a policy does, in words, numbers and pictures."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ac_client.cli.options import Json, TimeLimit
from ac_client.cli.output import (
    format_of,
    header,
    named_as_given,
    plain,
    progress_of,
    read,
    read_policy,
    read_profile,
)
from ac_client.files import write_whole

if TYPE_CHECKING:
    from autoac.planner import Policy, PolicySet


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
    time_limit_s: TimeLimit = 600.0,
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
    from autoac.planner.budget import budget_in_bytes
    from autoac.planner.formats.policy_set import SET_FORMAT
    from autoac.planner.report.by_module import by_module, op_decisions

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
                clock=time.monotonic,
                progress=progress.solving,
            )

    text = read(subject)
    name = named_as_given(subject)
    made: Plan | None = None
    if format_of(text) == SET_FORMAT:
        options = (profile_file, budget_gb, tensors, more_gb, html)
        if table or any(given is not None for given in options):
            raise typer.BadParameter("a policy set is explained by itself; a policy of it takes options")
        with name:
            policies = PolicySet.from_json(text)
        _explain_set(policies, as_json=as_json)
        return
    if format_of(text) == "autoac.profile":
        if budget_gb is None:
            raise typer.BadParameter("a profile is explained at a budget: pass one", param_hint="--budget-gb")
        if profile_file is not None:
            raise typer.BadParameter(f"{subject} is a profile itself: leave it out", param_hint="--profile")
        with name:
            observed = Profile.from_json(text)
        made = within(observed, budget_in_bytes(budget_gb))
        policy = made.policy()
    else:
        with name:
            policy = Policy.from_json(text)
        if budget_gb is not None:
            raise typer.BadParameter(
                f"{subject} is a policy, which has its budget: leave it out, or explain the profile",
                param_hint="--budget-gb",
            )
        if profile_file is not None:
            made = as_planned(policy, read_profile(profile_file))
    if made is None and (tensors or more_gb is not None or table or html is not None):
        raise typer.BadParameter(
            "bytes are in the profile, not in the policy: pass it", param_hint="--profile"
        )
    answer: dict[str, Any] = header(policy)
    words = [in_words(made, table=table) if made else in_words(policy)]
    if made is not None:
        answer["modules"] = plain(by_module(op_decisions(made.graph, made.save_set)))
        answer["tensors"] = []
        for key in tensors or []:
            reason = why(made, key)
            words.append(why_text(reason))
            answer["tensors"].append(plain(reason) | {"fits": reason.fits})
        if more_gb is not None:
            bought = more(made, budget_in_bytes(more_gb, "--more-gb"), planning=within)
            words.append(more_in_words(bought))
            answer["more"] = plain(bought) | {"gain_us": bought.gain_us}
        if html is not None:
            from autoac.planner.report.page import timeline_page

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
    from autoac.planner.formats.policy_set import Extent, shape_in_words

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
    from autoac.planner import Plan, as_planned, difference, difference_in_words

    policies = [read_policy(path) for path in (first, second)]
    subjects: list[Plan | Policy] = list(policies)
    if profile_file is not None:
        observed = read_profile(profile_file)
        subjects = [as_planned(policy, observed) for policy in policies]
    found = difference(subjects[0], subjects[1])
    text = difference_in_words(found, str(first), str(second))
    if as_json:
        print(json.dumps(plain(found) | {"same": found.same, "text": text}, indent=1))
    else:
        print(text)
