"""Backward: how a value is made again when autograd asks for it.

Rules c to f of NOTE [ Rules of the schedule ] in planner/memory/schedule.py; a `Pass` counts down the uses
that `Value.uses` counts (NOTE [ What is tracked ] in nodes.py). docs/backwards.md tells which backward
passes there are: several, partial, split, compiled.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ac_client.runtime.global_flags import Switches
from ac_client.runtime.nodes import Held, Node, Ref, Source, Value, alive
from ac_client.runtime.split_backward import Split, current_split
from ac_client.runtime.view_recipes import Recipe, StaleError, is_shown_by, recipe_of, show
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts import rng as randomness
from autoac.profiler.torch_facts.op_signature import outputs_of


class Pass:
    """What one backward pass has made again in one region, and still needs.

    A pass is one graph task, or, when backward is split, the several tasks of its parts. The engine's
    graph task owns it through a callback, so it ends with the task, also when that ends by an exception.
    It keeps no Value and no Node alive: each goes with the last Packed that needs it, and takes along the
    saved values that it would have read.
    """

    def __init__(self, task: int) -> None:
        self.first = task  # the graph task in which it began; its identity
        self.task = task  # the one that is running
        self.split: Split | None = None
        self.cache: dict[int, Tensor] = {}  # by serial of the Value
        self.left: dict[int, int] = {}  # uses, by serial of the Value
        self.ran: set[int] = set()  # orders of Nodes
        self.in_passing = False  # for one burst: nothing is counted, and nothing of it stays (rule g)
        # What unpacks gave out of the cache and is needed there still, by serial, with its version then.
        self.given_out: dict[int, list[tuple[Tensor, int]]] = {}

    def left_of(self, value: Value) -> int:
        left = self.left.get(value.serial)
        if left is None:
            left = self.left[value.serial] = value.uses
        return left

    def use(self, value: Value) -> None:
        """Use up one use; free the value at the last."""
        left = self.left_of(value) - 1
        self.left[value.serial] = left
        if left <= 0:
            self.cache.pop(value.serial, None)
            if self.given_out:
                self.given_out.pop(value.serial, None)

    def give_out(self, value: Value, tensor: Tensor) -> None:
        """Remember that a backward got `tensor`, if others will read the same memory."""
        if value.serial in self.cache:
            self.given_out.setdefault(value.serial, []).append((tensor, tensor._version))

    def check(self, value: Value, reader: str) -> None:
        """Raise if a backward wrote over `value` after it got it.

        Raises:
            StaleError: names `reader` and the tensor.
        """
        for tensor, version in self.given_out.get(value.serial, ()):
            if tensor._version != version:
                raise StaleError(
                    f"{reader} reads a saved tensor [{tensor.dtype} {list(tensor.shape)}] that a backward "
                    "has modified by an inplace operation after unpacking it. Let it write on a clone()."
                )

    def lose(self, value: Value) -> None:
        """A Packed went away without having been unpacked in this pass (rule f).

        To be called before the use is taken from `Value.uses`.
        """
        stack = [value]
        while stack:
            value = stack.pop()
            self.use(value)
            node = value.node
            if node.order in self.ran:
                continue
            if not any(self.left_of(v) > 0 for v in alive(node)):
                self.ran.add(node.order)
                stack.extend(node.reads)


class Log:
    """The events of a run, in order, for tests and for finding out. See `schedule` for their meaning."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def add(self, kind: str, name: str) -> None:
        self.events.append((kind, name))


class Home(list["weakref.ref[Any]"]):
    """What one region packed, by number: for those who can only pass a number on."""

    __slots__ = ("__weakref__", "_base")

    def __init__(self) -> None:
        super().__init__()
        serial = next(_serials)
        self._base = serial << 32
        homes[serial] = self

    def number(self, packed: Any) -> int:
        """The key of `packed`, for as long as the region's graph lives."""
        self.append(weakref.ref(packed))
        return self._base + len(self) - 1


_serials = itertools.count()
homes: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()


