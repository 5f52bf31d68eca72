"""The commands `explain` and `diff`: describe a policy in words, numbers and pictures."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ac_client.cli.options import HostBudget, Json, TimeLimit, with_host_budget
from ac_client.cli.output import (
    as_json_types,
    format_of,
    named_as_given,
    policy_header,
    read,
    read_policy,
    read_profile,
    say,
    show_progress,
)
from ac_client.files import check_writable, write_whole

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
        float | None, typer.Option("--budget-gb", help="For a PROFILE: GiB that may be live on the device.")
    ] = None,
    profile_file: Annotated[
        Path | None,
        typer.Option(
            "--profile", help="For a POLICY: the profile that it was planned from, which has the bytes."
        ),
    ] = None,
    tensors: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor",
            metavar="KEY",
            help="Key of an op, or the end of one: explain its decision and what the other would change. "
            "May be given several times.",
        ),
    ] = None,
    more_gb: Annotated[
        float | None, typer.Option("--more-gb", help="Say what this many GiB more would save. Plans again.")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Print bytes and times by module as a table.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write a page that draws memory over the step, and what is live at each moment."
        ),
    ] = None,
    host_budget_gb: HostBudget = 0.0,
    time_limit_s: TimeLimit = math.inf,
    as_json: Json = False,
) -> None:
    """Explain what a policy saves and recomputes.

    Says in words what each module saves and recomputes, and what that costs.
    """
    from autoac.planner import (
        Constraints,
        Graph,
        Plan,
        Policy,
        PolicySet,
        Profile,
        as_planned,
        more,
        more_in_words,
        picture,
        plan_with_host,
        why,
    )
    from autoac.planner import explain as in_words
    from autoac.planner import why_in_words as why_text
    from autoac.planner.budget import budget_in_bytes
    from autoac.planner.formats.policy_set import SET_FORMAT
    from autoac.planner.report.by_module import by_module, op_decisions
    from autoac.planner.report.loss_advice import loss_advice, loss_advice_in_words

    if more_gb is not None and not 0 < more_gb < float("inf"):
        raise typer.BadParameter(f"must be a positive number of GiB, got {more_gb}", param_hint="--more-gb")

    if html is not None:
        check_writable(html)

    def plan_within(profile: Profile | Graph, budget: int) -> Plan:
        constraints = planned.constraints if planned else None
        if observed is not None and host_budget_gb:
            constraints = with_host_budget(constraints or Constraints(), host_budget_gb, observed)
        name = profile.model if isinstance(profile, Profile) else "the graph"
        if constraints and isinstance(profile, Graph):
            constraints = constraints.beyond_the_graph
        with show_progress(f"planning {name}") as progress:
            return plan_with_host(
                profile,
                budget_bytes=budget,
                rates=observed.link if observed is not None else None,
                constraints=constraints,
                time_limit_s=time_limit_s,
                clock=time.monotonic,
                progress=progress.solving,
            )

    text = read(subject)
    name = named_as_given(subject)
    planned: Plan | None = None
    observed: Profile | None = None
    if format_of(text) == SET_FORMAT:
        options = (profile_file, budget_gb, tensors, more_gb, html)
        if table or any(option is not None for option in options):
            raise typer.BadParameter(
                "a policy set takes no further options; explain one of its policies instead"
            )
        with name:
            policies = PolicySet.from_json(text)
        _explain_set(policies, as_json=as_json)
        return
    if format_of(text) == "autoac.profile":
        if budget_gb is None:
            raise typer.BadParameter("must be given for a profile", param_hint="--budget-gb")
        if profile_file is not None:
            raise typer.BadParameter(
                f"must be left out, since {subject} is a profile", param_hint="--profile"
            )
        with name:
            observed = Profile.from_json(text)
        planned = plan_within(observed, budget_in_bytes(budget_gb))
        policy = planned.policy()
    else:
        with name:
            policy = Policy.from_json(text)
        if budget_gb is not None:
            raise typer.BadParameter(
                f"must be left out, since {subject} is a policy, which has a budget; or explain the profile",
                param_hint="--budget-gb",
            )
        if profile_file is not None:
            planned = as_planned(policy, read_profile(profile_file))
    if planned is None and (tensors or more_gb is not None or table or html is not None):
        raise typer.BadParameter(
            "must be given: a policy has no bytes, its profile has", param_hint="--profile"
        )
    answer: dict[str, Any] = policy_header(policy)
    words = [in_words(planned, table=table) if planned else in_words(policy)]
    if planned is not None:
        answer["modules"] = as_json_types(
            by_module(op_decisions(planned.graph, planned.save_set, planned.moved))
        )
        answer["tensors"] = []
        for key in tensors or []:
            reason = why(planned, key)
            words.append(why_text(reason))
            answer["tensors"].append(as_json_types(reason) | {"fits": reason.fits})
        if more_gb is not None:
            bought = more(planned, budget_in_bytes(more_gb, "--more-gb"), planning=plan_within)
            words.append(more_in_words(bought))
            answer["more"] = as_json_types(bought) | {"gain_us": bought.gain_us}
        advice = loss_advice(planned, plan_within)
        if advice is not None:
            words.append(loss_advice_in_words(advice))
            answer["loss"] = as_json_types(advice) | {"gain_us": advice.gain_us}
        if html is not None:
            from autoac.planner.report.page import timeline_page

            write_whole(html, timeline_page(picture(planned, policy=policy).data()))
            words.append(f"picture: {html}")
            answer["html"] = str(html)
    if as_json:
        print(json.dumps(answer | {"text": "\n\n".join(words)}, indent=1))
    else:
        say("\n\n".join(words))


def _explain_set(policies: PolicySet, *, as_json: bool) -> None:
    """Describe each policy and the batches that it serves, the smallest batch first."""
    from autoac.planner import explain as in_words
    from autoac.planner.formats.policy_set import Extent, shape_in_words

    buckets = sorted(policies.buckets, key=lambda bucket: Extent.of(bucket.shape).elements)
    descriptions = [
        f"Bucket {number} of {len(buckets)}, for batches up to {shape_in_words(bucket.shape)}:\n"
        + in_words(bucket.policy)
        for number, bucket in enumerate(buckets, 1)
    ]
    text = "\n\n".join(descriptions) or "The policy set is empty."
    if as_json:
        heads = [{"shape": bucket.shape} | policy_header(bucket.policy) for bucket in buckets]
        print(json.dumps({"buckets": heads, "text": text}, indent=1))
    else:
        say(text)


def diff(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A policy written by `autoac plan`.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="The policy to compare with.")],
    profile_file: Annotated[
        Path | None,
        typer.Option(
            "--profile", help="The profile of both: compare the tensors that are really saved, with bytes."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two policies.

    Says what only one of them saves, by module, and what that costs.
    """
    from autoac.planner import Plan, as_planned, difference, difference_in_words

    policies = [read_policy(path) for path in (first, second)]
    subjects: list[Plan | Policy] = list(policies)
    if profile_file is not None:
        observed = read_profile(profile_file)
        subjects = [as_planned(policy, observed) for policy in policies]
    changes = difference(subjects[0], subjects[1])
    text = difference_in_words(changes, str(first), str(second))
    if as_json:
        print(json.dumps(as_json_types(changes) | {"same": changes.same, "text": text}, indent=1))
    else:
        say(text)
