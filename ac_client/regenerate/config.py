"""Read `autoac.toml`: the models that have policies, their devices and their budgets."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ac_client.errors import CommandError
from autoac.planner.formats.base import complaints
from autoac.planner.formats.constraints import Constraints, Gradients, Patterns
from autoac.planner.units import bytes_from_gb

LOCAL: Final = "local"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_TENSOR = re.compile(r"(\w+)\[([\d, ]*)\]")
FLOATS = ("float64", "float32", "bfloat16", "float16")
TYPES = (*FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Gb = Annotated[Number, Field(ge=0)]  # GiB
Flag = Annotated[bool, Field(strict=True)]


class InvalidConfig(CommandError):
    """`autoac.toml` is invalid."""

    def __init__(self, file: Path, problem: str) -> None:
        self.file, self.problem = file, problem
        super().__init__(f"{file}: {problem}")


class ConfigTable(BaseModel):
    """Base class of the tables in `autoac.toml`. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ConstraintsTable(ConfigTable):
    """`[models.NAME.constraints]`: the constraints of docs/constraints.md, in GiB instead of bytes."""

    pin_save: Patterns = ()
    pin_recompute: Patterns = ()
    recompute_only: Patterns = ()
    fsdp_units: Patterns = ()
    save_deciding: Flag = True
    save_collectives: Flag = True
    forward_budget_gb: Annotated[Number, Field(gt=0)] | None = None
    host_budget_gb: Gb = 0.0
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
            save_collectives=self.save_collectives,
            forward_budget_bytes=None if forward is None else max(bytes_from_gb(forward), 1),
            host_budget_bytes=bytes_from_gb(self.host_budget_gb),
            extra_static_bytes=bytes_from_gb(self.extra_static_gb),
            gradients=self.gradients,
        )
        return None if constraints == Constraints() else constraints


class ModelTable(ConfigTable):
    """`[models.NAME]`: one model with one batch shape on one device, and its budgets."""

    entry: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]  # "module:function"
    device: str  # "local", or the short name of a datasheet
    budgets_gb: Annotated[tuple[Annotated[Number, Field(gt=0)], ...], Field(min_length=1)]  # GiB
    inputs: tuple[str, ...] | dict[str, str] | None = None  # "int64[8, 2048]"; None: the batch of the entry
    meta: Flag = False  # call the entry under torch.device("meta")
    autocast: Literal["bfloat16", "float16"] | None = None
    headroom_gb: Gb = 0.0
    gap: Annotated[Number, Field(ge=0, lt=1)] = 0.01
    time_limit_s: Annotated[Number, Field(gt=0)] = math.inf  # for each plan
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


class Config(ConfigTable):
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
            raise ValueError("must list a model: add a table [models.NAME]")
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
    try:
        config = Config.model_validate(tomllib.loads(path.read_text("utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(path, f"not TOML: {error}") from None
    except ValidationError as error:
        raise InvalidConfig(
            path, f"{'; '.join(complaints(error))}; docs/regenerate.md has all keys"
        ) from None
    known = (LOCAL, *datasheets)
    for name, table in config.models.items():
        if table.device not in known:
            raise InvalidConfig(
                path, f"models.{name}.device: must be one of {', '.join(known)}, got {table.device!r}"
            )
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
