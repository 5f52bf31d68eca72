"""Collect the facts about the steps of one model: its loop, its optimizers, its neighbors, its allocator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ac_client.planning.facts.forwards_in_flight import BackwardFacts, ForwardsInFlight, Listener
from ac_client.planning.facts.models_on_device import ModelOnDevice
from ac_client.planning.facts.optimizer_steps import ModelOptimizers
from ac_client.planning.facts.peak_watch import PeakWatch
from ac_client.planning.loaded_policy import PlannedBucket
from ac_client.planning.next_action import StepFacts
from ac_client.planning.options import ApplyOptions
from autoac.profiler import device_of
from autoac.profiler.static_memory import optimizer_bytes


class StepWatch:
    """Watches the training loop around one planned model.

    Attributes:
        optimizers: that step the model.
        on_device: the other planned models on the device.
        peaks: of the steps.
    """

    def __init__(self, model: nn.Module, options: ApplyOptions, optimizer: Any) -> None:
        self._options = options
        self._in_flight = ForwardsInFlight()
        self._most_forwards = 1  # in flight at once, so far
        self._adopted = 0  # optimizers that were adopted when their state was last compared with a plan's
        self.optimizers = ModelOptimizers(model, optimizer)
        self.on_device = ModelOnDevice(model, type(model).__name__, self.optimizers, self.waiting)
        self.peaks = PeakWatch(model, self.optimizers)

    def waiting(self) -> int:
        """Return how many forwards wait for their backward."""
        return self._in_flight.waiting()

    def close(self) -> None:
        """Stop watching."""
        self._in_flight.forget()
        self.optimizers.close()
        self.on_device.close()

    def before_forward(
        self, model: nn.Module, bucket: PlannedBucket, forwards: int, *, gradients: bool
    ) -> StepFacts:
        """Return the facts as a forward of `model` begins.

        Args:
            model: the model.
            bucket: that runs the forward.
            forwards: before one backward, for which steps are planned now.
            gradients: exist before the step.
        """
        waiting = self.waiting()
        self._most_forwards = max(self._most_forwards, waiting + 1)
        most = forwards if self._options.forwards_in_flight is not None else self._most_forwards
        loop = bucket.observed
        if loop.forwards != forwards:
            loop = replace(loop, forwards=forwards)
        if bucket.profile is None:  # the policy stays
            return StepFacts(waiting, loop, most, ran_skipped=bucket.ran_skipped)
        kept = None if waiting or loop.retains else self._in_flight.kept_outputs()
        needs = None
        if bucket.step.n_adopted != self.optimizers.adopted:
            bucket.step = replace(bucket.step, n_adopted=self.optimizers.adopted)
            needs = optimizer_bytes(self.optimizers.all, device_of(model))
        return StepFacts(
            waiting,
            loop,
            most,
            gradients,
            needs,
            self.optimizers.names_not_passed,
            self.on_device.others_nbytes(),
            bucket.room_requested,
            bucket.ran_skipped,
            kept_nbytes=0 if kept is None else kept + bucket.profile.kept_nbytes,
        )

    def after_forward(self, out: Any, listener: Listener) -> None:
        """Watch the forward that returned `out` until its backward begins."""
        self._in_flight.add(out, listener, has_loss=self._options.loss is not None)

    def in_backward(self, bucket: PlannedBucket, backward: BackwardFacts) -> StepFacts:
        """Return the facts as a backward begins through a forward that ran under `bucket`."""
        plan, profile = bucket.plan, bucket.profile
        if plan is None or profile is None or self._options.loss is not None:
            backward = backward._replace(nbytes_outside=0)
        if plan is not None and profile is not None:
            held = bucket.planned_for.loop.drops - backward.dropped
            backward = backward._replace(
                held_nbytes=profile.output_nbytes(held) if held else 0,
                nbytes_live=plan.graph.static_bytes + bucket.loaded.waiting_nbytes
                if backward.nbytes_outside
                else 0,
            )
        return StepFacts(backward=backward)

    def after_optimizer(self, model: nn.Module, bucket: PlannedBucket) -> StepFacts:
        """Return the facts after a step of an optimizer."""
        adopted, self._adopted = self._adopted, self.optimizers.adopted
        if bucket.profile is None or self._adopted in (bucket.step.n_adopted, adopted):
            return StepFacts()
        needs = optimizer_bytes(self.optimizers.all, device_of(model))
        return StepFacts(optimizers=needs, optimizer_names=self.optimizers.names_not_passed)
