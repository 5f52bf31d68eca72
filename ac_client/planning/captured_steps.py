"""Refuse a step that cannot be captured into a CUDA graph, before anything of the model is captured.

NOTE [ Captured steps ]

A graph is replayed without Python, so a captured step keeps the plan that it was captured with. And during a
capture nothing may wait for the device. So the plan must be final: made, compared once with what forward
saved, and not about to be made again. The rest of a planned step reads nothing of the device. Random ops
draw again from an earlier state of their generator. In a capture, torch takes that state as an offset from
the begin of the graph.
"""

from __future__ import annotations

from typing import NoReturn

from ac_client.planning.loaded_policy import ForwardRoute, PlannedBucket
from autoac.tape.errors import CannotCapture
from autoac.tape.unseen.fingerprints import Comparison

ONE_MORE_STEP = "run one more training step before the capture, on a batch of the same shape"


def refuse_capture(name: str, reason: str, advice: str = ONE_MORE_STEP) -> NoReturn:
    """Raise because a step of the model `name` is captured, and `reason`.

    Raises:
        CannotCapture: always.
    """
    raise CannotCapture(name, reason, advice)


def check_capture(name: str, bucket: PlannedBucket, route: ForwardRoute) -> None:
    """Check that a forward of the model `name` under `bucket`, on `route`, can be captured.

    Raises:
        CannotCapture: it cannot.
    """
    if bucket.policy.moves:
        refuse_capture(
            name,
            "its plan moves tensors to the host, which no captured step has done yet",
            "pass host_budget_gb=0 to ac_client.apply",
        )
    if Comparison.enabled and bucket.loaded.recomputes and not route.compared:
        refuse_capture(name, "backward has not yet compared what this plan recomputes")
