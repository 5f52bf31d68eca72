"""Two planned models on one device: each is planned with the bytes that the others hold.

A budget is the device's, so what other planned models hold is static to a plan: parameters, buffers,
gradients and optimizer state all the time, and what their forwards in flight have saved. Another model counts
in this way once it has run a planned forward after `apply` was called for this one. Before that, it may be a
model that never trains: on a GPU it counts with the bytes that it holds now.

On a GPU, all other tensors count too: a teacher, an average of the weights, the next batch, copies that an
optimizer keeps. So does what the pools of captured graphs hold beyond tensors. These bytes are measured
before the first steps of each plan.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ac_client.planning.facts.forwards_in_flight import ForwardsInFlight
from ac_client.planning.facts.model_structure import device_of
from ac_client.planning.facts.optimizer_steps import ModelOptimizers
from ac_client.planning.loaded_policy import PlannedBucket
from ac_client.planning.next_action import StepFacts, next_action
from autoac.planner.formats.profile import Profile, StaticBytes
from autoac.planner.units import format_bytes
from autoac.profiler.static_memory import optimizer_state_nbytes, static_bytes
from autoac.tape.distributed.fsdp import gathered_nbytes, unreduced_nbytes
from autoac.tape.torch_facts.libraries import free_workspaces, pool_nbytes
from autoac.tape.torch_facts.streams import is_capturing


class _InFlightNow(NamedTuple):
    """Count the forwards that wait for their backward."""

    own: int
    others: dict[ModelOnDevice, int]


MOST_ROOM_REQUESTS = 3  # by other planned models, of one bucket

_turns = itertools.count(1)


class ModelOnDevice:
    """One planned model and its neighbors on the device.

    Args:
        model: the planned model; not kept alive.
        name: of the model, in messages.
        optimizers: whose state counts.
        in_flight: the model's forwards.
    """

    def __init__(
        self, model: nn.Module, name: str, optimizers: ModelOptimizers, in_flight: ForwardsInFlight
    ) -> None:
        self._model = weakref.ref(model)
        self._name = name
        self._optimizers = optimizers
        self._in_flight = in_flight
        self._bucket: PlannedBucket | None = None  # of the last forward
        self._planned_at = next(_turns)
        self._forward_at = 0  # turn at which the last planned forward began
        # What planned models that may never train hold, as last measured.
        self._idle: weakref.WeakKeyDictionary[ModelOnDevice, int] = weakref.WeakKeyDictionary()
        self._unreduced = 0  # bytes of gradients that waited for a reduction as a forward began, at most
        self._uncounted = 0  # bytes on the device that no planned model holds, as last measured
        # How many forwards of this model and of each other one wait at moments of its steps.
        self._moments: list[_InFlightNow] = []  # of the last step
        self._running: list[_InFlightNow] = []  # of the step that runs
        _all.add(self)

    def close(self) -> None:
        """Stop counting in the plans of the neighbors."""
        _all.discard(self)

    def forward_begins(self, bucket: PlannedBucket) -> None:
        """Note that a forward under `bucket` begins. Neighbors without room for the model warn."""
        self._bucket = bucket
        self._forward_at = next(_turns)
        for other in self._others():
            other._warn_if_lacking_room()

    def note_moment(self) -> None:
        """Note how many forwards wait on the device as a forward or a backward of the model begins."""
        waiting = _InFlightNow(
            self._in_flight.waiting(), {other: other._in_flight.waiting() for other in self._others()}
        )
        if not (waiting.own or any(waiting.others.values())) and self._running:
            self._moments, self._running = self._running, []
        if waiting not in self._running:
            self._running.append(waiting)

    def device(self) -> torch.device | None:
        """Return the device on which the model trains; None if the model is gone."""
        model = self._model()
        return device_of(model) if model is not None else None

    def standing_nbytes(self) -> int:
        """Return the bytes that the model and its optimizers hold now, forwards in flight not counted."""
        model = self._model()
        if model is None:
            return 0
        device = device_of(model)
        state = self._optimizers.state_nbytes(device)
        return static_bytes(model, (), {}, state, device).total + _unsharded_nbytes(model)

    def others_standing_nbytes(self) -> int:
        """Return the bytes that the neighbors and their optimizers hold now, and what was last measured."""
        held = sum(o.standing_nbytes() - o._shared_nbytes(n) for o, n in self._others_in_turn())
        return self._measured_nbytes() + held

    def measure_uncounted(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        kept: int,
        *,
        counts: StaticBytes | None = None,
    ) -> None:
        """Measure what no planned model holds, unless a forward of this model is in flight.

        Args:
            args, kwargs: the batch of the step that begins.
            kept: bytes that variables of the step before hold, and that count elsewhere.
            counts: the static bytes of the plan, with the workspaces of cuBLAS that its steps have allocated.
                None before the first planned step: the workspaces are then freed.
        """
        model = self._model()
        if model is None or device_of(model).type != "cuda" or is_capturing() or self._in_flight.waiting():
            return  # what such a forward holds would count as well
        device = device_of(model)
        state = self._optimizers.state_nbytes(device)
        workspaces = 0
        if counts is None:
            free_workspaces(device)
        else:
            state, workspaces = min(state, counts.optimizer_state), counts.workspaces
        held = static_bytes(model, args, kwargs, state, device).total + _unsharded_nbytes(model) + kept

        def more_than_held() -> int:
            training = set(self._others())
            idle = (o for o in list(_all) if o is not self and o not in training and o.device() == device)
            self._idle = weakref.WeakKeyDictionary({other: other.standing_nbytes() for other in idle})
            in_flight = sum(other._in_flight.waiting() * other._forward_nbytes() for other in training)
            by_models = sum(o._held_nbytes(n) for o, n in self._others_in_turn()) + in_flight
            by_models += sum(self._idle.values())
            present = torch.cuda.memory_allocated(device) + pool_nbytes(device)
            return max(0, present - held - by_models - workspaces)

        before, self._uncounted = self._uncounted, more_than_held()
        if self._idle or self._uncounted > before:
            gc.collect()  # garbage is not held
            self._uncounted = more_than_held()

    def kept_nbytes(self, profile: Profile) -> int:
        """Return the bytes that variables keep of the last step, whose profile this is."""
        return self._in_flight.kept_nbytes(profile.kept_nbytes) or 0

    def others_nbytes(self) -> int:
        """Return the bytes on the device that the model does not hold, and those of unreduced gradients."""
        if (model := self._model()) is not None:
            self._unreduced = max(self._unreduced, unreduced_nbytes(model))
        return self._unreduced + self._measured_nbytes() + self.neighbors_nbytes()

    def _measured_nbytes(self) -> int:
        """Return the bytes of tensors and of planned models that do not train, as last measured."""
        training = set(self._others())
        return self._uncounted + sum(n for other, n in self._idle.items() if other not in training)

    def neighbors_nbytes(self) -> int:
        """Return the bytes that the neighbors hold between steps, and for forwards in flight.

        They are those of the moment at which the forwards of all models hold most, less what the forwards of
        this model hold less there than where most of them wait.
        """
        others = set(self._others())
        forwards = {other: other._forward_nbytes() for other in others}
        bucket, moments = self._bucket, (*self._moments, *self._running)
        most = bucket.planned_for.microbatches - 1 if bucket is not None else 0
        own = self._forward_nbytes()
        held = max(
            (
                (min(m.own, most) - most) * own
                + sum(n * forwards[other] for other, n in m.others.items() if other in others)
                for m in moments
            ),
            default=0,
        )
        return sum(o._held_nbytes(n) for o, n in self._others_in_turn()) + max(0, held)

    def ask_others_for_room(self, nbytes: int) -> None:
        """Have the neighbors planned for `nbytes` less, if that is positive."""
        for other in self._others() if nbytes > 0 else ():
            bucket = other._bucket
            if (
                bucket is not None
                and bucket.profile is not None
                and bucket.planned_for.peak <= bucket.planned_for.limit  # else it has none to give
                and bucket.room_requests < MOST_ROOM_REQUESTS
            ):
                bucket.withhold(nbytes)

    def name_others(self, error: Exception) -> None:
        """Add to `error` what the other planned models on the device hold, whether or not they train."""
        others = [
            f"{other._name} holds {format_bytes(other.standing_nbytes())}"
            for other in list(_all)
            if other is not self and other.device() == self.device()
        ]
        if others:
            error.add_note(
                "autoac: the budget is for the device, and other planned models are on it: "
                f"{', '.join(others)} between steps. That has to fit as well"
            )

    def _others(self) -> Iterator[ModelOnDevice]:
        """Yield the models on the same device that have trained since this one was planned."""
        for other in list(_all):
            if other is self or other._forward_at <= self._planned_at:
                continue
            device = other.device()
            if device is not None and device == self.device():
                yield other

    def _others_in_turn(self) -> Iterator[tuple[ModelOnDevice, list[torch.optim.Optimizer]]]:
        """Yield the models of `_others`, each with the optimizers whose state counts before it does."""
        counted = self._optimizers.all
        for other in self._others():
            yield other, counted
            counted = [*counted, *other._optimizers.all]

    def _shared_nbytes(self, counted: Sequence[torch.optim.Optimizer]) -> int:
        """Return the bytes of state of optimizers of this model that are among `counted`."""
        device = self.device()
        shared = [one for one in self._optimizers.all if any(one is other for other in counted)]
        return optimizer_state_nbytes(shared, device) if shared and device is not None else 0

    def _held_nbytes(self, counted: Sequence[torch.optim.Optimizer]) -> int:
        """Return the bytes held between steps, without the state of optimizers that are among `counted`."""
        bucket, shared = self._bucket, self._shared_nbytes(counted)
        if bucket is None or bucket.profile is None or bucket.plan is None or self._model() is None:
            return self.standing_nbytes() - shared
        static = bucket.profile.static
        held = static.total - static.inputs - static.workspaces  # which models share
        state = bucket.planned_for.optimizers.state
        held += state - static.optimizer_state - min(shared, state)
        return held + (0 if static.gradients else bucket.profile.gradient_nbytes)

    def _forward_nbytes(self) -> int:
        """Return the bytes that a forward of the model holds while it waits for its backward."""
        loaded = self._bucket.loaded if self._bucket is not None else None
        return loaded.waiting_nbytes // len(loaded.forwards) if loaded is not None else 0

    def _warn_if_lacking_room(self) -> None:
        """Warn if the running step goes over the budget because of the bytes that the neighbors hold."""
        bucket, waiting = self._bucket, self._in_flight.waiting()
        if bucket is None or not waiting:
            return  # between steps: the next forward counts it
        facts = StepFacts(waiting=waiting, others_nbytes=self.others_nbytes())
        bucket.warn(self._name, next_action(bucket.planned_for, facts))


def _unsharded_nbytes(model: nn.Module) -> int:
    return gathered_nbytes(model) + unreduced_nbytes(model)


_all: weakref.WeakSet[ModelOnDevice] = weakref.WeakSet()
