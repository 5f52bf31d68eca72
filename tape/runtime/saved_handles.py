"""Define the handles that autograd holds in place of saved tensors, and the unpack hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from autoac.tape.capture.step_tape import StepTape
from autoac.tape.runtime.moves.region_moves import FetchTrigger
from autoac.tape.runtime.nodes import NodeVersion, add_use, remove_use
from autoac.tape.runtime.replay import (
    RegionGraph,
    handle_of_key,
    recompute,
    recording_off,
    save_functions_before,
    view_of,
)
from autoac.tape.runtime.split_backward import leaves_gradients
from autoac.tape.runtime.write_guard import (
    ContentsDiffer,
    StaleError,
    check_counter,
    detached_alias,
    held_alias,
    version_counter,
)
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.op_facts import leaves_bytes_unwritten
from autoac.tape.torch_facts.storage_table import has_storage
from autoac.tape.torch_facts.view_recipes import Recipe, make_view, recipe_of
from autoac.tape.unseen.fingerprints import (
    Fingerprint,
    KeptWeights,
    can_compare,
    fingerprint,
    fingerprint_of,
    same_contents,
    shows_whole_storage,
)
from autoac.tape.unseen.held_storages import recorded
from autoac.tape.unseen.moving_weights import note_unpack


class RecomputedHandle:
    """A handle in place of a tensor that backward can recompute.

    Invariant: a live handle accounts for one use of its version.
    """

    __slots__ = (
        "__weakref__",
        "_last",
        "_last_task",
        "_used_in",
        "_version",
        "contents",
        "device",
        "graph",
        "key",
        "recipe",
        "trigger",
    )

    def __init__(self, tensor: Tensor, version: NodeVersion, recipe: Recipe, graph: RegionGraph) -> None:
        self._version = version
        self.recipe = recipe
        self.graph = graph
        self.device = tensor.device
        # Fingerprint of the tensor, where backward compares.
        self.contents: Fingerprint | None = None
        self.trigger: FetchTrigger | None = None
        refs = graph.handles
        self.key = graph.first_key + len(refs)
        refs.append(ref := weakref.ref(self))
        self._last: weakref.ref[Tensor] | None = None  # the tensor that the last unpack returned
        self._last_task = -1  # the graph task of the last unpack
        self._used_in = -1  # the pass that consumed the use
        if version.handles:
            version.handles.append(ref)
        else:
            version.handles = [ref]
        # No lock, which would cost as much as the count: see `add_use`.
        if version.uses:
            version.uses += 1
        else:
            add_use(version)

    def unpack(self) -> Tensor:
        """Return the tensor; recompute it unless the pass has it cached.

        Raises:
            StaleError: a tensor that the recompute reads was written after forward.
            ContentsDiffer: the contents are not those of forward.
        """
        graph = self.graph
        with graph.lock:
            latest = graph.latest()
            if latest is not None and latest.task == private.current_graph_task_id():
                running, consumes = latest, True
            else:
                running, consumes = graph.current_pass()
            is_again = self._last_task == running.task
            if is_again and self._last is not None and (last := self._last()) is not None:
                return last
            if running.split is not None and self._used_in == running.first_task and not is_again:
                running = graph.restart()
            if self.trigger is not None and consumes:
                self.trigger.fetch(running)
            version, held = self._version, None
            recomputed = running.cache.get(version.serial)
            if recomputed is None:
                recomputed = held = graph.held_in_forward(version)
                if held is None and graph.elsewhere:
                    recomputed = held = graph.held_elsewhere(version)
            if recomputed is None:
                recomputed = recompute(version, running, graph)
            elif running.handed_out:
                running.check_handed_out(version, "backward")
            if running.arriving:
                running.await_arrival((version,))
            if version.raw is False and self.recipe is version.recipe and held is None:
                tensor = recomputed
            else:
                tensor = view_of(version, recomputed, self.recipe)
            if self.contents is not None and not same_contents(fingerprint(tensor), self.contents):
                node = version.node
                save_functions_before(node)
                shape = f"{tensor.dtype} {list(tensor.shape)}"
                raise ContentsDiffer(node.name, graph.modules.get(node.order, ""), shape)
            if consumes:
                if self._used_in != running.first_task and not (
                    running.split is not None and leaves_gradients()
                ):
                    running.consume_use(version)
                    if held is not None:
                        running.skip_if_unused(version.node)
                    if version.serial in running.cache:  # other ops will read it
                        running.handed_out.setdefault(version.serial, []).append((tensor, tensor._version))
                    self._used_in = running.first_task
                self._last_task = running.task
                self._last = weakref.ref(tensor)
            return tensor

    def is_cached(self) -> bool:
        """Return True if the running pass, a cut, the model or the loop holds the tensor."""
        (running, _), serial = self.graph.current_pass(), self._version.serial
        return serial in running.cache or serial in self.graph.elsewhere or self._version.node.order < 0

    def move_to(self, newer: NodeVersion) -> None:
        """Recompute from `newer`, a later version with the same contents in all that this handle views."""
        with self.graph.lock:
            add_use(newer)
            remove_use(self._version)
            self._version = newer

    def unpack_writable(self) -> Tensor:
        """Return the tensor for compiled code, which may overwrite it: a copy if it is still needed."""
        with self.graph.lock:
            tensor = self.unpack()
            self._last = None
            running, _ = self.graph.current_pass()
            version = self._version
            needed = version.serial in running.cache or version.node.order < 0  # pinned
            return tensor.clone() if needed else tensor

    def __del__(self) -> None:
        graph, version = self.graph, self._version
        with graph.lock:
            running = graph.latest()
            if graph.overlapped or running is None or running.first_task != self._used_in:
                for ref in graph.passes.valuerefs():
                    running = ref()
                    if running is not None and running.first_task != self._used_in:
                        running.drop_use(version)
            if version.uses > 1:
                version.uses -= 1
            else:
                remove_use(version)


def handle_for(tensor: Tensor, version: NodeVersion, recipe: Recipe, graph: RegionGraph) -> RecomputedHandle:
    """Return a handle for `tensor`, a view of `version`, with a fingerprint where backward compares."""
    handle = RecomputedHandle(tensor, version, recipe, graph)
    if graph.weights is None:
        return handle
    if can_compare(tensor) and not leaves_bytes_unwritten(version.node.name, tensor.dtype):
        if version.contents is not None and shows_whole_storage(tensor):
            handle.contents = version.contents  # compared just now
        else:
            handle.contents = graph.weights.keep(fingerprint(tensor))
    return handle


class SavedHandle:
    """A handle in place of a tensor that stays saved."""

    __slots__ = ("__weakref__", "contents", "counter", "tensor", "trigger")

    def __init__(self, tensor: Tensor, graph: RegionGraph) -> None:
        follows = recorded.held is not None and not isinstance(tensor, Parameter)
        if follows or not tensor.is_leaf or tensor._is_view():
            tensor = held_alias(tensor, saved=True)
        self.hold(tensor)
        self.trigger: FetchTrigger | None = None
        self.contents: Fingerprint | None = None
        graph.handles.append(weakref.ref(self))

    def hold(self, tensor: Tensor) -> None:
        """Hold `tensor`, which has no history that would keep the graph of this handle alive."""
        self.tensor, self.counter = tensor, version_counter(tensor)

    def note_contents(self, weights: KeptWeights) -> None:
        """Have `unpack` compare the contents: NOTE [ Needed checkpoints ] in own_checkpoints.py."""
        if has_storage(self.tensor) and can_compare(self.tensor):
            self.contents = weights.keep(fingerprint(self.tensor))

    def unpack(self) -> Tensor:
        """Return the tensor.

        Raises:
            StaleError: the tensor was written after forward.
            ContentsDiffer: a checkpoint saved it, and it has other contents than in forward.
        """
        if self.trigger is not None:
            self.trigger.unpacked()
        check_counter(self.tensor, self.counter, "backward")
        if self.contents is not None and not same_contents(fingerprint(self.tensor), self.contents):
            node = private.current_autograd_node()
            if node is None or "BatchNorm" not in node.name():  # its statistics are saved, and not read
                raise ContentsDiffer("", "", f"{self.tensor.dtype} {list(self.tensor.shape)}")
        return self.tensor


class MovingWeightHandle:
    """A handle in place of a view of a parameter that is in memory only while its block runs.

    Args:
        parameter: of which `tensor` is a view.
        tensor: that autograd saves.
        held: a handle that holds it; None where backward fills the parameter again.
    """

    def __init__(self, parameter: Parameter, tensor: Tensor, held: Any) -> None:
        self._parameter = parameter
        self._recipe = recipe_of(tensor)
        self._device, self._nbytes = tensor.device, tensor.untyped_storage().nbytes()
        self._contents = fingerprint_of(tensor.untyped_storage())
        self.held = held

    def unpack(self) -> Tensor:
        """Return the view.

        Raises:
            StaleError: it is not held, and the parameter does not have the contents that it had in forward.
        """
        storage = self._parameter.untyped_storage()
        filled = (storage.device, storage.nbytes()) == (self._device, self._nbytes) and same_contents(
            fingerprint_of(storage), self._contents
        )
        note_unpack(self._parameter, filled=filled)
        if filled and type(self.held) is TapedHandle:
            self.held.leave_to_model()
        if not filled:
            if self.held is not None:
                return unpack(self.held)
            dtype, size = self._recipe[:2]
            raise StaleError(
                f"a parameter, of which autograd saved a {dtype} {list(size)}, must have in backward the "
                "contents that it had in forward, as in the steps before: its memory is there only while its "
                "block runs. Fill it with the same values before the backward of the block. The next "
                "step holds what autograd saves of it"
            )
        with recording_off:
            return make_view(storage, self._recipe)


class OuterHookHandle:
    """A handle in place of a saved tensor that the hooks around the region packed.

    Those hooks see the tensor as they would without the region, so that they can move it to the host.
    """

    def __init__(
        self, tensor: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        self._unpack = unpack
        with recording_off:
            self.packed = pack(detached_alias(tensor) if tensor.grad_fn is not None else tensor)

    def unpack(self) -> Tensor:
        """Return the tensor, which the hooks around the region unpack."""
        return self._unpack(self.packed)


class TapedHandle:
    """A handle of an observed step, whose unpacks and drop are recorded."""

    def __init__(self, handle: Any, saved: int, tape: StepTape) -> None:
        self._handle, self._saved, self._tape = handle, saved, tape

    def unpack(self) -> Tensor:
        """Return the tensor."""
        return self._tape.unpack(self._saved, self._unpack)

    def leave_to_model(self) -> None:
        """Record that the model has freed the memory, and filled it again."""
        self._tape.saved.leave_filled(self._saved)

    def _unpack(self) -> tuple[Tensor, bool]:
        handle = self._handle
        return handle.unpack(), not isinstance(handle, RecomputedHandle) or handle.is_cached()

    def __del__(self) -> None:
        self._tape.saved.note_drop(self._saved)


def taped(handle: Any, saved: int | None, tape: StepTape) -> Any:
    """Return `handle`, which packs saved tensor number `saved` of the step that `tape` records, taped."""
    tape.packed()
    if saved is not None and type(handle) is MovingWeightHandle:
        handle.held, saved = TapedHandle(handle.held, saved, tape), None
    return handle if saved is None else TapedHandle(handle, saved, tape)


# NOTE [ Compiled autograd ]
#
# Compiled autograd traces the unpack hook. Dynamo must see it as one opaque call: if Dynamo traced through
# it, every recomputed tensor would become an output of the graph, and a hook that Dynamo may not trace would
# break the graph at each unpack. So the call takes plain data only: a key, and what a fake tensor needs.
@torch.library.custom_op(
    "ac_client::unpack",
    mutates_args=(),
    schema="(SymInt key, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device) -> Tensor",
)
def _unpack_by_key(key: int, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    handle = handle_of_key(key)
    assert handle is not None
    tensor: Tensor = handle.unpack_writable()
    return tensor.resolve_conj().resolve_neg()


@_unpack_by_key.register_fake
def _(key: int, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


@torch.library.custom_op("ac_client::unpack_saved", mutates_args=())
def _unpack_saved(tensor: Tensor, counter: int) -> Tensor:
    check_counter(tensor, counter, "backward")
    return tensor.clone()  # compiled code may overwrite it


_unpack_saved.register_fake(lambda tensor, counter: torch.empty_like(tensor))


def unpack(handle: Any) -> Tensor:
    """Return the tensor behind `handle`; autograd calls this hook."""
    kind = type(handle)
    if torch.compiler.is_dynamo_compiling():
        if kind is RecomputedHandle:
            dtype, size, stride = handle.recipe[:3]
            return _unpack_by_key(handle.key, size, stride, dtype, handle.device)  # type: ignore[no-any-return]
        if kind is SavedHandle or kind is tuple:
            return _unpack_saved(*(handle if kind is tuple else (handle.tensor, handle.counter)))  # type: ignore[no-any-return]
    if kind is tuple:
        check_counter(handle[0], handle[1], "backward")
        return handle[0]  # type: ignore[no-any-return]
    if isinstance(handle, Tensor):
        return handle
    if private.peek_interpreter_stack() is None:
        return handle.unpack()  # type: ignore[no-any-return]
    with private.outside_of_transforms():  # gradients are batched, and what forward saved is not
        return handle.unpack()  # type: ignore[no-any-return]
