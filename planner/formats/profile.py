"""What was observed of one training step: the format that the service accepts.

A Profile is data from one step of one model at one set of input shapes. It is columnar: a table is an
object with one list for each field, and row `i` of a table is the `i`-th entry of each of its lists.
Rows refer to other rows by position.

Time is counted in *moments*. With `n` forward ops and `m` backward steps, moment `i < n` is forward op
`i`, moment `n + j` is backward step `j`, and moment `n + m` is the end of the step. `released` and
`dropped` columns hold the first moment at which something is no longer held.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from enum import IntFlag
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from autoac.planner.errors import MalformedProfile
from autoac.planner.formats.base import (
    Count,
    FrozenModel,
    Index,
    Microseconds,
    Name,
    OptionalIndex,
    read,
    read_data,
)
from autoac.planner.formats.op_key import OpKey

FORMAT: Final = "autoac.profile"
VERSION: Final = 1
DECIDES: Final = "its values decide"  # a reason of `must_save`: by default only, the user may lift it
PINNED: Final = "pinned"  # another: by the user
CROSSES: Final = "another FSDP unit reads it"  # another


class OpFlag(IntFlag):
    """Facts about an op that are not sizes or times."""

    RANDOM = 1  # draws from a generator
    MUTATES = 2  # writes a storage that it did not make
    COLLECTIVE = 4  # talks to other ranks
    MUST_RECOMPUTE = 8  # the user insists that its outputs are not saved


class Table(FrozenModel):
    """Columns of equal length."""

    @model_validator(mode="after")
    def _columns_have_one_length(self) -> Self:
        lengths = {name: len(value) for name, value in self if not name.startswith("_")}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in length: {lengths}")
        return self

    def __len__(self) -> int:
        return next(len(value) for _, value in self)


class Ragged(FrozenModel):
    """A column of lists: row `i` is `items[starts[i]:starts[i + 1]]`."""

    starts: tuple[Index, ...]
    items: tuple[Index, ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Self:
        """The column whose rows are `rows`."""
        starts = (0, *itertools.accumulate(len(row) for row in rows))
        return cls(starts=starts, items=tuple(itertools.chain.from_iterable(rows)))

    @model_validator(mode="after")
    def _starts_ascend(self) -> Self:
        ascending = all(a <= b for a, b in itertools.pairwise(self.starts))
        if not self.starts or self.starts[0] != 0 or self.starts[-1] != len(self.items) or not ascending:
            raise ValueError("starts must ascend from 0 to the number of items")
        return self

    def __len__(self) -> int:
        return len(self.starts) - 1

    def rows(self) -> list[tuple[int, ...]]:
        """The lists, one for each row."""
        return [self.items[a:b] for a, b in itertools.pairwise(self.starts)]


class Environment(FrozenModel):
    """Where the step ran."""

    torch: Name  # version
    device_type: Name  # "cpu", "cuda"
    device_name: Name
    dtype: Name  # of the first parameter
    autocast: Name  # "off", or the dtype
    allocator_rounding: Annotated[int, Field(ge=1, le=1 << 30)]  # sizes are multiples of this
    threads: Count  # intra-op threads; 0 where it does not matter


class StaticBytes(FrozenModel):
    """What no plan can change, in bytes."""

    parameters: Count
    buffers: Count
    gradients: Count  # those that exist before the step
    optimizer_state: Count
    inputs: Count  # the batch

    @property
    def total(self) -> int:
        return self.parameters + self.buffers + self.gradients + self.optimizer_state + self.inputs


class Storages(Table):
    """The memory that forward ops allocate.

    A block can be larger than what was asked for and rounded: CUDA's caching allocator does not split off a
    rest below 1 MiB. That slack differs from one measurement to the next. Where there is none, the published
    form does not have the column.
    """

    nbytes: tuple[Count, ...]  # asked for, as the allocator rounds it
    slack_nbytes: Annotated[tuple[Count, ...], Field(exclude_if=lambda column: not any(column))] = ()
    released: tuple[Index, ...]  # moment from which neither Python nor forward holds it

    @model_validator(mode="before")
    @classmethod
    def _no_slack_by_default(cls, data: Any) -> Any:
        if (
            isinstance(data, dict)
            and "slack_nbytes" not in data
            and isinstance(data.get("nbytes"), list | tuple)
        ):
            return data | {"slack_nbytes": (0,) * len(data["nbytes"])}
        return data

    def block_nbytes(self) -> list[int]:
        """What each storage takes of the device's memory."""
        return [nbytes + slack for nbytes, slack in zip(self.nbytes, self.slack_nbytes, strict=True)]


