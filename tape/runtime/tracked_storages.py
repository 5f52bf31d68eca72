"""Track, during forward, which storages recorded ops made or read, and writes to them.

See NOTE [ What is tracked ] in nodes.py.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from autoac.tape.capture.step_tape import StepTape
from autoac.tape.runtime.cursor import Cursor
from autoac.tape.runtime.cuts import Cuts
from autoac.tape.runtime.nodes import (
    Node,
    NodeVersion,
    Source,
    SourceView,
    UnsupportedTensor,
    VersionView,
    held_version,
    next_order,
    pin_version,
)
from autoac.tape.runtime.replay import HeldElsewhere, RegionGraph, bytes_of
from autoac.tape.runtime.write_guard import detached_alias, held_alias, version_counter
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.op_facts import OpFacts, written_tensors
from autoac.tape.torch_facts.storage_table import StorageTable, has_storage
from autoac.tape.torch_facts.view_recipes import Recipe, disjoint, make_view, recipe_of
from autoac.tape.unseen.fingerprints import Fingerprint, can_compare, fingerprint_of, same_contents
from autoac.tape.unseen.function_calls import SMALL

Origin = NodeVersion | Callable[[], Source | None]
"""Where the contents of a storage are from: a recorded op, or outside."""

_STRIDED = torch.strided

_OURS = 2  # references to a storage that only `look_last` holds: an alias, and the storage's Python object

_moving: StorageTable[bool] = StorageTable()
"""Small buffers that a loop has written between forward and backward, as an observed step has shown."""


def note_moving_buffers(tape: StepTape) -> None:
    """Have buffers copied from now on whenever recorded ops read them, if they were written since forward."""
    for tensor, counter in tape.copied:
        if version_counter(tensor) != counter:
            _moving.set(tensor, True)
    tape.copied.clear()


def small_buffers(model: nn.Module) -> frozenset[int]:
    """Return the addresses of the storages of small tensors that modules hold, without parameters."""
    attributes = (value for module in model.modules() for value in vars(module).values())
    tensors = (one for one in (*attributes, *model.buffers()) if isinstance(one, Tensor) and has_storage(one))
    storages = (tensor.untyped_storage() for tensor in tensors if not isinstance(tensor, Parameter))
    return frozenset(storage._cdata for storage in storages if storage.nbytes() <= SMALL)


# Ops that have made plain tensors of plain arguments: what they make may be sparse or quantized, no more.
_makes_plain: set[str] = set()


def _written_unseen() -> None:
    """Stand in for the origin of a storage that a kernel writes which PyTorch does not dispatch."""


class TrackedStorages:
    """The origin of each storage that recorded ops of one region made or read.

    Invariant: the origin of a storage describes its current contents, unless they were written unseen. A
    storage without an origin counts as from outside and not read yet.

    Attributes:
        key: name of the attribute that holds a storage's origin.
        position: of the op that reads now, in a plan with use groups.
        writes: number of writes to tracked storages.
        compares_reads: True if what is read is compared with what a recorded op has written.
        watches_code: True outside of plans: new code and new parameters switch the comparison on.
        cuts: of an observed step; None in other steps.
        hold: called with each tensor that a recorded op or Function has made or written, if it may be held.
    """

    def __init__(self, graph: RegionGraph) -> None:
        self._graph = graph
        self._table: StorageTable[Origin] = StorageTable()
        self.key = self._table.name
        self.position: float = 0
        self.writes = 0
        self.compares_reads = False
        self.watches_code = False
        self.cuts: Cuts | None = None
        self._saved: StorageTable[list[weakref.ref[Any]]] = StorageTable()
        self._read_unseen: StorageTable[Fingerprint] = StorageTable()  # contents that ops have read
        self.hold: Callable[[Tensor], None] | None = None
        self._watched: dict[int, tuple[Tensor, NodeVersion]] = {}  # by address: see `look_last`
        self._copied: dict[int, Source] = {}  # small buffers among the arguments of one node, by address
        self._copied_for: dict[NodeVersion, None] | None = None  # what that node reads
        self._since_pause: list[weakref.ref[torch.UntypedStorage]] = []  # entered since the last pause

    def origin(self, tensor: Tensor) -> Origin | None:
        """Return the origin of `tensor`'s storage; drop it first if the storage was written unseen."""
        try:
            origin = self._table.get(tensor)
        except NotImplementedError:  # it has no storage: it is sparse, or of a transform of torch.func
            return None
        if type(origin) is NodeVersion and origin.counter is not None and origin.written_in_pause(tensor):
            self._table.drop(tensor)
            return None
        return origin

    def is_recorded(self, tensor: Tensor) -> bool:
        """Return True if a recorded op made the contents of `tensor`'s storage."""
        return type(self.origin(tensor)) is NodeVersion

    def enter(self, storage: torch.UntypedStorage, origin: Origin) -> None:
        """Note which version, or which source from outside, `storage` holds now."""
        self._since_pause.append(self._table.put(storage, origin))

    def drop(self, tensor: Tensor) -> None:
        """Forget the origin of `tensor`'s storage."""
        self._table.drop(tensor)

    def close(self) -> None:
        """Forget all origins. From here on the counters of the sources show writes."""
        self.look_last(everything=True)
        if self.cuts is not None:
            self.cuts.settle()
            self._graph.elsewhere = {version.serial: held for version, held in self._held_elsewhere()}
        self._renew_guards()
        self._table.clear()
        self._saved.clear()
        self._copied_for, self._copied = None, {}

    def _held_elsewhere(self) -> Iterator[tuple[NodeVersion, HeldElsewhere]]:
        """Yield the versions that backward needs and whose memory the model or the loop holds anyway."""
        for storage, version in self._table.items():
            if type(version) is not NodeVersion or version.node.order < 0 or not version.uses:
                continue
            if version.contents is None and version.suspect:
                continue  # nobody knows who has written it
            contents = fingerprint_of(storage) if version.contents is None else version.contents
            yield version, (weakref.ref(storage), storage.nbytes(), contents)

    def _renew_guards(self) -> list[tuple[weakref.ref[torch.UntypedStorage], NodeVersion]]:
        """Accept all writes so far to sources entered since the last pause: the mode saw them.

        A version counter moves only after the mode has returned. Before a write that the mode sees, an older
        source is copied. So if the counter of an older source moved, the mode did not see the write.

        Returns:
            The versions entered since the last pause.
        """
        versions = []
        for ref in self._since_pause:
            storage = ref()
            origin: Origin | None = storage.__dict__.get(self.key) if storage is not None else None
            if type(origin) is NodeVersion:
                versions.append((ref, origin))
            elif origin is not None and (source := origin()) is not None and source.counter is not None:
                source.counter = version_counter(source.tensors[0])
        return versions

    def note_counters(self) -> bool:
        """Note the version counters of tracked storages before a pause; return False if one is unreadable.

        Counters noted before an earlier pause are not read again, so short pauses are cheap.
        """
        self._since_pause = [ref for ref, version in self._renew_guards() if not version.note_counter()]
        return not self._since_pause

    def pin(self, tensor: Tensor) -> None:
        """Hold the contents of `tensor`'s storage from here on, so that backward need not recompute them."""
        origin = self.origin(tensor)
        if type(origin) is NodeVersion:
            with self._graph.lock:
                for version in origin.runs:
                    pin_version(version, tensor, next_order())
            self._table.drop(tensor)

    def save(self, tensor: Tensor) -> None:
        """Hold the contents of `tensor`'s storage, as if the op that made them were saved."""
        origin = self.origin(tensor)
        if type(origin) is NodeVersion:
            with self._graph.lock:
                for version in origin.runs:
                    source = pin_version(version, tensor, next_order())
            self.enter(tensor.untyped_storage(), weakref.ref(source))

    def cut(self, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """Make a cut before an op if it is time for one, and hold what the op is the first to read.

        Args:
            read: the tensors among the op's arguments.
            written: those of them that the op writes, whose new contents are held in their place.
        """
        cuts = self.cuts
        assert cuts is not None
        if self.compares_reads:
            self.look_last()  # what only the comparison holds is not live
        rewritten = {tensor.untyped_storage()._cdata for tensor in written if has_storage(tensor)}
        with self._graph.lock:
            cuts.cut()
            for tensor in read:
                origin = self.origin(tensor)
                if type(origin) is NodeVersion:
                    address = tensor.untyped_storage()._cdata
                    if address not in rewritten and cuts.note_read(origin, tensor):
                        self._watched.pop(address, None)  # it shows what unseen kernels write, as if saved
                        if not tensor.requires_grad:  # what made it need not run again
                            self.save(tensor)

    def note_saved(self, handle: Any) -> None:
        """Have the tensor of `handle` copied before it is written: NOTE [ Needed checkpoints ]."""
        handles = self._saved.get(handle.tensor)
        if handles is None:
            self._saved.put(handle.tensor.untyped_storage(), handles := [])
        handles.append(weakref.ref(handle))

    def forget_saved(self, handle: Any) -> None:
        """Have the tensor of `handle` copied no more: the write that comes is by the op that saved it."""
        handles = self._saved.get(handle.tensor) or []
        handles[:] = [ref for ref in handles if ref() is not handle]

    def _copy(self, source: Source, copy: torch.UntypedStorage | None = None) -> None:
        """Have `source` hold `copy`, or a new copy. Cuts so far stay: to drop one would hold it, too."""
        source.keep_copy(copy)
        if self.cuts is not None:
            self.cuts.settle()

    def _copy_saved(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Have the handles of `note_saved` hold a copy of `tensor`'s storage; return it, if one does."""
        handles = [handle for ref in self._saved.get(tensor) or () if (handle := ref()) is not None]
        self._saved.drop(tensor)
        if not handles:
            return None
        copy: torch.UntypedStorage = tensor.untyped_storage().clone()
        for handle in handles:
            handle.hold(make_view(copy, recipe_of(handle.tensor)))
        return copy

    def before_write(self, tensors: Iterable[Tensor], *, untrack: bool, in_function: bool = False) -> None:
        """Copy what recorded ops have read from outside of `tensors`' storages, before they are written.

        Args:
            tensors: that are written.
            untrack: drop their origins: the writer is not recorded, so the new contents are from outside.
            in_function: an op of a Function writes. What was read of other parts of a storage needs no copy:
                solvers fill one storage part by part. Elsewhere, plans count a copy.
        """
        for tensor in tensors:
            copy = self._copy_saved(tensor) if self._saved.refs and has_storage(tensor) else None
            origin = self.origin(tensor)
            if origin is None:
                continue
            self.writes += 1
            if type(origin) is not NodeVersion:
                source = origin()
                if source is not None and in_function and source.reads_only_beside(tensor):
                    self.enter(tensor.untyped_storage(), origin)  # the counter is about to move
                    continue
                if source is not None:
                    self._copy(source, copy)
                if origin is not _written_unseen:
                    self._table.drop(tensor)
            else:
                if origin.node.order < 0:  # held by a cut
                    origin.node.args[0].keep_copy()
                if untrack:
                    self._table.drop(tensor)

    def before_silent_write(self, tensors: Sequence[Tensor]) -> None:
        """Prepare for a write to `tensors` that advances no version counter, by a collective or a Function.

        Drop their origins, and let handles see the write: backward gets the new contents for a tensor that
        autograd saved before. Ops that read the old contents run again on the old contents.
        """
        for tensor in tensors:
            origin = self.origin(tensor)
            if type(origin) is NodeVersion:
                for version in origin.runs:
                    move_handles(version, held_version(tensor), None)
        self.before_write(tensors, untrack=True)

    def before_resize(self, storage: torch.UntypedStorage) -> None:
        """Prepare for another size of `storage`: what autograd saved of it is as it will be in backward.

        So Megatron's checkpoint without output frees saved tensors, until hooks of backward fill them again.
        """
        if type(self._table.of(storage)) is not NodeVersion:
            return
        tensor = bytes_of(storage)
        if self._graph.tape is not None:
            self._graph.tape.note_resize(tensor)
        self.before_silent_write([tensor])

    def after_opaque_write(self, tensor: Tensor) -> None:
        """Drop the origin of a storage that an op wrote without announcing it.

        Ops that read it before cannot be replayed: nothing renews the guard of a source without an entry.
        """
        if self.origin(tensor) is not None:
            self.writes += 1
            self._table.drop(tensor)

    def writes_a_version(self, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
        """Return True if this call writes a storage whose contents a recorded op made."""
        return bool(self.versions_among(written_tensors(facts, args, kwargs)))

    def versions_among(self, tensors: Iterable[Tensor]) -> list[tuple[NodeVersion, Tensor]]:
        """Return the distinct versions on which `tensors` are, each with one of the tensors."""
        found: list[tuple[NodeVersion, Tensor]] = []
        for tensor in tensors:
            origin = self.origin(tensor)
            if type(origin) is NodeVersion:
                origin = origin.serving(self.position)
                if all(origin is not version for version, _ in found):
                    found.append((origin, tensor))
        return found

    def note_contents(self, version: NodeVersion, tensor: Tensor) -> None:
        """Note the contents that a recorded op has given to `version`, the storage of `tensor`."""
        weights = self._graph.weights
        if self.compares_reads and weights is not None and can_compare(tensor):
            version.suspect = True
            version.contents = weights.keep(fingerprint_of(tensor.untyped_storage()))
            self._watched[tensor.untyped_storage()._cdata] = held_alias(tensor), version

    def look_last(self, *, everything: bool = False) -> None:
        """Compare storages that the model has let go of, or all, with what recorded ops have written.

        An unseen kernel may have written to a storage that no op reads any more, but that backward unpacks.
        Plain autograd then gives backward the later contents. So each storage is held a little longer than
        the model holds it: until the next op.
        """
        watched, use_count = self._watched, private.storage_use_count
        for address in [address for address in watched if everything or use_count(address) <= _OURS]:
            tensor, version = watched.pop(address)
            unpacked = any(handle() is not None for run in version.runs for handle in run.handles)
            if unpacked and self._table.get(tensor) is version and version.contents is not None:
                self.as_written(version, tensor)

    def note_blank(self, tensor: Tensor) -> None:
        """Note that an op has allocated the storage of `tensor`, and that other code will write to it."""
        version = self._table.get(tensor)
        if type(version) is NodeVersion and tensor.numel():
            version.suspect = True
            version.contents = None

    def as_written(self, version: NodeVersion, tensor: Tensor) -> bool:
        """Return True if the storage of `tensor` has the contents that a recorded op gave to `version`.

        If not, an unseen kernel has written it, and its contents are from outside from here on.
        """
        if version.contents is None:
            self.save(tensor)
            self.enter(tensor.untyped_storage(), _written_unseen)
            return False
        if same_contents(fingerprint_of(tensor.untyped_storage()), version.contents):
            return True
        self._graph.code.note_unseen_write(version.node.name)
        if self._graph.tape is not None:
            self._graph.tape.note_unseen_write(tensor)
        self._written_by_others(version, tensor)
        return False

    def _written_by_others(self, version: NodeVersion, tensor: Tensor) -> None:
        """Drop `version` as the origin of a storage. Its handles read the storage as it is from now on."""
        self.writes += 1
        for run in version.runs:
            if run.handles:
                move_handles(run, held_version(tensor), None)
        self.enter(tensor.untyped_storage(), _written_unseen)

    def copies_of_sources(self, tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
        """Return copies of the storages of `tensors` that recorded ops have read from outside, by address."""
        copies = {}
        for tensor in tensors:
            origin = self.origin(tensor)
            if origin is not None and type(origin) is not NodeVersion and origin() is not None:
                storage = tensor.untyped_storage()
                copies[storage._cdata] = storage.clone()
        return copies

    def after_unseen_write(
        self, tensors: Iterable[Tensor], copies: Mapping[int, torch.UntypedStorage], *, shown: bool
    ) -> None:
        """Drop the origins of storages that a kernel may have written; `copies` has the old contents.

        Args:
            shown: ops have announced all writes, so what was read of other parts needs no copy.
        """
        for tensor in tensors:
            origin = self.origin(tensor)
            if type(origin) is NodeVersion:
                self._written_by_others(origin, tensor)
            elif origin is not None and ((source := origin()) is None or not shown):
                self.writes += 1
                if source is not None:
                    self._copy(source, copies.get(tensor.untyped_storage()._cdata))
                self._table.drop(tensor)

    def arguments(
        self, args: Iterable[Any], reads: dict[NodeVersion, None], unread: Any = None
    ) -> tuple[Any, ...]:
        """Return `args` with the stand-ins of their tensors; add the versions among them to `reads`.

        Args:
            unread: one of `args`, of which the op does not read the contents.

        Raises:
            UnsupportedTensor: a tensor is not described by its storage and recipe.
        """
        stand_ins: list[Any] = []
        key = self.key
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                strided = arg.layout is _STRIDED
            elif isinstance(arg, Tensor):
                strided = has_storage(arg)
            else:
                if (kind is list or kind is tuple) and any(isinstance(item, Tensor) for item in arg):
                    arg = kind(self.arguments(arg, reads))
                stand_ins.append(arg)
                continue
            if not strided:
                raise UnsupportedTensor
            origin = arg.untyped_storage().__dict__.get(key)
            if type(origin) is NodeVersion:
                if origin.counter is not None and origin.written_in_pause(arg):
                    origin = None
                elif origin.suspect and arg is not unread and not self.as_written(origin, arg):
                    origin = self._table.get(arg)
                else:
                    if origin.later_runs:
                        origin = origin.serving(self.position)
                    reads[origin] = None
                    if origin.recipe_if_returned(arg) is not None:
                        stand_ins.append(origin)
                    elif not arg.is_nested:
                        stand_ins.append(VersionView(origin, recipe_of(arg)))
                    else:
                        raise UnsupportedTensor
                    continue
            source = origin() if origin is not None else None
            known = source is not None and source.is_first_read(arg)
            unseen = origin is _written_unseen
            stand_ins.append(source if known else self._read_source(arg, source, reads, unseen=unseen))
        return tuple(stand_ins)

    def _read_source(
        self, tensor: Tensor, source: Source | None, reads: dict[NodeVersion, None], *, unseen: bool
    ) -> Source | SourceView:
        """Return what a node holds in place of `tensor`, which no recorded op made.

        Args:
            source: the Source of its storage, if an earlier node has read that storage.
            reads: of the node, which tells its calls of this method from those of other nodes.
            unseen: an unseen kernel writes the storage.
        """
        if not has_storage(tensor):
            raise UnsupportedTensor
        if source is None:
            if self.watches_code and type(tensor) is Parameter:
                self._note_parameter(tensor)
            source = Source(tensor)
            if (_moving.refs or self._graph.tape is not None) and self._moves(tensor, source):
                if self._copied_for is not reads:
                    self._copied_for, self._copied = reads, {}
                address = tensor.untyped_storage()._cdata
                if (copied := self._copied.get(address)) is not None:
                    return copied.argument_for(tensor)  # arguments on one storage stay so
                source.keep_copy()
                self._copied[address] = source
                return source
            if unseen:
                self._copy(source)  # nothing would show the next write
                if self._graph.tape is not None:
                    self._compare_with_last_read(tensor, self._graph.tape)
                return source
            self.enter(tensor.untyped_storage(), weakref.ref(source))
            return source
        return source.argument_for(tensor)

    def _moves(self, tensor: Tensor, source: Source) -> bool:
        """Return True if a loop may write `tensor` between forward and backward, since it is a small buffer.

        An observed step copies all of them, and notes which ones the loop writes.
        """
        tape = self._graph.tape
        if tape is not None and tensor.untyped_storage()._cdata in tape.small_buffers:
            if source.counter is not None:
                tape.copied.append((source.tensors[0], source.counter))
            return True
        return _moving.get(tensor) is not None

    def _compare_with_last_read(self, tensor: Tensor, tape: StepTape) -> None:
        """Note on the tape if an unseen kernel has written a storage again since an op last read it."""
        before, now = self._read_unseen.get(tensor), fingerprint_of(tensor.untyped_storage())
        if before is not None and not same_contents(now, before):
            tape.note_unseen_write(tensor)
        self._read_unseen.set(tensor, now)

    def _note_parameter(self, parameter: Parameter) -> None:
        """Compare contents from here on if this is the first region that reads `parameter`."""
        self._graph.code.note_parameter(parameter)
        self.compare_if_new()

    def compare_if_new(self) -> None:
        """Compare contents from here on if the region runs code that was not compared before."""
        if self._graph.code.is_new:
            self._graph.compare()
            self.compares_reads = self._graph.weights is not None

    def output(
        self, tensor: Tensor, node: Node, written: Sequence[Tensor]
    ) -> weakref.ref[NodeVersion] | None:
        """Track an output of `node`; return its version, or None if it is not on a new storage."""
        known = node.name in _makes_plain and type(tensor) is Tensor and not tensor.is_quantized
        if not known or tensor.layout is not _STRIDED:
            if not has_storage(tensor):
                return None
            _makes_plain.add(node.name)
        storage = tensor.untyped_storage()
        entries: dict[str, Any] = storage.__dict__
        if self.key in entries:
            return None  # the storage of an argument
        if written and any(has_storage(old) and old.untyped_storage() is storage for old in written):
            return None  # from outside: its origin was dropped before the write
        # As `enter`, whose calls would double the cost.
        entries[self.key] = version = NodeVersion(node, tensor)
        self._table.refs.append(ref := weakref.ref(storage))
        self._since_pause.append(ref)
        if self.cuts is not None:
            self.cuts.note_made(storage, version.serial)
        if self.compares_reads:
            self.note_contents(version, tensor)
        return weakref.ref(version)

    def rewrite(self, rewritten: Iterable[tuple[NodeVersion, Tensor]], node: Node) -> list[NodeVersion]:
        """Track the versions that the in-place op of `node` made, and return them.

        Args:
            rewritten: pairs of an old version and the tensor that was written.
        """
        made, rewrites = [], []
        for old, tensor in rewritten:
            new = NodeVersion(node, tensor, raw=True)
            made.append(new)
            if self.cuts is not None:
                self.cuts.note_rewritten(tensor.untyped_storage(), old.serial, new.serial)
            rewrites.append((old, weakref.ref(new)))
            self.enter(tensor.untyped_storage(), new)
            self.note_contents(new, tensor)
        node.rewrites = tuple(rewrites)
        return made


def move_handles(old: NodeVersion, new: NodeVersion, written: Recipe | None) -> None:
    """Move the handles on `old` that view nothing of what was `written` to `new`; with None, all handles."""
    staying: list[weakref.ref[Any]] = []
    moved: list[weakref.ref[Any]] = []
    for ref in old.handles:
        handle = ref()
        if handle is not None and (written is None or disjoint(written, handle.recipe)):
            handle.move_to(new)
            if written is None:
                handle.contents = None  # the contents changed
            moved.append(ref)
        else:
            staying.append(ref)
    old.handles, new.handles = staying, [*new.handles, *moved]


class ForwardHolds:
    """Hold what a plan recomputes for as long as a backward inside of forward needs it.

    Forces, gradient penalties and the like differentiate in forward. What such a backward unpacks is held
    until then, as without a plan. The plan says where forward lets go of it: autograd may hold the node for
    the backward of the step, which recomputes.

    Args:
        cursor: follows the plan.
        storages: of the region.
    """

    def __init__(self, cursor: Cursor, storages: TrackedStorages) -> None:
        self._cursor, self._storages = cursor, storages
        self._held: dict[int, tuple[int, Tensor]] = {}  # by serial of the version: until which op, a tensor
        self._next = math.inf  # the first of these ops

    def hold(self, tensor: Tensor) -> None:
        """Hold `tensor`, which the op that the cursor is at has just made or written, if the plan says so."""
        until = self._cursor.needed_until
        origin = self._storages.origin(tensor) if until is not None else None
        if until is None or type(origin) is not NodeVersion:
            return
        alias = detached_alias(tensor)
        for version in origin.runs:
            if version.raw:  # its own tensor may die, and with it the counter that shows writes in a pause
                version.tensor_ref, version.recipe = weakref.ref(alias), None
        self._held |= {version.serial: (until, alias) for version in origin.runs}
        self._next = min(self._next, until)

    def get(self, version: NodeVersion) -> Tensor | None:
        """Return a tensor that shows `version`; None if it is not held, or was written over since."""
        _, tensor = self._held.get(version.serial, (0, None))
        origin = self._storages.origin(tensor) if tensor is not None else None
        is_current = type(origin) is NodeVersion and any(run is version for run in origin.runs)
        return tensor if is_current else None

    def free_due(self) -> None:
        """Let go of what is not needed from the op on that the cursor is at."""
        position = self._cursor.position
        if position >= self._next:
            self._held = {serial: held for serial, held in self._held.items() if held[0] > position}
            self._next = min((until for until, _ in self._held.values()), default=math.inf)
