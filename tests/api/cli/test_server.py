"""Test the service as a process: its imports, its addresses, and its answers over the network."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from service_app import TOKEN
from waiting import listening

from autoac import api
from autoac.api import InvalidSettings, RefusedToListen, Settings
from autoac.api.cli.server import check_reach
from autoac.api.storage.database import Database
from autoac.api.storage.keys import Scope, create_key

pytestmark = pytest.mark.slow


def test_commands_children_and_the_service_import_only_what_they_need() -> None:
    code = (
        "import sys, autoac.api.cli.commands; print({'torch', 'sqlalchemy', 'pydantic'} & {*sys.modules});"
        "import autoac.api.solving.child_main; print({'fastapi', 'uvicorn'} & {*sys.modules});"
        "import autoac.planner, autoac.api.cli.server, autoac.api.__main__;"
        "print({'torch', 'ac_client', 'autoac.profiler'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == 3 * "set()\n", done.stderr


def test_public_names_are_there() -> None:
    assert api.__all__ == sorted(api.__all__)
    for name in api.__all__:
        assert getattr(api, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing"):
        _ = api.nothing


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_key(host: str, database: Database) -> None:
    check_reach(Settings(host=host), database)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "127.1"]
)
def test_other_addresses_need_a_key(host: str, database: Database) -> None:
    with pytest.raises(RefusedToListen, match="AUTOAC_TOKEN"):
        check_reach(Settings(host=host), database)
    check_reach(Settings(host=host, token=TOKEN), database)
    with database.write() as connection:
        create_key(connection, "a laptop", Scope.PLAN)
    check_reach(Settings(host=host), database)


def test_arguments_take_precedence_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOAC_PORT", "1234")
    monkeypatch.setenv("AUTOAC_SOLVES_AT_ONCE", "3")
    monkeypatch.setenv("AUTOAC_TOKEN", "")  # as in compose files: the same as unset
    settings = Settings.load(port=None)
    assert (settings.port, settings.solves_at_once, settings.token) == (1234, 3, None)
    assert Settings.load(port=99).port == 99


def test_invalid_setting_is_named_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOAC_TOKEN", "short secret")
    with pytest.raises(InvalidSettings, match="AUTOAC_TOKEN: Value should have at least 16") as caught:
        Settings.load()
    assert "short secret" not in str(caught.value)


def test_secrets_may_be_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "AUTOAC_TOKEN").write_text(f"{TOKEN}\n")
    (tmp_path / "AUTOAC_DATABASE_URL").write_text("postgresql://user:secret@host/name\n")
    monkeypatch.setenv("AUTOAC_SECRETS_DIR", str(tmp_path))
    loaded = Settings.load()
    assert loaded.token.get_secret_value() == TOKEN
    assert loaded.url == "postgresql://user:secret@host/name"
    monkeypatch.setenv("AUTOAC_TOKEN", "another token of more than sixteen")
    assert Settings.load().token != loaded.token  # a variable takes precedence
    monkeypatch.setenv("AUTOAC_SECRETS_DIR", str(tmp_path / "AUTOAC_TOKEN"))
    with pytest.raises(InvalidSettings, match="AUTOAC_SECRETS_DIR must be a folder"):
        Settings.load()
    monkeypatch.setenv("AUTOAC_SECRETS_DIR", str(tmp_path))
    (tmp_path / "AUTOAC_PORT").symlink_to("missing")
    with pytest.raises(InvalidSettings, match="AUTOAC_SECRETS_DIR must have readable files"):
        Settings.load()


def test_runner_ended_by_a_bug_ends_the_process() -> None:
    code = (
        "import autoac.api.storage.job_runs as runs, sys; from autoac.api.cli.commands import main\n"
        "def claim(*_): raise RuntimeError('a bug')\n"
        "runs.JobRuns.claim_next = claim\n"
        "sys.exit(main(['serve', '--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the runner has ended; this process needs a restart" in done.stderr


@dataclass(frozen=True)
class Running:
    """A service in a process of its own."""

    url: str
    pid: int
    log: Path

    def connect(self) -> socket.socket:
        address = httpx2.URL(self.url)
        return socket.create_connection((address.host, address.port), timeout=30)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run a service on a free port."""
    folder = tmp_path_factory.mktemp("running")
    log = folder / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AUTOAC_")} | {
        "XDG_DATA_HOME": str(folder),
        "AUTOAC_PORT": "0",
        "AUTOAC_MAX_SENT_BYTES": "2000000",
        "AUTOAC_HEAD_TIMEOUT_S": "1",
    }
    with log.open("wb") as stream:
        service = subprocess.Popen([sys.executable, "-m", "autoac.api"], env=environment, stderr=stream)
    try:
        yield Running(listening(service, log), service.pid, log)
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait(20)


def test_over_the_network(running: Running) -> None:
    with httpx2.Client(base_url=running.url, timeout=30) as http:
        assert http.get("/livez").json() == {"status": "alive"}
        assert http.head("/").headers["content-type"].startswith("text/html")
        headers = {"Content-Type": "application/json"}
        # By the real child: the errors of a body come from there.
        assert http.post("/v1/policies", content=b"{", headers=headers).status_code == 400
        # Far over the cap: the answer must arrive although the body is not read to its end.
        too_large = http.post("/v1/policies", content=bytes(30_000_000), headers=headers)
        assert too_large.status_code == 413
        assert http.get("/livez").status_code == 200
    assert_half_sent_heads_are_closed(running)
    for line in running.log.read_text().splitlines():  # uvicorn's lines too
        assert {"event", "level", "timestamp"} <= json.loads(line).keys()


def assert_half_sent_heads_are_closed(running: Running) -> None:
    """Send nothing, half a head, half a second head, and a head without end: each connection is closed."""
    whole = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for content in (b"", whole[:-2], whole + whole[:-2], whole[:-2] + b"X: " + b"x" * 200_000):
        with running.connect() as connection:
            answers = b""
            with suppress(ConnectionError):  # it was closed with bytes unread
                connection.sendall(content)
                while piece := connection.recv(65536):
                    answers += piece
            assert answers.count(b"200 OK") == (content[:50].count(b"\r\n\r\n"))


def test_request_that_arrived_in_time_is_answered_after_a_stall(running: Running) -> None:
    """The limits of a head and of an idle connection pass while the process is stopped."""
    get = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with running.connect() as fresh, running.connect() as idle:
        idle.sendall(get)
        assert b"200 OK" in idle.recv(65536)
        os.kill(running.pid, signal.SIGSTOP)
        try:
            fresh.sendall(get)
            idle.sendall(get)
            time.sleep(5.5)  # longer than uvicorn keeps an idle connection
        finally:
            os.kill(running.pid, signal.SIGCONT)
        assert b"200 OK" in fresh.recv(65536)
        assert b"200 OK" in idle.recv(65536)


def test_large_head_is_refused_even_if_one_read_takes_all_of_it(running: Running) -> None:
    for nbytes, status in ((60_000, b" 200 "), (70_000, b" 400 ")):
        with running.connect() as connection:
            os.kill(running.pid, signal.SIGSTOP)
            head = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * nbytes + b"\r\n\r\n"
            connection.sendall(head)
            os.kill(running.pid, signal.SIGCONT)
            assert status in connection.recv(65536)[:20]
