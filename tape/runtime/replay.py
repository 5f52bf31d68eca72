"""Run recorded ops again when autograd asks for a storage version in backward.

The rules are c to g of NOTE [ Rules of the schedule ] in planner/memory/schedule.py; NOTE [ Uses ] in
nodes.py says what a use is. docs/semantics.md lists the kinds of backward passes: several, partial, split,
compiled.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoac.tape.capture.step_tape import StepTape
from autoac.tape.runtime.nodes import (
    FunctionNode,
    MovedNode,
    Node,
    NodeVersion,
    Source,
    SourceView,
    VersionView,
    live_versions,
    next_order,
    pin_version,
)
from autoac.tape.runtime.split_backward import Split, current_split, is_nested_backward
from autoac.tape.runtime.write_guard import StaleError
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.nested_ops import AUTOCAST
from autoac.tape.torch_facts.op_signature import outputs_of
from autoac.tape.torch_facts.view_recipes import Recipe, make_view, matches_recipe, recipe_of, restrided
from autoac.tape.unseen.checked_code import CheckedCode
from autoac.tape.unseen.fingerprints import (
    Comparison,
    Fingerprint,
    KeptWeights,
    fingerprint_of,
    same_contents,
)
from autoac.tape.unseen.function_calls import FunctionRerun
from autoac.tape.unseen.global_flags import FlagSwitcher


class Pass:
    """The recomputed tensors and remaining uses of one backward pass over one region.

    A pass is one graph task or, when backward is split, the tasks of its parts. The engine's graph task owns
    the pass through a callback, so the pass ends with the task, also if the task ends by an exception.

    Invariant: `cache` holds a tensor for a version only while the version has a remaining use, or during the
    burst that computes it. A pass keeps no NodeVersion and no Node alive: each is freed with the last
    handle that needs it, together with the saved tensors that it would have read.
    """

    def __init__(self, task: int) -> None:
        self.first_task = task  # the graph task in which the pass began; identifies the pass
        self.task = task  # the graph task that is running
        self.thread = threading.get_ident()
        self.split: Split | None = None
        # What makes compute wait for the copy of a cached version from the host, by serial. It comes before
        # the cache: if an exception ends the pass, compute waits before the memory is freed.
        self.arriving: dict[int, Callable[[], None]] = {}
        self.cache: dict[int, Tensor] = {}  # by serial of the version
        self.uses: dict[int, int] = {}  # remaining uses, by serial of the version
        self.executed: set[int] = set()  # orders of the nodes that ran, or that nothing needs any more
        self.releases = False  # see `_hold_recomputed`
        self.uncounted = False  # for one burst: it consumes no uses and leaves nothing behind (rule g)
        # Tensors on cached versions that backward received, with their version counters then, by serial.
        self.handed_out: dict[int, list[tuple[Tensor, int]]] = {}

    def remaining_uses(self, version: NodeVersion) -> int:
        """Return the uses of `version` that this pass has not consumed."""
        uses = self.uses.get(version.serial)
        if uses is None:
            uses = self.uses[version.serial] = version.uses
        return uses

    def needs(self, version: NodeVersion, target: NodeVersion) -> bool:
        """Return True if `version` stays cached once it is computed, in the burst that computes `target`."""
        return version is target or self.uncounted or self.remaining_uses(version) > 0

    def consume_use(self, version: NodeVersion) -> None:
        """Consume one use of `version`; free its tensor at the last one."""
        serial = version.serial
        uses = self.uses.get(serial, version.uses) - 1  # as `remaining_uses`; a call would cost as much
        self.uses[serial] = uses
        if uses <= 0:
            if self.arriving and serial in self.arriving:
                self.arriving.pop(serial)()
            self.cache.pop(serial, None)
            if self.handed_out:
                self.handed_out.pop(serial, None)

    def await_arrival(self, versions: Iterable[NodeVersion]) -> None:
        """Have compute wait for those of `versions` that are still on their way from the host."""
        for version in versions:
            if version.serial in self.arriving:
                self.arriving.pop(version.serial)()

    def check_handed_out(self, version: NodeVersion, reader: str) -> None:
        """Check that backward did not write to the tensors on `version` that it received.

        Raises:
            StaleError: backward did; the message names `reader` and the tensor.
        """
        for tensor, counter in self.handed_out.get(version.serial, ()):
            if tensor._version != counter:
                raise StaleError(
                    f"{reader} reads a saved tensor [{tensor.dtype} {list(tensor.shape)}] that a backward "
                    "has modified by an inplace operation after unpacking it. Write to a clone() of it there"
                )

    def drop_use(self, version: NodeVersion) -> None:
        """Consume the use of a handle that died without having been unpacked in this pass (rule f).

        Call it before the use is removed from `NodeVersion.uses`.
        """
        self.consume_use(version)
        self.skip_if_unused(version.node)

    def skip_if_unused(self, node: Node) -> None:
        """If no use is left of what `node` makes, and it has not run, consume the uses of what it reads."""
        stack = [node]
        while stack:
            node = stack.pop()
            if node.order in self.executed:
                continue
            if not any(self.remaining_uses(live) > 0 for live in live_versions(node)):
                self.executed.add(node.order)
                for read in node.reads:
                    self.consume_use(read)
                    stack.append(read.node)


Log = Callable[[str, str], object]
"""Called with "compute" or "recompute" and the name of an op, for each that runs."""


_numbers = itertools.count()
_graphs: weakref.WeakValueDictionary[int, RegionGraph] = weakref.WeakValueDictionary()


def handle_of_key(key: int) -> Any:
    """Return the handle with `key`, which compiled code has passed on; None if it died."""
    return _graphs[key >> 32].handles[key & 0xFFFFFFFF]()


HeldElsewhere = tuple[weakref.ref[torch.UntypedStorage], int, Fingerprint]
"""A storage that the model or the loop holds, its bytes, and what a recorded op has put there.

