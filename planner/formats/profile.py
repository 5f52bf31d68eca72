"""Define the Profile: the record of one training step, in the format that the service accepts.

A Profile describes one step of one model at one set of input shapes. The format is columnar. A table is an
object with one list for each field, and row `i` of a table is the `i`-th entry of each of its lists.
Rows refer to other rows by position.

Time is counted in *moments*. With `n` forward ops and `m` backward steps, moment `i < n` is forward op
`i`, moment `n + j` is backward step `j`, and moment `n + m` is the end of the step. The columns `released`
and `dropped` hold the first moment at which a storage or saved tensor is free.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Collection, Sequence
from enum import IntFlag
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from autoac.planner.errors import MalformedProfile
from autoac.planner.formats.base import (
    VERSION,
    Count,
    FrozenModel,
    Index,
    Microseconds,
    Name,
    OptionalIndex,
    Title,
    read,
    read_data,
)
from autoac.planner.formats.op_key import OpKey, name_in_keys

FORMAT: Final = "autoac.profile"

ESTIMATED: Final = " (estimated)"  # ends the name of a device that was not there

# Reasons for `must_save`:
DECIDES: Final = "its values decide"
FUNCTIONAL_COLLECTIVE: Final = "functional collective"
LIFTABLE: Final = ("", FUNCTIONAL_COLLECTIVE)  # by `Constraints.save_collectives`
SHAPED_BY_DATA: Final = "its shape depends on data"
PINNED: Final = "pinned"  # the user pinned the op
UNSEEN: Final = "written by a kernel that PyTorch does not dispatch"
OVERWRITTEN: Final = "reads what is overwritten later"
# Reasons of a torch.autograd.Function:
WRITES_ARGUMENTS: Final = "it writes its arguments"
WRITES_OUTSIDE: Final = "it writes a tensor that it did not make"
COMMUNICATES: Final = "it communicates"
WRAPPED: Final = "its arguments include a tensor without a storage of its own"
OWN_GENERATOR: Final = "it draws from a generator of its own"
CAPTURED: Final = "its kernels are a captured graph"
DIFFERS: Final = "it does not make the same numbers when it runs again"
BEYOND_DISPATCH: Final = (
    UNSEEN,
    OVERWRITTEN,
    WRITES_ARGUMENTS,
    WRITES_OUTSIDE,
    COMMUNICATES,
    WRAPPED,
    OWN_GENERATOR,
    CAPTURED,
    DIFFERS,
)
CROSSES: Final = "another FSDP unit reads it"
ANOTHER_GRAPH: Final = "another compiled graph reads it, or an op outside of its graph"

RECOMPUTED_OP_US = 25.0
"""The host's time to record an op and run it again: `python -m benchmarks.overhead`, row "ours", at most."""


class OpFlag(IntFlag):
    """Mark properties of an op that are not sizes or times."""

    RANDOM = 1  # draws from a random number generator
    MUTATES = 2  # writes to a storage that an earlier op allocated
    COLLECTIVE = 4  # communicates with other ranks
    MUST_RECOMPUTE = 8  # the user pinned the op: its outputs must not be saved
    COMPILED = 16  # runs in a graph of torch.compile (rule h in planner/memory/schedule.py)
    GRAPH_BEGINS = 32  # the first op of a call of such a graph


class Table(FrozenModel):
    """A table: one column per field, all of the same length."""

    @model_validator(mode="after")
    def _columns_have_one_length(self) -> Self:
        lengths = {name: len(value) for name, value in self if not name.startswith("_")}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns must have the same length, got {lengths}")
        return self

    def __len__(self) -> int:
        return next(len(value) for _, value in self)


