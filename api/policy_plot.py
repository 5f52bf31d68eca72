"""Prepare the data that pages draw of plans, from the profile of the plan. Pure.

For a policy: the timelines of `planner.report.timeline`, and the decision on each op for the map of layers
and ops. For a frontier: the same for each of its points, but only in outline, so that a page can load all of
them and follow a budget that is dragged.
"""

from __future__ import annotations

import gzip
import json
from typing import Any

from autoac.planner.as_planned import as_planned
from autoac.planner.formats.op_key import OpKey
from autoac.planner.formats.policy import Policy
from autoac.planner.formats.profile import Profile
from autoac.planner.frontier import Frontier
from autoac.planner.memory.simulate import simulate
from autoac.planner.plan import Plan
from autoac.planner.report.by_module import Decision, OpDecision, op_decisions, runs_added_up
from autoac.planner.report.timeline import KernelTimes, picture, thin_out

IDLE, KEPT, AGAIN, MOVED = range(4)
"""The number of each decision: unused in backward, saved, recomputed, moved to the host."""

_FATES = {Decision.UNUSED: IDLE, Decision.SAVED: KEPT, Decision.RECOMPUTED: AGAIN, Decision.MOVED: MOVED}
_OF_FATES = {number: fate for fate, number in _FATES.items()}
OUTLINE = 400  # moments of memory that are drawn for a point
LEVEL = 6  # of gzip: a quarter of the size, within hundredths of a second


def plot_body(profile: bytes, policy: bytes) -> bytes:
    """Return the body for the child process: an object with both published forms."""
    return b'{"profile": ' + profile + b', "policy": ' + policy + b"}"


def plot_from_body(body: bytes) -> bytes:
    """Plot the policy of a `plot_body`.

    Raises:
        OtherProfile: the policy was made from another profile.
        MalformedProfile: the profile is not valid.
    """
    both = json.loads(body)
    return draw(Profile.from_data(both["profile"]), Policy.model_validate(both["policy"]))


def plot(profile: Profile, found: Policy | Frontier) -> bytes:
    """Return the plot of a policy or of a frontier of `profile`: see `draw` and `outline`."""
    return outline(found) if isinstance(found, Frontier) else draw(profile, found)


def draw(profile: Profile, policy: Policy) -> bytes:
    """Return the data that the page of `policy` draws, as gzipped JSON. Bytes and microseconds.

    Raises:
        OtherProfile: the policy was made from another profile.
    """
    plan = as_planned(policy, profile)
    fates = op_decisions(plan.graph, plan.save_set, plan.moved)
    data = picture(plan, policy=policy).data() | {
        "fates": {  # by op
            "fate": [_FATES[op.decision] for op in fates],
            "nbytes": [op.kept_bytes or op.recomputed_bytes for op in fates],
            "runtime_us": [op.runtime_us for op in fates],
        }
    }
    return _compressed(data)


def outline(found: Frontier) -> bytes:
    """Return the data that a model's page draws of a frontier, as gzipped JSON. Bytes and microseconds.

    `live_bytes` of a point keeps the highest and the last value of each stretch, so its maximum is the peak.
    """
    graph = found.plans[0].graph
    keys = [OpKey.parse(op.name) for op in graph.ops]
    modules = list(dict.fromkeys(key.module for key in keys))
    labels = list(dict.fromkeys(key.label for key in keys))
    at_module = {name: i for i, name in enumerate(modules)}
    at_label = {name: i for i, name in enumerate(labels)}
    return _compressed(
        {
            "version": 1,
            "modules": modules,
            "labels": labels,
            "ops": {
                "module": [at_module[key.module] for key in keys],
                "label": [at_label[key.label] for key in keys],
                "nbytes": [sum(graph.nbytes(w) for w in op.writes) for op in graph.ops],
                "runtime_us": [op.runtime_us for op in graph.ops],
            },
            "points": [_outlined(made) for made in found.plans],
        }
    )


def _outlined(plan: Plan) -> dict[str, Any]:
    timeline = simulate(plan.graph, plan.save_set)
    clock = KernelTimes.of(plan.graph, timeline, plan.timing)
    levels = [timeline.instants[i].live_bytes for i in clock.events]
    kept = thin_out(levels, OUTLINE)
    return {
        "budget_bytes": plan.budget,
        "peak_bytes": plan.peak,
        "end_us": round(clock.end_us, 1),
        "begin_us": [round(clock.begin_us[i], 1) for i in kept],
        "live_bytes": [levels[i] for i in kept],
        "fates": "".join(
            str(_FATES[op.decision]) for op in op_decisions(plan.graph, plan.save_set, plan.moved)
        ),  # by op
    }


def _compressed(data: dict[str, Any]) -> bytes:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), LEVEL, mtime=0)


def became(drawing: bytes, policy: Policy) -> list[OpDecision]:
    """Return the decision on each op of `policy`, read from its plot, in forward order."""
    drawn = json.loads(gzip.decompress(drawing))
    fates, keys, found = drawn["fates"], iter(policy.decisions), list[OpDecision]()
    for label, number, nbytes, us in zip(
        drawn["ops"]["label"], fates["fate"], fates["nbytes"], fates["runtime_us"], strict=True
    ):
        _, later, run = drawn["labels"][label].partition("@")  # a later run of the op before
        key = f"{found[-1].key}@{run}" if later else next(keys)
        fate = _OF_FATES[number]
        again = fate is Decision.RECOMPUTED
        found.append(OpDecision(key, fate, 0 if again else nbytes, nbytes if again else 0, us))
    return runs_added_up(found)