Recomputing the contents would take the memory twice. Nothing here keeps the storage alive. Its holder may
write to it, so the contents are compared each time.
"""


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Return a tensor of all bytes of `storage`, made unseen by a region that is recording."""
    with _BelowAutograd():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def nothing_held(_version: NodeVersion) -> Tensor | None:
    """Stand in for what forward holds while no plan has it hold anything."""
    return None


def _no_pass() -> None:
    """Stand in for a weak reference to a pass, before there is one."""


class RegionGraph:
    """State shared by all that one region recorded: its backward passes in progress, and a lock."""

    def __init__(self, log: Log | None) -> None:
        self.lock = threading.RLock()
        self.handles: list[weakref.ref[Any]] = []  # of the region: each has a key, from this one on
        self.first_key = (number := next(_numbers)) << 32
        _graphs[number] = self
        self.passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()  # by graph task
        self.latest: Callable[[], Pass | None] = _no_pass  # of `passes`, the one that was started last
        self.overlapped = False  # some pass was started while another lived
        self.suspended: Pass | None = None  # between two parts of a split backward
        self.log = log
        self.tape: StepTape | None = None  # of an observed step
        # While forward runs: returns what a plan holds of a version for a backward inside of forward.
        self.held_in_forward: Callable[[NodeVersion], Tensor | None] = nothing_held
        self.elsewhere: dict[int, HeldElsewhere] = {}  # of an observed step, by serial of the version
        # Graph tasks that hooks of backward run are parts of the pass that they interrupt.
        self.joins_nested = False
        self.selective = False  # a checkpoint outside of any plan saves what only recomputes read
        self.weights: KeptWeights | None = None  # set where backward compares what it recomputes
        self.code = CheckedCode()  # outside of plans
        self.modules: dict[int, str] = {}  # where backward compares under a plan: module by order of a node
        self._uncompared: list[tuple[FunctionRerun, Any]] = []  # until backward runs them; module or code

    def compare(self) -> None:
        """Have backward compare what it recomputes with what forward saves from here on."""
        if Comparison.enabled and self.weights is None:
            self.weights = KeptWeights()

    def compare_rerun(self, rerun: FunctionRerun, where: Any) -> None:
        """Have backward compare from here on if no backward has compared calls of this kind in `where`."""
        if Comparison.enabled and not rerun.is_compared(where):
            self.compare()
            self._uncompared.append((rerun, where))

    def current_pass(self) -> tuple[Pass, bool]:
        """Return the pass of the running graph task, and True if unpacking may consume its uses.

        Outside of backward, as when a debugger reads `grad_fn._saved_self`, return a new pass and False.
        """
        task = private.current_graph_task_id()
        if task == -1:
            return Pass(-1), False
        running = self.passes.get(task)
        if running is None and self.joins_nested and (outer := self._interrupted()) is not None:
            return outer, True
        if running is None:
            running, self.suspended = self.suspended, None
            if running is None:
                running = Pass(task)
                running.split = current_split()
                if self.selective and running.split is None:
                    running.releases = not private.current_graph_task_keeps_graph()
            else:
                del self.passes[running.task]
                running.task = task
            self._start(running)
        return running, True

    def _interrupted(self) -> Pass | None:
        """Return the pass that a hook of backward, which runs a graph task of its own, has interrupted."""
        thread = threading.get_ident()
        if not is_nested_backward():
            return None
        mine = (running for running in self.passes.values() if running.thread == thread)
        return max(mine, key=lambda running: running.task, default=None)

    def held_elsewhere(self, version: NodeVersion) -> Tensor | None:
        """Return a tensor that shows `version`, if the model or the loop holds it; it stays theirs."""
        if version.serial not in self.elsewhere:
            return None
        ref, nbytes, contents = self.elsewhere[version.serial]
        storage = ref()
        is_same = storage is not None and storage.nbytes() == nbytes
        if storage is None or not (is_same and same_contents(fingerprint_of(storage), contents)):
            del self.elsewhere[version.serial]
            return None
        if version.recipe is None or version.raw:
            return bytes_of(storage)
        with _BelowAutograd():
            return make_view(storage, version.recipe)

    def restart(self) -> Pass:
        """Start a new pass in place of the running one.

        Needed when a task that looked like the next part of a split backward unpacks a handle for a second
        time: it is a pass of its own.
        """
        running = Pass(private.current_graph_task_id())
        self._start(running)
        return running

    def _start(self, running: Pass) -> None:
        self.overlapped |= self.latest() not in (None, running)
        self.passes[running.task] = running
        self.latest = weakref.ref(running)
        # The engine keeps the callback, and so the pass, until the task ends.
        private.execution_engine.queue_callback(partial(self.suspend, running))

    def suspend(self, ended: Pass) -> None:
        """Keep a pass whose graph task ended if it was a part of a split backward; else free its tensors.

        The engine calls this only if the task ends without an exception.
        """
        self.code.confirm()
        for rerun, where in self._uncompared:
            if rerun.has_run:
                rerun.note_compared(where)
        self._uncompared = [pair for pair in self._uncompared if not pair[0].has_run]
        with self.lock:
            split = ended.split
            if split is not None and split.open and self.passes.get(ended.task) is ended:
                self.suspended = ended
                split.graphs.add(self)
            elif self.joins_nested and is_nested_backward():
                self.suspended = ended  # the rest of the pass is to come
            else:
                ended.arriving.clear()
                ended.cache.clear()
                ended.handed_out.clear()
                if self.weights is not None:
                    self.weights.release()  # a loss that outlives backward holds this graph

    def discard_suspended(self) -> None:
        """Free the suspended pass: the split backward is over."""
        with self.lock:
            self.suspended = None


