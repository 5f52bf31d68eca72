"""Record the ops of a forward that may be recomputed, following the policies in force.

Theory of operation
===================

A region is the outermost `with save_recompute_policy(...)` block on a thread. It installs a dispatch mode
(`Region`), which sees every op below autograd and autocast, and a pair of saved-tensor hooks (`RegionHooks`),
which see every tensor that autograd saves and every request for one. The mode asks the policies about each op
and records those that are not saved. The pack hook gives autograd a handle in place of each tensor. In
backward the unpack hook returns the tensor: as it was saved, or recomputed from recorded ops.

Rule 1. A view costs nothing and is not recorded; a recipe rebuilds it from its storage.
Rule 2. An op that is saved leaves nothing behind: its outputs are from outside, like parameters and inputs.
Rule 3. An op that is not saved becomes a `Node` with stand-ins for its tensors (nodes.py).
Rule 4. Before a write to a storage that recorded ops have read from outside, they get a private copy. A
        write to contents that a recorded op made is recorded itself, as a new version of the storage; if the
        writer is not recorded, the new contents are from outside.
Rule 5. The version counters of torch detect writes that the mode does not see. Backward then raises
        `StaleError` instead of computing with the wrong contents.
Rule 6. While the mode is paused (`pause`), over ops that are all saved, nothing is recorded. Counters noted
        before the pause show which storages were written during it.
Rule 7. Ops run by replays, by compiled code and by hooks around the region are never recorded.
Rule 8. What a plan moves to the host is recorded as an op whose run is the copy back (moves/).
Rule 9. What one stream makes and another reads is saved: NOTE [ Streams ] in torch_facts/streams.py.

A worked example, under a policy that saves only `o`:

    forward       decision     recorded                     packed by autograd
    h = x @ w     recompute    Node h (Source x, Source w)  x, w: SavedHandle
    r = relu(h)   recompute    Node r (version h)           r: RecomputedHandle
    o = r @ v     save         nothing                      r: RecomputedHandle, v: SavedHandle
    y = sin(o)    recompute    Node y (Source o)            o: SavedHandle

After forward, version r has two uses (its handles) and version h has one (node r reads it). Node y has no
use: nothing in backward needs y, so it is freed when the caller drops y.

    backward      unpacks      runs      cached afterwards
    of sin        o            nothing   nothing
    of r @ v      r            h, r      r, for its second handle; h was freed after r ran
    of relu       r            nothing   nothing; this was the last use of r
    of x @ w      x, w         nothing   nothing

What must stay true:

- Gradients, outputs, buffers and generator states equal those of the plain model, bit for bit.
- References lead from autograd to the past only, so that dropping the graph frees all of it at once.
- Closing the region leaves its graph intact: all that backward needs hangs on autograd's handles.

What this file must not know: where a policy is from, modules, bytes and budgets (ac_client/planning), and
graph tasks (replay.py).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoac.planner.formats.policy import OFFLOAD, SAVE
from autoac.planner.formats.profile import CROSSES
from autoac.tape.capture.step_tape import StepTape
from autoac.tape.distributed.fsdp import watch_sharding
from autoac.tape.distributed.wrapped_tensors import below, wraps_others
from autoac.tape.runtime.cursor import Cursor, UseGroup
from autoac.tape.runtime.cuts import Cuts
from autoac.tape.runtime.moves.region_moves import RegionMoves
from autoac.tape.runtime.nested_policies import PlannedPolicy, PolicyFrame, PolicyStack
from autoac.tape.runtime.nodes import Node, NodeVersion, UnsupportedTensor, next_order, run_with_shape
from autoac.tape.runtime.recorded_function import RecordedFunction
from autoac.tape.runtime.replay import Log, RegionGraph, nothing_held, recording_off
from autoac.tape.runtime.saved_tensor_hooks import RegionHooks
from autoac.tape.runtime.tracked_storages import ForwardHolds, TrackedStorages, move_handles
from autoac.tape.runtime.write_guard import note_wrappers
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.inductor import RecordingMode, anything_compiled, watch_compiled
from autoac.tape.torch_facts.op_facts import (
    OpFacts,
    facts_of,
    tensor_versions,
    unread_argument,
    updates_statistics,
    written_tensors,
)
from autoac.tape.torch_facts.op_signature import Args, Kwargs, outputs_of, tensors_in
from autoac.tape.torch_facts.rng import capture_generator, generator_of
from autoac.tape.torch_facts.storage_table import has_storage
from autoac.tape.torch_facts.streams import has_streams, hold_for_current_stream, streams_seen
from autoac.tape.torch_facts.view_recipes import recipe_of
from autoac.tape.unseen.function_calls import Apply, FunctionCall, watch_functions
from autoac.tape.unseen.held_storages import recorded

_NO_KWARGS: dict[str, Any] = {}
_ONE_RUN = (UseGroup(math.inf),)
TRANSFORMED = "a transform of torch.func runs it, and allows no hooks"
_COMPILED_CODE = "higher_order.inductor_compiled_code"  # of `wrap_inductor_compiled_regions`


class Region(RecordingMode):
    """Record the ops of the outermost with-block as a dispatch mode; inner ones push their policies onto it.

    Attributes:
        storages: the table of storages that recorded ops wrote or read.
        graph: shared by all that the region records.
        module: in a plan, returns the path of the module that runs.
    """

    def __init__(
        self, log: Log | None = None, *, cuts: Cuts | None = None, tape: StepTape | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._tape = tape
        self.graph = RegionGraph(log)
        self.graph.tape = tape
        self.storages = TrackedStorages(self.graph)
        self.storages.cuts = cuts
        self._hooks = RegionHooks(self.storages, self.graph)
        self._hooks.tape = tape
        self._frames: list[PolicyFrame] = []
        self._policy = PolicyStack(())
        self._cursor: Cursor | None = None  # of a plan alone, which only decides about ops
        self._compiled_unseen = False  # nothing was compiled in this process when the region was opened
        self._paused = False
        self._moves: RegionMoves | None = None
        self._holds: ForwardHolds | None = None
        self._function: RecordedFunction | None = None  # the call of a Function that is running
        self._written: Sequence[Tensor] = ()  # inputs that the compiled code that runs writes
        self.module: Callable[[], str] | None = None
        self._asks_inside = False  # policies are asked about the ops inside of that call
        self._has_streams = has_streams()
        self._stream = private.current_stream() if self._has_streams else 0  # that the last op ran on

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Dynamo is kept out once, below this class. torch's own way would wrap every call.
        return False

    def open(self) -> None:
        """Install the mode and the hooks.

        Raises:
            RuntimeError: torch does not allow saved-tensor hooks here.
        """
        watch_sharding()
        watch_functions()
        self._compiled_unseen = not watch_compiled()
        self._hooks.enter()
        self.__enter__()  # type: ignore[no-untyped-call]
        if self._tape is not None:
            recorded.held = self._tape.held
            self._tape.region = self

    def is_innermost(self) -> bool:
        """Return True if no mode and no hooks were entered on this thread after those of the region."""
        if torch.compiler.is_compiling():
            return True
        return private.get_current_dispatch_mode() is self and self._hooks.are_innermost()

    def close(self) -> None:
        """Remove the mode and the hooks. What backward needs hangs on autograd's handles from here on.

        Raises:
            RuntimeError: compiled code may have run unseen.
        """
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._hooks.exit()
        if self._moves is not None:
            self._moves.close()
        self._holds = self.storages.hold = None
        self.graph.held_in_forward = nothing_held
        try:
            with nullcontext() if self._tape is None else self._tape.hiding():
                self.storages.close()
        finally:
            if self._tape is not None:
                self._tape.region = None
            recorded.held = None
        if self._compiled_unseen and watch_compiled() and anything_compiled():
            raise RuntimeError(
                "torch.compile was used inside this region for the first time in this process, so the region "
                "did not see the writes of the compiled code: run the step again, or compile the model "
                "before the region begins"
            )

    def push_policy(self, frame: PolicyFrame) -> None:
        """Push a policy; it becomes the innermost."""
        if frame.site is not None and (not self._frames or self.storages.watches_code):
            self.storages.watches_code = True
            self.graph.code.note_site(frame.site)
            self.storages.compare_if_new()
        if frame.checkpoint is not None:
            frame.checkpoint.latest = -1 - sum(outer.checkpoint is not None for outer in self._frames)
            if frame.policy.needs_output and not any(type(f.policy) is PlannedPolicy for f in self._frames):
                self.graph.selective = True
        self.graph.joins_nested |= type(frame.policy) is PlannedPolicy
        self._frames.append(frame)
        self._resolve()

    def pop_policy(self, frame: PolicyFrame) -> bool:
        """Remove a policy, which need not be the innermost; return True if none is left."""
        newest = max(i for i, pushed in enumerate(self._frames) if pushed is frame)
        del self._frames[newest]
        if frame.checkpoint is not None:
            frame.checkpoint.latest = -math.inf
        self._resolve()
        return not self._frames

    def _resolve(self) -> None:
        self._policy = PolicyStack(self._frames)
        self._hooks.in_checkpoint = any(frame.checkpoint is not None for frame in self._frames)
        self._hooks.grouping = self._grouping = self._policy.grouping
        if self._policy.moving is not None and self._moves is None:
            self._hooks.moves = self._moves = RegionMoves(self._policy.moving, self.storages, self.graph)
        if self._policy.holding is not None and self._holds is None:
            self._holds = ForwardHolds(self._policy.holding, self.storages)
            self.storages.hold, self.graph.held_in_forward = self._holds.hold, self._holds.get
        watchers = self._tape, self._log, self._moves, self._holds
        self._cursor = self._policy.cursor if watchers == (None, None, None, None) else None

    def pause(self) -> bool:
        """Remove the mode while ops run that are all saved; return False if that is impossible now.

        Nothing is recorded until `resume`. If an op writes in place during the pause, the next read of what
        it wrote detects the write.
        """
        depth = private.len_dispatch_stack()
        innermost = private.get_dispatch_stack_at(depth - 1) if depth else None
        if self._paused or innermost is not self or not self.storages.note_counters():
            return False
        self._paused = True
        private.pop_dispatch_stack(None)
        return True

    def resume(self) -> None:
        """Record ops again, after `pause`."""
        if self._paused:
            self._paused = False
            private.push_on_dispatch_stack(self)

    def enter_compiled(self, written: Sequence[Tensor]) -> None:
        """Stop recording while compiled code runs that writes `written`."""
        if self._moves is not None:
            self._moves.free_due()
            self._moves.before_write(written)
        with nullcontext() if self._tape is None else self._tape.hiding():
            self.storages.before_write(written, untrack=True)
        recording_off.depth += 1
        if self._tape is not None:
            self._tape.recorder.enter_compiled(written)
            self._written = written

    def examines(self, *, captured: bool) -> bool:
        """Return True if compiled code runs in the first call of its Function."""
        if self._function is None or recording_off.depth:
            return False
        if captured:
            self._function.call.note_captured()
        return self._function.call.examined and not captured

    def leave_compiled(self) -> None:
        """Record again after compiled code."""
        recording_off.depth -= 1
        if self._tape is not None:
            self._tape.recorder.leave_compiled()
            self._written = ()

    def run_compiled(self, func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an op of a compiled graph that an observed step interprets."""
        depth, recording_off.depth = recording_off.depth, 0
        try:
            return self.__torch_dispatch__(func, types, args, kwargs)
        finally:
            recording_off.depth = depth

    def handle_of(self, tensor: Tensor) -> Any:
        """Return what backward unpacks in place of `tensor`."""
        return self._hooks.handle_of(tensor)

    def end_graph(self) -> None:
        """Note that all ops of a compiled graph have run; AOTAutograd writes to its inputs next."""
        assert self._tape is not None
        with self._tape.hiding():
            self.storages.before_write(self._written, untrack=True)

    def hold(self, tensors: Iterable[Tensor], reason: str = CROSSES) -> None:
        """Hold tensors that cross from one FSDP unit or compiled graph to another."""
        tensors = [inner for tensor in tensors for inner in below(tensor)]
        for tensor in tensors:
            self.storages.pin(tensor)
        if self._tape is not None:
            self._tape.recorder.hold(tensors, reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if types and any(map(wraps_others, types)):
            note_wrappers(tensors_in(args, kwargs or {}))
            self.storages.writes += 1  # no pause here: it would hide the wrappers that are made in it
            return NotImplemented  # the ops on the tensors inside come here
        try:
            facts: OpFacts = func._autoac_facts  # as `facts_of`, whose call would double the cost
        except AttributeError:
            facts = facts_of(func)
        if facts.view or recording_off.depth:
            return facts.call(*args, **kwargs) if kwargs else facts.call(*args)
        if facts.opaque and self._function is not None and facts.name == _COMPILED_CODE:
            with self:  # its ops are seen one by one, as those of compiled code that is not wrapped
                return args[0](args[1])
        tape = self._tape
        if tape is not None and not tape.inside:
            if self._hooks.set_aside:  # autograd may hold what the op reads, as the hooks would see
                self.hold(tensors_in(args, kwargs or {}), TRANSFORMED)
            must_save = TRANSFORMED if self._hooks.set_aside else ""
            return tape.run(self.__torch_dispatch__, func, facts, args, kwargs or {}, must_save)
        if self._has_streams:
            stream = private.current_stream()
            if stream != self._stream:
                self._stream, streams_seen.several = stream, True
            if streams_seen.several:
                self._save_crossing(tensors_in(args, kwargs or {}))
        moves = self._moves
        if self._cursor is not None and facts.plain and self._function is None and not streams_seen.several:
            decision = self._cursor.next_decision(facts.name_in_keys)
            saved = decision is None or decision == SAVE or self._hooks.set_aside
            if saved and not facts.mutates:
                return facts.call(*args, **kwargs) if kwargs else facts.call(*args)
            if saved or (facts.in_place and not self.storages.writes_a_version(facts, args, kwargs)):
                return self._run_saved(func, facts, args, kwargs)
            return self._run_recorded(func, facts, args, kwargs)
        if moves is not None and facts.mutates:
            moves.before_write(written_tensors(facts, args, kwargs))
        if self._function is not None:
            return self._run_in_function(self._function, func, facts, args, kwargs)
        if tape is not None and tape.unit_of is not None:
            self.hold(tape.crossing(tensors_in(args, kwargs or {})))
        if self.storages.cuts is not None:
            written = written_tensors(facts, args, kwargs) if facts.mutates else ()
            self.storages.cut(tensors_in(args, kwargs or {}), written)
        if self._log is not None:
            self._log("compute", facts.name)
        if facts.fills_packed >= 0:
            self._hooks.note_fill(args[facts.fills_packed])
        policy = self._policy
        if not policy.needs_output:
            saved = (tape is not None and bool(tape.must_save)) or policy.saves(func, facts, args, kwargs)
            if moves is not None:
                moves.free_due()
            if self._holds is not None:
                self._holds.free_due()
            if not saved and facts.in_place and not self.storages.writes_a_version(facts, args, kwargs):
                saved = True  # it writes a tensor from outside, whose new contents are from outside too
            if saved or self._hooks.set_aside or (facts.never_recomputed and facts.again is None):
                out = self._run_saved(func, facts, args, kwargs)
                if moves is not None and policy.planned is not None:
                    if policy.planned == OFFLOAD and not facts.blank:
                        stay = written_tensors(facts, args, kwargs) if facts.mutates else []
                        moves.leave(facts, out, stay, self._stream)
                    moves.mark(out)
                return out
        elif facts.never_recomputed or self._hooks.set_aside:
            out = self._run_saved(func, facts, args, kwargs)
            policy.saves(func, facts, args, kwargs, out)  # each policy sees each op; the answer is moot
            return out
        out = self._run_recorded(func, facts, args, kwargs)
        if moves is not None and policy.planned is not None:
            moves.mark(out)
        return out

    note_wrappers = staticmethod(note_wrappers)  # on which a Function of torch's own runs

    def run_function(self, cls: type, args: Args, kwargs: Kwargs, apply: Apply) -> Any:
        """Run a Function as one op, which the policies decide."""
        if recording_off.depth or self._function is not None:
            return apply(*args, **kwargs)
        call = FunctionCall(cls, args, kwargs)
        note_wrappers(call.arguments.tensors)
        if self._has_streams and streams_seen.several:
            self._save_crossing(call.arguments.tensors)
            for tensor in call.arguments.tensors:
                hold_for_current_stream(tensor)
        if self.storages.cuts is not None:
            self.storages.cut(call.arguments.tensors, ())
        if self._log is not None:
            self._log("compute", call.facts.name)
        tape = self._tape
        if tape is not None:
            tape.begin_function(call, args, kwargs)
        decided = self._policy.saves_function(call.facts)
        if self._holds is not None:
            self._holds.free_due()
        if self._moves is not None:
            self._moves.free_due()
            self._moves.before_write(call.arguments.tensors)
        saved = decided is True or (tape is not None and tape.must_save)
        with recording_off:  # the model does not run the copies of what the call may write
            function = RecordedFunction(
                call, self.storages, self.graph, self._grouping, self._stream, saved=saved
            )
        if not function.saved and call.rerun is not None:
            where = self.module() if self.module is not None else tuple(f.site for f in self._frames)
            self.graph.compare_rerun(call.rerun, where)
        self._function, self._asks_inside = function, decided is None
        self._hooks.pack_in_call = function.pack
        out, returned = None, False
        try:
            out = call.run(apply) if tape is None else tape.call(call.run, (apply,), {})
            returned = True
        finally:
            self._function = None
            self._hooks.pack_in_call = None
            if tape is not None:
                tape.end_function(call, out, raised=not returned)
        with recording_off:
            function.end(out)
        if tape is not None:
            tape.function_examined(call, function.order)
        return out

    def _run_in_function(
        self, function: RecordedFunction, func: Any, facts: OpFacts, args: Args, kwargs: Kwargs | None
    ) -> Any:
        """Run an op inside of a Function, which is recorded as a whole."""
        if function.is_known and not self._asks_inside and self._tape is None:
            return self._run_saved(func, facts, args, kwargs)
        function.note_op(facts, args, kwargs or {})
        out = self._run_saved(func, facts, args, kwargs)
        function.call.note_outputs(args, kwargs or {}, out)
        if self._asks_inside and self._policy.saves(func, facts, args, kwargs, out):
            function.saved = True
        return out

    def _save_crossing(self, tensors: Iterable[Tensor]) -> None:
        """Save those of `tensors` that another stream has made."""
        for origin, tensor in self.storages.versions_among(tensors):
            if origin.node.stream != self._stream:
                self.storages.save(tensor)

    def _run_saved(self, func: Any, facts: OpFacts, args: Args, kwargs: Kwargs | None) -> Any:
        """Run an op that backward does not run again."""
        if facts.mutates:
            if facts.opaque and not facts.writes_any:
                return self._run_opaque(func, args, kwargs or {})
            written = written_tensors(facts, args, kwargs)
            if facts.collective:
                self.storages.before_silent_write(written)
            else:
                self.storages.before_write(written, untrack=True, in_function=self._function is not None)
        if self._tape is not None:  # whose times are those of a recompute: a collective is waited for
            return self._tape.call(facts.again or facts.call, args, kwargs or {})
        return facts.call(*args, **kwargs) if kwargs else facts.call(*args)

    def _run_opaque(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run a higher-order op; version counters show afterwards which of its operands it wrote."""
        operands = tensor_versions((args, kwargs))
        if self._tape is not None:  # no plan has saved what reads them, so the old contents are kept
            buffers = [tensor for tensor, _ in operands if not isinstance(tensor, torch.nn.Parameter)]
            self.storages.before_write(buffers, untrack=False)
        out = func(*args, **kwargs) if self._tape is None else self._tape.call(func, args, kwargs)
        for tensor, counter in operands:
            if tensor._version != counter:
                self.storages.after_opaque_write(tensor)
        return out

    def _run_recorded(self, func: Any, facts: OpFacts, args: Args, kwargs: Kwargs | None) -> Any:
        """Run an op that may run again in backward, and record a node for it."""
        storages = self.storages
        if storages.compares_reads:
            storages.look_last()
        replayed_args = args
        updates = facts.statistics and updates_statistics(facts, args, kwargs or {})
        if updates and not storages.writes_a_version(facts, args, kwargs):
            # Replay without running statistics, so that they are updated once (pytorch#96136). Statistics
            # that a recorded op made are written again like any other version.
            replayed_args = [None if i in facts.statistics else arg for i, arg in enumerate(args)]
        unread = unread_argument(facts, args, kwargs) if facts.may_skip_first else None
        rng_state = None
        if facts.random and facts.draws(args, kwargs or {}):
            rng_state = capture_generator(generator_of(args, kwargs or {}))
        call = facts.call_again() if facts.nested or facts.collective else facts.call
        written: Sequence[Tensor] = ()
        if facts.mutates and replayed_args is args:
            written = written_tensors(facts, args, kwargs)
        rewritten: Sequence[tuple[NodeVersion, Tensor]] = ()
        # The runs of the op, each with its use group and the versions that it writes over.
        runs: list[tuple[UseGroup, Node, Sequence[tuple[NodeVersion, Tensor]]]] = []
        grouping = self._grouping
        groups = grouping.use_groups if grouping is not None else ()
        for group in groups or _ONE_RUN:
            if grouping is not None:
                storages.position = group.latest if groups else grouping.position
            reads: dict[NodeVersion, None] = {}
            named = _NO_KWARGS
            try:
                stand_ins = storages.arguments(replayed_args, reads, unread)
                if kwargs:
                    named = dict(zip(kwargs, storages.arguments(kwargs.values(), reads), strict=True))
            except UnsupportedTensor:
                return self._run_saved(func, facts, args, kwargs)
            node = Node(
                next_order(), facts.name, call, stand_ins, named, tuple(reads), rng_state, self._stream
            )
            if written:
                rewritten = storages.versions_among(written)
                node.writes_sources = len(rewritten) < len(written)
            runs.append((group, node, rewritten))
        (_, node, rewritten), *later_runs = runs
        if self.graph.weights is not None and self.module is not None:
            self.graph.modules[node.order] = self.module()
        if streams_seen.several:
            for tensor in tensors_in(args, kwargs or {}):
                hold_for_current_stream(tensor)
        if facts.mutates and replayed_args is not args:
            # The replay makes no statistics, so the new ones are from outside.
            storages.before_write(written_tensors(facts, args, kwargs), untrack=True)
        elif written:
            storages.before_write(written, untrack=False)
        if self._tape is not None:
            self._tape.note_node(node.order)
            out = self._tape.call(facts.call, args, kwargs or {})
        else:
            out = facts.call(*args, **kwargs) if kwargs else facts.call(*args)
        if facts.shaped_by_argument:
            for _, run, _ in runs:
                run.func = partial(run_with_shape, facts.call, facts.name, out.shape)
        if self._policy.needs_output and (
            self._policy.saves(func, facts, args, kwargs, out) or (facts.in_place and not rewritten)
        ):
            for tensor in written:
                if has_storage(tensor):
                    storages.drop(tensor)
            return out
        made = storages.rewrite(rewritten, node) if rewritten else []
        if made and facts.in_place and len(written) == 1 and not later_runs:
            ((old, tensor),) = rewritten
            move_handles(old, made[0], recipe_of(tensor))
        if type(out) is Tensor:
            outs: tuple[Tensor, ...] = (out,)
            node.outs = (storages.output(out, node, written),)
        else:
            outs = tuple(outputs_of(out))
            node.outs = tuple([storages.output(tensor, node, written) for tensor in outs])
        if facts.blank:
            storages.note_blank(outs[0])
        for group, run, rewrites in later_runs:
            run.rewrites = tuple(
                (old, weakref.ref(first.add_later_run(group, run, tensor)))
                for first, (old, tensor) in zip(made, rewrites, strict=True)
            )
            run.outs = tuple(
                weakref.ref(first.add_later_run(group, run, tensor))
                if ref is not None and (first := ref()) is not None
                else None
                for ref, tensor in zip(node.outs, outs, strict=True)
            )
        if storages.hold is not None:
            for tensor in (*outs, *written):
                storages.hold(tensor)
        return out


# Keep Dynamo from tracing the mode, and all that it calls, when a compiled submodule runs under it.
private.set_code_exec_strategy(
    Region.__torch_dispatch__.__code__,
    private.FrameExecStrategy(private.FRAME_SKIPPED, private.FRAME_SKIPPED),
)
