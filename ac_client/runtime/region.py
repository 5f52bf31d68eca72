"""Carries a policy out: the dispatch mode that records unsaved ops, and the saved-tensor hooks.

See docs/memory-model.md for the rules, and NOTE [ What is tracked ] in nodes.py for what is held.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointPolicy

from ac_client.runtime.nested_policies import (
    SAVES,
    Packing,
    PolicyConflict,
    Pushed,
    Stack,
    decider,
    without_offload,
)
from ac_client.runtime.nodes import Held, Node, OfShape, Ref, Source, Undescribed, Value, hold
from ac_client.runtime.replay import Graph, Log, suspended
from ac_client.runtime.saved_handles import HandedOn, Kept, Packed, unpack
from ac_client.runtime.view_recipes import Recipe, recipe_of, window_by
from autoac.profiler.distributed.fsdp import watch_sharding
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.inductor import (
    RecordingMode,
    anything_compiled,
    dynamo_is_active,
    keep_dynamo_out,
    watch_compiled,
)
from autoac.profiler.torch_facts.op_facts import (
    OpFacts,
    facts_of,
    known_facts,
    updates_statistics,
    versions,
    written_tensors,
)
from autoac.profiler.torch_facts.op_signature import outputs_of
from autoac.profiler.torch_facts.private import get_current_dispatch_mode
from autoac.profiler.torch_facts.rng import capture_generator, generator_of
from autoac.profiler.torch_facts.storage_table import StorageTable, Window, disjoint, has_storage, window_of


class _Active(threading.local):
    """The region that is open on this thread."""

    region: Region | None = None


active = _Active()

_NO_KWARGS: dict[str, Any] = {}

_STRIDED = torch.strided

_orders = itertools.count()  # forward order over all regions


class Region(RecordingMode):
    """The mode of the outermost region; policies are pushed on it."""

    supports_higher_order_operators = True  # they pass as one opaque op

    def __init__(self, log: Log | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policies: list[Pushed] = []
        self.log = log
        self.graph = Graph(log)
        self._asked: Stack = Stack(())
        self.tracked_writes = 0  # writes to what an unsaved op made or has read
        self._untold = False  # nothing was compiled in this process when it was opened
        self.orphans = (
            0  # values that were read after a pause, and cannot tell whether they were written in it
        )
        self._paused = False  # the mode is off
        self._was_paused = False
        self._fresh: list[weakref.ref[torch.UntypedStorage]] = []  # entered in the table since the last pause
        self._origins: StorageTable[Value | weakref.ref[Source]] = StorageTable()
        self._name = self._origins.name
        self._outer: Packing | None = None  # the hooks around the region
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)

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
        watch_sharding()
        self._untold = not watch_compiled()
        if not torch.compiler.is_compiling():
            self._outer = private.top_saved_tensors_default_hooks(True)
        enter_hooks(self._hooks)
        self.__enter__()  # type: ignore[no-untyped-call]
        active.region = self

    def on_top(self) -> bool:
        """Whether this thread has neither mode nor hooks that were entered after ours."""
        if torch.compiler.is_compiling():
            return True
        hooks = private.top_saved_tensors_default_hooks(True)
        return (
            active.region is self
            and get_current_dispatch_mode() is self
            and hooks is not None
            and hooks[0] == self.pack
        )

    def close(self) -> None:
        """Take them away. What backward needs hangs on autograd's handles from now on.

        Raises:
            RuntimeError: what it recorded cannot be trusted.
        """
        active.region = None
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._hooks.__exit__(None, None, None)
        del self._hooks  # it holds our method, and so us
        self._renew_guards()
        self._origins.clear()
        if self._untold and watch_compiled() and anything_compiled():
            raise RuntimeError(
                "torch.compile was used for the first time in this process, and inside this region, which "
                "could not see what the compiled part writes: run the step again, or compile before it"
            )

    def begin(self, policy: Pushed) -> None:
        """Let `policy` speak last."""
        self.policies.append(policy)
        self._asked = Stack(self.policies)

    def end(self, policy: Pushed) -> bool:
        """Take `policy` away, which need not be the last; whether it was the last one left."""
        newest = max(i for i, pushed in enumerate(self.policies) if pushed is policy)
        del self.policies[newest]
        self._asked = Stack(self.policies)
        return not self.policies

    def _enter(self, storage: torch.UntypedStorage, origin: Value | weakref.ref[Source]) -> None:
        """Make `origin` the entry of `storage` in the table."""
        self._origins.put(storage, origin)
        self._fresh.append(weakref.ref(storage))

    def _renew_guards(self) -> None:
        """Take what was written to new sources so far as seen by the mode.

        A counter moves only after the mode has returned. To older sources a write that the mode sees is one
        that they were copied for, so a counter that has moved all the same is one that it has not seen.
        """
        for ref in self._fresh:
            storage = ref()
            origin = self._origins.of(storage) if storage is not None else None
            if origin is not None and type(origin) is not Value:
                source = origin()
                if source is not None and source.guard is not None:
                    source.guard.renew()

    def before_pause(self) -> bool:
        """Take down the versions of what is tracked; False if some counter cannot be reached.

        What was taken down before an earlier pause is not looked at again, so pauses may be short.
        """
        self._renew_guards()
        unreached = []
        for ref in self._fresh:
            storage = ref()
            origin = self._origins.of(storage) if storage is not None else None
            if type(origin) is Value and not origin.note_version():
                unreached.append(ref)
        self._fresh = unreached
        return not unreached

    def pause(self) -> bool:
        """Run what follows, ops that are all saved, without the mode; False if that cannot be.

        Nothing is recorded until `resume`. A write in place that happens all the same is noticed when what
        it hit is read next.
        """
        depth = private.len_dispatch_stack()
        if (
            self._paused
            or depth == 0
            or private.get_dispatch_stack_at(depth - 1) is not self
            or not self.before_pause()
        ):
            return False
        self._paused = self._was_paused = True
        private.pop_dispatch_stack(None)
        return True

    def resume(self) -> None:
        """Record again."""
        if self._paused:
            self._paused = False
            private.push_on_dispatch_stack(self)

    def _written_unseen(self, value: Value) -> bool:
        """Return True if `value`, which is older than a pause, may have been written without the mode."""
        tensor = value.shown_by()
        if tensor is None:  # only a view is left of it
            self.orphans += 1
            return self._was_paused
        return tensor._version != value.version

    def _origin(self, tensor: Tensor) -> Value | weakref.ref[Source] | None:
        """The entry of the storage of `tensor` in the table. What was written unseen is held from outside."""
        origin = self._origins.get(tensor)
        if type(origin) is Value and origin.version is not None and self._written_unseen(origin):
            self._origins.drop(tensor)
            return None
        return origin

    def enter_compiled(self, written: Sequence[Tensor]) -> None:
        """What compiled code runs is not recorded, and what it writes is held from outside."""
        self._before_write(written, forget=True)
        suspended.depth += 1

    def leave_compiled(self) -> None:
        """Record again."""
        suspended.depth -= 1

    def cross_units(self, tensors: Iterable[Tensor]) -> None:
        """What goes into an FSDP unit or comes out of it is held: it could not be made again at any time."""
        for tensor in tensors:
            self._hold(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        facts = known_facts.get(id(func)) or facts_of(func)
        if facts.view or suspended.depth:
            return facts.call(*args, **kwargs) if kwargs else facts.call(*args)
        if self.log is not None:
            self.log.add("compute", facts.name)
        if facts.fills_packed >= 0:
            self._hold(args[facts.fills_packed])
        asked = self._asked
        if not asked.after:
            if asked.none_saved and not facts.must_save:
                saved = False
            else:
                saved = asked.all_saved or asked.saves(func, facts, args, kwargs)
            if not saved and facts.in_place and not self._rewrites_tracked(facts, args, kwargs):
                saved = True  # written from outside, it is held from outside
            if saved or facts.kept:
                return self._run_kept(func, facts, args, kwargs)
        elif facts.kept:
            return self._run_kept(func, facts, args, kwargs)
        return self._run_unsaved(func, facts, args, kwargs)

    def _run_kept(self, func: Any, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        """Run an op that is not run again."""
        if facts.mutates:
            if facts.opaque and not facts.writes_any:
                return self._run_opaque(func, args, kwargs or {})
            self._before_write(written_tensors(facts, args, kwargs or {}), forget=True)
        return facts.call(*args, **kwargs) if kwargs else facts.call(*args)

    def _run_opaque(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order op: what it writes of its operands, their version counters tell afterwards."""
        operands = versions((args, kwargs))
        out = func(*args, **kwargs)
        for tensor, version in operands:
            if tensor._version == version or (origin := self._origin(tensor)) is None:
                continue
            self.tracked_writes += 1
            if type(origin) is not Value and (source := origin()) is not None and source.guard is not None:
                source.guard.settle()  # what read it before can not be run again
            self._origins.drop(tensor)
        return out

    def _run_unsaved(
        self, func: Any, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> Any:
        """Run an op that may be run again, and make a node of it."""
        given = args
        if (
            facts.statistics
            and updates_statistics(facts, args, kwargs or {})
            and not self._rewrites_tracked(facts, args, kwargs)
        ):
            # Run again without them, so that they move once (pytorch#96136). Those that an unsaved op made
            # are written again like any value.
            given = [None if i in facts.statistics else arg for i, arg in enumerate(args)]
        reads: dict[Value, None] = {}
        try:
            flat = self._arguments(given, reads)
            named = _NO_KWARGS
            if kwargs:
                named = dict(zip(kwargs, self._arguments(kwargs.values(), reads), strict=True))
        except Undescribed:
            return self._run_kept(func, facts, args, kwargs)
        random = None
        if facts.random and facts.draws(args, kwargs or {}):
            random = capture_generator(generator_of(args, kwargs or {}))
        node = Node(next(_orders), facts.name, facts.call, flat, named, tuple(reads), random)
        written: Sequence[Tensor] = ()
        rewritten: Sequence[tuple[Value, Tensor]] = ()
        if facts.mutates:
            written = list(written_tensors(facts, args, kwargs or {}))
            if given is not args:
                # The run again makes no new statistics: whoever reads these finds them held from outside.
                self._before_write(written, forget=True)
                written = ()
            rewritten = self._rewritten(written)
            node.writes_sources = len(rewritten) < len(written)
            self._before_write(written, forget=False)
        out = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
        if facts.shaped_by_argument:
            node.func = OfShape(facts.call, facts.name, out.shape)
        if self._asked.after and self._saves_after(func, facts, out, args, kwargs, rewritten):
            for tensor in written:
                if has_storage(tensor):
                    self._origins.drop(tensor)
            return out
        node.insists = self._asked.insists
        if rewritten:
            rewrites = []
            for old, tensor in rewritten:
                new = Value(node, tensor, as_memory=True)
                rewrites.append((old, weakref.ref(new)))
                self._enter(tensor.untyped_storage(), new)
            node.rewrites = tuple(rewrites)
            if facts.in_place and len(written) == 1:
                _move_packed(old, new, window_of(tensor))
        if type(out) is Tensor:
            node.outs = (self._made(out, node, written),)
        else:
            node.outs = tuple(self._made(tensor, node, written) for tensor in outputs_of(out))
        return out

    def _rewritten(self, written: Iterable[Tensor]) -> list[tuple[Value, Tensor]]:
        """The Values among what is about to be written, each once, and a tensor that shows it."""
        found: list[tuple[Value, Tensor]] = []
        for tensor in written:
            origin = self._origin(tensor) if has_storage(tensor) else None
            if type(origin) is Value and all(origin is not old for old, _ in found):
                found.append((origin, tensor))
        return found

    def _made(self, tensor: Tensor, node: Node, written: Sequence[Tensor]) -> weakref.ref[Value] | None:
        """The Value of an output; None if it is no new storage. Arguments are in the table already."""
        if not has_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        if self._name in storage.__dict__:
            return None
        if written and any(has_storage(old) and old.untyped_storage() is storage for old in written):
            return None  # from outside: it was forgotten when it was written
        value = Value(node, tensor)
        self._enter(storage, value)
        return weakref.ref(value)

    def _saves_after(
        self,
        func: Any,
        facts: OpFacts,
        out: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        rewritten: Sequence[tuple[Value, Tensor]],
    ) -> bool:
        if self._asked.saves(func, facts, args, kwargs, out):
            return True
        return facts.in_place and not rewritten

    def _arguments(self, args: Iterable[Any], reads: dict[Value, None]) -> tuple[Any, ...]:
        """`args` with what a node holds in place of their tensors; adds the Values among them to `reads`."""
        held: list[Any] = []
        name = self._name
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                strided = arg.layout is _STRIDED
            elif isinstance(arg, Tensor):
                strided = has_storage(arg)
            else:
                if (kind is list or kind is tuple) and any(isinstance(item, Tensor) for item in arg):
                    arg = kind(self._arguments(arg, reads))
                held.append(arg)
                continue
            if not strided:
                raise Undescribed
            origin = arg.untyped_storage().__dict__.get(name)
            if type(origin) is Value and origin.version is not None and self._written_unseen(origin):
                origin = None
            if type(origin) is Value:
                reads[origin] = None
                as_made = origin.recipe_if_made(arg) is not None
                held.append(origin if as_made else Ref(origin, _plain_recipe_of(arg)))
                continue
            source = origin() if origin is not None else None
            held.append(
                source if source is not None and source.is_first(arg) else self._from_outside(arg, source)
            )
        return tuple(held)

    def _from_outside(self, tensor: Tensor, source: Source | None) -> Source | Held:
        """What a node holds in place of `tensor`, of which `source` is known so far.

        Raises:
            Undescribed: storage and recipe do not say all about it.
        """
        if not has_storage(tensor):
            raise Undescribed
        if source is None:
            source = Source(tensor)
            self._enter(tensor.untyped_storage(), weakref.ref(source))
        return source.hold(tensor)

    def _hold(self, tensor: Tensor) -> None:
        """What was packed of `tensor`'s storage is to show what the op that runs next writes there."""
        origin = self._origin(tensor) if has_storage(tensor) else None
        if type(origin) is Value:
            with self.graph.lock:
                hold(origin, tensor, next(_orders))
            self._origins.drop(tensor)

    def tag(self, tensor: Tensor, word: CheckpointPolicy) -> None:
        """The innermost word on one tensor, which has been made."""
        origin = self._origin(tensor) if has_storage(tensor) else None
        if type(origin) is not Value:
            if word is CheckpointPolicy.MUST_RECOMPUTE:
                raise RuntimeError(
                    f"a {tensor.dtype} {list(tensor.shape)} tagged must_recompute was saved when it was "
                    "made, or made outside; run what makes it under save_recompute_policy(...) instead"
                )
        elif word in SAVES:
            insists = origin.node.insists
            if not insists:
                self._hold(tensor)
            elif word is CheckpointPolicy.MUST_SAVE:
                raise PolicyConflict(origin.node.name, f"MUST_RECOMPUTE by {insists}", "MUST_SAVE by the tag")

    def _rewrites_tracked(self, facts: OpFacts, args: Sequence[Any], kwargs: dict[str, Any] | None) -> bool:
        written = [t for t in written_tensors(facts, args, kwargs or {}) if has_storage(t)]
        return any(type(self._origin(t)) is Value for t in written)

    def _before_write(self, tensors: Iterable[Tensor], *, forget: bool) -> None:
        """A storage is about to be written: what unsaved ops have read of it is copied first.

        With `forget` the new version is not tracked: it is held from outside, as its writer is saved.
        """
        for tensor in tensors:
            if not has_storage(tensor):
                continue
            origin = self._origin(tensor)
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
        if ((kind is Tensor or kind is Parameter) and tensor.layout is _STRIDED) or has_storage(tensor):
            value = tensor.untyped_storage().__dict__.get(self._name)
            if type(value) is Value and (value.version is None or not self._written_unseen(value)):
                recipe = value.recipe_if_made(tensor)
                if recipe is None and has_storage(tensor):  # nested ones are strided as well
                    recipe = recipe_of(tensor)
                if recipe is not None:
                    return Packed(value, recipe, self.graph, tensor.device)
        packing = self._asked.packing or self._outer
        if packing is not None:
            return HandedOn(tensor, *packing)
        return Kept(tensor, self.graph)


def _move_packed(old: Value, new: Value, written: Window) -> None:
    """Have what autograd holds of `old` made from `new`, where it shows nothing of what was written."""
    staying = []
    for ref in old.packs:
        packed = ref()
        if packed is not None and disjoint(written, window_by(packed.recipe)):
            packed.move(new)
            new.packs.append(ref)
        else:
            staying.append(ref)
    old.packs = staying


def _plain_recipe_of(tensor: Tensor) -> Recipe:
    if not has_storage(tensor):
        raise Undescribed
    return recipe_of(tensor)


# Dynamo is not to look into what the mode, or anything that it calls, does when a compiled submodule runs
# under it.
_frames = private.eval_frame
_frames.set_code_exec_strategy(
    Region.__torch_dispatch__.__code__,
    _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP),
)