class Values(Table):
    """The versions of the storages: a write in place makes a new one."""

    storage: tuple[Index, ...]
    op: tuple[Index, ...]  # the op that wrote this version
    previous: tuple[OptionalIndex, ...]  # the version that it overwrote; -1 for a fresh storage


class Ops(Table):
    """Forward ops in execution order. An op that only makes a view is not listed."""

    module: tuple[Index, ...]  # into Profile.modules
    overload: tuple[Index, ...]  # into Profile.overloads
    reads: Ragged  # values
    runtime_us: tuple[Microseconds, ...]
    spread_us: tuple[Microseconds, ...]  # median absolute deviation of the samples behind runtime_us
    flops: tuple[Count, ...]  # 0 where not known
    workspace_nbytes: tuple[Count, ...]  # most that the kernel holds beside its outputs
    other_nbytes: tuple[Count, ...]  # live at the op and in no recorded storage
    flags: tuple[Annotated[int, Field(ge=0, le=15)], ...]  # OpFlag
    must_save: tuple[OptionalIndex, ...]  # into Profile.reasons; -1: the planner decides


class SavedTensors(Table):
    """What autograd kept for backward, in the order in which it was packed.

    A tensor that shows no byte of what an op writes to its storage later is a saved tensor of the version
    that this op makes, and `packed` is before the op.
    """

    value: tuple[Index, ...]
    packed: tuple[Index, ...]  # ops that had started by then
    dropped: tuple[Index, ...]  # moment from which autograd holds it no more


class BackwardSteps(Table):
    """Backward, cut so that within a step all unpacks come first, then work, then releases."""

    name: tuple[Index, ...]  # into Profile.nodes: the autograd node that unpacked
    unpacks: Ragged  # rows of SavedTensors
    runtime_us: tuple[Microseconds, ...]
    other_nbytes: tuple[Count, ...]  # gradients and temporaries live while it unpacks
    peak_nbytes: tuple[Count, ...]  # the most of them, and of workspace, while it works


