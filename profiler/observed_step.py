"""Run one training step for real, under a policy that needs no profile, and record its profile.

Everything that may be recomputed is, but for what *cuts* hold (tape/runtime/cuts.py), so the step takes
about as much memory as torch's checkpoint around every block. Its numbers are those of plain training. The
record is made by the region that runs the step (tape/capture/step_tape.py), and nothing runs twice but
what backward recomputes. Those replays are what times the ops.

    begin_forward, the model's forward, end_forward, a loss, backward, profile

Several forwards may precede one backward. What runs between the last of them and backward (a loss) is one op
of the profile, outside of the model.
"""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from autoac.planner.formats.profile import Profile
from autoac.planner.units import format_bytes
from autoac.profiler.compiler.second_stage import carried_by
from autoac.profiler.environment import describe_leaf, environment_of_device
from autoac.profiler.joint_graph.interpreted_part import InterpretedParts
from autoac.profiler.static_memory import memory_nbytes, static_bytes
from autoac.profiler.step_profile import profile_of, with_cached_backward
from autoac.profiler.steps.step_record import StepRecord, force_saves_of_units
from autoac.profiler.steps.training_loop import Loop, TrainingStep, check_roots, run_forwards
from autoac.profiler.timing.cache import Times, machine
from autoac.tape.capture.allocations import AllocationRecord, allocated_between, freed_between, peaks_nbytes
from autoac.tape.capture.backlog import Backlog
from autoac.tape.capture.backward_calls import BackwardCalls
from autoac.tape.capture.fake_allocations import Allocations, FakeAllocations
from autoac.tape.capture.op_timer import OpSpans, median_and_spread
from autoac.tape.capture.step_tape import StepTape
from autoac.tape.checkpoints.own_checkpoints import NEEDED, checkpoints_left_alone, plain_checkpoints
from autoac.tape.distributed.ddp import buckets_of, wrapper_paths
from autoac.tape.distributed.fsdp import check_sharded, gathered_nbytes, parameters_of, shards_of
from autoac.tape.distributed.process_groups import noting_groups
from autoac.tape.distributed.wrapped_tensors import below, with_memory
from autoac.tape.errors import NothingToProfile
from autoac.tape.runtime.cuts import Cuts
from autoac.tape.runtime.policy_context import active, save_recompute_policy
from autoac.tape.runtime.tracked_storages import note_moving_buffers, small_buffers
from autoac.tape.runtime.write_guard import version_counter
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.batch_contents import batch_tensors
from autoac.tape.torch_facts.gradients import (
    gradient_of,
    leaves_of,
    noting_gradients,
    output_of_leaf,
    roots_of,
)
from autoac.tape.torch_facts.inductor import compile_within, is_called_compiled, runs_compiled
from autoac.tape.torch_facts.libraries import free_workspaces
from autoac.tape.torch_facts.module_paths import ROOT, is_called, watch_modules
from autoac.tape.torch_facts.module_pins import pins_of
from autoac.tape.torch_facts.private import compiled_autograd_off, tree_map
from autoac.tape.torch_facts.storage_table import has_storage, watching_resizes

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class _Latest(threading.local):
    step: weakref.ref[ObservedStep] | None = None  # that began a forward on this thread


_latest = _Latest()
HELD = 0.03  # of what forwards saved: if backward leaves less, the graph is taken to be over
_recorded: list[weakref.ref[ObservedStep]] = []  # whose record has begun, the latest last


def recorded_step() -> ObservedStep | None:
    """Return the step that is recorded now, on any thread, and whose model is not running forward."""
    step = _recorded[-1]() if _recorded else None
    return step if step is not None and step.recording and not step.in_forward else None


def is_recorded_elsewhere() -> bool:
    """Return True if a step is recorded now on another thread: torch has one profiler for all threads."""
    steps = (ref() for ref in _recorded)
    return any(step and step.recording and step.thread != threading.get_ident() for step in steps)