def enter_hooks(hooks: torch.autograd.graph.saved_tensors_hooks) -> None:
    """Enter saved-tensor hooks, where torch allows any.

    Raises:
        RuntimeError: it does not.
    """
    try:
        hooks.__enter__()
    except RuntimeError as error:
        raise RuntimeError(
            "a planned model or region needs saved-tensor hooks, which are disabled here, as inside of "
            "torch.func.grad, vjp, jacrev and hessian. Differentiate with torch.autograd.grad, or call "
            f"ac_client.applied_model(model).remove() first. They were disabled with: {error}"
        ) from error


class save_recompute_policy:
    """Run what is inside under `policy`: which saved tensors are kept, which are made again in backward.

    Regions nest: the outermost installs the runtime, inner ones only push their policy, and the stack
    resolves from the outermost to the innermost (PREFER_SAVE to begin with; a MUST beats a PREFER; two
    different MUSTs are an error). Regions of generators and coroutines that interleave on one thread share
    one runtime, which goes with the last of them.

    Args:
        policy: "recompute_all"; "must_save_all"; a list of ops to save; a function
            `(ctx, out, op, *args, **kwargs) -> CheckpointPolicy | bool`, asked after the op has run, with
            its output.
        packing: a pair of functions: what to hold in place of a tensor that stays saved for backward, and
            the tensor back from it; for offload, or saves of half the width. The innermost counts. Hooks of
            torch.autograd.graph around the region serve as well. What a recompute reads stays as it is.

    Raises:
        TypeError, ValueError: `policy` is none of these.
        PolicyConflict: from an op inside, on which two policies insist differently.
        RuntimeError: on entering, if it is entered already, or inside of torch.compile, torch.func.grad and
            its like; on leaving, if that is on another thread or before a mode or hook that was entered
            inside is left.
    """

    def __init__(self, policy: Any, *, packing: Packing | None = None, log: Log | None = None) -> None:
        self._decider = decider(policy)
        self._packing = packing
        self._log = log
        self._entered: tuple[Region, Pushed] | None = None

    def __enter__(self) -> None:
        if dynamo_is_active():
            raise RuntimeError(
                f"save_recompute_policy was entered inside of torch.compile; {_OUT_OF_COMPILED}"
            )
        if self._entered is not None:
            raise RuntimeError("this save_recompute_policy is entered already: make one for each with-block")
        caller = sys._getframe(1)
        region = active.region
        if region is None:
            region = Region(self._log)
            region.open()
        pushed = Pushed(self._decider, caller.f_code.co_filename, caller.f_lineno, self._packing)
        region.begin(pushed)
        self._entered = region, pushed

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._leave() and (error is None or isinstance(error, GeneratorExit)):
            # From now on it saves all that it sees, and the next region where it was entered takes it over.
            raise RuntimeError(
                "a region must be left on the thread that entered it, and after the dispatch modes and "
                "saved-tensor hooks that were entered inside: leave it before handing over"
            )

    def __del__(self) -> None:
        if getattr(self, "_entered", None) is not None:
            self._leave()  # entered by hand, and an exception went past the exit

    def _leave(self) -> bool:
        """Take the policy off; False if it was the last and the region cannot be closed from here."""
        entered, self._entered = self._entered, None
        assert entered is not None
        region, pushed = entered
        # Generators and coroutines that suspend inside leave in any order.
        if not region.end(pushed):
            return True
        region.resume()
        if not region.on_top():
            return False
        region.close()
        return True


