"""Install the saved-tensor hooks of a region, and pack each tensor that autograd saves into a handle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoac.tape.capture.step_tape import STAND_IN, StepTape
from autoac.tape.checkpoints.own_checkpoints import running_call
from autoac.tape.distributed.wrapped_tensors import WrapperHandle, wraps_others
from autoac.tape.runtime.moves.region_moves import RegionMoves
from autoac.tape.runtime.nested_policies import Grouping
from autoac.tape.runtime.nodes import NodeVersion
from autoac.tape.runtime.replay import RegionGraph
from autoac.tape.runtime.saved_handles import (
    MovingWeightHandle,
    OuterHookHandle,
    RecomputedHandle,
    SavedHandle,
    handle_for,
    taped,
    unpack,
)
from autoac.tape.runtime.tracked_storages import TrackedStorages
from autoac.tape.runtime.write_guard import detached_alias, note_wrappers, version_counter
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.inductor import keep_dynamo_out
from autoac.tape.torch_facts.storage_table import has_storage
from autoac.tape.torch_facts.streams import streams_seen
from autoac.tape.torch_facts.view_recipes import recipe_of
from autoac.tape.unseen.moving_weights import is_refilled, moving_base, moving_weights

_STRIDED = torch.strided


class RegionHooks:
    """The saved-tensor hooks of one region.

    Attributes:
        pack_in_call: set while a call is recorded as one op; returns None for a tensor from outside of it.
        grouping: says which run of an op serves a tensor that is packed now; None if ops run once.
        moves: of a plan that moves outputs of ops to the host.
        in_checkpoint: a checkpoint of `ac_client` runs.
        tape: records an observed step.
        set_aside: a transform of torch.func runs, which allows no hooks.
    """

    def __init__(self, storages: TrackedStorages, graph: RegionGraph) -> None:
        self.pack_in_call: Callable[[Tensor], Any] | None = None
        self.grouping: Grouping | None = None
        self.moves: RegionMoves | None = None
        self.in_checkpoint = False
        self.set_aside = False
        self.tape: StepTape | None = None
        self._storages = storages
        self._key = storages.key
        self._graph = graph
        self._outer: tuple[Any, Any] | None = None  # pack and unpack of the hooks around the region
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)

    def enter(self) -> None:
        """Install the hooks.

        Raises:
            RuntimeError: torch does not allow saved-tensor hooks here.
        """
        if not torch.compiler.is_compiling():
            self._outer = private.top_saved_tensors_default_hooks(True)
        enter_saved_tensor_hooks(self._hooks)
        with _lock:
            _thread.hooks = self
            _entered.append(self)
            torch.autograd.graph.disable_saved_tensors_hooks = _without_hooks

    def exit(self) -> None:
        """Stop handling what autograd saves on this thread."""
        with _lock:
            _thread.hooks = None
            _entered.remove(self)
            if not _entered:
                torch.autograd.graph.disable_saved_tensors_hooks = _disabled
        self._hooks.__exit__(None, None, None)
        del self._hooks  # it holds a method of this object: a cycle

    def are_innermost(self) -> bool:
        """Return True if no hooks were entered on this thread after these."""
        hooks = private.top_saved_tensors_default_hooks(True)
        return hooks is not None and hooks[0] == self.pack

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the body without the hooks: what autograd saves stays saved."""
        self._hooks.__exit__(None, None, None)
        self.set_aside = True
        try:
            yield
        finally:
            self.set_aside = False
            self._hooks.__enter__()

    def pack(self, tensor: Tensor) -> Any:
        """Return the handle that autograd holds in place of `tensor`."""
        kind = type(tensor)
        if kind is not Tensor and kind is not Parameter and wraps_others(kind):
            if (wait := getattr(tensor, "trigger_wait", None)) is not None:
                return self.pack(wait())  # of a collective, which arrives only then
            note_wrappers((tensor,))
            return WrapperHandle(tensor, self.pack, unpack)
        tape = self.tape
        if tape is not None and hasattr(tensor, STAND_IN):
            return tensor
        saved = tape.pack(tensor) if tape is not None else None
        if self.pack_in_call is not None and (packed := self.pack_in_call(tensor)) is not None:
            return packed if tape is None else taped(packed, saved, tape)
        handle = self.handle_of(tensor) if moving_weights.data else self._handle_of(tensor)
        return handle if tape is None else taped(handle, saved, tape)

    def note_fill(self, tensor: Tensor) -> None:
        """Note that an op is about to fill `tensor`, which autograd has packed just now with its input."""
        for ref in self._graph.handles[-2:]:
            handle = ref()
            if (
                type(handle) is SavedHandle
                and has_storage(handle.tensor)
                and handle.tensor.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            ):
                handle.contents = None  # those of before
                self._storages.forget_saved(handle)
        self._storages.before_silent_write((tensor,))

    def handle_of(self, tensor: Tensor) -> Any:
        """Return a handle for `tensor`, which no running Function has made."""
        parameter = moving_base(tensor)
        if parameter is None:
            return self._handle_of(tensor)
        held = None if is_refilled(parameter) else self._handle_of(tensor)
        return MovingWeightHandle(parameter, tensor, held)

    def _handle_of(self, tensor: Tensor) -> Any:
        handle: RecomputedHandle | SavedHandle | None = None
        kind = type(tensor)
        if ((kind is Tensor or kind is Parameter) and tensor.layout is _STRIDED) or has_storage(tensor):
            version = tensor.untyped_storage().__dict__.get(self._key)
            if type(version) is not NodeVersion:
                version = None
            elif streams_seen.several and version.node.stream != private.current_stream():
                self._storages.save(tensor)
                version = None
            if (
                version is not None
                and (version.counter is None or not version.written_in_pause(tensor))
                and not (version.suspect and not self._storages.as_written(version, tensor))
            ):
                if version.later_runs and self.grouping is not None:
                    version = version.serving(self.grouping.position)
                recipe = version.recipe_if_returned(tensor)
                if recipe is None and not tensor.is_nested:  # which are strided as well
                    recipe = recipe_of(tensor)
                if recipe is not None:
                    make = RecomputedHandle if self._graph.weights is None else handle_for
                    handle = make(tensor, version, recipe, self._graph)
        if handle is None:
            if self._outer is not None:
                return OuterHookHandle(tensor, *self._outer)
            if self.tape is None and self.moves is None and self._graph.weights is None:
                if not tensor.is_leaf or tensor._is_view():
                    tensor = detached_alias(tensor)
                return tensor, version_counter(tensor)
            if self.tape is not None and running_call() and has_storage(tensor):
                handle = SavedHandle(detached_alias(tensor), self._graph)  # not what `.data = ...` puts there
                self._storages.note_saved(handle)
            else:
                handle = SavedHandle(tensor, self._graph)
            if self._graph.weights is not None and (self.in_checkpoint or running_call()):
                handle.note_contents(self._graph.weights)
        if self.moves is not None:
            handle.trigger = self.moves.trigger_of(tensor)
        return handle


