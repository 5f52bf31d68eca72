"""Carry out the moves of a plan in one region: NOTE [ Moves ] in planner/problem/moves.py.

A moved op is recorded as a node that reads nothing and whose run is the copy from the host (`MovedNode`). So
uses, bursts and handles are those of a recompute. This file adds when the storage leaves the device and is
freed, and the fetch before the first use: at the first unpack of a tensor that the op `fetch` of the plan
made.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from autoac.tape.runtime.cursor import Cursor
from autoac.tape.runtime.moves.copies import Departure, HostCopy
from autoac.tape.runtime.nodes import MovedNode, NodeVersion
from autoac.tape.runtime.replay import Pass, RegionGraph, recompute
from autoac.tape.runtime.tracked_storages import TrackedStorages
from autoac.tape.torch_facts.op_facts import OpFacts
from autoac.tape.torch_facts.op_signature import outputs_of
from autoac.tape.torch_facts.storage_table import StorageTable, has_storage
from autoac.tape.torch_facts.streams import streams_seen


class FetchTrigger:
    """The moved versions to fetch when backward first unpacks what one op made."""

    def __init__(self, graph: RegionGraph) -> None:
        self._graph = graph
        self._versions: list[weakref.ref[NodeVersion]] = []  # in forward order
        self._fired_in = -1  # the pass

    def add(self, version: weakref.ref[NodeVersion]) -> None:
        """Fetch `version` too."""
        self._versions.append(version)

    def unpacked(self) -> None:
        """Note that backward unpacks what the op made."""
        with self._graph.lock:
            running, consumes = self._graph.current_pass()
            if consumes:
                self.fetch(running)

    def fetch(self, running: Pass) -> None:
        """Fetch once in each pass, outputs of the last op first. The caller holds the lock of the graph."""
        if self._fired_in == running.first_task or streams_seen.several:
            return
        self._fired_in = running.first_task
        for ref in reversed(self._versions):
            version = ref()
            if (
                version is not None
                and type(version.node) is MovedNode
                and version.serial not in running.cache
                and version.node.order not in running.executed
                and running.remaining_uses(version) > 0
            ):
                recompute(version, running, self._graph)


class RegionMoves:
    """The moves of the plan that one region follows."""

    def __init__(self, cursor: Cursor, storages: TrackedStorages, graph: RegionGraph) -> None:
        self._cursor, self._storages, self._graph = cursor, storages, graph
        self._departures: dict[int, Departure] = {}  # by address of the storage
        self._next_free = math.inf
        self._triggers: dict[int, FetchTrigger] = {}  # by position of the op
        self._made_by: StorageTable[FetchTrigger] = StorageTable()
        self._fetches: list[tuple[int, weakref.ref[NodeVersion]]] = []  # from the end of forward on

    def free_due(self) -> None:
        """Free what is to be freed before the op that the cursor is at."""
        if self._cursor.position >= self._next_free:
            self._finish([d for d in self._departures.values() if d.free <= self._cursor.position])

    def before_write(self, written: Iterable[Tensor]) -> None:
        """Free those of `written` that are being copied out, since their copies must end before the write."""
        if self._departures:
            storages = {tensor.untyped_storage()._cdata for tensor in written if has_storage(tensor)}
            self._finish([d for address, d in self._departures.items() if address in storages])

    def close(self) -> None:
        """Free what is still to be freed: forward is over."""
        self._finish(list(self._departures.values()))
        for position, ref in self._fetches:
            self._trigger(position).add(ref)
        self._fetches.clear()
        self._made_by.clear()

    def leave(self, facts: OpFacts, out: Any, stay: Sequence[Tensor], stream: int) -> None:
        """Copy the outputs of the op that the cursor is at to the host, for backward to fetch.

        Args:
            facts: of the op.
            out: what it returned.
            stay: arguments that it wrote.
            stream: that it ran on.
        """
        move = self._cursor.move
        assert move is not None
        node = MovedNode(facts.name, stream)
        refs: list[weakref.ref[NodeVersion] | None] = []
        copies: list[HostCopy | None] = []
        for tensor in outputs_of(out):
            ref = self._storages.output(tensor, node, stay) if tensor.numel() else None
            refs.append(ref)
            if ref is None:
                copies.append(None)
                continue
            version = ref()
            assert version is not None
            version.raw = True  # backward caches the bytes of the storage
            departure = Departure(tensor, facts.name, move.free)
            self._departures[departure.storage._cdata] = departure
            self._next_free = min(self._next_free, move.free)
            copies.append(departure.copy)
            if move.fetch is not None:
                self._fetches.append((move.fetch, ref))
            if self._storages.hold is not None:
                self._storages.hold(tensor)
        node.outs, node.copies = tuple(refs), tuple(copies)

    def mark(self, out: Any) -> None:
        """If the op that the cursor is at triggers fetches, have the unpack of its outputs do them."""
        if self._cursor.is_trigger:
            trigger = self._trigger(self._cursor.position)
            for tensor in outputs_of(out):
                if has_storage(tensor):
                    self._made_by.set(tensor, trigger)

    def trigger_of(self, tensor: Tensor) -> FetchTrigger | None:
        """Return what the unpack of `tensor`, which autograd saves now, fetches."""
        return self._made_by.get(tensor) if has_storage(tensor) else None

    def _trigger(self, position: int) -> FetchTrigger:
        return self._triggers.setdefault(position, FetchTrigger(self._graph))

    def _finish(self, departures: Sequence[Departure]) -> None:
        for departure in departures:
            del self._departures[departure.storage._cdata]
            departure.finish()
        self._next_free = min((d.free for d in self._departures.values()), default=math.inf)
