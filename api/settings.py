"""Read the settings from the environment, once."""

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


def data_folder() -> Path:
    """Return the default folder of the SQLite database."""
    home = os.environ.get("XDG_DATA_HOME") or str(Path("~/.local/share").expanduser())
    return Path(home) / "autoac"


class InvalidSettings(ValueError):
    """An environment variable or an argument of `serve` is not valid."""


def is_loopback(host: str) -> bool:
    """Return True if `host` is a loopback address or localhost. Other names may mean any machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _stripped(text: Any) -> Any:
    return text.strip() if isinstance(text, str) else text


class Settings(BaseSettings):
    """The configuration. The variable of each field is AUTOAC_ and its name in capitals.

    A variable that is not set may be a file of its name in the folder AUTOAC_SECRETS_DIR.
    """

    # An empty variable counts as unset: with `AUTOAC_TOKEN=` no token is set.
    model_config = SettingsConfigDict(
        env_prefix="AUTOAC_", env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8421  # 0: any free port
    allowed_hosts: str = ""  # host names that need no key, in addition to loopback
    # A key with the scope admin. Surrounding white space is ignored.
    token: Annotated[SecretStr, BeforeValidator(_stripped), Field(min_length=16)] | None = None
    database_url: SecretStr | None = None  # None: a SQLite file in the data folder
    runner: Literal["embedded", "workers"] | None = None  # None: embedded on SQLite, else workers

    max_sent_bytes: Bytes = 8 * MIB  # of a body as sent, compressed or not
    max_plain_bytes: Bytes = 64 * MIB  # of a body once it is decoded
    head_timeout_s: Seconds = 10  # until the head of a request has arrived
    body_timeout_s: Seconds = 30  # until a body has arrived
    reads_at_once: Annotated[int, Field(ge=1, le=1024)] = os.cpu_count() or 1  # bodies that are checked
    reads_waiting: Annotated[int, Field(ge=0, le=100_000)] = 64  # requests with a body beyond those

    wait_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = (
        10  # how long a request waits for its job by default
    )
    max_wait_s: Seconds = 600  # limit of `Prefer: wait`
    solve_time_limit_s: Seconds = 120  # limit of time_limit_s in a request
    solve_grace_s: Seconds = 30  # more time for the child to start, read and simulate before it is killed
    solve_memory_bytes: Bytes = 8192 * MIB  # of the child's address space
    solves_at_once: Annotated[int, Field(ge=1, le=1024)] = os.cpu_count() or 1  # by one service or worker
    queue_most: Annotated[int, Field(ge=1)] = 1000  # queued jobs of all keys; then 503
    key_queued: Annotated[int, Field(ge=1)] = 100  # queued jobs of one key; then 429
    key_running: Annotated[int, Field(ge=1)] = 1024  # running jobs of one key; the others wait in the queue
    key_streams: Annotated[int, Field(ge=1)] = 100  # event streams of one key; then 429
    lease_s: Seconds = 15  # a worker without a heartbeat for so long is dead; its jobs are queued again
    attempts: Annotated[int, Field(ge=1, le=100)] = 3  # of a job whose runner dies

    worker_port: Annotated[int, Field(ge=0, le=65_535)] | None = None  # of a worker's /metrics and /livez
    shutdown_s: Seconds = 10  # until answers must end after SIGTERM

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Return the settings of the environment; an override that is not None takes precedence.

        Raises:
            InvalidSettings: a variable is not valid. The message names it, never its value.
        """
        folder = os.environ.get("AUTOAC_SECRETS_DIR") or None
        if folder is not None and not Path(folder).is_dir():
            raise InvalidSettings(f"AUTOAC_SECRETS_DIR must be a folder, got {folder}")
        try:
            given = {name: value for name, value in overrides.items() if value is not None}
            return cls(**{"_secrets_dir": folder} | given)
        except ValidationError as error:
            complaints = error.errors(include_url=False, include_input=False, include_context=False)
            lines = [f"AUTOAC_{'_'.join(map(str, c['loc'])).upper()}: {c['msg']}" for c in complaints]
            raise InvalidSettings("; ".join(lines)) from None
        except ValueError as error:  # pydantic's own, for a file that it cannot read
            cause = error.__cause__ or error
            raise InvalidSettings(f"AUTOAC_SECRETS_DIR must have readable files: {cause}") from None

    @property
    def on_loopback(self) -> bool:
        """Return True if only this machine can reach `host`; False for names other than localhost."""
        return is_loopback(self.host)

    def answers_to(self, host: str) -> bool:
        """Return True if a Host header, whatever its port, names this machine or one of `allowed_hosts`."""
        name = re.sub(r":[0-9]*$", "", host.strip()).lower()
        return is_loopback(name.strip("[]")) or name in self.allowed_hosts.lower().replace(",", " ").split()

    @property
    def url(self) -> str:
        """Return the database's URL, with its password if it has one."""
        if self.database_url is not None:
            return self.database_url.get_secret_value()
        return f"sqlite:///{data_folder() / 'service.sqlite3'}"

    @property
    def runs_embedded(self) -> bool:
        """Return True if the process that serves also runs jobs."""
        if self.runner is not None:
            return self.runner == "embedded"
        return self.url.startswith("sqlite")
