"""Carries a policy out: the dispatch mode that records unsaved ops, and the saved-tensor hooks.

See docs/memory-model.md for the rules, and NOTE [ What is tracked ] in nodes.py for what is held.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from ac_client.nodes import Node, Opaque, Ref, Source, Value
from ac_client.policies import Pushed, Stack, decider
from ac_client.recipes import Guard
from ac_client.replay import Graph, Kept, Log, Packed, suspended
from autoac.profiler.ops import (
    OpFacts,
    facts_of,
    has_storage,
    known_facts,
    outputs_of,
    updates_statistics,
    written_tensors,
)
from autoac.profiler.randomness import capture, generator_of
from autoac.profiler.storages import StorageTable


class _Active(threading.local):
    """The region that is open on this thread."""

    region: Region | None = None


active = _Active()

WORTH_PAUSING = 8  # saved ops in a row from which on taking the mode off and putting it back pays

_orders = itertools.count()  # forward order over all regions


class Region(TorchDispatchMode):
    """The mode of the outermost region; policies are pushed on it."""

    def __init__(self, log: Log | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policies: list[Pushed] = []
        self.log = log
        self.graph = Graph(log)
        self._asked: Stack = Stack(())
        self.tracked_writes = 0  # writes to what an unsaved op made or has read
        self._paused: list[tuple[weakref.ref[Tensor], int]] | None = None  # the mode is off
        self._origins: StorageTable[Value | weakref.ref[Source]] = StorageTable()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)

    @classmethod
    def is_infra_mode(cls) -> bool:
        # Else Dynamo would silently leave compiled submodules uncompiled (pytorch#164143).
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Dynamo is kept out below, once. torch's own way would wrap every call.
        return False

    def open(self) -> None:
        """Install mode and hooks."""
        self._hooks.__enter__()
        self.__enter__()  # type: ignore[no-untyped-call]
        active.region = self

    def close(self) -> None:
        """Take them away. What backward needs hangs on autograd's handles from now on."""
        self.resume()
        active.region = None
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(None, None, None)
        del self._hooks  # it holds our method, and so us
        self._renew_guards()
        self._origins.clear()

    def begin(self, policy: Pushed) -> None:
        """Let `policy` speak last."""
        self.policies.append(policy)
        self._asked = Stack(self.policies)

    def end(self) -> None:
        """Take the last policy away."""
        self.policies.pop()
        self._asked = Stack(self.policies)

    def _renew_guards(self) -> None:
        # Writes up to here were seen by the mode, and a counter moves only after the mode has returned.
        for guard in self._guards():
            guard.renew()

    def _guards(self) -> Iterator[Guard]:
        for origin in self._origins.values():
            if type(origin) is not Value and (source := origin()) is not None and source.guard is not None:
                yield source.guard

    def pause(self, ops: int) -> bool:
        """Run the next `ops` ops, all of them saved, without the mode; whether that is worth it.

        Nothing is recorded until `resume`. A write in place that happens all the same is noticed there.
        """
        depth = torch._C._len_torch_dispatch_stack()
        if (
            self._paused is not None
            or ops < WORTH_PAUSING
            or ops * 4 < len(self._origins.entries)
            or depth == 0
            or torch._C._get_dispatch_stack_at(depth - 1) is not self
        ):
            return False
        versions: list[tuple[weakref.ref[Tensor], int]] = []
        for origin in self._origins.values():
            if type(origin) is Value:
                tensor = origin.shown_by()
                if tensor is None or tensor.is_inference():
                    return False  # only a view is left of it: its counter cannot be reached
                versions.append((origin.shown_by, tensor._version))
        self._renew_guards()
        self._paused = versions
        self.__exit__(None, None, None)
        return True

    def resume(self) -> None:
        """Record again. What was written meanwhile counts as written by an op that is saved."""
        versions, self._paused = self._paused, None
        if versions is None:
            return
        self.__enter__()  # type: ignore[no-untyped-call]
        for ref, version in versions:
            tensor = ref()
            if tensor is not None and tensor._version != version:
                self._origins.drop(tensor)
        for guard in self._guards():
            guard.settle()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        facts = known_facts.get(id(func)) or facts_of(func)
        if facts.view or suspended.depth:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.log is not None:
            self.log.add("compute", facts.name)
        asked = self._asked
        if not asked.after:
            saved = asked.all_saved or asked.saves(func, facts, args, kwargs)
            if not saved and facts.in_place and not self._rewrites_tracked(facts, args, kwargs):
                saved = True  # written from outside, it is held from outside
            if saved:
                if facts.mutates:
                    self._before_write(written_tensors(facts, args, kwargs or {}), forget=True)
                return func(*args, **kwargs) if kwargs else func(*args)
        return self._run_unsaved(func, facts, args, kwargs)

    def _run_unsaved(
        self, func: Any, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> Any:
        """Run an op that may be run again, and make a node of it."""
        given = args
        if facts.statistics and updates_statistics(facts, args, kwargs or {}):
            # Run again without them, so that they move once (pytorch#96136).
            given = [None if i in facts.statistics else arg for i, arg in enumerate(args)]
        reads: dict[Value, None] = {}
        flat = self._arguments(given, reads)
        named = (
            dict(zip(kwargs, self._arguments(kwargs.values(), reads), strict=True)) if kwargs else _NO_KWARGS
        )
        random = None
        if facts.random and facts.draws(args, kwargs or {}):
            random = capture(generator_of(args, kwargs or {}))
        node = Node(next(_orders), facts.name, func, flat, named, tuple(reads), random)
        written: list[Tensor] = []
        rewritten: list[tuple[Value, Tensor]] = []
        if facts.mutates:
            written = list(written_tensors(facts, args, kwargs or {}))
            for tensor in written:
                origin = self._origins.get(tensor) if has_storage(tensor) else None
                if type(origin) is Value and all(origin is not old for old, _ in rewritten):
                    rewritten.append((origin, tensor))
            node.writes_sources = len(rewritten) < len(written) and given is args
            self._before_write(written, forget=False)
        out = func(*args, **kwargs) if kwargs else func(*args)
        if self._asked.after and self._saves_after(func, facts, out, args, kwargs, rewritten):
            for tensor in written:
                if has_storage(tensor):
                    self._origins.drop(tensor)
            return out
        if rewritten:
            rewrites = []
            for old, tensor in rewritten:
                new = Value(node, tensor)
                rewrites.append((old, weakref.ref(new)))
                self._origins.set(tensor, new)
            node.rewrites = tuple(rewrites)
        if type(out) is Tensor:
            node.outs = (self._made(out, node, written),)
        else:
            node.outs = tuple(self._made(tensor, node, written) for tensor in outputs_of(out))
        return out

    def _made(self, tensor: Tensor, node: Node, written: Sequence[Tensor]) -> weakref.ref[Value] | None:
        """The Value of an output; None if it is no new storage. Arguments are in the table already."""
        if tensor.layout is not _STRIDED or (type(tensor) is not Tensor and not has_storage(tensor)):
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self._origins.entries:
            return None
        if written and any(has_storage(old) and old.untyped_storage() is storage for old in written):
            return None  # from outside: it was forgotten when it was written
        value = Value(node, tensor)
        self._origins.put(storage, value)
        return weakref.ref(value)

    def _saves_after(
        self,
        func: Any,
        facts: OpFacts,
        out: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        rewritten: list[tuple[Value, Tensor]],
    ) -> bool:
        if self._asked.saves(func, facts, args, kwargs, out):
            return True
        return facts.in_place and not rewritten

    def _arguments(self, args: Iterable[Any], reads: dict[Value, None]) -> tuple[Any, ...]:
        """`args` with what a node holds in place of their tensors; adds the Values among them to `reads`."""
        held: list[Any] = []
        entries = self._origins.entries
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter or isinstance(arg, Tensor):
                if arg.layout is not _STRIDED or (
                    kind is not Tensor and kind is not Parameter and not has_storage(arg)
                ):
                    held.append(Opaque(arg.detach()))
                    continue
                storage = arg.untyped_storage()
                entry = entries.get(storage._cdata)
                origin = entry[1] if entry is not None else None
                if type(origin) is Value:
                    reads[origin] = None
                    held.append(Ref(origin, origin.recipe_of(arg)))
                    continue
                source = origin() if origin is not None else None
                if source is None:
                    source = Source(arg)
                    self._origins.put(storage, weakref.ref(source))
                held.append(source.hold(arg))
            elif (kind is list or kind is tuple) and any(isinstance(item, Tensor) for item in arg):
                held.append(kind(self._arguments(arg, reads)))
            else:
                held.append(arg)
        return tuple(held)

    def _rewrites_tracked(self, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any] | None) -> bool:
        written = [t for t in written_tensors(facts, args, kwargs or {}) if has_storage(t)]
        return any(type(self._origins.get(t)) is Value for t in written)

    def _before_write(self, tensors: Iterable[Tensor], *, forget: bool) -> None:
        """A storage is about to be written: what unsaved ops have read of it is copied first.

        With `forget` the new version is not tracked: it is held from outside, as its writer is saved.
        """
        for tensor in tensors:
            if not has_storage(tensor):
                continue
            origin = self._origins.get(tensor)
            if origin is None:
                continue
            self.tracked_writes += 1
            if type(origin) is not Value:
                source = origin()
                if source is not None:
                    source.keep_copy()
                self._origins.drop(tensor)
            elif forget:
                self._origins.drop(tensor)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd is to hold in place of `tensor`."""
        kind = type(tensor)
        if tensor.layout is not _STRIDED or (
            kind is not Tensor and kind is not Parameter and not has_storage(tensor)
        ):
            return tensor.detach() if tensor.grad_fn is not None else tensor
        entry = self._origins.entries.get(tensor.untyped_storage()._cdata)
        if entry is not None and type(value := entry[1]) is Value:
            return Packed(value, value.recipe_of(tensor), self.graph)
        return Kept(tensor)


_STRIDED = torch.strided
_NO_KWARGS: dict[str, Any] = {}

# Dynamo is not to look into what the mode does when a compiled submodule runs under it.
_frames = torch._C._dynamo.eval_frame
_frames.set_code_exec_strategy(
    Region.__torch_dispatch__.__code__,
    _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP),
)


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    tensor: Tensor = packed.unpack()
    return tensor


class save_recompute_policy:
    """Run what is inside under `policy`: which saved tensors are kept, which are made again in backward.

    Regions nest: the outermost installs the runtime, inner ones only push their policy, and the stack
    resolves from the outermost to the innermost (PREFER_SAVE to begin with; a MUST beats a PREFER; two
    different MUSTs are an error).

    Args:
        policy: "recompute_all"; "must_save_all"; a list of ops to save; a function
            `(ctx, out, op, *args, **kwargs) -> CheckpointPolicy | bool`, asked after the op has run, with
            its output.

    Raises:
        TypeError, ValueError: `policy` is none of these.
        PolicyConflict: from an op inside, on which two policies insist differently.
    """

    def __init__(self, policy: Any, *, log: Log | None = None) -> None:
        self._decider = decider(policy)
        self._log = log
        self._outermost = False

    def __enter__(self) -> None:
        caller = sys._getframe(1)
        region = active.region
        self._outermost = region is None
        if region is None:
            region = Region(self._log)
            region.open()
        region.begin(Pushed(self._decider, caller.f_code.co_filename, caller.f_lineno))
        self._region = region

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        region = self._region
        del self._region
        region.end()
        if self._outermost:
            region.close()
