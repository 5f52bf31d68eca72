"""One plan for the models of a device: what their forwards may hold while they wait for backward.

Models on one device depend on each other in one way. While one of them works, forwards of the others wait,
with what their plans save. A plan that is made alone saves all that fits at its own moments, and may leave no
room at those of the others. Where no plan fits for that reason, the models divide the device: a forward that
waits may hold a *share* of what its plan decides about, the same for all models.

    least, 64 KiB   everything is recomputed that may be
    most, 576 KiB   everything is saved
    a share of 1/4: a waiting forward holds 64 + (576 - 64) / 4 = 192 KiB at most

A few shares are tried. The one is taken with which all plans keep their limits, and recompute least together.
"""

from __future__ import annotations

from autoac.planner import Profile, build
from autoac.planner.memory.simulate import waiting_bytes

SHARES = (0.75, 0.5, 0.375, 0.25, 0.125, 0.0625, 0.0)


def waiting_limit(profile: Profile, share: float) -> int:
    """Return the bytes that each forward of `profile` may hold as the last of them ends."""
    graph = build(profile)
    least, most = (waiting_bytes(graph, saved) for saved in (frozenset(), graph.everything))
    return (least + int(share * (most - least))) // (len(profile.forward_ends) or 1)


def with_share(profile: Profile, share: float, limit: int) -> Profile:
    """Return `profile` with a limit for what its forwards hold as the last of them ends.

    In its last op, as much counts in addition as the limit for a peak is above the one of waiting forwards.

    Args:
        limit: of the peak, without static bytes that `profile` does not count.
    """
    ops = profile.ops
    forwards = (len(profile.forward_ends) or 1) * (1 + profile.waiting_microbatches)
    reserved = limit - profile.static.total - forwards * waiting_limit(profile, share)
    last = max(ops.other_nbytes[-1], reserved - ops.workspace_nbytes[-1])
    columns = {"other_nbytes": (*ops.other_nbytes[:-1], last)}
    return profile.model_copy(update={"ops": ops.model_copy(update=columns)})
