"""Build the step of one microbatch on a stage of a pipeline: planner/pipeline/plan_stages.py plans it."""

from __future__ import annotations

from dataclasses import replace

from autoac.planner.errors import InvalidPipeline
from autoac.planner.formats.profile import Profile
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import Graph


def stage_graph(profile: Profile | Graph, in_flight: int, *, beside_bytes: int = 0) -> Graph:
    """Return the Graph of one microbatch's step on a stage that holds `in_flight` of them.

    Each waiting microbatch also holds its own batch, the stage's input. If the profiled step allocates the
    gradients, they exist already when later microbatches run. So they count as static bytes, and again where
    the profiled step allocates them: the count is too large by up to their size. It is exact for a profile of
    a step in which gradients exist (`zero_grad(set_to_none=False)`).
    """
    if in_flight < 1:
        raise InvalidPipeline(f"in_flight must be at least 1, got {in_flight}")
    if beside_bytes < 0:
        raise InvalidPipeline(f"beside_bytes must be at least 0, got {beside_bytes}")
    if isinstance(profile, Graph):
        return replace(
            profile, waiting_microbatches=in_flight - 1, static_bytes=profile.static_bytes + beside_bytes
        )
    graph = build(profile)
    gradients = profile.gradient_nbytes
    return replace(
        graph,
        waiting_microbatches=in_flight - 1,
        static_bytes=graph.static_bytes + beside_bytes + gradients + (in_flight - 1) * profile.static.inputs,
        closing_bytes=graph.closing_bytes - gradients,
    )