_OUT_OF_COMPILED = (
    "leave the code that enters it uncompiled and compile what runs inside, or use ac_client.checkpoint, "
    "which hands over to torch's own there"
)
keep_dynamo_out(save_recompute_policy.__enter__, f"save_recompute_policy records ops; {_OUT_OF_COMPILED}")


_TAGS = {policy.name.lower(): policy for policy in CheckpointPolicy}
Tagged = TypeVar("Tagged", bound=Tensor)


def tag(tensor: Tagged, policy: str | CheckpointPolicy) -> Tagged:
    """Say of one tensor, which an op inside a region has just made, whether it is saved. Returns it.

    Outside of regions it says nothing. Its word is the innermost: it replaces a PREFER of the policies
    around, and a MUST of theirs stands.

    Args:
        tensor: what the op returned, or a view of it: all of its memory is meant.
        policy: "must_save", "prefer_save", "must_recompute", "prefer_recompute", or torch's words for them;
            "must_cpu_offload" and "prefer_cpu_offload" save on the device, with a warning.

    Raises:
        ValueError: `policy` is not one of these.
        PolicyConflict: "must_save" where a policy insists on recomputing.
        RuntimeError: "must_recompute" for a tensor that was saved when it was made.
    """
    word = policy if isinstance(policy, CheckpointPolicy) else _TAGS.get(policy)
    if word is None:
        raise ValueError(f"cannot tag {policy!r}: use one of {', '.join(map(repr, _TAGS))}")
    if active.region is not None:
        active.region.tag(tensor, without_offload(word))
    return tensor
