"""`autoac.toml`: which models have policies, for which device, within which budgets."""

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
class Problem:
    """Something wrong with the file: where, what, and what to do."""

    table: str  # "[models.decoder]"; "" for the top of the file
    key: str  # "budgets_gb[0]"; "" for the table itself
    text: str
    line: int = 0  # of the table's header, from 1; 0: not known

    def __str__(self) -> str:
        where = " ".join(part for part in (self.table, self.key) if part)
        return f"{where}: {self.text}" if where else self.text


class InvalidSettings(Exception):
    """`autoac.toml` does not say what to do. `problems` has an entry for each thing found."""

    def __init__(self, file: str, problems: Sequence[Problem]) -> None:
        self.file, self.problems = file, tuple(problems)
        super().__init__(f"{file}: " + "; ".join(str(problem) for problem in self.problems))


class Table(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ConstraintsTable(Table):
    """`[models.NAME.constraints]`: docs/constraints.md, with GiB in place of bytes."""

    pin_save: Patterns = ()
    pin_recompute: Patterns = ()
    recompute_only: Patterns = ()
    fsdp_units: Patterns = ()
    save_deciding: Flag = True
    forward_budget_gb: Annotated[Number, Field(gt=0)] | None = None
    extra_static_gb: Gb = 0.0
    gradients: Gradients = "as profiled"

    def constraints(self) -> Constraints | None:
        """As the planner takes them; None where nothing is asked for."""
        forward = self.forward_budget_gb
        made = Constraints(
            pin_save=self.pin_save,
            pin_recompute=self.pin_recompute,
            recompute_only=self.recompute_only,
            fsdp_units=self.fsdp_units,
            save_deciding=self.save_deciding,
            forward_budget_bytes=None if forward is None else max(bytes_from_gb(forward), 1),
            extra_static_bytes=bytes_from_gb(self.extra_static_gb),
            gradients=self.gradients,
        )
        return None if made == Constraints() else made


class ModelTable(Table):
    """`[models.NAME]`: one model at one shape on one device, within some budgets."""

    entry: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]  # "module:function"
    device: str  # "local", or the short name of a datasheet
    budgets_gb: Annotated[tuple[Annotated[Number, Field(gt=0)], ...], Field(min_length=1)]  # GiB
    inputs: tuple[str, ...] | dict[str, str] | None = None  # "int64[8, 2048]"; None: the entry's own batch
    meta: Flag = False  # call the entry under torch.device("meta")
    autocast: Literal["bfloat16", "float16"] | None = None
    headroom_gb: Gb = 0.0
    gap: Annotated[Number, Field(ge=0, lt=1)] = 0.01
    time_limit_s: Annotated[Number, Field(gt=0)] = 600.0  # for each plan
    constraints: ConstraintsTable = ConstraintsTable()

    @field_validator("inputs")
    @classmethod
    def _shapes_are_read(cls, value: Any) -> Any:
        for spelled in value.values() if isinstance(value, Mapping) else value or ():
            tensor_of(spelled)
        return value

    @model_validator(mode="after")
    def _keys_go_together(self) -> ModelTable:
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
        spelled = [budget_name(gb) for gb in self.budgets_gb]
        for gb, name in zip(self.budgets_gb, spelled, strict=True):
            if spelled.count(name) > 1:
                raise ValueError(f"budgets_gb lists {name} twice; each budget has a file of its own")
            if self.headroom_gb >= gb:
                raise ValueError(
                    f"headroom_gb = {self.headroom_gb:g} leaves nothing of the budget of {gb:g} GiB; "
                    "make it smaller than every budget"
                )
        return self

    def asked(self) -> dict[str, Any]:
        """What a plan depends on beside profile and budget, by key, as JSON has it."""
        made = self.constraints.constraints()
        return {
            "headroom_gb": self.headroom_gb,
            "gap": self.gap,
            "constraints": None if made is None else made.model_dump(mode="json", exclude_defaults=True),
        }


class Settings(Table):
    """The whole file."""

    policies: str = "policies"  # folder, beside the file
    models: dict[str, ModelTable]

    @field_validator("policies")
    @classmethod
    def _folder_is_inside(cls, value: str) -> str:
        path = Path(value)
        if not value or path.is_absolute() or ".." in path.parts or path == Path():
            raise ValueError('must be a folder of its own below the file, such as "policies"')
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