def view_of(version: NodeVersion, recomputed: Tensor, recipe: Recipe) -> Tensor:
    """Return the view that autograd saved, on recomputed memory.

    Args:
        version: the version that the view shows.
        recomputed: the tensor that was computed for `version`.
        recipe: dtype, size, stride and offset of the view.
    """
    recording_off.depth += 1
    try:
        return _view(version, recomputed, recipe)
    finally:
        recording_off.depth -= 1


def _view(version: NodeVersion, recomputed: Tensor, recipe: Recipe) -> Tensor:
    """Return `view_of`. Call it unrecorded."""
    # Usually `recipe` is that of the tensor that the op returned.
    if matches_recipe(recomputed, recipe) and (
        (recipe is version.recipe and not version.raw) or recomputed.is_neg() is recipe[5]
    ):
        return recomputed
    return restrided(recomputed, recipe)


def save_functions_before(node: Node) -> None:
    """Have the Function of `node` saved from now on; if it is an op, the Functions whose outputs it needs."""
    stack, seen = [node], {node.order}
    while stack:
        node = stack.pop()
        if type(node) is FunctionNode:
            node.func.note_difference()  # type: ignore[attr-defined]
            continue
        for version in node.reads:
            if version.node.order not in seen:
                seen.add(version.node.order)
                stack.append(version.node)


