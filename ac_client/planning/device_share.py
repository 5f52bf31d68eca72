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

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ac_client.planning.facts.models_on_device import ModelOnDevice
from ac_client.service_client.errors import RemoteError
from autoac.planner import Plan, PlannerError, Profile, build
from autoac.planner.memory.simulate import waiting_bytes

SHARES = (0.75, 0.5, 0.375, 0.25, 0.125, 0.0625, 0.0)


class Part(NamedTuple):
    """Hold what a model needs of the device. Sizes are in bytes."""

    plan: Callable[[Profile, int, int, float], Plan]  # of a limit, static bytes and a share
    profile: Profile  # of the model's step
    limit: int  # of its peak
    static: int  # that the profile does not count, without forwards of the others that wait


def best_share(parts: Mapping[ModelOnDevice, Part]) -> tuple[float, dict[ModelOnDevice, int]] | None:
    """Return the share with which all models recompute least, and what a forward of each may then hold.

    None if their plans keep the limits with no share.
    """
    best, least_us = None, 0.0
    for share in SHARES:
        allowed = {model: waiting_limit(part.profile, share) for model, part in parts.items()}
        extra_us = 0.0
        try:
            for model, part in parts.items():
                static = part.static + model.waiting_nbytes({**allowed, model: 0})
                extra_us += part.plan(part.profile, part.limit, static, share).extra_us
        except (PlannerError, RemoteError):
            if best is not None:
                break
            continue
        if best is not None and extra_us >= least_us:
            break
        best, least_us = (share, allowed), extra_us
    return best


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
