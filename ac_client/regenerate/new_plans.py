"""Plan what `autoac.toml` lists, and say why a stored policy is out of date.

NOTE [ Out of date ]

A stored policy is out of date if its text is not that of a new plan, and one of these holds:

- the file does not exist, or is not a policy;
- its fingerprint, budget or constraints are not those of the new plan;
- carried out on the model as it is now, it needs more than its budget;
- a new plan is faster by more than the gap.

So other numbers in a header are not enough: a new release of the solver may find another plan of the same
time, and a policy that is within its gap is worth keeping.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path

import torch

from ac_client.model_loader import call_function, load_function, setup_from
from ac_client.regenerate.config import Config, ModelTable, policy_file
from autoac.planner import Plan, PlannerError, Policy, Profile, Progress, carried, plan_with_host
from autoac.planner.formats.op_key import OpKey
from autoac.planner.units import bytes_from_gb, format_bytes, format_us
from autoac.profiler import DATASHEETS


def new_plans(
    config: Config, folder: Path, on_task: Callable[[str], None], progress: Callable[[Progress], bool | None]
) -> Iterator[tuple[str, float, Plan | Exception]]:
    """Plan each budget of each listed model.

    Args:
        config: the models.
        folder: searched first for the modules of their entries.
        on_task: called with a few words before each long task.
        progress: called by the solver; returning True stops it.

    Yields:
        For each policy the name of its file, its gap, and its plan, or the error that left none.
    """
    for name, table in config.models.items():
        on_task(f"{name}: profiling")
        try:
            profile = _profile_of(table, folder)
        except Exception as error:  # noqa: BLE001 - anything that the user's model raises
            yield from ((policy_file(name, gb), table.gap, error) for gb in table.budgets_gb)
            continue
        for gb in table.budgets_gb:
            on_task(f"{name}: planning for {gb:g} GiB")
            planned: Plan | Exception
            try:
                planned = plan_with_host(
                    profile,
                    budget_bytes=bytes_from_gb(gb),
                    constraints=table.constraints,
                    gap=table.gap,
                    time_limit_s=table.time_limit_s,
                    clock=time.monotonic,
                    progress=progress,
                )
            except PlannerError as error:
                planned = error
            yield policy_file(name, gb), table.gap, planned


def _profile_of(table: ModelTable, folder: Path) -> Profile:
    """Profile a step of a listed model on fake tensors."""
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for our results, not for the user's prints
        function = load_function(table.entry, str(folder.resolve()))
        setup = setup_from(call_function(function, table.entry), table.entry)
        autocast = getattr(torch, table.autocast) if table.autocast is not None else None
        link = table.constraints.host_budget_bytes > 0
        return setup.observe(DATASHEETS[table.device], autocast, link=link)


def why_out_of_date(file: Path, new: Plan, gap: float) -> str:
    """Return why the policy in `file` is out of date, in one line; "" if it is not. NOTE [ Out of date ]."""
    policy = new.policy()
    try:
        text = file.read_bytes()
        if text == policy.to_json().encode():
            return ""
        stored = Policy.from_json(text)
    except FileNotFoundError:
        return "the file does not exist"
    except PlannerError as error:
        return " ".join(str(error).split())
    return "; ".join(_differences(stored, policy, new, gap))


def _differences(stored: Policy, policy: Policy, new: Plan, gap: float) -> Iterator[str]:
    assert new.profile is not None
    if stored.fingerprint != policy.fingerprint:
        yield from _changes_of_step(stored, policy)
    if stored.budget_bytes != policy.budget_bytes:
        was, now = format_bytes(stored.budget_bytes), format_bytes(policy.budget_bytes)
        yield f"its budget is {was}, and autoac.toml has {now}"
    if stored.constraints != policy.constraints:
        yield "its constraints are not those of autoac.toml"
    update = {"budget_bytes": policy.budget_bytes, "constraints": policy.constraints}
    old = carried(stored.model_copy(update=update), new.profile)
    if old.peak > new.budget:
        yield f"its peak is {format_bytes(old.peak)} now, over {format_bytes(new.budget)}"
    elif old.extra_us - new.extra_us > gap * old.extra_us:
        yield (
            f"it takes {format_us(old.extra_us)} more than with nothing recomputed, and a new plan "
            f"{format_us(new.extra_us)}: further from the best than the gap of {gap:.1%}"
        )


def _changes_of_step(stored: Policy, policy: Policy) -> Iterator[str]:
    """Say how the step differs from the one that `stored` was planned for."""
    facts = (
        ("model", stored.model, policy.model),
        ("batch", ", ".join(stored.inputs), ", ".join(policy.inputs)),
        ("device", stored.device, policy.device),
        ("torch", stored.tools.get("torch"), policy.tools.get("torch")),
    )
    yield from (f"its {name} was {was}, and is {now}" for name, was, now in facts if was != now)
    pairs = zip_longest(stored.decisions, policy.decisions)
    first = next(((was, now) for was, now in pairs if was != now), None)
    if first is None:
        yield "another fingerprint: the same ops, with other sizes or lifetimes"
        return
    was, now = first
    key = was if now is None or (was is not None and was not in policy.decisions) else now
    unknown = len(policy.decisions.keys() - stored.decisions.keys())
    yield (
        f"another fingerprint: module {OpKey.parse(key).module} changed first, from {was or 'the end'} to "
        f"{now or 'the end'}; at run time, {unknown} ops that this policy does not know are saved"
    )
