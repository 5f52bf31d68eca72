"""Read `autoac.toml`: the models that have policies, their devices and their budgets."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from autoac.planner.formats.constraints import Constraints, Gradients, Patterns
from autoac.planner.units import bytes_from_gb

LOCAL: Final = "local"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_TENSOR = re.compile(r"(\w+)\[([\d, ]*)\]")
_FLOATS = ("float64", "float32", "bfloat16", "float16")
TYPES = (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Gb = Annotated[Number, Field(ge=0)]  # GiB
Flag = Annotated[bool, Field(strict=True)]


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing wrong with the file, with its location and the next step."""

    table: str  # "[models.decoder]"; "" at the top of the file
    key: str  # "budgets_gb[0]"; "" for the table itself
    text: str
    line: int = 0  # of the table's header, from 1; 0: unknown

    def __str__(self) -> str:
        where = " ".join(part for part in (self.table, self.key) if part)
        return f"{where}: {self.text}" if where else self.text


class InvalidConfig(Exception):
    """`autoac.toml` is invalid. `problems` has an entry for each thing found."""

    def __init__(self, file: str, problems: Sequence[ConfigProblem]) -> None:
        self.file, self.problems = file, tuple(problems)
        super().__init__(f"{file}: " + "; ".join(str(problem) for problem in self.problems))


class Table(BaseModel):
    """Base class of the tables in `autoac.toml`. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ConstraintsTable(Table):
    """`[models.NAME.constraints]`: the constraints of docs/constraints.md, in GiB instead of bytes."""

    pin_save: Patterns = ()
    pin_recompute: Patterns = ()
    recompute_only: Patterns = ()
    fsdp_units: Patterns = ()
    save_deciding: Flag = True
    forward_budget_gb: Annotated[Number, Field(gt=0)] | None = None
    extra_static_gb: Gb = 0.0
    gradients: Gradients = "as profiled"

    def constraints(self) -> Constraints | None:
        """Return the planner's constraints; None if the table sets none."""
        forward = self.forward_budget_gb
        constraints = Constraints(
            pin_save=self.pin_save,
            pin_recompute=self.pin_recompute,
            recompute_only=self.recompute_only,
            fsdp_units=self.fsdp_units,
            save_deciding=self.save_deciding,
            forward_budget_bytes=None if forward is None else max(bytes_from_gb(forward), 1),
            extra_static_bytes=bytes_from_gb(self.extra_static_gb),
            gradients=self.gradients,
        )
        return None if constraints == Constraints() else constraints


class ModelTable(Table):
    """`[models.NAME]`: one model with one batch shape on one device, and its budgets."""

    entry: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]  # "module:function"
    device: str  # "local", or the short name of a datasheet
    budgets_gb: Annotated[tuple[Annotated[Number, Field(gt=0)], ...], Field(min_length=1)]  # GiB
    inputs: tuple[str, ...] | dict[str, str] | None = None  # "int64[8, 2048]"; None: the batch of the entry
    meta: Flag = False  # call the entry under torch.device("meta")
    autocast: Literal["bfloat16", "float16"] | None = None
    headroom_gb: Gb = 0.0
    gap: Annotated[Number, Field(ge=0, lt=1)] = 0.01
    time_limit_s: Annotated[Number, Field(gt=0)] = 600.0  # for each plan
    constraints: ConstraintsTable = ConstraintsTable()

    @field_validator("inputs")
    @classmethod
    def _inputs_are_tensors(cls, value: Any) -> Any:
        for text in value.values() if isinstance(value, Mapping) else value or ():
            tensor_of(text)
        return value

    @model_validator(mode="after")
    def _keys_are_consistent(self) -> ModelTable:
        if self.meta and self.device == LOCAL:
            raise ValueError(
                'meta = true builds a model without memory, which cannot run on device = "local"; '
                "leave meta out, or name a datasheet as device"
            )
        if self.meta and self.inputs is None:
            raise ValueError(
                "meta = true leaves the entry's own batch without values; "
                'give the batch here: inputs = ["int64[8, 128]"]'
            )
        names = [budget_name(gb) for gb in self.budgets_gb]
        for gb, name in zip(self.budgets_gb, names, strict=True):
            if names.count(name) > 1:
                raise ValueError(f"budgets_gb lists {name} twice; each budget has a file of its own")
            if self.headroom_gb >= gb:
                raise ValueError(
                    f"headroom_gb = {self.headroom_gb:g} leaves nothing of the budget of {gb:g} GiB; "
                    "make it smaller than every budget"
                )
        return self

    def plan_settings(self) -> dict[str, Any]:
        """Return what a plan depends on in addition to profile and budget, by key, as JSON types."""
        constraints = self.constraints.constraints()
        return {
            "headroom_gb": self.headroom_gb,
            "gap": self.gap,
            "constraints": None
            if constraints is None
            else constraints.model_dump(mode="json", exclude_defaults=True),
        }


class Config(Table):
    """The content of `autoac.toml`: where policies are written, and the models to plan."""

    policies: str = "policies"  # folder, relative to the file
    models: dict[str, ModelTable]

    @field_validator("policies")
    @classmethod
    def _folder_is_inside(cls, value: str) -> str:
        path = Path(value)
        if not value or path.is_absolute() or ".." in path.parts or path == Path():
            raise ValueError('must be a folder of its own, in the folder of this file, such as "policies"')
        return value

    @field_validator("models")
    @classmethod
    def _names_make_files(cls, value: dict[str, ModelTable]) -> dict[str, ModelTable]:
        if not value:
            raise ValueError("no model is listed; add a table [models.NAME]")
        seen: dict[str, str] = {}
        for name in value:
            if not re.fullmatch(NAME, name):
                raise ValueError(
                    f"{name!r} becomes part of file names: use letters, digits, '.', '_' and '-', at most 100"
                )
            other = seen.setdefault(name.lower(), name)
            if other != name:
                raise ValueError(f"{other!r} and {name!r} are one file name on some systems; rename one")
        return value