class ObservedStep:
    """One step of a model, while it runs and afterwards.

    Args:
        model: the model, in training.
        args, kwargs: of its first forward.
        device: of the model.
        leave_checkpoints: leave the checkpoints of the model to torch.
        needs_checkpoints: do so because the model needs them: NOTE [ Needed checkpoints ].
        allocations: the record of a fake step, whose model and batch have no memory (fake_step.py).

    Attributes:
        model: that runs the step.
        thread: that runs its forwards.
        recording: True from the first forward until a backward through the step has freed its graph, or the
            next step begins.
        groups: in the collectives of the latest forward.
        needs_checkpoints: the model does, and some ran as plain calls: the step has no profile.
        dropped_nbytes: of the first batch and its gradients, and of gradients of the step before, which the
            loop no longer held after backward, or as `note_dropped` was called.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        device: torch.device,
        *,
        leave_checkpoints: bool = False,
        needs_checkpoints: bool = False,
        allocations: FakeAllocations | None = None,
    ) -> None:
        check_sharded(model, fake=False)
        # Where gradients are views of buckets, which exist: else those that exist are counted, and no others.
        buckets = buckets_of(model, None)
        self._accumulates = buckets.holds_gradients
        self.model = weakref.ref(model)
        self.thread = threading.get_ident()
        self.recording = False
        self.needs_checkpoints = False
        self.dropped_nbytes = self._of_batch = 0  # bytes of the batch and its gradients, at most
        self._batch = [weakref.ref(tensor) for tensor in batch_tensors((*args, *kwargs.values()))]
        self.groups: Any = None
        static = static_bytes(model, args, kwargs, 0, device, accumulates=self._accumulates)
        # Shards that a forward before, as of an evaluation, has left gathered. Other steps gather them again.
        gathered = static.parameters + gathered_nbytes(model)
        self._static = static.model_copy(update={"parameters": gathered})
        # Of gradients that exist before the step and not in backward. Those in buckets are not freed.
        self._freed_gradients = max(0, static.gradients - buckets.nbytes)
        self._device = device
        self._environment = environment_of_device(model, device)
        self._inputs = [describe_leaf(leaf) for leaf in private.tree_leaves((tuple(args), dict(kwargs)))]
        self._is_fake = allocations is not None
        self._allocations: Allocations = allocations or AllocationRecord(device, nodes=True)
        self._tape = StepTape(self._allocations, OpSpans(device, Backlog(device), sparing=True))
        if allocations is not None:
            self._tape.replaced = allocations.new_memory
        self._tape.recorder.pins = pins_of(model)
        self._tape.wrappers = wrapper_paths(model)
        self._tape.recorder.compiled = is_called_compiled(model)
        self._parts = InterpretedParts(self._tape) if runs_compiled(model) else None
        self._shards = shards_of(model)
        if self._shards is not None:
            self._tape.unit_of = self._shards.unit_of
            self._tape.saved.can_run = self._shards.is_gathered
        self._calls = BackwardCalls(self._backward_called, self._backward_returned)
        self._path = [ROOT]
        self._cuts = Cuts()
        self._forward: ExitStack | None = None  # what ends with the forward that runs
        self._checkpoints: AbstractContextManager[None] = (
            checkpoints_left_alone(needed=True) if leave_checkpoints or needs_checkpoints else nullcontext()
        )
        self._unplanned = dict.fromkeys([NEEDED] if needs_checkpoints else ())
        self._begin = self._end = self._last = -1  # marks of all passes of backward
        self._pass = -1  # mark at which the pass that runs began; -1: none runs
        self._pass_ends: list[int] = []  # marks
        self._freed: tuple[int, int] | None = None  # marks: workspaces are freed in between
        self._untraced = ExitStack()  # what ends with the backward that runs
        self._was_recorded = False  # at first
        self._reached = False  # backward has, an output of the step
        self._reaches = self._missed = False  # the pass that runs has; one before was of another thread
        self._retains = False  # the pass that runs retains its graph
        self._kept_nbytes = 0  # of the tensors that backward starts from
        self._seeds: set[int] = set()  # addresses of the gradients that backward starts with
        self._leaves: list[weakref.ref[Tensor]] = []  # that forward made, and that get gradients
        self._gradients: list[tuple[int, int]] = []  # their addresses, and marks once they were added up
        self._held: tuple[list[int], list[int]] = [], []  # their addresses, and those of their gradients
        self._left_out = -1  # mark since which nothing belongs to the step
        self._others_follow = False  # another planned model has run forward since this one's last forward
        self._batches: dict[int, tuple[int, int]] = {}  # by address: bytes beyond the first batch, and a mark
        if not self._is_fake:
            self.note_batch(batch_tensors((*args, *kwargs.values())))
            self._batches = dict.fromkeys(self._batches, (0, 0))

    @property
    def in_forward(self) -> bool:
        """Return True while a forward of the step runs."""
        return self._forward is not None

    @property
    def in_backward(self) -> bool:
        """Return True while a backward runs."""
        return self._pass >= 0

    @property
    def has_backward(self) -> bool:
        """Return True if a backward through the step has ended, perhaps one of several."""
        return self._end >= 0

    @property
    def missed_backward(self) -> bool:
        """Return True if a backward through the step was called on another thread than its forward."""
        return self._was_recorded and self._reached and self._begin < 0

    @property
    def peak_nbytes(self) -> int:
        """Return the most bytes in use until the end of backward, with those of the model and the batch."""
        self._allocations.read()
        until, since = peaks_nbytes(self._allocations, self._begin)
        return self._static.total + max(until, since - self._freed_gradients)

    def begin_forward(self, *, recorded: bool = True) -> None:
        """Begin a forward of the step.

        Args:
            recorded: False if torch.profiler runs: the step is over with this forward, and has no profile.

        Raises:
            ProfilerBusy: torch.profiler runs on this thread.
            RuntimeError: torch does not allow saved-tensor hooks here.
        """
        last = _latest.step() if _latest.step is not None else None
        if last is not None and last.in_forward and not is_called(last.model):
            last.discard()  # its forward was interrupted, which calls no hook
        _latest.step = weakref.ref(self)
        with self._or_discard():
            if recorded and not self.recording:
                free_workspaces(self._device)  # each is allocated in the record
                self._allocations.__enter__()
                self.recording = self._was_recorded = True
                if not self._is_fake:
                    _recorded[:] = [*(ref for ref in _recorded if ref() is not None), weakref.ref(self)]
                self._calls.open()
                compile_within(self._tape.hiding)
                weakref.finalize(self, self._allocations.close)  # also when the process ends
            self._path = [ROOT]
            self._others_follow = False
            if (model := self.model()) is not None and not self._is_fake:
                trained = [p for p in parameters_of(model) if p.requires_grad and gradient_of(p) is None]
                self._cuts = Cuts(gradients=memory_nbytes(trained, self._device.type, 1))
                if self._shards is None:  # else units say when their weights are there
                    self._tape.recorder.begin_forward(model.parameters())
                self._tape.small_buffers = small_buffers(model)
            self._tape.saved.forward_over = False
            with ExitStack() as stack:
                self.groups = stack.enter_context(noting_groups())
                if not self._tape.recorder.compiled:  # torch.compile handles checkpoints itself
                    stack.enter_context(self._checkpoints)
                    stack.enter_context(plain_checkpoints(self._unplanned))
                if self._parts is not None:
                    stack.enter_context(carried_by(self._parts))
                policy = CheckpointPolicy.PREFER_SAVE if self._is_fake else "recompute_all"
                cuts = None if self._is_fake else self._cuts
                stack.enter_context(save_recompute_policy(policy, cuts=cuts, tape=self._tape))
                if not self._is_fake:
                    stack.enter_context(watching_resizes(before=_before_resize))
                self._forward = stack.pop_all()

    def note_batch(self, batch: Iterable[Tensor]) -> None:
        """Note the batch of a further forward, which counts if it existed before the step.

        On CUDA the client measures what exists, and a batch that is made in the step is in the record.
        """
        if self._device.type == "cuda":
            return
        mark = self._allocations.mark()
        for tensor in with_memory(batch):
            if tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                self._batches.setdefault(storage.data_ptr(), (storage.nbytes(), mark))

    def enter(self, path: str) -> None:
        """Note a call of the module at `path`."""
        self._path.append(path)
        self._tape.recorder.module = path

    def leave(self, path: str) -> None:
        """Note the end of that call."""
        if len(self._path) > 1 and self._path[-1] == path:
            self._path.pop()
        self._cuts.note_exit(path)
        self._tape.recorder.module = self._path[-1]

    def end_forward(self, output: Any) -> None:
        """End a forward, which returned `output`."""
        if self._forward is None:
            return
        with self._or_discard():
            self._tape.recorder.end_forward(output)
            storages = {
                inner.untyped_storage()._cdata: inner.untyped_storage().nbytes()
                for inner in with_memory(roots_of(output))
            }
            self._kept_nbytes = sum(storages.values())
            self._close_forward()

    def _close_forward(self) -> None:
        forward, self._forward = self._forward, None
        assert forward is not None
        forward.close()
        # Writes of forward itself come from the model.
        self._tape.copied = [(tensor, version_counter(tensor)) for tensor, _ in self._tape.copied]
        self._tape.saved.forward_over = True
        self.needs_checkpoints = self._tape.recorder.needs_checkpoints
        if self.needs_checkpoints or not self.recording:
            self.discard()
        else:
            self._tape.begin_outside()

    def leave_out(self) -> None:
        """Leave out of the record what follows: another planned model runs, whose plan counts it."""
        if self._left_out < 0:
            self._left_out = self._allocations.mark()
        self._others_follow |= not self.in_backward

    def take_in(self) -> None:
        """End what `leave_out` began, if it did."""
        if self._left_out >= 0:
            self._tape.hidden.append((self._left_out, self._allocations.mark()))
        self._left_out = -1

    def note_backward(self) -> None:
        """Note that the backward that runs has reached an output of the step."""
        if self._others_follow and not self._reached:  # so far, backward was that of the other models
            self._tape.hidden.append((self._begin, self._allocations.mark()))
        if not self._reaches:
            self._retains = private.current_graph_task_keeps_graph()
        self._reached = self._reaches = True

    def begin_backward(self) -> None:
        """Note that backward begins. Calls of it are noted without this."""
        self._tape.held.look()
        self._pass, self._reaches = self._allocations.mark(), False
        if self.has_backward:
            return
        self._begin, self._missed = self._pass, self._tape.saved.first_task >= 0
        model = self.model() if self._freed_gradients else None
        if model is not None and any(gradient_of(p) is not None for p in parameters_of(model)):
            self._freed_gradients = 0
        if self._shards is not None:
            self._shards.gather(self._tape.kept_units)

    def unwatch_calls(self) -> None:
        """Leave it to the caller to say where backward begins and ends."""
        self._calls.close()

    def end_backward(self) -> None:
        """Note that a backward through the step is over."""
        self.take_in()
        note_moving_buffers(self._tape)
        self._tape.held.look()
        self._pass = -1
        self._end = self._allocations.mark()
        self._pass_ends.append(self._end)
        self.note_dropped()
        leaves = [leaf for ref in self._leaves if (leaf := ref()) is not None]
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
        self._held = self._addresses(leaves), self._addresses(gradients)

    def note_dropped(self) -> None:
        """Note what the loop has dropped of the first batch and its gradients, and of earlier gradients."""
        batch = [tensor for ref in self._batch if (tensor := ref()) is not None]
        both = [*batch, *map(gradient_of, batch)]
        held = memory_nbytes(both, self._device.type, self._environment.allocator_rounding)
        self._of_batch = max(self._of_batch, self._static.inputs, held)
        self.dropped_nbytes = self._of_batch - held + self._freed_gradients

    def end(self) -> None:
        """End the record, if it has not ended: the step is over, or a backward has freed its graph."""
        if not self.recording:
            return
        compile_within(None)
        self._tape.saved.closed = True
        self._calls.close()
        begin = self._allocations.mark()
        if free_workspaces(self._device):
            self._freed = begin, self._allocations.mark()
        self.recording = False
        self._allocations.close()

    def _backward_called(self, roots: Sequence[Any], gradients: Sequence[Tensor | None]) -> None:
        self._untraced.enter_context(compiled_autograd_off())  # it would trace what the step holds
        self._allocations.backward_runs(True)
        if self.in_forward:
            return
        self.begin_backward()
        self._seeds.update(self._addresses([one for one in gradients if one is not None]))
        newest = self._tape.recorder.newest
        leaves = leaves_of([root for root in roots if isinstance(root, Tensor)])
        self._leaves += [weakref.ref(leaf) for leaf in leaves if newest.get(leaf) is not None]
        self._untraced.enter_context(self._noting_gradients(leaves))

    def _noting_gradients(self, leaves: Sequence[Tensor]) -> AbstractContextManager[None]:
        # Compiled code adds up gradients itself. The leaves of units are gathered, and reduced at once.
        alone = self._shards is not None or self._tape.recorder.compiled
        return noting_gradients(() if alone else leaves, self._note_gradient)

    def _note_gradient(self, gradient: Tensor) -> None:
        if self.recording:
            mark = self._allocations.mark()
            self._gradients += [(address, mark) for address in self._addresses([gradient])]

    def _backward_returned(self, raised: bool) -> None:
        self._untraced.close()
        self._allocations.backward_runs(False)
        if self.in_forward:
            return
        if raised:
            self.discard(sys.exception())  # it saw only a part of a backward
        elif self._reaches or not (self._missed or self.has_backward or self._tape.saved.first_task < 0):
            with self._or_discard():
                self.end_backward()
                self._last = self._allocations.mark()
                if not self._holds_graph():
                    self.end()
        else:
            if self._others_follow:
                self._tape.hidden.append((self._pass, self._allocations.mark()))
            self._pass = -1
            if not self.has_backward:
                self._begin = -1

    def _holds_graph(self) -> bool:
        """Return True if more passes may follow: backward retains its graph, or has reached a part of it.

        What backwards inside of it retain is theirs.
        """
        saved, record = self._tape.saved, self._tape.recorder.record
        forward_of = [bisect_left(record.forward_ends, packed) for packed in saved.packed]
        unpacked = {event.saved for event in saved.events if event.kind == "unpack"}
        reached = {forward_of[h] for h in unpacked}
        gone = {event.saved for event in saved.events if event.kind == "drop"}
        gone |= set() if self._retains else unpacked
        storages = [record.versions[version].storage for version in saved.versions]
        of_reached = {storage for h, storage in enumerate(storages) if forward_of[h] in reached}
        held = of_reached & {storage for h, storage in enumerate(storages) if h not in gone}
        nbytes, still = (sum(record.storages[s].nbytes for s in part) for part in (of_reached, held))
        return still > HELD * nbytes

    def discard(self, error: BaseException | None = None) -> None:
        """Record no more, and forget the step; have an `error` of it say what it needs, if memory ran out."""
        forward, self._forward = self._forward, None
        was_recording = self.recording
        with ExitStack() as stack:  # all of it, whatever fails
            stack.callback(self._allocations.close)
            stack.callback(self._calls.close)
            if self.recording:
                stack.callback(compile_within, None)
            if forward is not None:
                stack.callback(forward.close)
            self.recording = False
            self._tape.saved.closed = True
        if was_recording and isinstance(error, torch.OutOfMemoryError):
            error.add_note(
                "autoac: this step was observed, without a plan, and needs over "
                f"{format_bytes(self.peak_nbytes)}. A plan may need less: make one before (`autoac fit`), "
                "and run the first step under it by ac_client.apply(model, policy=...)"
            )

    @contextmanager
    def _or_discard(self) -> Iterator[None]:
        """Run the body; if it raises, leave nothing of the step in the process."""
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def run(
        self, subject: TrainingStep, note_leaves: Callable[[list[Tensor]], Sequence[Tensor] | None]
    ) -> None:
        """Run the whole step: its forwards, its loss, and one backward.

        If the model turns out to need checkpoints of its own, the step ends with the forward.

        Args:
            subject: the step of this object.
            note_leaves: called with the leaves to which backward is about to give gradients; returns those to
                which it gives some, or None for all.

        Raises:
            NothingToProfile: nothing requires a gradient.
            ProfilerBusy: torch.profiler runs on this thread.
        """
        model, recorder = subject.compiled, self._tape.recorder
        batch = tuple(subject.args), dict(subject.kwargs)
        leaves: dict[int, Tensor] = {}
        batches = [_own_batch(batch, leaves) for _ in range(subject.loop.forwards)]
        inputs = subject.loop.forwards * self._static.inputs  # as if each forward had a batch of its own
        self._static = self._static.model_copy(update={"inputs": inputs})
        watches = ExitStack() if is_called_compiled(model) else watch_modules(model, self.enter, self.leave)
        try:
            self.begin_forward()
            calls = [partial(model, *args, **kwargs) for args, kwargs in batches]
            held, roots = run_forwards(calls, subject.loss, recorder.end_forward, self._tape.begin_loss)
            self._close_forward()
            if self.needs_checkpoints:
                return
            check_roots(roots, [*model.parameters(), *batch_tensors(batch)])
            torch.clear_autocast_cache()  # a real backward runs outside of autocast
            with self._tape.hiding():
                ends = note_leaves(trained := leaves_of(roots))
            self.begin_backward()
            self.unwatch_calls()
            with (
                compiled_autograd_off(),
                torch.autocast(self._device.type, enabled=False),
                self._noting_gradients(trained),
            ):
                seeds = [torch.ones_like(root) for root in roots]
                self._allocations.backward_runs(True)
                torch.autograd.backward(roots, seeds, inputs=ends)
                self._allocations.backward_runs(False)
                del seeds
            self.end_backward()
            del roots, ends, trained
            self._last = self._allocations.mark()
            self.end()
            del held
        finally:
            self.discard()
            recorder.generators.restore()
            watches.close()

    def record(self) -> StepRecord:
        """Return the records of the step."""
        tape, at = self._tape, self._allocations.times_ns
        ops = tape.recorder.record.ops
        in_step_us = [(at[op.end_mark] - at[op.begin_mark]) / 1e3 for op in ops]
        signatures: list[Hashable] = [op.signature for op in ops]
        replays = {} if self._is_fake else tape.replays.samples()
        return StepRecord(
            tape.recorder.record,
            tape.saved,
            self._allocations,
            at,
            self._begin,
            self._end,
            self._last,
            self._pass_ends[:-1],
            freed_between(self._allocations, *self._freed) if self._freed is not None else (),
            op_times=median_and_spread(in_step_us, signatures, replays),
            unplanned=tuple(self._unplanned),
            temporary=tape.temporary,
            hidden=tape.hidden,
            gradients=self._gradients,
        )

    def profile(self, model: nn.Module, optimizer: Optimizers = None, times: Times | None = None) -> Profile:
        """Return the profile of the step.

        Args:
            model: the model of the step, which is not held.
            optimizer: as for `observe`.
            times: the cache of run times.

        Raises:
            NothingToProfile: no backward has reached the step.
            CannotProfile: the allocations of some threads are not in the record.
        """
        tape, record = self._tape, self._tape.recorder.record
        if not self.has_backward:
            raise NothingToProfile(
                "no backward has reached the outputs of the observed forward, so its step has no profile"
            )
        self._allocations.read()
        self._allocations.check_complete(type(model).__name__, record.storages)
        outside = tape.end_outside(self._allocations, self._begin)
        if self._shards is not None:
            force_saves_of_units(record, self._shards, tape.saved.out_of_reach)
        step = self.record()
        here = machine(self._device, self._environment.device_name)
        if times is not None:
            known = times.ops(here, step.op_times.keys())
            times.keep_ops(here, {key: row for key, row in step.op_times.items() if key not in known})
            step = replace(step, op_times={**step.op_times, **known})
        kinds = len(step.op_times)
        notes = [f"measured: run times of {kinds} kinds of op, in a step that recomputes", *step.unplanned]
        if note := tape.replays.note():
            notes.append(note)
        loop = Loop(max(1, len(record.forward_ends)))
        existed = sum(
            nbytes
            for address, (nbytes, mark) in self._batches.items()
            if self._allocations.block_at(address, mark) is None
        )
        found = profile_of(
            TrainingStep(model, (), {}, None, self._accumulates, loop),
            step,
            notes,
            self._inputs,
            self._environment,
            self._device,
            None,
            optimizer,
            self._static.model_copy(update={"inputs": self._static.inputs + existed}),
        )
        # What was made between the model and backward, such as the loss, is not a gradient that stays, and
        # neither is that of a leaf which forward made.
        end = self._allocations.positions[self._last]
        hidden = {id(b) for span in tape.hidden for b in allocated_between(self._allocations, *span)}
        left = [
            block
            for block in outside
            if (block.freed_at is None or block.freed_at >= end) and id(block) not in hidden
        ]
        kept = self._kept_nbytes + sum(block.nbytes for block in left if block.address not in self._seeds)
        leaves, gradients = map(self._live_nbytes, self._held)
        found = found.with_dropped_outputs(found.droppable_outputs).model_copy(
            update={
                "gradient_nbytes": found.gradient_nbytes - sum(block.nbytes for block in left) - gradients,
                "kept_nbytes": max(found.kept_nbytes, kept + leaves + gradients),
            }
        )
        return with_cached_backward(found, times, here) if times is not None else found

    def _addresses(self, tensors: Sequence[Tensor]) -> list[int]:
        inside = (inner for tensor in tensors for inner in below(tensor))
        locate = self._allocations.locate
        return list({locate(inner.untyped_storage()) for inner in inside if has_storage(inner)})

    def _live_nbytes(self, addresses: Sequence[int]) -> int:
        """Return the bytes of the blocks at `addresses` as backward ended."""
        found = (self._allocations.block_at(address, self._end) for address in addresses)
        return sum(block.nbytes for block in found if block is not None)


def _own_batch(batch: Any, leaves: dict[int, Tensor]) -> Any:
    """Return containers of a forward's own, which may pop from them, and let no backward leave the batch.

    Args:
        batch: the arguments of forward.
        leaves: gets the ends of backward in place of tensors with a graph, by their id.
    """
    own: dict[int, Tensor] = {}

    def of(item: Any) -> Any:
        if not isinstance(item, Tensor) or item.grad_fn is None:
            return item
        if id(item) not in own:
            own[id(item)] = output_of_leaf(leaves.setdefault(id(item), item.detach().requires_grad_()))
        return own[id(item)]

    return tree_map(of, batch)


def _before_resize(storage: torch.UntypedStorage) -> None:
    if active.region is not None:
        active.region.storages.before_resize(storage)


class BackwardListener:
    """Listen for the backward of one forward of an observed step; autograd's nodes hold this object.

    If nobody differentiates the forward, the step ends with it: torch.profiler must not go on running. Only
    the thread that started torch.profiler can end it.
    """

    def __init__(self, step: ObservedStep) -> None:
        self._step = step

    def __call__(self, _facts: Any) -> None:
        """Note a backward."""
        self._step.note_backward()

    def __del__(self) -> None:
        step = self._step
        over = not (step.in_forward or step.in_backward or step.has_backward)
        if over and step.thread == threading.get_ident():
            step.discard()