class Profile(FrozenModel):
    """One training step, observed. See the module docstring for how to read the tables."""

    format: Literal["autoac.profile"] = FORMAT
    version: Literal[1] = VERSION
    model: Name
    inputs: tuple[Name, ...]  # "int64[4, 128]", in the order of the arguments
    environment: Environment
    static: StaticBytes
    gradient_nbytes: Count  # gradients that the step leaves behind
    optimizer_workspace_nbytes: Count  # most that optimizer.step() holds for itself
    # What running an op again takes beside its run time, to record and replay it; 0 where that is not known.
    replay_us: Annotated[Microseconds, Field(exclude_if=lambda us: us == 0)] = 0.0
    modules: tuple[Name, ...]
    overloads: tuple[Name, ...]
    nodes: tuple[Name, ...]
    reasons: tuple[Name, ...]
    storages: Storages
    values: Values
    ops: Ops
    saved: SavedTensors
    backward: BackwardSteps
    notes: tuple[Name, ...] = ()  # what was estimated, and what could not be seen
    # Where several forwards of the model run before one backward: the number of ops up to the end of each.
    forward_ends: Annotated[tuple[Index, ...], Field(exclude_if=lambda ends: not ends)] = ()

    @model_validator(mode="after")
    def _references_exist(self) -> Self:
        n, end = len(self.ops), len(self.ops) + len(self.backward)

        def within(what: str, column: Sequence[int], bound: int) -> None:
            if column and max(column) >= bound:
                raise ValueError(f"{what} refers to row {max(column)} of {bound}")

        within("ops.module", self.ops.module, len(self.modules))
        within("ops.overload", self.ops.overload, len(self.overloads))
        within("ops.must_save", self.ops.must_save, len(self.reasons))
        within("ops.reads", self.ops.reads.items, len(self.values))
        within("values.op", self.values.op, n)
        within("values.storage", self.values.storage, len(self.storages))
        within("saved.value", self.saved.value, len(self.values))
        within("saved.packed", self.saved.packed, n + 1)
        within("saved.dropped", self.saved.dropped, end + 1)
        within("storages.released", self.storages.released, end + 1)
        within("backward.name", self.backward.name, len(self.nodes))
        within("backward.unpacks", self.backward.unpacks.items, len(self.saved))
        within("forward_ends", self.forward_ends, n + 1)
        if any(a > b for a, b in itertools.pairwise(self.forward_ends)):
            raise ValueError("forward_ends must ascend")
        for step, unpacks in enumerate(self.backward.unpacks.rows()):
            for saved in unpacks:
                if self.saved.dropped[saved] <= n + step:
                    raise ValueError(f"backward step {step} unpacks saved tensor {saved}, dropped before")
        reads_of = self.ops.reads.rows()
        for op, reads in enumerate(reads_of):
            late = [value for value in reads if self.values.op[value] >= op]
            if late:
                raise ValueError(f"op {op} reads value {late[0]}, which it or a later op writes")
        current: dict[int, int] = {}  # the newest version of each storage so far
        for value, (storage, previous) in enumerate(
            zip(self.values.storage, self.values.previous, strict=True)
        ):
            if current.get(storage, -1) != previous:
                raise ValueError(f"value {value} does not follow the version before it of storage {storage}")
            if previous >= 0 and previous not in reads_of[self.values.op[value]]:
                raise ValueError(
                    f"op {self.values.op[value]} must read value {previous}, which it writes over with value "
                    f"{value}: add it to ops.reads"
                )
            current[storage] = value
        if any(a > b for a, b in itertools.pairwise(self.values.op)):
            raise ValueError("values must be listed in the order in which ops write them")
        if len(set(keys := self.keys())) != n:
            twice = next(key for i, key in enumerate(keys) if key in keys[:i])
            raise ValueError(f"op keys must be unique, got {twice!r} twice: profile the model again")
        return self

    def keys(self) -> list[str]:
        """The name of each op: module path, overload, and how often that pair came before.

        `model.layers.3.mlp/aten.mm.default#1` is the second `mm` in that module.
        """
        seen: dict[tuple[int, int], int] = {}
        names = []
        for pair in zip(self.ops.module, self.ops.overload, strict=True):
            ordinal = seen.get(pair, 0)
            seen[pair] = ordinal + 1
            names.append(str(OpKey(self.modules[pair[0]], self.overloads[pair[1]], ordinal)))
        return names

    @property
    def digest(self) -> str:
        """Identifies this content: SHA-256 of the JSON with sorted keys."""
        return _sha256(self.model_dump(mode="json"))

    @property
    def fingerprint(self) -> str:
        """Identifies the same model at the same shapes on the same kind of device.

        Left out is what differs from one measurement to the next: run times and replays, workspaces, the
        allocator's slack, and the bytes of temporaries and gradients, which are read off the allocator.
        """
        content = self.model_dump(
            mode="json",
            exclude={
                "notes": True,
                "replay_us": True,
                "gradient_nbytes": True,
                "storages": {"slack_nbytes"},
                "ops": {"runtime_us", "spread_us", "workspace_nbytes", "other_nbytes"},
                "backward": {"runtime_us", "other_nbytes", "peak_nbytes"},
            },
        )
        return _sha256(content)

    def to_json(self) -> str:
        """The published form."""
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
