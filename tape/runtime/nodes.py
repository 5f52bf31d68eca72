"""Define recorded ops and the storage versions that they make: what backward needs to run an op again.

NOTE [ What is tracked ]

Only ops that may be recomputed are tracked. An op whose outputs are saved has no node. Downstream ops see
its outputs as they see parameters and inputs: as sources from outside. So saving an op costs only the
question to the policy, and the recorded graph ends at saved tensors.

    NodeVersion        one version of a storage that a recorded op made; refers to its node
    Source             one version of a storage from outside; owned by the nodes that read it
    Node               a recorded op with its arguments. A tensor argument is replaced by
                         - its NodeVersion, if it is the very tensor that the op returned;
                         - a VersionView (NodeVersion, recipe), for any other tensor on that storage;
                         - its Source, if it is the first tensor that a node read from that storage;
                         - a SourceView (Source, position), for any other tensor on that storage
    RecomputedHandle   what autograd holds in place of a tensor: a NodeVersion and a recipe

References point from autograd to the past: RecomputedHandle -> NodeVersion -> Node -> NodeVersion or
Source -> ... References to the future are weak. So when autograd drops its last handle, everything behind
it is freed at once, without the garbage collector. Views need no node, because a recipe rebuilds a tensor
from its storage. The region's table maps each storage to its NodeVersion or, weakly, to its Source.

NOTE [ Uses ] (rules c to f of NOTE [ Rules of the schedule ] in planner/memory/schedule.py)

A NodeVersion has one use for each RecomputedHandle on it, and one for each node that reads it and has an
output with a use. `NodeVersion.uses` counts over all of autograd's graph; a `Pass` counts down a copy.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from autoac.tape.runtime.cursor import UseGroup
from autoac.tape.runtime.moves.copies import HostCopy
from autoac.tape.runtime.write_guard import StaleError, check_counter, held_alias, version_counter
from autoac.tape.torch_facts.rng import GeneratorState
from autoac.tape.torch_facts.streams import event_on, streams_seen, wait_for
from autoac.tape.torch_facts.view_recipes import Recipe, disjoint, make_view, matches_recipe, recipe_of
from autoac.tape.unseen.fingerprints import Fingerprint
from autoac.tape.unseen.global_flags import Flags, current_flags


class Source:
    """One version of a storage from outside the recorded ops: a parameter, an input, a saved tensor.

    Invariant: while `counter` is None, `tensors` are on a private copy that nothing else can write.
    """

    __slots__ = ("__weakref__", "_copied", "_first", "_recipe", "counter", "nbytes", "tensors")

    def __init__(self, tensor: Tensor) -> None:
        self._first = weakref.ref(tensor)  # the tensor that tensors[0] was made from
        self._recipe: Recipe | None = None  # of tensors[0], computed when first needed
        self._copied: torch.Event | None = None  # end of the private copy, if streams must wait for it
        self.nbytes = tensor.untyped_storage().nbytes()
        self.tensors = [held_alias(tensor)]  # as nodes read them: on the storage, without history
        self.counter: int | None = version_counter(self.tensors[0])  # after all writes that the region saw
        if tensor.is_inference():
            self.keep_copy()  # a later write could not be detected

    def argument_for(self, tensor: Tensor) -> SourceView:
        """Return the stand-in among the arguments of a node for `tensor`, which is not the first one read."""
        copy = self.tensors[0].untyped_storage() if self.counter is None else None
        view = held_alias(tensor) if copy is None else make_view(copy, recipe_of(tensor))
        self.tensors.append(view)
        return SourceView(self, len(self.tensors) - 1)

    def is_first_read(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is the first one read and unchanged: `tensor.data = ...` runs no op."""
        if self._first() is not tensor:
            return False
        if self._recipe is None:
            self._recipe = recipe_of(self.tensors[0])
        return matches_recipe(tensor, self._recipe)

    def reads_only_beside(self, written: Tensor) -> bool:
        """Return True if nothing is read of what `written` shows, and the storage was not written so far."""
        unwritten = self.counter == version_counter(self.tensors[0])
        return unwritten and all(disjoint(recipe_of(written), recipe_of(tensor)) for tensor in self.tensors)

    def keep_copy(self, copy: torch.UntypedStorage | None = None) -> None:
        """Replace the storage by a private copy, because the original is about to be written.

        Args:
            copy: the copy, if the original is written already.
        """
        storage = self.tensors[0].untyped_storage().clone() if copy is None else copy
        self.tensors = [make_view(storage, recipe_of(tensor)) for tensor in self.tensors]
        self.counter = None
        if streams_seen.several:
            self._copied = event_on(self.tensors[0])

    def read(self, position: int, reader: str) -> Tensor:
        """Return `tensors[position]` to the node named `reader`, which is being replayed.

        Raises:
            StaleError: the storage was written, freed or resized after it was recorded.
        """
        tensor = self.tensors[position]
        if self.counter is not None:
            check_counter(self.tensors[0], self.counter, reader)
            nbytes = tensor.untyped_storage().nbytes()
            if nbytes != self.nbytes:
                raise StaleError(
                    f"the storage of a {tensor.dtype} {list(tensor.shape)}, which {reader} reads, must have "
                    f"{self.nbytes} bytes, got {nbytes}: it was freed or resized after forward. Keep the "
                    "storage until backward is over, or save the outputs of the ops that read it"
                )
        elif self._copied is not None:
            wait_for(self._copied, tensor)
        return tensor


