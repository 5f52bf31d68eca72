"""Carries a policy out: the dispatch mode that records unsaved ops, and the saved-tensor hooks.

See docs/memory-model.md for the rules, and NOTE [ What is tracked ] in nodes.py for what is held.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from ac_client.nodes import Node, Source, Value, as_arguments
from ac_client.policies import SAVES, Decider, decider, resolve
from ac_client.recipes import recipe_of
from ac_client.replay import Graph, Kept, Log, Packed, suspended
from autoac.profiler.ops import (
    OpFacts,
    facts_of,
    has_storage,
    outputs_of,
    tensors_in,
    updates_statistics,
    written_tensors,
)
from autoac.profiler.randomness import capture, generator_of
from autoac.profiler.storages import StorageTable


class _Active(threading.local):
    """The region that is open on this thread."""

    region: Region | None = None


active = _Active()

_orders = itertools.count()  # forward order over all regions


class Region(TorchDispatchMode):
    """The mode of the outermost region; policies are pushed on it."""

    def __init__(self, log: Log | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policies: list[Decider] = []
        self.log = log
        self.graph = Graph(log)
        self._origins: StorageTable[Value | Source] = StorageTable()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)

    @classmethod
    def is_infra_mode(cls) -> bool:
        # Else Dynamo would silently leave compiled submodules uncompiled (pytorch#164143).
        return True

    def open(self) -> None:
        """Install mode and hooks."""
        self._hooks.__enter__()
        self.__enter__()  # type: ignore[no-untyped-call]
        active.region = self

    def close(self) -> None:
        """Take them away. What backward needs hangs on autograd's handles from now on."""
        active.region = None
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(None, None, None)
        del self._hooks  # it holds our method, and so us
        self._renew_guards()
        self._origins.clear()

    def _renew_guards(self) -> None:
        # Writes up to here were seen by the mode, and a counter moves only after the mode has returned.
        for origin in self._origins.values():
            if type(origin) is Source and origin.guard is not None:
                origin.guard.renew()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        if facts.view or suspended.depth:
            return func(*args, **kwargs)
        word = resolve(self.policies, func, facts.name, args, kwargs)
        saved = word in SAVES or (facts.must_save != "" and word is not CheckpointPolicy.MUST_RECOMPUTE)
        if not saved and facts.in_place and not self._rewrites_tracked(facts, args, kwargs):
            saved = True  # written from outside, it is held from outside
        if self.log is not None:
            self.log.add("compute", facts.name)
        if saved:
            if facts.mutates:
                self._before_write(written_tensors(facts, args, kwargs), forget=True)
            return func(*args, **kwargs)
        return self._run_unsaved(func, facts, args, kwargs)

    def _run_unsaved(self, func: Any, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        written = list(written_tensors(facts, args, kwargs)) if facts.mutates else []
        given = args
        if updates_statistics(facts, args, kwargs):
            # Run again without them, so that they move once (pytorch#96136).
            given = [None if i in facts.statistics else arg for i, arg in enumerate(args)]
        flat, named, reads = as_arguments(given, kwargs, self._origin_of)
        random = capture(generator_of(args, kwargs)) if facts.draws(args, kwargs) else None
        node = Node(next(_orders), facts.name, func, flat, named, reads, random)
        rewritten: list[tuple[Value, Tensor]] = []
        for tensor in written:
            origin = self._origins.get(tensor) if has_storage(tensor) else None
            if type(origin) is Value and all(origin is not old for old, _ in rewritten):
                rewritten.append((origin, tensor))
        if written:
            node.writes_sources = len(rewritten) < len(written) and given is args
            self._before_write(written, forget=False)
        out = func(*args, **kwargs)
        for old, tensor in rewritten:
            new = Value(node)
            node.rewrites.append((old, weakref.ref(new)))
            self._origins.set(tensor, new)
        inputs: set[int] | None = None
        for tensor in outputs_of(out):
            ref = None
            if has_storage(tensor) and self._origins.get(tensor) is None:
                if inputs is None:
                    inputs = {t.untyped_storage()._cdata for t in tensors_in(args, kwargs) if has_storage(t)}
                if tensor.untyped_storage()._cdata not in inputs:
                    value = Value(node)
                    self._origins.set(tensor, value)
                    ref = weakref.ref(value)
            node.outs.append(ref)
        return out

    def _rewrites_tracked(self, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        written = [t for t in written_tensors(facts, args, kwargs) if has_storage(t)]
        return any(type(self._origins.get(t)) is Value for t in written)

    def _origin_of(self, tensor: Tensor) -> Value | Source | None:
        """What holds the storage of an argument; None if storage and recipe do not describe it."""
        if not has_storage(tensor):
            return None
        origin = self._origins.get(tensor)
        if origin is None:
            origin = Source(tensor)
            self._origins.set(tensor, origin)
        return origin

    def _before_write(self, tensors: Any, *, forget: bool) -> None:
        """A storage is about to be written: what unsaved ops have read of it is copied first.

        With `forget` the new version is not tracked: it is held from outside, as its writer is saved.
        """
        for tensor in tensors:
            if not has_storage(tensor):
                continue
            origin = self._origins.get(tensor)
            if type(origin) is Source:
                if origin.read:
                    origin.keep_copy()
                self._origins.drop(tensor)
            elif origin is not None and forget:
                self._origins.drop(tensor)

    def pack(self, tensor: Tensor) -> Any:
        """What autograd is to hold in place of `tensor`."""
        if not has_storage(tensor):
            return tensor.detach() if tensor.grad_fn is not None else tensor
        origin = self._origins.get(tensor)
        if type(origin) is Value:
            return Packed(origin, recipe_of(tensor), self.graph)
        return Kept(tensor)


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
            `(ctx, op, *args, **kwargs) -> CheckpointPolicy | bool` as torch's selective checkpoint takes.

    Raises:
        TypeError, ValueError: `policy` is none of these.
        PolicyConflict: from an op inside, on which two policies insist differently.
    """

    def __init__(self, policy: Any, *, log: Log | None = None) -> None:
        self._decider = decider(policy)
        self._log = log
        self._outermost = False

    def __enter__(self) -> None:
        region = active.region
        self._outermost = region is None
        if region is None:
            region = Region(self._log)
            region.open()
        region.policies.append(self._decider)
        self._region = region

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        region = self._region
        del self._region
        region.policies.pop()
        if self._outermost:
            region.close()