def read(path: Path, datasheets: Sequence[str]) -> Settings:
    """The settings in `path`.

    Args:
        path: of the file.
        datasheets: short names of the devices that can be estimated.

    Raises:
        OSError: it cannot be read.
        InvalidSettings: it is no TOML, or does not say what to do; says where and what to do about it.
    """
    text = path.read_text("utf-8")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        raise InvalidSettings(
            str(path), [Problem("", "", f"not TOML: {error}", int(line[1]) if line else 0)]
        ) from None
    try:
        found = Settings.model_validate(data)
    except ValidationError as error:
        raise InvalidSettings(str(path), list(_problems(error, text))) from None
    unknown = [
        _placed(
            ("models", name, "device"),
            f"{table.device!r} is none of {', '.join((LOCAL, *datasheets))}"
            + _near(table.device, (LOCAL, *datasheets)),
            text,
        )
        for name, table in found.models.items()
        if table.device not in (LOCAL, *datasheets)
    ]
    if unknown:
        raise InvalidSettings(str(path), unknown)
    return found


def tensor_of(spelled: str) -> tuple[str, tuple[int, ...]]:
    """Type and shape of a tensor as the file spells it.

    >>> tensor_of("int64[8, 2048]")
    ('int64', (8, 2048))
    """
    match = _TENSOR.fullmatch(spelled)
    if match is None or match[1] not in TYPES:
        raise ValueError(
            f'{spelled!r} is no tensor; write a type and a shape, such as "int64[8, 2048]". '
            f"Types: {', '.join(TYPES)}"
        )
    return match[1], tuple(int(n) for n in match[2].split(",") if n.strip())


def is_float(dtype: str) -> bool:
    """Whether a type's name is that of a floating-point one."""
    return dtype in _FLOATS


def budget_name(gb: float) -> str:
    """A budget in GiB as file names have it: no exponent, and no more digits than needed.

    >>> budget_name(40.0), budget_name(0.25)
    ('40', '0.25')
    """
    return f"{gb:.6f}".rstrip("0").rstrip(".")


def policy_file(name: str, gb: float) -> str:
    """The name of the file with the policy of model `name` for a budget of `gb` GiB."""
    return f"{name}-{budget_name(gb)}gib.json"


def lock_file(name: str) -> str:
    """The name of the file that says what the policies of model `name` were made for."""
    return f"{name}.lock.json"


# --- complaints -----------------------------------------------------------------------------------------

_NEXT: Mapping[str, str] = {
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


def _problems(error: ValidationError, text: str, most: int = 8) -> Iterator[Problem]:
    seen: set[tuple[str, str]] = set()
    for complaint in error.errors(include_url=False, include_context=False):
        loc = tuple(part for part in complaint["loc"] if part not in ("tuple[str, ...]", "dict[str,str]"))
        key = next((str(part) for part in reversed(loc) if not isinstance(part, int)), "")
        match complaint["type"]:
            case "extra_forbidden":
                known = _keys_of(loc[:-1])
                said = f"unknown key{_near(key, known)}; keys here are {', '.join(known)}"
            case "missing":
                said = f"missing; {_NEXT.get(key, 'add it')}"
            case "value_error":
                said = complaint["msg"].removeprefix("Value error, ")
            case _:
                said = f"{_shown(complaint['input'])}: {_first_lower(complaint['msg'])}"
                said += f"; {_NEXT[key]}" if key in _NEXT else ""
        problem = _placed(loc, said, text)
        if (problem.table, problem.key) not in seen and len(seen) < most:
            seen.add((problem.table, problem.key))
            yield problem


def _placed(loc: Sequence[int | str], said: str, text: str) -> Problem:
    """A complaint about what is at `loc`, with the header of its table."""
    depth = 0  # how many parts of `loc` are the table's
    if loc[:1] == ("models",) and len(loc) > 1:
        depth = 3 if len(loc) > 3 and loc[2] == "constraints" else 2
    table = ".".join(str(part) for part in loc[:depth])
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[depth:])
    header = re.compile(rf"^\s*\[\s*{re.escape(table)}\s*\]")
    lines = (n for n, line in enumerate(text.splitlines(), 1) if table and header.match(line))
    return Problem(f"[{table}]" if table else "", key.lstrip("."), said, next(lines, 0))


def _keys_of(loc: Sequence[int | str]) -> tuple[str, ...]:
    table: type[Table] = Settings
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