def recompute(target: NodeVersion, running: Pass, graph: RegionGraph) -> Tensor:
    """Recompute `target`: run, in forward order, the ops since the nearest saved tensors."""
    burst: dict[int, Node] = {}  # by order
    borrowed: list[NodeVersion] = []  # for this burst: others hold them, and may write to them afterwards
    stack = [target]
    cache = running.cache
    while stack:
        version = stack.pop()
        node = version.node
        if version.serial not in cache and node.order not in burst:
            if graph.elsewhere and (tensor := graph.held_elsewhere(version)) is not None:
                cache[version.serial] = tensor
                borrowed.append(version)
                continue
            burst[node.order] = node
            stack += node.reads
    if not running.executed.isdisjoint(burst):
        # An op has consumed its uses and is needed again: a custom function unpacks late.
        counted, running = running, Pass(running.task)
        running.uncounted = True
        running.cache.update(counted.cache)
        running.handed_out.update(counted.handed_out)
        running.arriving.update(counted.arriving)
    with FlagSwitcher() as flags:
        for kind, nodes in itertools.groupby(map(burst.__getitem__, sorted(burst)), key=type):
            if kind is MovedNode:
                with _BelowAutograd():
                    for node in nodes:
                        _fetch(node, running, graph, target)
            else:
                with _BelowAutograd() if kind is Node else _unrecorded():
                    for node in nodes:
                        _replay(node, running, graph, target, flags)
    if running.uncounted:  # what else was copied from the host is freed now: these copies must be over
        for wait in running.arriving.values():
            wait()
    recomputed = running.cache[target.serial]
    if not running.uncounted and running.remaining_uses(target) <= 0:
        del running.cache[target.serial]
    for version in borrowed:
        cache.pop(version.serial, None)
        if not running.uncounted:
            running.skip_if_unused(version.node)
    return recomputed


def _fetch(node: Node, running: Pass, graph: RegionGraph, target: NodeVersion) -> None:
    """Queue the copies from the host of the outputs of `node`."""
    assert isinstance(node, MovedNode)
    if graph.log is not None:
        graph.log("recompute", node.name)
    running.executed.add(node.order)
    for ref, copy in zip(node.outs, node.copies, strict=True):
        version = ref() if ref is not None else None
        if version is None or version.node is not node or copy is None:
            continue
        needed = running.needs(version, target)
        storage, wait = copy.fetch()
        if needed:
            cache = running.cache
            cache[version.serial] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            running.arriving[version.serial] = wait
        else:
            wait()


def _replay(node: Node, running: Pass, graph: RegionGraph, target: NodeVersion, flags: FlagSwitcher) -> None:
    """Run `node` again, cache its outputs, and consume one use of each version that it reads."""
    cache, uses, tape = running.cache, running.uses, graph.tape
    if running.handed_out:
        for read in node.reads:
            running.check_handed_out(read, node.name)
    if running.arriving:
        running.await_arrival(node.reads)
    buffers = _buffers_to_write(node, running) if node.rewrites or node.writes_sources else _NO_BUFFERS
    if buffers or type(node) is FunctionNode:
        with _BelowAutograd():  # a Function runs above it
            args = [_argument(arg, node, cache, buffers) for arg in node.args]
    else:
        args = [
            cache[arg.serial]
            if type(arg) is NodeVersion and arg.raw is False
            else _argument(arg, node, cache, buffers)
            for arg in node.args
        ]
    kwargs = node.kwargs
    if kwargs:
        kwargs = {name: _argument(arg, node, cache, buffers) for name, arg in kwargs.items()}
    if graph.log is not None and node.order >= 0:  # a negative order marks a pinned version
        graph.log("recompute", node.name)
    if node.flags != flags.current:
        flags.set(node.flags)
    began = tape.replays.begin() if tape is not None else None
    if node.rng_state is not None:
        flags.drawn.keep(node.rng_state.generator)
        node.rng_state.restore()
    out = node.func(*args, **kwargs) if kwargs else node.func(*args)
    if tape is not None:
        tape.note_replay(node.order, began)
    for old, new in node.rewrites:
        version = new()
        if version is not None and version.node is node and running.needs(version, target):
            storage = buffers[id(old)]
            cache[version.serial] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    for tensor, ref in zip((out,) if type(out) is Tensor else outputs_of(out), node.outs, strict=True):
        version = ref() if ref is not None else None
        if version is None or version.node is not node:
            continue
        left = uses.get(version.serial)  # as `remaining_uses`; a call would cost as much
        if left is None:
            left = uses[version.serial] = version.uses
        if left > 0 or version is target or running.uncounted:
            cache[version.serial] = tensor
            if version.raw is None and version.recipe is not None:
                version.raw = not matches_recipe(tensor, version.recipe)
    del args, kwargs, out, buffers
    if running.uncounted:
        return
    if node.order not in running.executed:
        running.executed.add(node.order)
        for version in node.reads:
            running.consume_use(version)
    if running.releases:
        for version in live_versions(node):
            if version.handles:
                _hold_recomputed(version, cache)


