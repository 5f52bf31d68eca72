"""Test the service as a process: its imports, its addresses, and its answers over the network."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
from waiting import listening

from autoac import api
from autoac.api import InvalidSettings, RefusedToListen, Settings
from autoac.api.cli.server import check_reach
from autoac.api.storage.database import Database
from autoac.api.storage.keys import Scope, create_key

pytestmark = pytest.mark.slow

TOKEN = "a token of more than sixteen"


def test_service_and_the_planner_import_no_torch() -> None:
    code = (
        "import sys, autoac.planner, autoac.api.cli.server;"
        "import autoac.api.solving.child_main, autoac.api.__main__;"
        "print(sorted({'torch', 'ac_client', 'autoac.profiler'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_child_imports_no_web_server() -> None:
    code = (
        "import sys, autoac.api.solving.child_main; sys.exit(bool({'fastapi', 'uvicorn'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


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


def test_refusal_to_listen_is_one_line() -> None:
    environment = os.environ | {"AUTOAC_HOST": "0.0.0.0"}
    done = subprocess.run(
        [sys.executable, "-m", "autoac.api"], env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert re.fullmatch("autoac: 0.0.0.0 can be reached .*\n", done.stderr)


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


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Run a service in a process of its own, on a free port."""
    log = tmp_path / "log"
    environment = os.environ | {
        "AUTOAC_PORT": "0",
        "AUTOAC_MAX_SENT_BYTES": "2000000",
        "AUTOAC_HEAD_TIMEOUT_S": "1",
    }
    with log.open("wb") as stream:
        service = subprocess.Popen([sys.executable, "-m", "autoac.api"], env=environment, stderr=stream)
    try:
        yield listening(service, log)
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait(20)


def test_over_the_network(url: str, tmp_path: Path) -> None:
    with httpx2.Client(base_url=url, timeout=30) as http:
        assert http.get("/livez").json() == {"status": "alive"}
        assert http.head("/").headers["content-type"].startswith("text/html")
        headers = {"Content-Type": "application/json"}
        # By the real child: the errors of a body come from there.
        assert http.post("/v1/policies", content=b"{", headers=headers).status_code == 400
        # Far over the cap: the answer must arrive although the body is not read to its end.
        too_large = http.post("/v1/policies", content=bytes(30_000_000), headers=headers)
        assert too_large.status_code == 413
        assert http.get("/livez").status_code == 200
    assert_half_sent_heads_are_closed(url)
    for line in (tmp_path / "log").read_text().splitlines():  # uvicorn's lines too
        assert {"event", "level", "timestamp"} <= json.loads(line).keys()


def assert_half_sent_heads_are_closed(url: str) -> None:
    """Send nothing, half a head, half a second head, and a head without end: each connection is closed."""
    address = httpx2.URL(url)
    whole = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for content in (b"", whole[:-2], whole + whole[:-2], whole[:-2] + b"X: " + b"x" * 200_000):
        with socket.create_connection((address.host, address.port), timeout=30) as connection:
            answers = b""
            with suppress(ConnectionError):  # it was closed with bytes unread
                connection.sendall(content)
                while piece := connection.recv(65536):
                    answers += piece
            assert answers.count(b"200 OK") == (content[:50].count(b"\r\n\r\n"))
