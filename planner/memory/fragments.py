"""Predict how much more than it hands out CUDA's caching allocator reserves for a training loop.

The simulator counts bytes; fragments depend on the order and the size of each block. So the events of the
first steps are replayed through the rules of an empty allocator (caching_allocator.py). The second step takes
more than the first: the optimizer has put its state into the memory that the first one left free.

`fully_shard` reduces gradients on a stream of its own, and the allocator gives a block only to the stream
that it was taken for. So the memory of sharded gradients is not shared with anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoac.planner.formats.profile import CROSSES, Profile
from autoac.planner.memory.caching_allocator import Allocate, Release, replay
from autoac.planner.memory.schedule import Backward, Compute, Free, OptimizerStep, Recompute, schedule
from autoac.planner.problem.graph import Graph, Op, SaveSet, StorageId

MOST_COPIES = 4  # of a parameter, in the optimizer's state
STEPS = 3  # in later ones the allocator finds what it reserved for these


def fragment_bytes(
    profile: Profile, graph: Graph, save_set: SaveSet, *, expandable_segments: bool = False
) -> int:
    """Return by how much the most reserved bytes exceed the most allocated ones.

    Sizes that the profile does not have are taken from the gradients that the step makes: parameters, the
    optimizer's state and its temporaries have blocks of these sizes. Without such gradients, as where they
    exist before the step, each sum is one block.

    Args:
        profile: of one step, with its temporaries.
        graph: of the same step; it may have moves and use groups.
        save_set: ops of `graph` whose outputs are saved.
        expandable_segments: as in PYTORCH_CUDA_ALLOC_CONF.
    """
    log = loop_log(profile, graph, save_set)
    apart = log.gradients if CROSSES in profile.reasons else set()
    streams = [[event for event in log.events if (event.name in apart) is own] for own in (False, True)]
    return sum(max(replay(s, expandable_segments=expandable_segments), default=0) for s in streams) - log.most


def loop_log(profile: Profile, graph: Graph, save_set: SaveSet) -> Log:
    """Return the events of the first steps; the arguments are those of `fragment_bytes`."""
    log = Log()
    loop = _Loop(profile, graph, log)
    for _ in range(STEPS):
        loop.step(save_set)
    return log


class Log:
    """Events of an allocator, and the most bytes that they have live at once."""

    def __init__(self) -> None:
        self.events: list[Allocate | Release] = []
        self.most = 0
        self.gradients: set[int] = set()  # names of blocks that a step makes and leaves behind
        self._live: dict[int, int] = {}  # bytes, by name
        self._nbytes = 0

    def allocate(self, nbytes: int) -> int:
        """Return the name of a new block."""
        name = len(self.events)
        self.events.append(Allocate(name, nbytes))
        self._live[name] = nbytes
        self._nbytes += nbytes
        self.most = max(self.most, self._nbytes)
        return name

    def free(self, names: Sequence[int]) -> None:
        """Free the blocks of these names."""
        for name in names:
            self.events.append(Release(name))
            self._nbytes -= self._live.pop(name)


class _Loop:
    """Training steps, as events of the allocator."""

    def __init__(self, profile: Profile, graph: Graph, log: Log) -> None:
        self._graph, self._log = graph, log
        changes = profile.temporaries.changes
        self._nbytes = profile.temporaries.nbytes
        self._rows_of_ops = dict(zip(profile.keys(), changes.rows(), strict=False))
        self._rows_of_steps = changes.rows()[len(profile.ops) :]
        times = Counter(changes.items)
        gradients = [nbytes for block, nbytes in enumerate(self._nbytes) if times[block] == 1]
        self._parameters = gradients[::-1]  # backward goes from the last to the first
        static = profile.static
        held = [*self._blocks_of(static.parameters), *self._blocks_of(static.gradients)]
        for nbytes in filter(None, [*held, static.buffers, static.inputs, static.workspaces]):
            log.allocate(nbytes)
        self._state = self._blocks_of(static.optimizer_state)
        self._workspace = self._blocks_of(profile.optimizer_workspace_nbytes)

    def _blocks_of(self, nbytes: int) -> list[int]:
        """Return blocks of `nbytes` in all, in the sizes of the parameters that get gradients.

        Each size is there as often as all of them fit, up to `MOST_COPIES`. What is left is one block.
        """
        times = min(MOST_COPIES, nbytes // (sum(self._parameters) or nbytes + 1))
        blocks = [size for size in self._parameters for _ in range(times)]
        left = nbytes - sum(blocks)
        for size in self._parameters:
            if left >= size:
                blocks.append(size)
                left -= size
        return [*blocks, left] if left else blocks

    def step(self, save_set: SaveSet) -> None:
        """Add the events of one step, after which the gradients are freed."""
        graph, log = self._graph, self._log
        storages: dict[StorageId, list[int]] = {}
        temporaries: dict[int, list[int]] = {}
        for event in schedule(graph, save_set):
            match event:
                case Compute(op, nbytes):
                    self._allocate_outputs(graph.ops[op], nbytes, storages)
                    self._carry_out(self._rows_of_ops.get(graph.ops[op].name, ()), temporaries)
                case Recompute(op, nbytes, _):
                    self._allocate_outputs(graph.ops[op], nbytes, storages)
                    times = Counter(row := self._rows_of_ops.get(graph.ops[op].name, ()))
                    self._carry_out([block for block in row if times[block] == 2], temporaries)
                case Backward(step):
                    self._carry_out(self._rows_of_steps[step], temporaries)
                case Free(version, nbytes):
                    if nbytes and (names := storages.get(graph.versions[version].storage)):
                        log.free([names.pop(0)])
                case OptimizerStep():
                    for nbytes in self._state:
                        log.allocate(nbytes)
                    self._state = []  # from now on it is there
                    log.free([log.allocate(nbytes) for nbytes in self._workspace])
        for names in temporaries.values():
            log.gradients.update(names)
        for names in (*storages.values(), *temporaries.values()):
            log.free(names)

    def _allocate_outputs(self, op: Op, nbytes: int, storages: dict[StorageId, list[int]]) -> None:
        """Allocate `nbytes` for the versions that `op` writes."""
        for version in op.writes:
            size = self._graph.nbytes(version)
            if 0 < size <= nbytes:
                storage = self._graph.versions[version].storage
                storages.setdefault(storage, []).append(self._log.allocate(size))
                nbytes -= size

    def _carry_out(self, row: Sequence[int], temporaries: dict[int, list[int]]) -> None:
        """Allocate the blocks of `row` that are not allocated, and free the others."""
        for block in row:
            if block in temporaries:
                self._log.free(temporaries.pop(block))
            else:
                temporaries[block] = [self._log.allocate(self._nbytes[block])]