_serials = itertools.count()

_NO_HANDLES: list[weakref.ref[Any]] = []  # of a version that has none yet

next_order: Callable[[], int] = itertools.count().__next__  # of nodes: forward order over all regions


@final
class NodeVersion:
    """One version of a storage that a recorded op made.

    Invariant: `uses` is the number of live handles on it, plus the number of nodes that read it and have an
    output with a use.
    """

    __slots__ = (
        "__weakref__",
        "contents",
        "counter",
        "first_counter",
        "handles",
        "later_runs",
        "node",
        "raw",
        "recipe",
        "serial",
        "suspect",
        "tensor_ref",
        "uses",
    )

    def __init__(self, node: Node, tensor: Tensor, *, raw: bool | None = None) -> None:
        self.node = node
        # Replay caches some tensor on the storage, not one that `recipe` describes. None: none was cached.
        self.raw: bool | None = raw or None
        self.tensor_ref = weakref.ref(tensor)  # the tensor that the op returned or wrote
        self.recipe: Recipe | None = None  # of that tensor, computed when first needed
        self.serial = next(_serials)  # names this version without keeping it alive
        self.uses = 0
        self.handles = _NO_HANDLES  # every RecomputedHandle made for it, alive or not
        # With use groups: the versions that other runs of the op make, last first, each with its group.
        self.later_runs: tuple[tuple[UseGroup, NodeVersion], ...] = ()
        self.counter: int | None = None  # version counter of the tensor, noted before the mode pauses
        self.first_counter = -1 if raw else 0  # the counter when this version was made; -1 if unknown
        self.suspect = False  # readers must first compare: an unseen kernel may have written it
        # Fingerprint of the storage; None if suspect: nobody has written it.
        self.contents: Fingerprint | None = None

    def note_counter(self) -> bool:
        """Note the version counter of the tensor; return False if it cannot be read."""
        tensor = self.tensor_ref()
        # Nothing has written to a tensor that is gone.
        self.counter = version_counter(tensor) if tensor is not None else self.first_counter
        return self.counter >= 0

    def written_in_pause(self, view: Tensor) -> bool:
        """Return True if an op may have written to the storage since `note_counter`.

        Args:
            view: a tensor on the storage. If the tensor that the op returned is gone, the counter of `view`
                shows writes.
        """
        tensor = self.tensor_ref()
        return version_counter(tensor if tensor is not None else view) != self.counter

    def serving(self, position: float) -> NodeVersion:
        """Return the version that serves a use at `position`; see NOTE [ Use groups ] in the planner."""
        for group, version in self.later_runs:
            if position <= group.latest:
                return version
        return self

    def add_later_run(self, group: UseGroup, node: Node, tensor: Tensor) -> NodeVersion:
        """Add the version that `node`, a later run of the op, makes of the same tensor; return it."""
        later = NodeVersion(node, tensor, raw=self.raw)
        self.later_runs = ((group, later), *self.later_runs)
        return later

    @property
    def runs(self) -> tuple[NodeVersion, ...]:
        """Return this version, and the version of each later run if the op has use groups."""
        return (self, *(version for _, version in self.later_runs))

    def recipe_if_returned(self, tensor: Tensor) -> Recipe | None:
        """Return the recipe of `tensor` if it is the very tensor that the op returned, else None."""
        if self.tensor_ref() is not tensor:
            return None
        if self.recipe is None:
            self.recipe = recipe_of(tensor)
        elif not matches_recipe(tensor, self.recipe):
            return None  # `tensor.data = ...` runs no op
        return self.recipe


class VersionView(NamedTuple):
    """A tensor on a NodeVersion, other than the one that the op returned, as an argument of a node."""

    version: NodeVersion
    recipe: Recipe


