"""Refuse a step that cannot be captured into a CUDA graph, before anything of the model is captured.

NOTE [ Captured steps ]

A graph is replayed without Python, so a captured step keeps the plan that it was captured with. And during a
capture nothing may wait for the device. So the plan must be final: made, compared once with what forward
saved, and not about to be made again. The rest of a planned step reads nothing of the device. Random ops
draw again from an earlier state of their generator. In a capture, torch takes that state as an offset from
the begin of the graph.
"""

from __future__ import annotations

from ac_client.planning.loaded_policy import ForwardRoute, PlannedBucket
from autoac.tape.errors import CannotCapture
from autoac.tape.unseen.fingerprints import Comparison


def check_capture(name: str, bucket: PlannedBucket, route: ForwardRoute) -> None:
    """Check that a forward of the model `name` under `bucket`, on `route`, can be captured.

    Raises:
        CannotCapture: it cannot.
    """
    if bucket.policy.moves:
        raise CannotCapture(
            name,
            "its plan moves tensors to the host, which no captured step has done yet",
            "pass host_budget_gb=0 to ac_client.apply",
        )
    if Comparison.enabled and bucket.loaded.recomputes and not route.compared:
        raise CannotCapture(name, "backward has not yet compared what this plan recomputes")
