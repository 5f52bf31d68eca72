"""Environment -> Settings, read once."""

from __future__ import annotations

import ipaddress
import os
from typing import Annotated, Any

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

MIB = 1 << 20

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Bytes = Annotated[int, Field(gt=0)]


class InvalidSettings(ValueError):
    """An environment variable, or an argument of `serve`, that is not what it should be."""


class Settings(BaseSettings):
    """How the service runs. Each field is read from the environment as AUTOAC_ and its name in capitals."""

    # An empty variable counts as unset, so that `AUTOAC_TOKEN=` is no token rather than the empty one.
    model_config = SettingsConfigDict(
        env_prefix="AUTOAC_", env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8421  # 0: one that is free
    token: Annotated[SecretStr, Field(min_length=16)] | None = None  # asked of every request but /livez
    max_sent_bytes: Bytes = 8 * MIB  # of a body as it is sent, compressed or not
    max_plain_bytes: Bytes = 64 * MIB  # of a body once it is decoded
    body_timeout_s: Seconds = 30  # for a body to arrive
    solve_time_limit_s: Seconds = 120  # most that a request may ask for
    solve_grace_s: Seconds = 30  # beyond it, for the child to start, read and simulate; then it is killed
    solve_memory_bytes: Bytes = 8192 * MIB  # of the child's address space
    solves_at_once: Annotated[int, Field(ge=1, le=1024)] = os.cpu_count() or 1
    solves_waiting: Annotated[int, Field(ge=0, le=100_000)] = 32  # beyond those that run
    shutdown_s: Seconds = 10  # for running solves to end when the service is told to stop

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """The settings of the environment; an override that is not None goes before it.

        Raises:
            InvalidSettings: names each variable that is wrong, never its value.
        """
        try:
            return cls(**{name: value for name, value in overrides.items() if value is not None})
        except ValidationError as error:
            complaints = error.errors(include_url=False, include_input=False, include_context=False)
            lines = [f"AUTOAC_{'_'.join(map(str, c['loc'])).upper()}: {c['msg']}" for c in complaints]
            raise InvalidSettings("; ".join(lines)) from None

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach `host`. A name other than localhost counts as no."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