def _hold_recomputed(version: NodeVersion, cache: Mapping[int, Tensor]) -> None:
    """Hold `version` for autograd's handles as if it were saved, and release what its node read.

    torch's selective checkpoint releases a saved tensor when the recompute has read it. A backward that does
    not retain the graph no longer needs that tensor, and a later backward finds `version` saved.
    """
    if version.serial in cache:
        pin_version(version, cache[version.serial], next_order())


_NO_BUFFERS: dict[int, torch.UntypedStorage] = {}


def _argument(
    arg: Any, node: Node, cache: Mapping[int, Tensor], buffers: Mapping[int, torch.UntypedStorage]
) -> Any:
    """Return an argument of `node` with tensors in place of their stand-ins. Call it below autograd."""
    kind = type(arg)
    if kind is NodeVersion or kind is VersionView:
        version, recipe = (arg, arg.recipe) if kind is NodeVersion else arg
        buffer = buffers.get(id(version)) if buffers else None
        if buffer is not None:
            return make_view(buffer, recipe)
        return _view(version, cache[version.serial], recipe)
    if kind is Source or kind is SourceView:
        source, position = (arg, 0) if kind is Source else arg
        buffer = buffers.get(id(source)) if buffers else None
        if buffer is not None:
            return make_view(buffer, recipe_of(source.tensors[position]))
        return source.read(position, node.name)
    if kind is list or kind is tuple:
        return kind(_argument(item, node, cache, buffers) for item in arg)
    return arg


def _buffers_to_write(node: Node, running: Pass) -> dict[int, torch.UntypedStorage]:
    """Return the storages that an in-place op writes in its replay, by id of the stand-in that they replace.

    Take the storage of the old version if nothing else will need that version, else a copy (rule e). What is
    held in place of a version is copied too.
    """
    buffers: dict[int, torch.UntypedStorage] = {}
    for old, _ in node.rewrites:
        storage = running.cache[old.serial].untyped_storage()
        pinned = old.node.order < 0
        if running.remaining_uses(old) == 1 and not (old.handles or pinned or running.uncounted):
            del running.cache[old.serial]
        else:
            storage = storage.clone()
        buffers[id(old)] = storage
    if node.writes_sources:
        for source in _sources((*node.args, *node.kwargs.values())):
            if source.counter is None and id(source) not in buffers:
                buffers[id(source)] = source.tensors[0].untyped_storage().clone()
    return buffers


def _sources(args: Sequence[Any]) -> Iterator[Source]:
    for arg in args:
        kind = type(arg)
        if kind is Source:
            yield arg
        elif kind is SourceView:
            yield arg.source
        elif kind is list or kind is tuple:
            yield from _sources(arg)


class _RecordingOff(threading.local):
    """Sections of this thread whose ops an open region does not record (rule 7), as a context.

    Attributes:
        depth: number of nested sections.
    """

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1


recording_off = _RecordingOff()


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Run the body unseen by a region that is recording, above autograd."""
    with recording_off, private.ExcludeDispatchKey(_VMAP):
        yield


# Backward of batched gradients runs inside of vmap, which refuses random ops. No saved tensor is batched.
_VMAP = private.DispatchKeySet(private.parse_dispatch_key("VmapMode"))
_ABOVE = AUTOCAST | _VMAP


class _BelowAutograd:
    """Run the body below autograd and autocast, unseen by a region that is recording (rule 7)."""

    __slots__ = ("_autocast", "_autograd")

    def __enter__(self) -> None:
        recording_off.depth += 1
        self._autograd = private.AutoDispatchBelowAutograd()
        self._autograd.__enter__()
        self._autocast = private.ExcludeDispatchKeyGuard(_ABOVE)
        self._autocast.__enter__()

    def __exit__(self, *_: Any) -> None:
        self._autocast.__exit__(None, None, None)
        self._autograd.__exit__(None, None, None)
        recording_off.depth -= 1
