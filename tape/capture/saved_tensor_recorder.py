"""Record what autograd saves, and when backward asks for it and drops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from autoac.tape.capture.op_recorder import OpRecorder, RecordedStorage
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.storage_table import has_storage
from autoac.tape.torch_facts.view_recipes import Recipe, disjoint, recipe_of

UNPACKED = "a backward inside forward reads it"


@dataclass(slots=True)
class SavedEvent:
    """An unpack or a drop of a saved tensor."""

    kind: str  # "unpack" or "drop"
    saved: int
    mark: int
    node: str  # autograd node that unpacked it
    task: int = -1  # the graph task of backward that unpacked it
    end_mark: int = -1  # of an unpack
    kept: bool = False  # the region goes on holding what it returned
    freed_mark: int = -1  # mark at which that was freed
    # Of an unpack by a backward inside of forward: how many ops had begun when its node returned.
    needed_until: int = 0


class SavedTensorRecorder:
    """Record each saved tensor of forward, its unpacks and its drop.

    Attributes:
        versions: by saved tensor, the version of its storage that was saved.
        packed: by saved tensor, how many ops had started.
        events: unpacks and drops, in order.
        in_registers: storages of values that compiled code has in registers.
        kernels: pairs of marks. What is allocated and freed in between takes no memory in compiled code.
        closed: True once the step is over: drops no longer count.
        forward_over: False while an unpack belongs to a backward that the model runs inside forward.
        can_run: returns True if an op of a module could run now.
        out_of_reach: ops whose output was unpacked while they could not run.
        elsewhere: saved tensors whose memory the model itself frees and fills again.
    """

    def __init__(self, recorder: OpRecorder, mark: Callable[[], int]) -> None:
        self._recorder = recorder
        self._mark = mark
        self._windows: list[Recipe | None] = []  # by saved tensor; None: the whole storage
        self.versions: list[int] = []
        self.packed: list[int] = []
        self.events: list[SavedEvent] = []
        self.in_registers: list[RecordedStorage] = []
        self.kernels: list[tuple[int, int]] = []
        self.closed = False
        self.forward_over = False
        self.can_run: Callable[[str], bool] = lambda _module: True
        self.out_of_reach: set[int] = set()
        self.elsewhere: set[int] = set()

    def sees(self, tensor: Tensor, depth: int) -> bool:
        """Return True if `tensor`, which autograd packs, is one that forward made.

        Args:
            depth: as for `FunctionCall.is_forward_over`.
        """
        recorder = self._recorder
        return (
            recorder.note_pack(tensor, depth)
            and has_storage(tensor)
            and recorder.newest.get(tensor) is not None
        )

    def add_tensor(self, tensor: Tensor) -> int:
        """Record that autograd saves `tensor`, which forward made; return the number of the saved tensor."""
        recorder = self._recorder
        version = recorder.newest.get(tensor)
        assert version is not None
        recorder.note_stream(version)
        recorder.note_contents(version)
        return self.add(version, recipe_of(tensor))

    def add(self, version: int, window: Recipe | None = None) -> int:
        """Record that `window` of `version` is saved, and return the number of the saved tensor.

        Compiled code saves, and writes, whole storages.
        """
        self.versions.append(version)
        self.packed.append(len(self._recorder.record.ops))
        self._windows.append(window)
        return len(self.versions) - 1

    def hide(self, tensor: Tensor) -> None:
        """Leave out the memory of a value that compiled code has in registers."""
        address = self._recorder.locate(tensor.untyped_storage())
        self.in_registers.append(RecordedStorage(address, self._mark()))

    @contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Leave out temporaries of the node inside, which compiled code has in registers."""
        begin = self._mark()
        yield
        self.kernels.append((begin, self._mark()))

    def begin_unpack(self, saved: int, name: str = "") -> SavedEvent:
        """Record that a node of backward asks for a saved tensor: by default, autograd's own that runs."""
        node = private.current_autograd_node()
        name = name or (node.name() if node is not None else "")
        event = SavedEvent("unpack", saved, self._mark(), name)
        if self.forward_over:
            event.task = private.current_graph_task_id()
        self.events.append(event)
        record = self._recorder.record
        writer = record.versions[self.versions[saved]].op
        if not self.can_run(record.ops[writer].module):
            self.out_of_reach.add(writer)
        return event

    def note_unpack_in_forward(self, tensor: Tensor, saved: int) -> Tensor:
        """Return `tensor`, which was unpacked.

        If forward unpacked it, ops that read it read the saved version, and the op that wrote this version
        must be saved: a plan has no recompute in forward.
        """
        if not self.forward_over:
            version = self.versions[saved]
            self._recorder.newest.set(tensor, version)
            self._recorder.force_save(version, UNPACKED)
        return tensor

    @property
    def first_task(self) -> int:
        """Return the graph task of backward that began first; -1: none has unpacked anything."""
        return min((event.task for event in self.events if event.task >= 0), default=-1)

    def newest_unchanged(self, saved: int, until_op: int) -> int:
        """Return the newest version in which the bytes of saved tensor `saved` are still those it had.

        Writes to other parts of the storage make such versions. So do all writes of collectives and of
        Functions: they advance no version counter, and backward gets what they wrote. Only writes before op
        `until_op` count: there autograd dropped the saved tensor.
        """
        version, window = self.versions[saved], self._windows[saved]
        record = self._recorder.record
        while (following := record.versions[version].next) >= 0:
            written, writer = record.versions[following].window, record.versions[following].op
            facts = record.ops[writer].facts
            if not (facts.collective or facts.function) and (
                written is None or window is None or not disjoint(written, window)
            ):
                break
            if writer >= until_op:
                break
            version = following
        return version

    def leave_to_model(self, storage: int) -> None:
        """Record that autograd holds no memory for its saved tensors on `storage`, which the model frees."""
        for saved, version in enumerate(self.versions):
            if self._recorder.record.versions[version].storage == storage:
                self.leave_filled(saved)

    def leave_filled(self, saved: int) -> None:
        """Record that the model fills the memory of a saved tensor itself, which autograd never held."""
        self.note_drop(saved, self._recorder.record.ops[self.packed[saved] - 1].begin_mark)
        self.elsewhere.add(saved)

    def note_drop(self, index: int, mark: int | None = None) -> None:
        """Record that autograd dropped saved tensor `index`: by default, now."""
        if not self.closed and index not in self.elsewhere:
            self.events.append(SavedEvent("drop", index, self._mark() if mark is None else mark, ""))