class Graph:
    """What is shared by all that one region recorded: its passes in progress, and a lock."""

    def __init__(self, log: Log | None) -> None:
        self.lock = threading.RLock()
        self.home = Home()
        self.passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
        self.resting: Pass | None = None  # between two parts of a split backward
        self.log = log

    def current_pass(self) -> tuple[Pass, bool]:
        """The pass of the graph task that is running, and whether it may use things up.

        Outside of backward (a debugger looks at `grad_fn._saved_self`) it is a pass of its own.
        """
        task = private.current_graph_task_id()
        if task == -1:
            return Pass(-1), False
        running = self.passes.get(task)
        if running is None:
            running, self.resting = self.resting, None
            if running is None:
                running = Pass(task)
                running.split = current_split()
            else:
                del self.passes[running.task]
                running.task = task
            self._begin(running)
        return running, True

    def afresh(self) -> Pass:
        """A pass that takes the place of the running one: a split backward came by again, and is none."""
        task = private.current_graph_task_id()
        fresh = Pass(task)
        self._begin(fresh)
        return fresh

    def _begin(self, running: Pass) -> None:
        self.passes[running.task] = running
        private.execution_engine.queue_callback(_Owner(running, self))

    def rest(self, ended: Pass) -> None:
        """A graph task ended. What it made is kept if it was a part of a split backward, else freed."""
        with self.lock:
            split = ended.split
            if split is not None and split.open and self.passes.get(ended.task) is ended:
                self.resting = ended
                split.graphs.add(self)
            else:
                ended.cache.clear()
                ended.given_out.clear()

    def forget(self) -> None:
        """The split backward is over."""
        with self.lock:
            self.resting = None


class _Owner:
    """Held by the engine until the graph task ends, and called if it ends well."""

    def __init__(self, owned: Pass, graph: Graph) -> None:
        self._owned = owned
        self._graph = graph

    def __call__(self) -> None:
        self._graph.rest(self._owned)


def shown(value: Value, made: Tensor, recipe: Recipe) -> Tensor:
    """Return the recomputed `value`, as `recipe` shows it."""
    # Mostly the tensor that the op returned, whose own recipe this is.
    if recipe is value.recipe and not value.as_memory:
        if is_shown_by(made, recipe):
            return made
    elif recipe_of(made) == recipe:
        return made
    with _Ambient():
        return show(made.untyped_storage(), recipe)


def realize(wanted: Value, running: Pass, graph: Graph) -> Tensor:
    """Make `wanted` again: run what it needs, nearest saved values first, in the order of forward."""
    burst: set[Node] = set()
    stack = [wanted]
    cache = running.cache
    while stack:
        value = stack.pop()
        if value.serial not in cache and value.node not in burst:
            burst.add(value.node)
            stack.extend(value.node.reads)
    if any(node.order in running.ran for node in burst):
        # Used up before, and wanted again (a custom function that unpacks late).
        spare, running = running, Pass(running.task)
        running.in_passing = True
        running.cache.update(spare.cache)
        running.given_out.update(spare.given_out)
    with _Ambient(), Switches() as switches:
        for node in sorted(burst, key=_order) if len(burst) > 1 else burst:
            _run_again(node, running, graph, wanted, switches)
    made = running.cache[wanted.serial]
    if not running.in_passing and running.left_of(wanted) <= 0:
        del running.cache[wanted.serial]
    return made


def _order(node: Node) -> int:
    return node.order


