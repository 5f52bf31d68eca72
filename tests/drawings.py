"""Profiles and timelines to draw: small steps, a plan with moves, and names that try to be code."""

from __future__ import annotations

import sys
from pathlib import Path

from autoac.planner import Constraints, Picture, Plan, Profile, as_planned, picture, plan
from autoac.planner.formats.profile import LinkRates
from autoac.planner.offload import plan_with_host

sys.path.append(str(Path(__file__).parent / "planner"))

import graphs

HOSTILE = (
    "</script><script>window.broken = 1</script>",
    '"><img src=x onerror="window.broken = 1">',
    "<!--<script>",
    "@@SCRIPTS@@ \\u003c \u2028 ${window.broken = 1} &lt;",
    "__proto__",
)


def small(layers: int = 3) -> Profile:
    return graphs.gpt2(layers, batch=32, length=128, vocabulary=512)


HOST = Constraints(host_budget_bytes=1 << 40)


def linked(share: float = 1.0) -> Profile:
    """Return the small step with `share` of the bandwidth of a link over which it pays to move outputs."""
    rate = share * 1500.0
    return small().model_copy(
        update={"link": LinkRates(out_bytes_per_us=rate, in_bytes_per_us=rate, latency_us=0.0)}
    )


def moves_budget() -> int:
    """Return the bytes of the device for which outputs of `linked` move."""
    return plan(small(), budget_gb=1000).peak * 55 // 100


def moving(share: float = 1.0) -> Plan:
    """Return a plan with moves, carried out over `share` of the link that it was made for."""
    made = plan_with_host(linked(), budget_bytes=moves_budget(), constraints=HOST)
    assert made.moves
    return as_planned(made.policy(), linked(share))


def recompute_activations(profile: Profile) -> Plan:
    """Return a plan made by hand, which recomputes activations and attention's dropout."""
    saved_all = plan(profile, budget_gb=1000).policy()
    recomputed = ("mlp.act/", "attn.attn_dropout/")
    return as_planned(
        saved_all.model_copy(
            update={
                "budget_bytes": saved_all.predicted.peak_bytes,
                "decisions": {
                    key: "recompute" if any(part in key for part in recomputed) else "save"
                    for key in saved_all.decisions
                },
            }
        ),
        profile,
    )


def timeline_of(profile: Profile) -> Picture:
    """Return the timeline of `recompute_activations`, with a measured peak 1 % above the predicted one."""
    made = recompute_activations(profile)
    return picture(made, measured_peak_bytes=made.peak * 101 // 100)


def hostile() -> Profile:
    """Return the small step with names that a page must not run."""
    profile = small()
    modules = tuple(
        f"{HOSTILE[i % len(HOSTILE)]}.{i}.{name}" if i % 3 == 0 else name
        for i, name in enumerate(profile.modules)
    )
    return profile.model_copy(
        update={
            "model": HOSTILE[0],
            "inputs": (HOSTILE[1],),
            "modules": modules,
            "nodes": tuple(f"{name}{HOSTILE[0]}" for name in profile.nodes),
            "environment": profile.environment.model_copy(update={"device_name": HOSTILE[1]}),
        }
    )