class Ragged(FrozenModel):
    """A column of lists, stored flat: row `i` is `items[starts[i]:starts[i + 1]]`."""

    starts: tuple[Index, ...]
    items: tuple[Index, ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Self:
        """Return the column that has these rows."""
        starts = (0, *itertools.accumulate(len(row) for row in rows))
        return cls(starts=starts, items=tuple(itertools.chain.from_iterable(rows)))

    @model_validator(mode="after")
    def _starts_ascend(self) -> Self:
        ascending = all(a <= b for a, b in itertools.pairwise(self.starts))
        if not self.starts or self.starts[0] != 0 or self.starts[-1] != len(self.items) or not ascending:
            raise ValueError(f"starts must ascend from 0 to {len(self.items)}, the number of items")
        return self

    def __len__(self) -> int:
        return len(self.starts) - 1

    def rows(self) -> list[tuple[int, ...]]:
        """Return the items of each row."""
        return [self.items[a:b] for a, b in itertools.pairwise(self.starts)]


class Environment(FrozenModel):
    """The device and the settings that the step ran with."""

    torch: Name  # version
    device_type: Name  # "cpu", "cuda"
    device_name: Name
    dtype: Name  # of the first parameter
    autocast: Name  # "off", or the dtype
    allocator_rounding: Annotated[int, Field(ge=1, le=1 << 30)]  # sizes are multiples of this
    threads: Count  # intra-op threads; 0 on devices where the number does not matter
    cudnn: Count  # 92000 is 9.20.0; 0: none
    ranks: Name  # how many, and the meshes that parameters are on: "4 (mesh dp 2 x tp 2)"


class LinkRates(FrozenModel):
    """The rates of the link between the device and its host, with both directions busy."""

    out_bytes_per_us: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    in_bytes_per_us: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    latency_us: Microseconds  # of a copy

    def slower(self, share: float) -> LinkRates:
        """Return the rates of a link with this share of the bandwidth."""
        out, into = share * self.out_bytes_per_us, share * self.in_bytes_per_us
        return self.model_copy(update={"out_bytes_per_us": out, "in_bytes_per_us": into})


class StaticBytes(FrozenModel):
    """Bytes that are live during the whole step and that no plan can change."""

    parameters: Count
    buffers: Count
    gradients: Count  # only those that exist before the step
    optimizer_state: Count
    inputs: Count  # the batch
    workspaces: Count  # what cuBLAS keeps for forward and backward

    @property
    def total(self) -> int:
        held = self.parameters + self.buffers + self.gradients + self.optimizer_state
        return held + self.inputs + self.workspaces


class Storages(Table):
    """The storages that forward ops allocate.

    A block can be larger than the requested and rounded size, because CUDA's caching allocator does not split
    off a remainder below 1 MiB. The difference, the slack, varies between measurements.
    """

    nbytes: tuple[Count, ...]  # the requested size, rounded by the allocator
    slack_nbytes: tuple[Count, ...]
    released: tuple[Index, ...]  # first moment at which neither Python nor forward holds the storage

    def block_nbytes(self) -> list[int]:
        """Return the device memory of each storage: its size and its slack."""
        return [nbytes + slack for nbytes, slack in zip(self.nbytes, self.slack_nbytes, strict=True)]


class Values(Table):
    """The versions of the storages. An in-place write makes a new version."""

    storage: tuple[Index, ...]
    op: tuple[Index, ...]  # the op that wrote this version
    previous: tuple[OptionalIndex, ...]  # the version that the op wrote over; -1 for a new storage


class Ops(Table):
    """Forward ops in execution order. Ops that only make views are not listed."""

    module: tuple[Index, ...]  # into Profile.modules
    overload: tuple[Index, ...]  # into Profile.overloads
    reads: Ragged  # rows of Values
    runtime_us: tuple[Microseconds, ...]
    spread_us: tuple[Microseconds, ...]  # median absolute deviation of the samples of runtime_us
    flops: tuple[Count, ...]  # 0 if not known
    workspace_nbytes: tuple[Count, ...]  # most that the kernel holds in addition to its outputs
    other_nbytes: tuple[Count, ...]  # live at the op, but not in a recorded storage
    flags: tuple[Annotated[int, Field(ge=0, le=63)], ...]  # OpFlag
    must_save: tuple[OptionalIndex, ...]  # into Profile.reasons; -1 if the planner decides


class SavedTensors(Table):
    """The tensors that autograd holds for backward, in the order in which it packed them.

    After a tensor is packed, an op may write in place to other bytes of the same storage. The tensor then
    counts as a saved tensor of the version that this op writes, and its `packed` comes before the op.
    """

    value: tuple[Index, ...]  # row of Values
    packed: tuple[Index, ...]  # the number of ops that had started when autograd packed the tensor
    dropped: tuple[Index, ...]  # first moment at which autograd no longer holds the tensor
    # Of a tensor that a backward inside of forward unpacks: the first moment at which no such backward
    # needs it any more. 0 where none unpacks it.
    needed_until: tuple[Index, ...]


class Outputs(Table):
    """The tensors among the model's outputs on storages that forward made, which a training loop may hold."""

    position: tuple[Index, ...]  # among the tensors of one forward's output
    storage: tuple[Index, ...]
    released: tuple[Index, ...]  # of the storage, if the loop drops the output before backward


class BackwardSteps(Table):
    """Backward, divided into steps. A step unpacks saved tensors, then works, then releases memory."""

    name: tuple[Index, ...]  # into Profile.nodes: the autograd node that unpacked
    unpacks: Ragged  # rows of SavedTensors
    runtime_us: tuple[Microseconds, ...]
    other_nbytes: tuple[Count, ...]  # gradients and temporaries that are live during the unpacks
    peak_nbytes: tuple[Count, ...]  # most gradients, temporaries and workspace live during the work


class Temporaries(FrozenModel):
    """Blocks that a step allocates and that are not storages of forward ops: gradients and temporaries."""

    nbytes: tuple[Count, ...]  # in the order in which they are allocated
    # For each moment but the end, blocks in the order in which it allocates and frees them. A block is in at
    # most two places: where it is allocated, and where it is freed. Gradients outlive backward.
    changes: Ragged

    def __len__(self) -> int:
        return len(self.nbytes)

    @model_validator(mode="after")
    def _blocks_are_freed_once(self) -> Self:
        if len(set(self.changes.items)) != len(self):
            raise ValueError(f"changes must name each of the {len(self)} blocks, and no others")
        if most := [block for block, times in Counter(self.changes.items).items() if times > 2]:
            raise ValueError(f"changes must name a block at most twice, got block {most[0]} more often")
        return self


class Profile(FrozenModel):
    """The record of one training step. The module docstring explains how to read the tables."""

    format: Literal["autoac.profile"] = FORMAT
    version: Literal[7] = VERSION
    model: Title
    inputs: tuple[Name, ...]  # "int64[4, 128]", in the order of the arguments
    environment: Environment
    static: StaticBytes
    gradient_nbytes: Count  # gradients that the step allocates and that outlive backward
    # Held after backward by its root and the graph: a name carries them into the next step's forward.
    kept_nbytes: Count
    optimizer_workspace_nbytes: Count  # most temporaries that optimizer.step() holds at once
    link: LinkRates | None  # if measured
    modules: tuple[Name, ...]
    overloads: tuple[Name, ...]
    nodes: tuple[Name, ...]
    reasons: tuple[Name, ...]
    storages: Storages
    values: Values
    ops: Ops
    saved: SavedTensors
    backward: BackwardSteps
    outputs: Outputs
    temporaries: Temporaries
    notes: tuple[Name, ...]  # which numbers are estimates, and what the profiler could not record
    # If several forwards of the model run before one backward: the number of ops up to the end of each.
    forward_ends: tuple[Index, ...]
    # If backward has several passes: the number of its steps up to the end of each pass but the last. A pass
    # recomputes afresh. What the loop does between two passes is in the first steps of the later one.
    pass_ends: tuple[Index, ...]
    waiting_microbatches: Count  # other forwards like this one, which wait for a backward of their own
    loss_begins: Index | None  # the first op of a loss that is not in the model's forward

    @model_validator(mode="after")
    def _references_exist(self) -> Self:
        n, end = len(self.ops), len(self.ops) + len(self.backward)

        def within(what: str, column: Sequence[int], bound: int) -> None:
            if column and max(column) >= bound:
                raise ValueError(f"{what} must refer to rows below {bound}, got row {max(column)}")

        within("ops.module", self.ops.module, len(self.modules))
        within("ops.overload", self.ops.overload, len(self.overloads))
        within("ops.must_save", self.ops.must_save, len(self.reasons))
        within("ops.reads", self.ops.reads.items, len(self.values))
        within("values.op", self.values.op, n)
        within("values.storage", self.values.storage, len(self.storages))
        within("saved.value", self.saved.value, len(self.values))
        within("saved.packed", self.saved.packed, n + 1)
        within("outputs.storage", self.outputs.storage, len(self.storages))
        within("outputs.released", self.outputs.released, end + 1)
        within("saved.dropped", self.saved.dropped, end + 1)
        within("saved.needed_until", self.saved.needed_until, n + 1)
        within("storages.released", self.storages.released, end + 1)
        within("backward.name", self.backward.name, len(self.nodes))
        within("backward.unpacks", self.backward.unpacks.items, len(self.saved))
        within("forward_ends", self.forward_ends, n + 1)
        within("pass_ends", self.pass_ends, len(self.backward))
        within("temporaries.changes", self.temporaries.changes.items, len(self.temporaries))
        if (rows := len(self.temporaries.changes)) != end:
            raise ValueError(f"temporaries.changes must have a row for each of {end} moments, got {rows}")
        within("loss_begins", () if self.loss_begins is None else (self.loss_begins,), n)
        for name, ends in (("forward_ends", self.forward_ends), ("pass_ends", self.pass_ends)):
            if any(a > b for a, b in itertools.pairwise(ends)):
                raise ValueError(f"{name} must ascend, got {ends}")
        for step, unpacks in enumerate(self.backward.unpacks.rows()):
            for saved in unpacks:
                if self.saved.dropped[saved] <= n + step:
                    raise ValueError(
                        f"saved tensor {saved} must be dropped after backward step {step}, which unpacks it, "
                        f"got moment {self.saved.dropped[saved]}"
                    )
        reads_of = self.ops.reads.rows()
        for op, reads in enumerate(reads_of):
            late = [value for value in reads if self.values.op[value] >= op]
            if late:
                raise ValueError(
                    f"op {op} must read values that earlier ops write, got value {late[0]}, which op "
                    f"{self.values.op[late[0]]} writes"
                )
        current: dict[int, int] = {}  # the latest version of each storage so far
        for value, (storage, previous) in enumerate(
            zip(self.values.storage, self.values.previous, strict=True)
        ):
            if current.get(storage, -1) != previous:
                raise ValueError(
                    f"values.previous of value {value} must be {current.get(storage, -1)}, the latest "
                    f"version of storage {storage}, got {previous}"
                )
            if previous >= 0 and previous not in reads_of[self.values.op[value]]:
                raise ValueError(
                    f"op {self.values.op[value]} must read value {previous}, which it writes over with value "
                    f"{value}: add it to ops.reads"
                )
            current[storage] = value
        for value, (before, op) in enumerate(itertools.pairwise(self.values.op), start=1):
            if op < before:
                raise ValueError(
                    f"values.op must not descend, got op {before} for value {value - 1} and op {op} for "
                    f"value {value}: list the values that earlier ops write first"
                )
        if len(set(keys := self.keys())) != n:
            twice = next(key for i, key in enumerate(keys) if key in keys[:i])
            raise ValueError(f"op keys must be unique, got {twice!r} twice: profile the model again")
        return self

    def keys(self) -> list[str]:
        """Return the key of each op: its module path, its name and its occurrence in the module.

        `model.layers.3.mlp/aten.mm.default#1` is the second `mm` in that module.
        """
        ops = [name_in_keys(overload) for overload in self.overloads]
        seen: dict[tuple[int, str], int] = {}
        names = []
        for module, overload in zip(self.ops.module, self.ops.overload, strict=True):
            pair = (module, ops[overload])
            ordinal = seen.get(pair, 0)
            seen[pair] = ordinal + 1
            names.append(str(OpKey(self.modules[module], ops[overload], ordinal)))
        return names

    @property
    def droppable_outputs(self) -> frozenset[int]:
        """Return the positions of the outputs of which a loop frees memory if it drops them before backward.

        Outputs that backward starts from are not among them.
        """
        end = len(self.ops) + len(self.backward)
        rows = zip(self.outputs.position, self.outputs.released, strict=True)
        return frozenset(position for position, released in rows if released < end)

    def with_dropped_outputs(self, dropped: Collection[int]) -> Profile:
        """Return the profile of a loop that holds the other outputs until the end of backward.

        Args:
            dropped: positions of the outputs that the loop drops before backward.
        """
        end = len(self.ops) + len(self.backward)
        rows = list(zip(self.outputs.position, self.outputs.storage, self.outputs.released, strict=True))
        moments = {storage: released for _, storage, released in rows}
        moments |= {storage: end for position, storage, _ in rows if position not in dropped}
        released = tuple(moments.get(i, moment) for i, moment in enumerate(self.storages.released))
        return self.model_copy(update={"storages": self.storages.model_copy(update={"released": released})})

    def with_kept(self, nbytes: int) -> Profile:
        """Return the profile of a step in which `nbytes` more are held during forward."""
        other = tuple(other + nbytes for other in self.ops.other_nbytes)
        return self.model_copy(update={"ops": self.ops.model_copy(update={"other_nbytes": other})})

    def blocks_that_outlive_backward(self) -> list[list[int]]:
        """Return for each backward step the temporaries that it allocates and that no step frees."""
        times = Counter(self.temporaries.changes.items)
        rows = self.temporaries.changes.rows()[len(self.ops) :]
        return [[block for block in row if times[block] == 1] for row in rows]

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the JSON with sorted keys. Equal profiles have equal digests."""
        return _sha256(self.model_dump(mode="json"))

    @property
    def fingerprint(self) -> str:
        """Return a hash that is equal for the same model, at the same shapes, on the same kind of device.

        The hash leaves out the numbers that vary between measurements: run times, the link, workspaces, the
        allocator's slack, and the bytes of temporaries and gradients. It also leaves out which storages are
        outputs, which follows from the ops.
        """
        content = self.model_dump(
            mode="json",
            exclude={
                "notes": True,
                "link": True,
                "loss_begins": True,
                "outputs": True,
                "gradient_nbytes": True,
                "kept_nbytes": True,
                "temporaries": True,
                "storages": {"slack_nbytes"},
                "ops": {"runtime_us", "spread_us", "workspace_nbytes", "other_nbytes"},
                "backward": {"runtime_us", "other_nbytes", "peak_nbytes"},
            },
        )
        return _sha256(content)

    def to_json(self) -> str:
        """Return the profile as JSON, in the published format."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Profile:
        """Return the Profile that `text` holds in the published form.

        Raises:
            UnknownVersion, MalformedProfile: as for `read`.
        """
        return read(cls, text, MalformedProfile)

    @classmethod
    def from_data(cls, data: Any) -> Profile:
        """Return the Profile that `data`, as a JSON reader returns it, holds.

        Raises:
            UnknownVersion, MalformedProfile: as for `read`.
        """
        return read_data(cls, data, MalformedProfile)


def _sha256(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