class SourceView(NamedTuple):
    """A tensor on a Source, other than the first one read, as an argument of a node."""

    source: Source
    position: int  # in source.tensors


class UnsupportedTensor(Exception):
    """Raised for an argument that its storage and recipe do not describe, such as a sparse tensor."""


@dataclass(slots=True, eq=False)
class Node:
    """A recorded op, ready to run again."""

    order: int  # position in forward
    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[NodeVersion, ...]  # distinct
    rng_state: GeneratorState | None
    stream: int = 0  # that it ran on in forward
    flags: Flags = field(default_factory=current_flags)
    outs: tuple[weakref.ref[NodeVersion] | None, ...] = ()  # one for each output tensor
    # Of an in-place op: the version that it reads and, weakly, the version that it makes.
    rewrites: tuple[tuple[NodeVersion, Callable[[], NodeVersion | None]], ...] = ()
    writes_sources: bool = False  # replay must run it on copies of its sources
    used_outs: int = 0  # number of outputs with a use


class FunctionNode(Node):
    """A call of a torch.autograd.Function, recorded as one op. `func` runs its forward above autograd."""


class MovedNode(Node):
    """A recorded op whose outputs are on the host. `func` is not called: the outputs are copied back.

    Attributes:
        copies: one for each of `outs`; None where that is None.
    """

    def __init__(self, name: str, stream: int) -> None:
        super().__init__(next_order(), name, _nothing, (), {}, (), None, stream)
        self.copies: tuple[HostCopy | None, ...] = ()


def run_with_shape(
    func: Callable[..., Tensor], name: str, shape: torch.Size, /, *args: Any, **kwargs: Any
) -> Tensor:
    """Run an op whose output shape depends on values (a mask, an index), and check the shape.

    Raises:
        RuntimeError: the output does not have the shape that it had in forward.
    """
    out = func(*args, **kwargs)
    if out.shape != shape:
        raise RuntimeError(
            f"{name} must return {list(shape)} as it did in forward, got {list(out.shape)} "
            "when it was run again: the mask or index that it reads has changed. Save the op that makes "
            'it, for example with ac_client.pin(module, "must_save")'
        )
    return out


def add_use(version: NodeVersion) -> None:
    """Count one more use of `version`; if its node had none, also of each version that the node reads.

    The recording forward calls this without a lock, while a backward on another thread may remove uses. That
    is safe because no other thread runs between reading a count and acting on it, and because the steps of
    the two may interleave in any order.
    """
    stack = [version]
    while stack:
        version = stack.pop()
        version.uses += 1
        if version.uses == 1:
            node = version.node
            node.used_outs += 1
            if node.used_outs == 1:
                for read in node.reads:
                    if read.uses:
                        read.uses += 1
                    else:
                        stack.append(read)


def remove_use(version: NodeVersion) -> None:
    """Remove a use of `version`. If its op is then not needed, remove the uses of what the op reads."""
    stack = [version]
    while stack:
        version = stack.pop()
        version.uses -= 1
        if version.uses == 0:
            node = version.node
            node.used_outs -= 1
            if node.used_outs == 0:
                stack.extend(node.reads)


def pin_version(version: NodeVersion, tensor: Tensor, order: int) -> Source:
    """Hold `tensor` as the contents of `version`, so that its node no longer has to make them."""
    source = Source(tensor)
    node = _pinned_node(source, order)
    node.outs = (weakref.ref(version),)
    make_by(version, node)
    version.raw = True
    return source


def make_by(version: NodeVersion, node: Node) -> None:
    """Have `node` make the contents of `version` from here on, in place of the node that did."""
    uses = version.uses
    if uses:
        version.uses = 1
        remove_use(version)
    version.node = node
    if uses:
        add_use(version)
        version.uses = uses


def held_version(tensor: Tensor) -> NodeVersion:
    """Return a new version that holds `tensor`, with its present contents and what unseen kernels write."""
    node = _pinned_node(Source(tensor), next_order())
    version = NodeVersion(node, tensor, raw=True)
    node.outs = (weakref.ref(version),)
    return version


def _pinned_node(source: Source, order: int) -> Node:
    # It reads no version, so it may run before all others.
    return Node(-order, "pinned", lambda tensor: tensor, (source,), {}, (), None)


def _nothing() -> None:
    """Stand in for a weak reference to a version that the node no longer makes."""


def live_versions(node: Node) -> list[NodeVersion]:
    """Return the versions that `node` makes and that something still refers to."""
    versions = [ref() for ref in node.outs if ref is not None] + [new() for _, new in node.rewrites]
    return [version for version in versions if version is not None and version.node is node]