class _Thread(threading.local):
    hooks: RegionHooks | None = None  # of the region that is open on this thread


_thread = _Thread()
_lock = threading.Lock()
_entered: list[RegionHooks] = []  # on all threads
_disabled = torch.autograd.graph.disable_saved_tensors_hooks


@contextmanager
def _without_hooks(error_message: str) -> Iterator[None]:
    """Set the hooks of a region aside for the transforms of torch.func, which raise if there are any."""
    hooks = _thread.hooks
    ours = hooks is not None and hooks.are_innermost()
    with hooks.aside() if hooks is not None and ours else nullcontext(), _disabled(error_message):
        yield


# Dynamo skips the forwards of torch's own modules, but not what they call: autograd calls `pack` from them.
keep_dynamo_out(RegionHooks.pack, "it runs while eager ops do", recursively=True)


def enter_saved_tensor_hooks(hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
    """Enter `hooks`.

    Raises:
        RuntimeError: torch does not allow saved-tensor hooks here.
    """
    try:
        hooks.__enter__()
    except RuntimeError as error:
        raise RuntimeError(
            "a planned model or region needs saved-tensor hooks, which are disabled here, as inside of "
            "torch.func.grad, vjp, jacrev and hessian. Differentiate with torch.autograd.grad, or call "
            f"ac_client.applied(model).remove() first. They were disabled with: {error}"
        ) from error


def is_in_checkpoint() -> bool:
    """Return True if a checkpoint of torch, not a reentrant one, receives what autograd saves here."""
    hooks = private.top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
