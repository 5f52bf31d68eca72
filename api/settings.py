"""Environment -> Settings, read once."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

MIB = 1 << 20

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Bytes = Annotated[int, Field(gt=0)]
Days = Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)]


def data_folder() -> Path:
    """Where the embedded database lies unless a setting says otherwise."""
    home = os.environ.get("XDG_DATA_HOME") or str(Path("~/.local/share").expanduser())
    return Path(home) / "autoac"


class InvalidSettings(ValueError):
    """An environment variable, or an argument of `serve`, that is not what it should be."""


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of loopback or localhost. Other names may stand for anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _stripped(text: Any) -> Any:
    return text.strip() if isinstance(text, str) else text


class Settings(BaseSettings):
    """How the service runs. Each field is read from the environment as AUTOAC_ and its name in capitals."""

    # An empty variable counts as unset, so that `AUTOAC_TOKEN=` is no token rather than the empty one.
    model_config = SettingsConfigDict(
        env_prefix="AUTOAC_", env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8421  # 0: one that is free
    allowed_hosts: str = ""  # names that the service answers to without a key, beside those of loopback
    # Counts as a key with the scope admin. A file that it is read from may end with a newline.
    token: Annotated[SecretStr, BeforeValidator(_stripped), Field(min_length=16)] | None = None
    database_url: SecretStr | None = None  # none: a SQLite file in the data folder
    runner: Literal["embedded", "workers"] | None = None  # none: embedded on SQLite, else workers

    max_sent_bytes: Bytes = 8 * MIB  # of a body as it is sent, compressed or not
    max_plain_bytes: Bytes = 64 * MIB  # of a body once it is decoded
    head_timeout_s: Seconds = 10  # for the head of a request to arrive
    body_timeout_s: Seconds = 30  # for a body to arrive
    reads_at_once: Annotated[int, Field(ge=1, le=1024)] = os.cpu_count() or 1  # bodies that are checked
    reads_waiting: Annotated[int, Field(ge=0, le=100_000)] = 64  # requests with a body beyond those

    wait_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 10  # for a job, by default
    max_wait_s: Seconds = 600  # most that `Prefer: wait` may ask for
    solve_time_limit_s: Seconds = 120  # most that a request may ask for
    solve_grace_s: Seconds = 30  # beyond it, for the child to start, read and simulate; then it is killed
    solve_memory_bytes: Bytes = 8192 * MIB  # of the child's address space
    solves_at_once: Annotated[int, Field(ge=1, le=1024)] = os.cpu_count() or 1  # of one runner or worker
    queue_most: Annotated[int, Field(ge=1)] = 1000  # jobs that are queued, of everybody
    key_queued: Annotated[int, Field(ge=1)] = 100  # of one key; then 429
    key_running: Annotated[int, Field(ge=1)] = 1024  # of one key; the others wait in the queue
    key_streams: Annotated[int, Field(ge=1)] = 100  # jobs that one key listens to at once; then 429
    lease_s: Seconds = 15  # a running job of which nothing was heard for so long is queued again
    attempts: Annotated[int, Field(ge=1, le=100)] = 3  # of a job whose runner went away

    draw_ahead: bool = True  # whoever makes a policy draws its page too, before anybody opens it

    keep_policies_days: Days | None = None  # older ones go when `db prune` runs; none: kept
    keep_policies_count: Annotated[int, Field(ge=1)] | None = None  # newest of a model, device and budget
    keep_drawings_bytes: Annotated[int, Field(ge=0)] = 1024 * MIB  # of all; the oldest go at once
    keep_jobs_days: Days = 30
    keep_audit_days: Days = 365

    worker_port: Annotated[int, Field(ge=0, le=65_535)] | None = None  # of a worker's /livez and /metrics
    shutdown_s: Seconds = 10  # for answers to end when the service is told to stop

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
    def draws(self) -> bool:
        """Whether who makes a policy draws it: not where no drawing is kept."""
        return self.draw_ahead and self.keep_drawings_bytes > 0

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach `host`. A name other than localhost counts as no."""
        return is_loopback(self.host)

    def answers_to(self, host: str) -> bool:
        """Whether a Host header, with or without a port, names this machine or one of `allowed_hosts`."""
        name = re.sub(r":[0-9]*$", "", host.strip()).lower()
        return is_loopback(name.strip("[]")) or name in self.allowed_hosts.lower().replace(",", " ").split()

    @property
    def url(self) -> str:
        """The database's URL, with its password if it has one."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{data_folder() / 'service.sqlite3'}"

    @property
    def runs_embedded(self) -> bool:
        """Whether the process that serves also solves."""
        if self.runner is not None:
            return self.runner == "embedded"
        return self.url.startswith("sqlite")
