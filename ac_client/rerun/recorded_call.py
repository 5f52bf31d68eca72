"""Record a call of a module as one op in forward, and run the module again when backward needs its tensors.

Theory of operation
===================

While the call runs, the dispatch mode is paused, and the region's pack hook asks `RecordedCall.pack`. It
gives autograd a handle on a NodeVersion of one CallNode for each tensor that the call makes, and remembers
the position of the pack. In backward the module's forward runs again under hooks of its own: the pack at the
same position captures the tensor. Once all needed tensors are captured, an exception ends the rerun.

The rerun follows rule i of NOTE [ Rules of the schedule ] in planner/memory/schedule.py. It computes the same
numbers as forward because everything that it reads is put back as it was when the call began:

- tensor arguments, as stand-ins like those of any recorded op; other arguments are immutable or copied;
- attributes of the module and its submodules, which are set back afterwards;
- generators, autocast, global flags (ambient_state.py).

Parameters and buffers must not have been written: their version counters are compared. The shapes of the
packed tensors must be those of forward. call_audit.py says which calls are recorded in this way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ac_client.runtime.nodes import CallNode, NodeVersion, UnsupportedTensor
from ac_client.runtime.region import Region
from ac_client.runtime.replay import recording_off
from ac_client.runtime.saved_handles import RecomputedHandle, handle_for
from ac_client.runtime.view_recipes import Recipe, matches_recipe, recipe_of
from ac_client.runtime.write_guard import StaleError, version_counter
from autoac.profiler.torch_facts.private import tree_leaves
from autoac.profiler.torch_facts.storage_table import has_storage
from autoac.profiler.unseen.ambient_state import AmbientState
from autoac.profiler.unseen.call_arguments import CallArguments

_STRIDED = torch.strided


@dataclass(frozen=True, slots=True)
class CallSite:
    """A position in forward at which a module is called, and at which its later calls may become one op.

    CallAudit returns one after it has watched the first call.
    """

    path: str
    end: int  # position in the route after the call
    modules: tuple[weakref.ref[nn.Module], ...]  # the module and its submodules
    hooks: int  # how many forward hooks they have
    saved: tuple[bool, ...]  # True for each leaf of the output that the plan saves


def arguments_of(args: Sequence[Any], kwargs: dict[str, Any]) -> CallArguments:
    """Return the arguments of a call that is recorded as one op.

    Raises:
        UnsupportedTensor: an argument is neither a plain tensor nor immutable nor a container of these.
    """
    arguments = CallArguments(args, kwargs)
    if arguments.wrapped or arguments.opaque:
        raise UnsupportedTensor
    return arguments


class _AllCaptured(BaseException):
    """End a rerun. Not an Exception, which code of the module may catch."""


class RecordedCall:
    """One call of a module, recorded as one op. See the theory of operation above."""

    __slots__ = (
        "_ambient",
        "_arguments",
        "_graph",
        "_key",
        "_last_pack",
        "_module",
        "_namespaces",
        "_out_slots",
        "_outs",
        "_outside",
        "_packs",
        "_region",
        "_site",
        "_slots",
        "_tensors",
        "node",
    )

    def __init__(
        self, site: CallSite, region: Region, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Begin to record; the region is paused.

        Raises:
            UnsupportedTensor: the call cannot be recorded as one op.
        """
        self._site = site
        self._region: Region | None = region
        self._key, self._graph = region.storages.key, region.graph
        self._module = module
        self._arguments = arguments_of(args, kwargs)
        tensors = self._arguments.tensors
        self._arguments.release()
        self._namespaces, self._tensors = _state_of(site)
        reads: dict[NodeVersion, None] = {}
        stand_ins = region.storages.arguments(tensors, reads)
        self._outside = {storage for _, _, storage in self._tensors}
        self._outside.update(tensor.untyped_storage()._cdata for tensor in tensors)
        self._ambient = AmbientState(tensors[0].device if tensors else torch.device("cpu"))
        self._packs: list[tuple[int, Recipe] | None] = []  # slot and recipe; None: a tensor from outside
        self._slots: dict[int, int] = {}  # by serial of the version
        self._outs: list[weakref.ref[NodeVersion]] = []
        self._last_pack: dict[int, int] = {}  # by slot: position of its last pack
        self._out_slots: dict[int, int] = {}  # by slot: leaf of the output
        self.node = CallNode(f"the call of {site.path}", stand_ins, tuple(reads), self.run_again)
        region.set_pack_in_call(self.pack)

    def pack(self, tensor: Tensor) -> RecomputedHandle | None:
        """Return the handle for `tensor` if the call made it, else None."""
        packs = self._packs
        kind = type(tensor)
        if (kind is not Tensor and kind is not Parameter) or tensor.layout is not _STRIDED:
            packs.append(None)
            return None
        entries = tensor.untyped_storage().__dict__
        version = entries.get(self._key)
        if version is None and has_storage(tensor) and tensor.untyped_storage()._cdata not in self._outside:
            # Not in the region's table, which is for tensors that outlive the call.
            version = entries[self._key] = self._add(tensor)
        if type(version) is not NodeVersion or version.node is not self.node:
            packs.append(None)
            return None
        slot, recipe = self._slots[version.serial], recipe_of(tensor)
        self._last_pack[slot] = len(packs)
        packs.append((slot, recipe))
        return handle_for(tensor, version, recipe, self._graph)

    def _add(self, tensor: Tensor) -> NodeVersion:
        version = NodeVersion(self.node, tensor, raw=True)
        self._slots[version.serial] = len(self._outs)
        self._outs.append(weakref.ref(version))
        return version

    def end(self, output: Any) -> None:
        """End the recording; `output` is what the call returned, or None if it raised."""
        region, node = self._region, self.node
        assert region is not None
        region.set_pack_in_call(None)
        region.resume()
        storages = region.storages
        leaves = tree_leaves(output)
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not has_storage(leaf):
                continue
            storage = leaf.untyped_storage()
            version = storage.__dict__.get(storages.key)
            saved = i >= len(self._site.saved) or self._site.saved[i]
            if version is None and storage._cdata not in self._outside and not saved:
                version = self._add(leaf)
            if type(version) is NodeVersion and version.node is node:
                storages.enter(storage, version)
                version.tensor_ref, version.recipe = weakref.ref(leaf), None
                version.first_counter = version_counter(leaf)
                self._out_slots.setdefault(self._slots[version.serial], i)
        self._region = None
        del self._graph  # backward needs neither graph nor region
        del self.node  # it refers to this object: a cycle
        node.outs = tuple(self._outs)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and (i >= len(self._site.saved) or self._site.saved[i]):
                storages.pin(leaf)

    def run_again(self, tensors: list[Any], needed: list[bool]) -> list[Tensor | None]:
        """Run the module again on `tensors`; return the contents of the slots that are `needed`.

        Raises:
            StaleError: a parameter or buffer was written after forward.
            RuntimeError: the module did not do what it did in forward.
        """
        self._check_unwritten()
        args, kwargs = self._arguments.with_tensors(tensors)
        rerun = _Rerun(self, needed)
        changed = self._set_attributes()
        recording_off.depth += 1
        recording_off.reruns += 1
        try:
            with (
                self._ambient.restored(),
                torch.autograd.graph.saved_tensors_hooks(rerun.pack, rerun.unpack),
            ):
                rerun.run(self._module, args, kwargs)
        finally:
            recording_off.depth -= 1
            recording_off.reruns -= 1
            for namespace, present in changed:
                namespace.clear()
                namespace.update(present)
        return rerun.contents()

    def _check_unwritten(self) -> None:
        for tensor, counter, storage in self._tensors:
            if tensor._version != counter or tensor.untyped_storage()._cdata != storage:
                raise StaleError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: a {tensor.dtype} {list(tensor.shape)} of {self._site.path}, which backward "
                    "runs again, was written after forward. Write it after backward"
                )

    def _set_attributes(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Set the attributes to what they were; return their present values, to be put back."""
        present = []
        for namespace, before in self._namespaces:
            present.append((namespace, namespace.copy()))
            if len(namespace) != len(before) or not all(map(is_, namespace.values(), before.values())):
                namespace.clear()
                namespace.update(before)
        return present


class _Rerun:
    """Runs the module of a recorded call again in backward, and captures the tensors that backward needs."""

    __slots__ = (
        "_captured",
        "_counters",
        "_needed",
        "_out_slots",
        "_packs",
        "_path",
        "_position",
        "_stop_at",
    )

    def __init__(self, call: RecordedCall, needed: list[bool]) -> None:
        self._packs, self._out_slots = call._packs, call._out_slots
        self._path = call._site.path
        self._needed = needed
        self._captured: list[Tensor | None] = [None] * len(needed)
        self._counters: list[int] = [0] * len(needed)
        self._position = 0
        never = len(call._packs)
        self._stop_at = max(call._last_pack.get(slot, never) for slot, wanted in enumerate(needed) if wanted)

    def run(self, module: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Run the module until all needed tensors are captured."""
        try:
            output = module.forward(*args, **kwargs)
        except _AllCaptured:
            return
        if self._position != len(self._packs):
            raise self._mismatch(f"{self._position} tensors were saved for backward", len(self._packs))
        leaves = tree_leaves(output)
        for slot, leaf in self._out_slots.items():
            if self._needed[slot] and self._captured[slot] is None:
                self._capture(slot, leaves[leaf])

    def pack(self, tensor: Tensor) -> None:
        """Capture the tensor if it is needed."""
        i = self._position
        self._position += 1
        if i >= len(self._packs):
            raise self._mismatch("more tensors were saved for backward", len(self._packs))
        expected = self._packs[i]
        if expected is not None:
            slot, recipe = expected
            if not matches_recipe(tensor, recipe):
                raise self._mismatch(f"saved tensor {i} is {tensor.dtype} {list(tensor.shape)}", recipe[:2])
            if self._needed[slot] and self._captured[slot] is None:
                self._capture(slot, tensor)
        if i == self._stop_at:
            raise _AllCaptured

    def unpack(self, _packed: None) -> Tensor:
        """Refuse a backward inside of the rerun, which had none in forward."""
        raise self._mismatch("a backward ran inside", "none")

    def _capture(self, slot: int, tensor: Tensor) -> None:
        self._captured[slot] = captured = tensor.detach()
        self._counters[slot] = captured._version

    def contents(self) -> list[Tensor | None]:
        """Return the captured tensors.

        Raises:
            StaleError: the module wrote to one of them after autograd had saved it.
        """
        for tensor, counter in zip(self._captured, self._counters, strict=True):
            if tensor is not None and tensor._version != counter:
                raise StaleError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: {self._path} writes to a tensor [{tensor.dtype} {list(tensor.shape)}] after "
                    "autograd has saved it. Write to a clone() of the tensor there"
                )
        return self._captured

    def _mismatch(self, found: str, expected: object) -> RuntimeError:
        return RuntimeError(
            f"{self._path} must do in backward what it did in forward, got a difference: {found}; expected "
            f"{expected}. It depends on something besides its arguments, attributes and torch's generators. "
            'Keep it from running again with ac_client.pin(module, "must_save")'
        )


def _state_of(
    site: CallSite,
) -> tuple[list[tuple[dict[str, Any], dict[str, Any]]], list[tuple[Tensor, int, int]]]:
    """Return the attributes of the modules, with copies, and their parameters and buffers, with versions.

    Raises:
        UnsupportedTensor: a module is gone or has another hook.
    """
    namespaces, tensors, hooks = [], [], 0
    for ref in site.modules:
        module = ref()
        if module is None:
            raise UnsupportedTensor
        attributes = module.__dict__
        hooks += len(attributes["_forward_hooks"]) + len(attributes["_forward_pre_hooks"])
        namespaces.append((attributes, attributes.copy()))
        for kind in ("_parameters", "_buffers"):
            named = attributes[kind]
            if named:
                namespaces.append((named, named.copy()))
                tensors += [
                    (tensor, tensor._version, tensor.untyped_storage()._cdata)
                    for tensor in named.values()
                    if tensor is not None
                ]
    if hooks != site.hooks:
        raise UnsupportedTensor
    return namespaces, tensors
