"""Two planned models on one device: each is planned with the bytes that the others hold.

A budget is the device's, so what other planned models hold is static to a plan: parameters, buffers,
gradients and optimizer state all the time, and what their forwards in flight have saved. Another model counts
in this way once a step of it, after `apply` was called for this one, is planned. Before that, it may never
train: on a GPU it counts with the bytes that it holds now.

On a GPU, all other tensors count too: a teacher, an average of the weights, the next batch, copies that an
optimizer keeps. So does what the pools of captured graphs hold beyond tensors. These bytes are measured
before the first steps of each plan.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ac_client.planning.batch_shape import ModelCall
from ac_client.planning.facts.forwards_in_flight import ForwardsInFlight, InFlight, storages_of
from ac_client.planning.facts.model_structure import device_of, module_changes
from ac_client.planning.facts.optimizer_steps import ModelOptimizers
from ac_client.planning.facts.peak_watch import PeakWatch
from ac_client.planning.loaded_policy import PlannedBucket
from autoac.planner.formats.profile import Profile
from autoac.planner.units import format_bytes
from autoac.profiler.static_memory import OptimizerBytes, optimizer_state_nbytes, static_bytes
from autoac.tape.distributed.fsdp import gathered_nbytes, unreduced_nbytes
from autoac.tape.distributed.pipelining import held_by_schedule
from autoac.tape.torch_facts.libraries import free_workspaces, pool_nbytes
from autoac.tape.torch_facts.streams import is_capturing


class _Moment(NamedTuple):
    """Count the forwards that wait for their backward as another begins, or its backward."""

    own: int
    others: dict[ModelOnDevice, int]
    batches: int  # bytes that batches hold
    by_schedule: int  # bytes that a pipeline's schedule holds in addition


_turns = itertools.count(1)


class ModelOnDevice:
    """One planned model and its neighbors on the device.

    Args:
        model: the planned model; not kept alive.
        name: of the model, in messages.
        optimizers: whose state counts.
        in_flight: the model's forwards.
        peaks: of the model's steps.

    Attributes:
        bucket: of the last forward, or of the next one, if it was planned since.
        share: of what a forward may save, that it may hold while it waits: device_share.py.
        allowed_nbytes: these bytes, of a forward under the share.
        inputs: bytes of batches that the plan of the model counts.
        scheduled: a pipeline's schedule runs, in which each forward has a backward of its own.
        planner: returns the `BatchPlanner` of the model, if it is still there.
        settle: returns the function that plans the observed step of the model, if that is over.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        optimizers: ModelOptimizers,
        in_flight: ForwardsInFlight,
        peaks: PeakWatch,
    ) -> None:
        self._model = weakref.ref(model)
        self._name = name
        self._optimizers = optimizers
        self._in_flight = in_flight
        self._peaks = peaks
        self.bucket: PlannedBucket | None = None
        self.share, self.allowed_nbytes = 1.0, 0
        self.planner: Callable[[], Any] = lambda: None
        self.settle: Callable[[], Callable[[nn.Module], None] | None] = lambda: None
        self._planned_at = next(_turns)
        self._trains_at = 0  # turn at which its last forward began
        # What planned models that may never train hold, as last measured.
        self._idle: weakref.WeakKeyDictionary[ModelOnDevice, int] = weakref.WeakKeyDictionary()
        self._unreduced = 0  # bytes of gradients that waited for a reduction as a forward began, at most
        self._uncounted = 0  # bytes on the device that no planned model holds, as last measured
        self.inputs, self.scheduled = 0, False
        self._counted: dict[Hashable, tuple[Any, int]] = {}  # by `_once`: when, and how many bytes
        self._moments: list[_Moment] = []  # of the last step
        self._running: list[_Moment] = []  # of the step that runs
        self._others_wait = False  # as of the last of these moments
        self._passing = 1 << 62  # the least bytes of waiting forwards that are gone as an optimizer steps
        _all.add(self)

    def close(self) -> None:
        """Stop counting in the plans of the neighbors."""
        _all.discard(self)

    def note_moment(self, running: ModelCall | InFlight) -> None:
        """Note how many forwards wait, and what is held, as a forward of the model begins, or a backward.

        If none waits as a forward begins, the observed steps of other models are planned: a plan of this one
        counts what they hold.

        Args:
            running: the call that begins, or the forward that backward has reached.
        """
        others, forward = self._others(), isinstance(running, ModelCall)
        self._trains_at = next(_turns) if forward else self._trains_at
        in_flight = {other: other.in_flight() for other in others}
        self._others_wait = any(in_flight.values())
        waiting = _Moment(self.in_flight(), in_flight, *self._held_beyond_plans(running))
        if not (waiting.own or self._others_wait):
            for other in others if forward else ():
                if (settle := other.settle()) is not None and (model := other._model()) is not None:
                    settle(model)
        if waiting not in self._running:
            self._running = [*self._running[-256:], waiting]  # of steps that no optimizer ends, the last

    def note_step(self) -> None:
        """Begin the moments of another step; note whether a forward of another model waits now.

        An optimizer of this model has stepped.
        """
        if self._running:
            self._moments, self._running = self._running, []
        self._passing = 0 if any(other.in_flight() for other in self._others()) else self._passing

    def forget_peaks(self) -> None:
        """Compare no step that runs on the device: another plan is made in it, or a step is observed."""
        for one in (self, *self._others()):
            one._peaks.discard()

    def in_flight(self) -> int:
        """Return how many forwards of the model wait for their backward."""
        return self._in_flight.waiting()

    def device(self) -> torch.device | None:
        """Return the device on which the model trains; None if the model is gone."""
        return device_of(model) if (model := self._model()) is not None else None

    def standing_nbytes(self) -> int:
        """Return the bytes that the model and its optimizers hold now, forwards in flight not counted."""
        model = self._model()
        return self._static_nbytes(model) + _unsharded_nbytes(model) if model is not None else 0

    def _static_nbytes(self, model: nn.Module, *, accumulates: bool = False) -> int:
        device = device_of(model)
        state = self._optimizers.state_nbytes(device)
        return static_bytes(model, (), {}, state, device, accumulates=accumulates).total

    def others_standing_nbytes(self) -> int:
        """Return the bytes that the neighbors and their optimizers hold now, and what was last measured."""
        held = sum(o.standing_nbytes() - o._shared_nbytes(n) for o, n in self._in_turn(self.neighbors()))
        return self._measured_nbytes() + held

    def measure_uncounted(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        kept: int,
        *,
        counts: tuple[int, int] | None = None,
    ) -> None:
        """Measure what no planned model holds, unless a forward of this model is in flight.

        Args:
            args, kwargs: the batch of the step that begins.
            kept: bytes that variables of the step before hold, and that count elsewhere.
            counts: bytes of the optimizers' state, and of the workspaces of cuBLAS that planned steps have
                allocated. None before the first planned step: the workspaces are then freed.
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
            state, workspaces = min(state, counts[0]), counts[1]
        held = static_bytes(model, args, kwargs, state, device).total + _unsharded_nbytes(model) + kept

        def more_than_held() -> int:
            training = self.neighbors()
            idle = [other for other in self._others() if other not in training]
            self._idle = weakref.WeakKeyDictionary()
            by_models = sum(other._in_flight.waiting() * other.forward_nbytes() for other in training)
            for other, counted in self._in_turn([*training, *idle]):
                if other in idle:
                    self._idle[other] = other.standing_nbytes() - other._shared_nbytes(counted)
                else:
                    by_models += other._held_nbytes(counted)
            by_models += sum(self._idle.values())
            present = torch.cuda.memory_allocated(device) + pool_nbytes(device)
            return max(0, present - held - by_models - workspaces)

        before, self._uncounted = self._uncounted, more_than_held()
        if self._idle or self._uncounted > before:
            gc.collect()  # garbage is not held
            self._uncounted = more_than_held()

    def _held_beyond_plans(self, running: ModelCall | InFlight) -> tuple[int, int]:
        """Return the bytes of batches, and of what else a pipeline's schedule holds.

        Both are 0 on a GPU, where `measure_uncounted` counts them, and without a schedule or a
        waiting forward of another model.
        """
        schedule = held_by_schedule(losses=isinstance(running, ModelCall))  # plans count that of a backward
        self.scheduled = bool(schedule)
        device = self.device() if schedule or self._others_wait else None
        if device is None or device.type == "cuda":
            return 0, 0
        in_flight = {one: one._in_flight.alive() for one in (self, *self.neighbors())}
        counted = {ref for forwards in in_flight.values() for one in forwards for ref in one.outputs}
        if isinstance(running, InFlight):
            batches, counted = dict(running.batch), counted.union(running.outputs)
        else:
            batches = storages_of(running.tensors)
            if schedule:
                self._in_flight.note_gradients_of(running.tensors)
        held = storages_of(schedule)
        for one, forwards in in_flight.items():
            held |= one._in_flight.made if schedule else {}  # some are being sent
            for forward in forwards:
                batches |= {r: n for r, n in forward.batch.items() if one is self or r not in counted}
        counted |= batches.keys()
        rest = sum(nbytes for ref, nbytes in held.items() if ref() and ref not in counted)
        return sum(nbytes for ref, nbytes in batches.items() if ref()), rest

    def kept_nbytes(self, call: ModelCall, profile: Profile) -> int:
        """Return the bytes that variables keep of the last step, whose profile this is, as `call` begins."""
        forward = self._in_flight.ended()
        return forward.kept_nbytes(profile.kept_nbytes, call.tensors) if forward is not None else 0

    def others_nbytes(self) -> int:
        """Return the bytes on the device that the model does not hold, and those of unreduced gradients."""
        if (model := self._model()) is not None:
            self._unreduced = max(self._unreduced, unreduced_nbytes(model))
        return self._unreduced + self._measured_nbytes() + self.neighbors_nbytes()

    def _measured_nbytes(self) -> int:
        """Return the bytes of tensors and of planned models that do not train, as last measured."""
        if not self._idle:
            return self._uncounted
        training = set(self.neighbors())
        return self._uncounted + sum(n for other, n in self._idle.items() if other not in training)

    def neighbors_nbytes(self) -> int:
        """Return the bytes that the neighbors hold between steps, and for forwards in flight."""
        return sum(o._held_nbytes(n) for o, n in self._in_turn(self.neighbors())) + self.waiting_nbytes()

    def waiting_nbytes(
        self, forwards: Mapping[ModelOnDevice, int] | None = None, *, alone: bool = False
    ) -> int:
        """Return the bytes that waiting forwards of the neighbors hold.

        They are those of the moment at which the forwards of all models hold most, less what the forwards of
        this model hold less there than where most of them wait.

        Args:
            forwards: bytes that one waiting forward of each model holds; None: as planned now.
            alone: leave out what a pipeline's schedule holds.
        """
        moments = [m for m in (*self._moments, *self._running) if m.by_schedule or any(m.others.values())]
        if not moments:
            return 0
        if forwards is None:
            forwards = {one: one.forward_nbytes() for one in (self, *self.neighbors())}
        most = self.bucket.planned_for.microbatches - 1 if self.bucket is not None else 0
        held = (
            (min(m.own, most) - most) * forwards[self]
            + sum(n * forwards[other] for other, n in m.others.items() if other in forwards)
            + max(0, m.batches + (0 if alone else m.by_schedule) - self.inputs)
            for m in moments
        )
        return max(0, *held)

    def optimizers_need(self, dropped: int) -> OptimizerBytes:
        """Return what the optimizers need, less what is gone when they step.

        Args:
            dropped: bytes of the batch that are gone then, in addition to waiting forwards of the neighbors.
        """
        passing = min(self._passing, self.waiting_nbytes(alone=True))
        if self._optimizers.steps:
            self._passing = passing  # from now on it only falls, so plans do not take turns
        return self._optimizers.needs().less(dropped + passing)

    def name_others(self, error: Exception) -> None:
        """Add to `error` what the other planned models on the device hold, whether or not they train."""
        others = [f"{other._name} holds {format_bytes(other.standing_nbytes())}" for other in self._others()]
        if others:
            error.add_note(
                "autoac: the budget is for the device, and other planned models are on it: "
                f"{', '.join(others)} between steps. That has to fit as well"
            )

    def _others(self) -> list[ModelOnDevice]:
        """Return the other planned models on the same device."""
        others = [one for one in _all if one is not self] if len(_all) > 1 else []
        device = self.device() if others else None
        return [one for one in others if device is not None and one.device() == device]

    def neighbors(self) -> list[ModelOnDevice]:
        """Return the planned models on the same device that have trained since `apply` of this one."""
        return [o for o in self._others() if o.bucket is not None and o._trains_at > self._planned_at]

    def _in_turn(
        self, models: Iterable[ModelOnDevice]
    ) -> Iterator[tuple[ModelOnDevice, list[torch.optim.Optimizer]]]:
        """Yield each of `models`, with the optimizers whose state counts before it does."""
        counted = self._optimizers.all
        for other in models:
            yield other, counted
            counted = [*counted, *other._optimizers.all]

    def _shared_nbytes(self, counted: Sequence[torch.optim.Optimizer]) -> int:
        """Return the bytes of state of optimizers of this model that are among `counted`."""
        shared = [one for one in self._optimizers.all if any(one is other for other in counted)]
        if not shared or (device := self.device()) is None:
            return 0
        return self._once(tuple(map(id, shared)), partial(optimizer_state_nbytes, shared, device))

    def _once(self, what: Hashable, count: Callable[[], int]) -> int:
        """Return what `count` returns, called again when modules of the model or its optimizers change."""
        model = self._model()
        since = model and (module_changes(model), self._optimizers.progress)
        if what not in self._counted or self._counted[what][0] != since:
            self._counted[what] = since, count()
        return self._counted[what][1]

    def _held_nbytes(self, counted: Sequence[torch.optim.Optimizer]) -> int:
        """Return the bytes held between steps, without the state of optimizers that are among `counted`."""
        bucket, shared, model = self.bucket, self._shared_nbytes(counted), self._model()
        if model is None:
            return 0
        if bucket is None or bucket.profile is None or bucket.plan is None:
            own = self._once("static", partial(self._static_nbytes, model, accumulates=True))
            return own + _unsharded_nbytes(model) - shared
        static = bucket.profile.static
        held = static.total - static.inputs - static.workspaces  # which models share
        held -= static.optimizer_state
        if not all(any(one is other for other in counted) for one in self._optimizers.all):
            held += max(0, bucket.planned_for.present.optimizers.state - shared)
        return held + (0 if static.gradients else bucket.profile.gradient_nbytes)

    def forward_nbytes(self) -> int:
        """Return the bytes that a waiting forward of the model holds, once it is planned with its share."""
        if (bucket := self.bucket) is None:
            return 0
        nbytes = bucket.loaded.waiting_nbytes // len(bucket.loaded.forwards)
        return nbytes if bucket.planned_for.present.share == self.share else min(nbytes, self.allowed_nbytes)


def _unsharded_nbytes(model: nn.Module) -> int:
    return gathered_nbytes(model) + unreduced_nbytes(model)


_all: weakref.WeakSet[ModelOnDevice] = weakref.WeakSet()
