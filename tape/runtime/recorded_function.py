"""Record a call of a `torch.autograd.Function` in a region as one op, which backward runs again as a whole.

tape/unseen/function_calls.py says what a call makes and whether it may run again. Here the call's slots,
the storages that it made and then saved for backward or returned, become NodeVersions of one FunctionNode. A
call that is saved has no node, and its outputs are from outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoac.tape.runtime.cursor import UseGroup
from autoac.tape.runtime.nested_policies import Grouping
from autoac.tape.runtime.nodes import (
    FunctionNode,
    NodeVersion,
    Source,
    SourceView,
    UnsupportedTensor,
    next_order,
    pin_version,
)
from autoac.tape.runtime.replay import RegionGraph
from autoac.tape.runtime.saved_handles import SavedHandle, handle_for
from autoac.tape.runtime.tracked_storages import TrackedStorages
from autoac.tape.runtime.write_guard import version_counter
from autoac.tape.torch_facts.op_facts import OpFacts
from autoac.tape.torch_facts.op_signature import Args, Kwargs
from autoac.tape.torch_facts.view_recipes import recipe_of
from autoac.tape.unseen.function_calls import FunctionCall


class RecordedFunction:
    """One call of a Function, while it runs.

    Attributes:
        call: the facts about the call that the profiler collects, too.
        saved: True if the call is saved. Final once `forward` is over.
        is_known: True if it was known beforehand that the call is saved: then nothing is noted of it.
    """

    def __init__(
        self,
        call: FunctionCall,
        storages: TrackedStorages,
        graph: RegionGraph,
        grouping: Grouping | None,
        stream: int,
        *,
        saved: bool,
    ) -> None:
        self.call = call
        self._storages, self._graph, self._grouping = storages, graph, grouping
        self.saved = saved or bool(call.reason) or call.rerun is None
        self._node: FunctionNode | None = None
        self._later_runs: list[tuple[UseGroup, FunctionNode]] = []
        self._versions: list[NodeVersion] = []  # by slot
        self._copies: dict[int, torch.UntypedStorage] | None = None
        tensors = call.arguments.tensors
        if not self.saved:
            groups: Sequence[UseGroup] = ()
            if grouping is not None:
                groups = grouping.use_groups
                storages.position = groups[0].latest if groups else grouping.position
            try:
                self._node = self._make_node(stream)
                for group in groups[1:]:
                    storages.position = group.latest
                    self._later_runs.append((group, self._make_node(stream)))
            except UnsupportedTensor:
                self.saved = True
        self.is_known = self.saved and not call.examined
        if call.examined:
            self._copies = storages.copies_of_sources(tensors)
            return
        if not self.saved and call.written:
            # Not only what the call writes: a loop that keeps such state also moves it on before backward.
            state = [t for t in call.small if not t.requires_grad]
            storages.before_write([t for t in state if not storages.is_recorded(t)], untrack=True)
        storages.before_silent_write([t for t in call.written if call.unseen or storages.is_recorded(t)])

    @property
    def order(self) -> int | None:
        """Return the order of the node of the call; None if the call is saved."""
        return self._node.order if self._node is not None else None

    def _make_node(self, stream: int) -> FunctionNode:
        reads: dict[NodeVersion, None] = {}
        args = self._storages.arguments(self.call.arguments.tensors, reads)
        assert self.call.rerun is not None
        return FunctionNode(
            next_order(), self.call.facts.name, self.call.rerun, args, {}, tuple(reads), None, stream
        )

    def note_op(self, facts: OpFacts, args: Args, kwargs: Kwargs) -> None:
        """Note an op of the call. If it shows that the call must be saved, hold nothing to rerun it."""
        self.call.note_op(facts, args, kwargs)
        if self.call.unseen and self._copies is not None:
            self._storages.after_unseen_write(self.call.written, self._copies, shown=False)
        if self.call.reason and self._node is not None:
            for node in (self._node, *(node for _, node in self._later_runs)):
                for arg in node.args:
                    if type(arg) is SourceView:
                        arg.source.tensors.pop()  # the latest: no op was recorded since the call began
            self._node, self.saved = None, True

    def pack(self, tensor: Tensor) -> Any:
        """Return the handle for what the call saves; None for a tensor that the call did not make."""
        if not self.call.is_forward_over(2):
            return SavedHandle(tensor, self._graph)  # a graph inside of forward
        self._end_forward()
        if self.is_known:
            return None
        slot = self.call.saved_slot(tensor)
        if slot is None or self.saved:
            return None
        version = self._version(slot, tensor)
        if version.later_runs and self._grouping is not None:
            version = version.serving(self._grouping.position)
        return handle_for(tensor, version, recipe_of(tensor), self._graph)

    def _end_forward(self) -> None:
        copies, self._copies = self._copies, None
        if copies is not None:
            self._storages.after_unseen_write(self.call.written, copies, shown=not self.call.unseen)
        self.saved = self.saved or bool(self.call.reason) or not self._writes_copies(copies or {})

    def _writes_copies(self, copies: Mapping[int, torch.UntypedStorage]) -> bool:
        """Have a rerun write copies; return False if the call writes what a recorded op has made.

        Such an op runs again, too, and what it makes may be needed as it was before this call.

        Args:
            copies: of the sources from before the first call of a kind, by address.
        """
        if self._node is None or not self.call.written:
            return True
        written = {tensor.untyped_storage()._cdata for tensor in self.call.written}
        for tensor, arg in zip(self.call.arguments.tensors, self._node.args, strict=True):
            source = arg.source if type(arg) is SourceView else arg
            address = tensor.untyped_storage()._cdata
            small = any(address == other.untyped_storage()._cdata for other in self.call.small)
            if type(source) is Source and small and address in copies:
                source.keep_copy(copies[address])
                self._storages.drop(tensor)
            if address in written and (type(source) is not Source or source.counter is not None):
                return False
        for node in (self._node, *(node for _, node in self._later_runs)):
            node.writes_sources = True
        return True

    def _version(self, slot: int, tensor: Tensor) -> NodeVersion:
        if slot == len(self._versions):
            assert self._node is not None
            version = NodeVersion(self._node, tensor, raw=True)
            version.first_counter = version_counter(tensor)
            for group, node in self._later_runs:
                version.add_later_run(group, node, tensor)
            self._versions.append(version)
            self._storages.enter(tensor.untyped_storage(), version)
            if self._storages.cuts is not None:
                self._storages.cuts.note_made(tensor.untyped_storage(), version.serial)
            self._storages.note_contents(version, tensor)
            if self._storages.hold is not None:
                self._storages.hold(tensor)
        return self._versions[slot]

    def end(self, out: Any) -> None:
        """Note what the call returned."""
        self._end_forward()
        if self.is_known:
            self.call.finish()
            return
        slots = list(self.call.returned_slots(out))
        if not self.saved and self._node is not None:
            for slot, tensor in slots:
                version = self._version(slot, tensor)
                version.tensor_ref, version.recipe = weakref.ref(tensor), None
                version.first_counter = version_counter(tensor)
            self._node.outs = tuple(map(weakref.ref, self._versions))
            for i, (_, node) in enumerate(self._later_runs):
                node.outs = tuple(weakref.ref(version.runs[-1 - i]) for version in self._versions)
        contents = self.call.examine()
        if self.call.reason and not self.saved:  # its second run showed that it must not run again
            for version, tensor in zip(self._versions, contents, strict=True):
                for run in version.runs:
                    pin_version(run, tensor, next_order())
                self._storages.drop(tensor)
        self.call.finish()
