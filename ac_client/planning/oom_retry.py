"""A step that ran out of memory: undo it, plan it again for less memory, and run it once more."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ac_client.planning.facts.optimizer_steps import steps_begun
from ac_client.planning.model_planning import ModelPlanning
from ac_client.planning.planned_forward import ForwardOfThread
from ac_client.runtime.write_guard import version_counter
from ac_client.service_client.errors import RemoteError
from autoac.planner import PlannerError
from autoac.planner.units import format_bytes
from autoac.profiler import device_of
from autoac.profiler.restore.module_state import ModuleState
from autoac.profiler.torch_facts.rng import DefaultGenerators

Result = TypeVar("Result")

_OUT_OF_MEMORY_MESSAGES = (
    "DefaultCPUAllocator: can't allocate memory",
    # CUDA and its libraries take memory themselves, while the caching allocator holds the rest.
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",  # a handle, as at the first product on backward's thread
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an allocator had nothing left; not all of them raise torch.OutOfMemoryError."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_MESSAGES)


class OomRetry:
    """Runs steps of one model, and runs a step again that ran out of memory.

    Attributes:
        retries: steps that were planned again and run a second time.
    """

    def __init__(self, model: nn.Module, planning: ModelPlanning, of_thread: ForwardOfThread) -> None:
        self.retries = 0
        self._model = weakref.ref(model)
        self._planning = planning
        self._of_thread = of_thread

    def run(self, fn: Callable[[], Result], *, retry_oom: bool, keep_gradients: bool) -> Result:
        """Run `fn` as `Applied.step` does."""
        model = self._model()
        snapshot = (
            StepSnapshot(model, keep_gradients=keep_gradients) if retry_oom and model is not None else None
        )
        allocator = self._planning.watch.peaks.allocator
        peak = allocator.allocated_peak() if allocator is not None else 0
        try:
            with snapshot.watched() if snapshot is not None else nullcontext():
                return fn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._abandon()
            bucket = self._planning.store.current
            if reason := self._why_not(snapshot):
                self.note(error, f"The step was not run again: {reason}.")
                raise
            origin = "".join(traceback.format_tb(error.__traceback__, limit=-4))
            # What its frames hold must be gone before the second run.
            failed = error.with_traceback(None)
            failed.__context__ = failed.__cause__ = None
        assert snapshot is not None
        assert bucket is not None
        gc.collect()
        if allocator is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()  # what was freed may be fragmented
        snapshot.restore()
        try:
            self._planning.tighten(bucket, peak)
        except (PlannerError, RemoteError) as error:
            failed.add_note(f"It came from:\n{origin}")
            self.note(
                failed, f"The step was not run again, because the planner found no tighter plan: {error}"
            )
            raise failed from None
        self.retries += 1
        try:
            return fn()
        except Exception as error:
            if is_out_of_memory(error):
                self._abandon()
                self.note(error, "The step was planned again for less memory, and ran out again.")
            raise

    def note(self, error: BaseException, what: str) -> None:
        """Add a note to `error` that says `what` was done. The first note also gives advice to the user."""
        noted = any(note.startswith("autoac:") for note in getattr(error, "__notes__", ()))
        error.add_note(f"autoac: {what}")
        if noted:
            return
        bucket = self._planning.store.latest
        if bucket is None:
            error.add_note(
                "The first step is profiled before it is planned, so no plan limits its memory. Train on "
                "a smaller batch first, or plan without the device: autoac.profiler.profile(model, ..., "
                "on=DATASHEETS[...]), and pass the plan as policy=...."
            )
            return
        budget = self._planning.options.budget_bytes
        of = f" of a budget of {format_bytes(budget)}" if budget is not None else ""
        error.add_note(f"The planned peak was {format_bytes(bucket.policy.predicted.peak_bytes)}{of}.")
        error.add_note(
            "Pass a smaller budget_gb or more headroom_gb, use a smaller batch, or run "
            "the step as ac_client.applied(model).step(fn, retry_oom=True)."
        )

    def _why_not(self, snapshot: StepSnapshot | None) -> str:
        """Return why the step cannot run again; "" if it can."""
        bucket = self._planning.store.current
        if bucket is None:
            return "it was not planned yet: the profiled step itself did not fit"
        if snapshot is None:
            return "retry_oom=True was not passed to step()"
        if (ranks := self._planning.chooser.ranks) is not None:
            return f"the other {ranks.size - 1} ranks, which it talks to, would not run it again"
        if reason := snapshot.why_not():
            return reason
        if bucket.profile is None:
            return "its policy was given, and cannot be planned again without budget_gb and a profile"
        return ""

    def _abandon(self) -> None:
        """Give up the step that is running: it will not end."""
        self._planning.watch.peaks.discard()
        self._of_thread.forward.end()


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A parameter before a step. The gradient is held weakly, so that the step can free it."""

    parameter: nn.Parameter
    version: int
    gradient: weakref.ref[Tensor] | None
    gradient_version: int
    copy: Tensor | None  # of the gradient, in the host's memory

    def written(self) -> bool:
        return _version(self.parameter) != self.version

    def kept(self) -> bool:
        """Return True if the gradient from before the step exists unchanged, or can be put back."""
        gradient = self.parameter.grad
        return (
            self.gradient is None
            or self.copy is not None
            or (gradient is self.gradient() and _version(gradient) == self.gradient_version)
        )

    def restore(self) -> None:
        gradient = self.parameter.grad
        if self.gradient is None:
            self.parameter.grad = None
        elif self.copy is not None:
            if gradient is not None and gradient is self.gradient():
                gradient.copy_(self.copy)
            else:
                self.parameter.grad = self.copy.to(self.parameter.device)


class StepSnapshot:
    """The state that a step may change and must find again: gradients, buffers, modules, generators.

    Copies are in the host's memory; on a CPU that is the memory of the budget.

    Args:
        keep_gradients: copy the gradients that exist, so that a step that has added to them can be undone.
            Otherwise only gradients that the step made are dropped.
    """

    def __init__(self, model: nn.Module, *, keep_gradients: bool) -> None:
        self._generators = DefaultGenerators(device_of(model))
        self._leaves = []
        for parameter in model.parameters():
            gradient = parameter.grad
            self._leaves.append(
                _Leaf(
                    parameter,
                    _version(parameter),
                    weakref.ref(gradient) if gradient is not None else None,
                    _version(gradient),
                    _copied(gradient) if keep_gradients and gradient is not None else None,
                )
            )
        self._model = model
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._modules = ModuleState(model, _copied)
        self._buffers = [(buffer, _copied(buffer)) for buffer in model.buffers()]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the step, which runs inside the block."""
        with steps_begun(self._model) as self._optimizers:
            yield

    def why_not(self) -> str:
        """Return what prevents the step from being undone; "" if nothing does."""
        if self._optimizers or any(leaf.written() for leaf in self._leaves):
            return "it has written to parameters (an optimizer in backward?)"
        if not all(leaf.kept() for leaf in self._leaves):
            return (
                "it has changed gradients of earlier steps; step(fn, keep_gradients=True) keeps copies of "
                "them, and zero_grad belongs before the step"
            )
        return ""

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for leaf in self._leaves:
                leaf.restore()
            self._modules.restore()
            for buffer, copy in self._buffers:
                if not torch.equal(buffer.cpu(), copy):
                    buffer.copy_(copy)
        self._generators.restore()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else version_counter(tensor)
