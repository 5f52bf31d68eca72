"""Read the published formats: JSON, format, version and model are checked here, in this order."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from autoac.planner.errors import MalformedPolicy, MalformedProfile, UnknownVersion
from autoac.planner.units import printable

VERSION: Final = 7  # of every format; a file of another version is made again

MAX_INT = 2**53  # integers beyond this do not survive JSON readers that use doubles
MAX_COMPLAINTS = 5

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Index = Annotated[int, Field(ge=0, le=MAX_INT)]
OptionalIndex = Annotated[int, Field(ge=-1, le=MAX_INT)]  # -1: none
Microseconds = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=4096)]
Title = Annotated[  # of a model: a class may have any name, and it is printed in the middle of lines
    Name,
    AfterValidator(lambda name: printable(name).replace("\n", "\\n").replace("\t", "\\t")),
    Field(max_length=4096),  # once escaped, so that what is written can be read again
]


class FrozenModel(BaseModel):
    """Base of the models: immutable, without keys that the format does not have."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Model = TypeVar("Model", bound=FrozenModel)

_FORMATS = {
    "autoac.profile": "a profile, as `autoac profile` writes it",
    "autoac.policy": "a policy, as `autoac plan` writes it",
    "autoac.policy-set": "a policy set, as `autoac fit` writes it",
}


def read(cls: type[Model], text: str | bytes, malformed: type[MalformedProfile | MalformedPolicy]) -> Model:
    """Parse `text`, JSON that need not be trusted, in the format of `cls`.

    Raises:
        UnknownVersion: the format is right, and its version is another one.
        MalformedProfile, MalformedPolicy: the text is invalid otherwise. The error has the first problems.
    """
    try:
        data = read_json(text)
    except ValueError as error:
        raise malformed([f"not JSON: {error}"]) from None
    return read_data(cls, data, malformed)


def read_json(text: str | bytes) -> Any:
    """Return the data of `text`, JSON that all readers understand alike.

    Raises:
        ValueError: the text is not JSON, an object has a key twice, or a number is not one of JSON's.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_such_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {json.dumps(twice[:100])} occurs twice: is a merge unfinished?")
    return data


def _no_such_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def read_data(cls: type[Model], data: Any, malformed: type[MalformedProfile | MalformedPolicy]) -> Model:
    """Check `data`, as a JSON reader returns it, and return it in the format of `cls`.

    Raises:
        UnknownVersion, MalformedProfile, MalformedPolicy: as for `read`.
    """
    format = cls.model_fields["format"].default
    if not isinstance(data, dict):
        raise malformed([f"must be {_FORMATS[format]}, got JSON that is not an object"])
    found = data.get("format")
    if found is None:
        raise malformed([f"format must be {format!r}, got nothing"])
    if isinstance(found, str) and found != format and found in _FORMATS:
        raise malformed([f"must be {_FORMATS[format]}, got {_FORMATS[found].partition(',')[0]}"])
    if found == format and data.get("version") != VERSION:
        raise UnknownVersion(format, data.get("version"), VERSION)
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise malformed(complaints(error)) from None


def complaints(error: ValidationError, limit: int = MAX_COMPLAINTS) -> list[str]:
    """Return the first complaints of pydantic as "where: what", or "what" of the whole, without the input."""
    found = error.errors(include_url=False, include_input=False, include_context=False)
    lines = [
        ": ".join([*filter(None, [".".join(map(str, c["loc"]))]), c["msg"].removeprefix("Value error, ")])
        for c in found[:limit]
    ]
    return lines + ([f"and {len(found) - limit} more"] if len(found) > limit else [])