def _run_again(node: Node, running: Pass, graph: Graph, wanted: Value, switches: Switches) -> None:
    cache = running.cache
    if running.given_out:
        for read in node.reads:
            running.check(read, node.name)
    taken = _buffers_to_write(node, running) if node.rewrites or node.writes_sources else _NOTHING

    args = [_argument(arg, node, cache, taken) for arg in node.args]
    kwargs = node.kwargs
    if kwargs:
        kwargs = {name: _argument(arg, node, cache, taken) for name, arg in kwargs.items()}
    if graph.log is not None and node.order >= 0:  # else it is only held
        graph.log.add("recompute", node.name)
    switches.like(node.ambient)
    if node.random is None:
        out = node.func(*args, **kwargs)
    else:
        with randomness.generator_at(node.random):
            out = node.func(*args, **kwargs)
    for old, new in node.rewrites:
        value = new()
        if value is not None:
            storage = taken[id(old)]
            cache[value.serial] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    for tensor, ref in zip((out,) if type(out) is Tensor else outputs_of(out), node.outs, strict=True):
        value = ref() if ref is not None else None
        if value is not None:
            cache[value.serial] = tensor
    del args, kwargs, out, taken
    if running.in_passing:
        return
    if node.order not in running.ran:
        running.ran.add(node.order)
        for value in node.reads:
            running.use(value)
    for value in alive(node):
        if value is not wanted and running.left_of(value) <= 0:
            cache.pop(value.serial, None)


_NOTHING: dict[int, torch.UntypedStorage] = {}


def _argument(
    arg: Any, node: Node, cache: Mapping[int, Tensor], taken: Mapping[int, torch.UntypedStorage]
) -> Any:
    """An argument of `node` with its tensors in place of what stands for them."""
    kind = type(arg)
    if kind is Value or kind is Ref:
        value, recipe = (arg, arg.recipe) if kind is Value else arg
        written = taken.get(id(value)) if taken else None
        return show(written, recipe) if written is not None else shown(value, cache[value.serial], recipe)
    if kind is Source or kind is Held:
        source, at = (arg, 0) if kind is Source else arg
        written = taken.get(id(source)) if taken else None
        if written is not None:
            return show(written, recipe_of(source.tensors[at]))
        return source.read(at, node.name)
    if kind is list or kind is tuple:
        return kind(_argument(item, node, cache, taken) for item in arg)
    return arg


def _buffers_to_write(node: Node, running: Pass) -> dict[int, torch.UntypedStorage]:
    """The buffers that an in-place op writes when it is run again, by the identity of what they replace.

    The old version's own buffer if nothing else will need it, else a copy (rule e).
    """
    taken: dict[int, torch.UntypedStorage] = {}
    for old, _ in node.rewrites:
        storage = running.cache[old.serial].untyped_storage()
        if running.left_of(old) == 1 and not old.packs and not running.in_passing:
            del running.cache[old.serial]
        else:
            storage = storage.clone()
        taken[id(old)] = storage
    if node.writes_sources:
        for source in _sources((*node.args, *node.kwargs.values())):
            if source.guard is None and id(source) not in taken:
                taken[id(source)] = source.tensors[0].untyped_storage().clone()
    return taken


def _sources(args: Sequence[Any]) -> Iterator[Source]:
    for arg in args:
        kind = type(arg)
        if kind is Source:
            yield arg
        elif kind is Held:
            yield arg.source
        elif kind is list or kind is tuple:
            yield from _sources(arg)


class _Suspended(threading.local):
    """Whether this thread is replaying, so that a mode that is recording lets it pass unseen."""

    depth = 0


suspended = _Suspended()


class _Ambient:
    """Replays run below autograd and autocast, and out of sight of a mode that is recording (rule 7)."""

    __slots__ = ("_autocast", "_autograd")

    def __enter__(self) -> None:
        suspended.depth += 1
        self._autograd = private.AutoDispatchBelowAutograd()
        self._autograd.__enter__()
        self._autocast = private.ExcludeDispatchKeyGuard(_AUTOCAST)
        self._autocast.__enter__()

    def __exit__(self, *_: Any) -> None:
        self._autocast.__exit__(None, None, None)
        self._autograd.__exit__(None, None, None)
        suspended.depth -= 1


_AUTOCAST = private.DispatchKeySet(private.DispatchKey.AutocastCPU)
for _key in ("AutocastCUDA", "AutocastXPU", "AutocastMPS", "AutocastHPU", "AutocastPrivateUse1"):
    if hasattr(private.DispatchKey, _key):
        _AUTOCAST = _AUTOCAST | private.DispatchKeySet(getattr(private.DispatchKey, _key))
