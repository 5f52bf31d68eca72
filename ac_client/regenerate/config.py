"""Read `autoac.toml`: the models that have policies, their devices and their budgets."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ac_client.errors import CommandError
from autoac.planner.formats.base import complaints
from autoac.planner.formats.constraints import Constraints

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]  # part of file names
Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]


class ConfigTable(BaseModel):
    """Base class of the tables in `autoac.toml`. An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelTable(ConfigTable):
    """`[models.NAME]`: one model with one batch on one device, and its budgets."""

    entry: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]  # "module:function"
    device: str  # the short name of a datasheet
    budgets_gb: Annotated[tuple[Positive, ...], Field(min_length=1)]
    autocast: Literal["bfloat16", "float16"] | None = None
    gap: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.01
    time_limit_s: Positive = math.inf  # for each plan
    constraints: Constraints = Constraints()


class Config(ConfigTable):
    """The content of `autoac.toml`: where policies are written, and the models to plan."""

    policies: str = "policies"  # folder, relative to the file
    models: Annotated[dict[Name, ModelTable], Field(min_length=1)]


def read_config(path: Path, devices: Sequence[str]) -> Config:
    """Read and check the file at `path`.

    Args:
        path: the file.
        devices: short names of the datasheets.

    Raises:
        OSError: the file cannot be read.
        CommandError: the file is not TOML, or a table is invalid.
    """
    try:
        config = Config.model_validate(tomllib.loads(path.read_text("utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise CommandError(f"{path}: not TOML: {error}") from None
    except ValidationError as error:
        raise CommandError(
            f"{path}: {'; '.join(complaints(error))}; docs/regenerate.md has all keys"
        ) from None
    for name, table in config.models.items():
        if table.device not in devices:
            raise CommandError(
                f"{path}: models.{name}.device must be one of {', '.join(devices)}, got {table.device!r}"
            )
    return config


def policy_file(name: str, budget_gb: float) -> str:
    """Return the name of the file with the policy of model `name` for a budget.

    >>> policy_file("decoder", 40.0), policy_file("decoder", 2.5)
    ('decoder-40gib.json', 'decoder-2.5gib.json')
    """
    return f"{name}-{str(budget_gb).removesuffix('.0')}gib.json"
