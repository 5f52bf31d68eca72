"""Profiles and timelines to draw: a small step, a long one, and one with names that try to be code."""

from __future__ import annotations

import sys
from pathlib import Path

from autoac.planner import Picture, Plan, Profile, as_planned, picture, plan, simulate
from autoac.planner.report.align_measured import KernelTimes, MeasuredStep

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
    """Return the timeline of `recompute_activations`, with a measured step 1 % above the predicted one."""
    made = recompute_activations(profile)
    graph = made.graph
    timeline = simulate(graph, made.save_set)
    clock = KernelTimes.of(graph, timeline)
    time_us, levels = [0.0], [timeline.instants[0].live_bytes]
    for i, us in zip(clock.events[:-1], clock.begin_us, strict=False):
        live = timeline.instants[i].live_bytes * 101 // 100
        time_us += [max(us - 1e-3, 0.0), us + 1e-3]  # frees precede a kernel, allocations are inside
        levels += [min(live, levels[-1]), live]
    return picture(made, MeasuredStep(tuple(time_us), tuple(levels), (), clock.end_us))


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