def read(path: Path, datasheets: Sequence[str]) -> Config:
    """Read and check the file at `path`.

    Args:
        path: the file.
        datasheets: short names of the devices that can be estimated.

    Raises:
        OSError: the file cannot be read.
        InvalidConfig: the file is not TOML, or a table is invalid.
    """
    text = path.read_text("utf-8")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise InvalidConfig(
            str(path), [ConfigProblem("", "", f"not TOML: {error}", int(line[1]) if line else 0)]
        ) from None
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise InvalidConfig(str(path), list(_problems(error, text))) from None
    unknown = [
        _locate(
            ("models", name, "device"),
            f"must be one of {', '.join((LOCAL, *datasheets))}, got {table.device!r}"
            + _near(table.device, (LOCAL, *datasheets)),
            text,
        )
        for name, table in config.models.items()
        if table.device not in (LOCAL, *datasheets)
    ]
    if unknown:
        raise InvalidConfig(str(path), unknown)
    return config


def tensor_of(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse the type and the shape of a tensor.

    >>> tensor_of("int64[8, 2048]")
    ('int64', (8, 2048))
    """
    match = _TENSOR.fullmatch(text)
    if match is None or match[1] not in TYPES:
        raise ValueError(
            f'an input must be a type and a shape such as "int64[8, 2048]", got {text!r}. '
            f"Types: {', '.join(TYPES)}"
        )
    return match[1], tuple(int(n) for n in match[2].split(",") if n.strip())


def is_float(dtype: str) -> bool:
    """Return True if `dtype` names a floating-point type."""
    return dtype in _FLOATS


def budget_name(gb: float) -> str:
    """Format a budget in GiB for a file name: no exponent, and no more digits than needed.

    >>> budget_name(40.0), budget_name(0.25)
    ('40', '0.25')
    """
    return f"{gb:.6f}".rstrip("0").rstrip(".")


def policy_file(name: str, gb: float) -> str:
    """Return the name of the file with the policy of model `name` for a budget of `gb` GiB."""
    return f"{name}-{budget_name(gb)}gib.json"


def lock_file(name: str) -> str:
    """Return the name of the lock of model `name`."""
    return f"{name}.lock.json"


# --- errors of pydantic in our own words ----------------------------------------------------------------

_NEXT_STEP: Mapping[str, str] = {
    "entry": 'write "module:function", a function that returns the model',
    "device": 'write "local", or a datasheet such as "h100"',
    "budgets_gb": "list the GiB that the device may hold, such as [40, 24]",
    "inputs": 'list tensors, ["int64[8, 2048]"], or name them, {ids = "int64[8, 2048]"}',
    "meta": "write true or false",
    "autocast": 'write "bfloat16" or "float16", or leave it out',
    "headroom_gb": "give GiB, 0 or more",
    "gap": "give a fraction from 0 to below 1, such as 0.01",
    "time_limit_s": "give seconds, more than 0",
    "models": "add a table [models.NAME]",
    "policies": 'name a folder, such as "policies"',
    "gradients": 'write "as profiled", "present" or "absent"',
    "save_deciding": "write true or false",
    "forward_budget_gb": "give GiB, more than 0",
    "extra_static_gb": "give GiB, 0 or more",
}


def _problems(error: ValidationError, text: str, limit: int = 8) -> Iterator[ConfigProblem]:
    seen: set[tuple[str, str]] = set()
    for found in error.errors(include_url=False, include_context=False):
        loc = tuple(part for part in found["loc"] if part not in ("tuple[str, ...]", "dict[str,str]"))
        key = next((str(part) for part in reversed(loc) if not isinstance(part, int)), "")
        match found["type"]:
            case "extra_forbidden":
                known = _keys_of(loc[:-1])
                message = f"unknown key{_near(key, known)}; keys here are {', '.join(known)}"
            case "missing":
                message = f"missing; {_NEXT_STEP.get(key, 'add it')}"
            case "value_error":
                message = found["msg"].removeprefix("Value error, ")
            case _:
                message = f"{_shown(found['input'])}: {_first_lower(found['msg'])}"
                message += f"; {_NEXT_STEP[key]}" if key in _NEXT_STEP else ""
        problem = _locate(loc, message, text)
        if (problem.table, problem.key) not in seen and len(seen) < limit:
            seen.add((problem.table, problem.key))
            yield problem


def _locate(loc: Sequence[int | str], message: str, text: str) -> ConfigProblem:
    """Find the table and its header's line for a problem at `loc`."""
    depth = 0  # number of parts of `loc` that name the table
    if loc[:1] == ("models",) and len(loc) > 1:
        depth = 3 if len(loc) > 3 and loc[2] == "constraints" else 2
    table = ".".join(str(part) for part in loc[:depth])
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[depth:])
    header = re.compile(rf"^\s*\[\s*{re.escape(table)}\s*\]")
    lines = (n for n, line in enumerate(text.splitlines(), 1) if table and header.match(line))
    return ConfigProblem(f"[{table}]" if table else "", key.lstrip("."), message, next(lines, 0))


def _keys_of(loc: Sequence[int | str]) -> tuple[str, ...]:
    table: type[Table] = Config
    if loc[:1] == ("models",) and len(loc) > 1:
        table = ConstraintsTable if len(loc) > 2 else ModelTable
    return tuple(table.model_fields)


def _near(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _first_lower(text: str) -> str:
    return text[:1].lower() + text[1:]
