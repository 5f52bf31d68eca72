"""A policy for each shape of batch that was planned, and the rule that chooses one of them.

The shape of a batch has an entry for each leaf, `{"0": "int64[4, 128]"}`. A bucket
covers a batch with the same leaves, of the same types, in which no dimension is larger than the bucket's.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from autoac.planner.errors import MalformedPolicy
from autoac.planner.formats.base import VERSION, FrozenModel, Name, read
from autoac.planner.formats.policy import Policy

SET_FORMAT: Final = "autoac.policy-set"

Shape = Mapping[str, str]
"""The shape of a batch, by leaf: `float32[4, 64]` for a tensor, else a type's name, True, False or None."""

Leaf = tuple[str, str, Sequence[int] | None]
"""Its name, its type, and the dimensions of a tensor."""

_name = operator.itemgetter(0)
_TENSOR = re.compile(r"(\w+)\[([\d, ]*)\]")


class Bucket(FrozenModel):
    """A policy and the shape of the batch that it was planned for."""

    shape: dict[Name, Name]
    policy: Policy


class PolicySet(FrozenModel):
    """The policies of one model by the shape of its batch, in the form that is stored and carried out."""

    format: Literal["autoac.policy-set"] = SET_FORMAT
    version: Literal[7] = VERSION
    buckets: tuple[Bucket, ...]

    def to_json(self) -> str:
        """Return the published form: the same text for the same set."""
        return json.dumps(self.model_dump(mode="json"), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> PolicySet:
        """Return the PolicySet that `text` holds in the published form; text from a stranger is safe to read.

        Raises:
            UnknownVersion, MalformedPolicy: as for `read`.
        """
        return read(cls, text, MalformedPolicy)


@dataclass(frozen=True, slots=True)
class Extent:
    """The parsed shape of a batch: its leaves with their types, and how large each dimension is.

    Parsing a shape once makes it cheap to compare with the shape of each new batch.
    """

    structure: tuple[tuple[str, str, int], ...]  # of each leaf its name, type, and number of dimensions
    dims: tuple[int, ...]  # of all leaves, concatenated
    elements: int  # of all tensors

    @classmethod
    def of(cls, shape: Shape) -> Extent:
        """Parse `shape`, such as {"0": "int64[4, 128]"}."""
        return cls.of_leaves((leaf, *_read(kind)) for leaf, kind in shape.items())

    @classmethod
    def of_leaves(cls, leaves: Iterable[Leaf]) -> Extent:
        """Return the leaves, sorted by name, as an Extent."""
        structure: list[tuple[str, str, int]] = []
        flat: list[int] = []
        elements = 0
        for leaf, kind, dims in sorted(leaves, key=_name):
            structure.append((leaf, kind, -1 if dims is None else len(dims)))
            if dims is not None:
                flat += dims
                elements += math.prod(dims)
        return cls(tuple(structure), tuple(flat), elements)

    def covers(self, batch: Extent) -> bool:
        """Return True if `batch` has the same leaves and types, and no larger dimension."""
        return self.structure == batch.structure and all(map(operator.ge, self.dims, batch.dims))


def shape_in_words(shape: Shape) -> str:
    """Return the shape as text for a person: `0=int64[4, 128], mask=bool[4, 128]`."""
    return ", ".join(f"{leaf}={kind}" for leaf, kind in shape.items()) or "no arguments"


def _read(kind: str) -> tuple[str, list[int] | None]:
    """Return the type of a leaf, and its dimensions if it is a tensor."""
    match = _TENSOR.fullmatch(kind)
    if match is None:
        return kind, None
    return match[1], [int(dim) for dim in match[2].split(",")] if match[2] else []
