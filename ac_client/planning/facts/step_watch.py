"""Collect the facts about the steps of one model: its loop, its optimizers, its neighbors, its allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ac_client.planning.batch_shape import ModelCall
from ac_client.planning.facts.forwards_in_flight import BackwardFacts, ForwardsInFlight
from ac_client.planning.facts.models_on_device import ModelOnDevice
from ac_client.planning.facts.optimizer_steps import ModelOptimizers
from ac_client.planning.facts.peak_watch import PeakWatch
from ac_client.planning.loaded_policy import PlannedBucket
from ac_client.planning.options import ApplyOptions
from ac_client.planning.trigger import WATCHED_STEPS, Present
from autoac.tape.torch_facts import private


class StepWatch:
    """Watches the training loop around one planned model.

    Attributes:
        in_flight: the forwards that wait for their backward.
        optimizers: that step the model.
        on_device: the other planned models on the device.
        peaks: of the steps.
    """

    def __init__(self, model: nn.Module, options: ApplyOptions, optimizer: Any) -> None:
        self.in_flight = ForwardsInFlight()
        self._found_gradients = 0  # bytes that the last forward found, until a backward has begun
        self._graphs = 0  # created by backwards since the last one that freed what it used
        self._stepped_at = 0  # steps of the optimizers when the last backward began
        self.optimizers = ModelOptimizers(model, optimizer)
        self.peaks = PeakWatch(options, self.optimizers)
        self.on_device = ModelOnDevice(
            model, type(model).__name__, self.optimizers, self.in_flight, self.peaks
        )

    def waiting_for(self, bucket: PlannedBucket) -> int:
        """Return how many forwards wait; of microbatches, as many as hold their bytes under `bucket`."""
        if bucket.planned_for.microbatches == 1 or bucket.extent is None:
            return self.in_flight.waiting()
        return -(-sum(one.elements for one in self.in_flight.alive()) // max(1, bucket.extent.elements))

    def close(self) -> None:
        """Stop watching."""
        self.in_flight.forget()
        self.optimizers.close()
        self.on_device.close()

    def present(self, call: ModelCall, bucket: PlannedBucket, waiting: int, *, gradients: bool) -> Present:
        """Return what is present as a forward begins.

        Args:
            call: of the model, on the batch.
            bucket: the bucket that runs the forward.
            waiting: how many forwards wait for their backward.
            gradients: True if gradients exist before the step.
        """
        counted, profile = bucket.planned_for.present, bucket.profile
        self._found_gradients = 0
        if profile is None:  # the policy stays
            return counted
        needs = self.on_device.optimizers_need(bucket.step.dropped_nbytes)
        kept = self.on_device.kept_nbytes(call, profile)
        if not waiting and bucket.statistics.compared < WATCHED_STEPS:
            counts = (needs.state, profile.static.workspaces) if bucket.statistics.steps else None
            self.on_device.measure_uncounted(call.args, call.kwargs, kept, counts=counts)
        self.on_device.inputs = profile.static.inputs
        if gradients and not profile.static.gradients:
            self._found_gradients = profile.gradient_nbytes
        others, share = self.on_device.others_nbytes(), self.on_device.share
        before = profile.waiting_microbatches
        more = max(0, self.waiting_for(bucket) - before) if before or self.on_device.scheduled else 0
        frees = bool(bucket.frees_gradients)
        return Present(self._found_gradients > 0, frees, needs, others, kept, more, share)

    def in_backward(
        self, bucket: PlannedBucket, backward: BackwardFacts, gradients_exist: Callable[[], bool]
    ) -> tuple[BackwardFacts, int | None]:
        """Return the facts as a backward begins through a forward that ran under `bucket`.

        The second are the bytes of gradients that forward found, as backward finds them; None: not looked at.
        """
        gradients, self._found_gradients = self._found_gradients, 0
        if backward.forward is not None:
            self.on_device.note_moment(backward.forward)
        if not private.current_graph_task_keeps_graph() or self.optimizers.steps > self._stepped_at:
            self._graphs = 0
        self._graphs += backward.creates_graph and backward.passes == 1
        backward = backward._replace(graphs=max(1, self._graphs))
        self._stepped_at = self.optimizers.steps
        return backward, (gradients if gradients_exist() else 0) if gradients else None
