"""`python -m autoac.api COMMAND`, in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from service_app import BOTH, JSON, POSTGRES, Serve
from service_fakes import request
from sqlalchemy import text

from autoac.api.cli.commands import main
from autoac.api.storage.database import Database
from autoac.api.storage.tables import policies
from autoac.planner.formats.profile import Profile

pytestmark = pytest.mark.slow


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, database_url: str) -> None:
    """Point the settings at this test's database."""
    monkeypatch.setenv("AUTOAC_DATABASE_URL", database_url)


def said(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    """Run a command and return the JSON that it printed."""
    assert main([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@BOTH
@pytest.mark.usefixtures("environment")
def test_key_is_created_listed_used_and_revoked(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    made = said(capsys, "keys", "create", "ci", "--scope", "read")
    assert made["key"].startswith("autoac_")
    listed = said(capsys, "keys", "list")
    assert [(k["id"], k["name"], k["scope"], k["revoked_at"]) for k in listed] == [
        (made["id"], "ci", "read", None)
    ]
    assert made["key"] not in json.dumps(listed)
    bearer = {"Authorization": f"Bearer {made['key']}"}
    assert serve().get("/v1/policies", headers=bearer).status_code == 200
    said(capsys, "keys", "revoke", made["id"])
    assert serve().get("/v1/policies", headers=bearer).status_code == 401
    assert main(["keys", "revoke", "nothing"]) == 1
    assert "autoac keys list" in capsys.readouterr().err


@pytest.mark.usefixtures("environment")
def test_new_key_is_alone_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "create", "laptop"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("autoac_")
    assert len(out.split()) == 1
    assert "scope plan" in err
    assert main(["keys", "list"]) == 0
    assert "laptop" in capsys.readouterr().out


@BOTH
@pytest.mark.usefixtures("environment")
def test_prune_deletes_what_is_older(
    serve: Serve, profile: Profile, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    http = serve()
    for gb in (1, 2):
        http.post("/v1/policies", content=request(profile, budget_gb=gb), headers=JSON)
    with database.write() as connection:
        connection.execute(policies.update().where(policies.c.number == 1).values(created_at=0))
    assert main(["db", "prune", "--days", "30"]) == 0
    assert capsys.readouterr().out == "deleted 0 jobs, 1 policies, 0 profiles\n"
    assert [p["budget_bytes"] >> 30 for p in http.get("/v1/policies").json()["items"]] == [2]
    assert main(["db", "prune"]) == 2
    assert main(["db", "prune", "--days", "-1"]) == 2


@pytest.mark.usefixtures("environment")
def test_name_of_a_key_is_printable_and_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "create", "ci"]) == 0
    for name in ("ci", "token", "loopback"):
        assert main(["keys", "create", name]) == 1
    for name in ("", " ", "ci ", "a\nb", "x" * 101):
        assert main(["keys", "create", name]) == 2
    assert "another caller is called ci: choose another name" in capsys.readouterr().err


def test_upgrade_prints_the_earlier_migration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOAC_DATABASE_URL", f"sqlite:///{tmp_path / 'a' / 'b.sqlite3'}")
    assert main(["db", "upgrade"]) == 0
    assert "from none" in capsys.readouterr().out
    assert main(["db", "upgrade"]) == 0
    assert "already" in capsys.readouterr().out


def findings(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, dict[str, Any]]:
    return {finding["what"]: finding for finding in said(capsys, "doctor", code=code)}


@pytest.mark.usefixtures("environment")
def test_doctor_finds_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(capsys, 0)
    assert set(found) == {"settings", "database", "migrations", "writes", "keys", "runners", "solver"}
    assert not any(finding["move"] for finding in found.values())
    assert main(["doctor"]) == 0
    assert "ok    solver" in capsys.readouterr().out


def test_doctor_names_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOAC_PORT", "many")
    assert "AUTOAC_PORT" in findings(capsys, 1)["settings"]["said"]
    monkeypatch.delenv("AUTOAC_PORT")
    (tmp_path / "old.sqlite3").touch()
    monkeypatch.setenv("AUTOAC_DATABASE_URL", f"sqlite:///{tmp_path / 'old.sqlite3'}")
    found = findings(capsys, 1)
    assert found["migrations"]["move"] == "run `autoac db upgrade`"
    assert found["solver"]["ok"]  # one thing that is wrong hides no other
    monkeypatch.setenv("AUTOAC_DATABASE_URL", "postgresql://me:secret@127.0.0.1:9/none")
    away = findings(capsys, 1)["database"]
    assert not away["ok"]
    assert "secret" not in json.dumps(away)


@pytest.mark.usefixtures("environment")
def test_database_of_a_newer_release_is_one_line_with_the_next_step(
    database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0099'"))
    assert main(["serve"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "another release made" in error
    move = findings(capsys, 1)["migrations"]["move"]
    assert move.startswith("install that release here, restore an earlier backup")


def test_doctor_names_the_next_step_for_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.sqlite3").write_bytes(b"no database" * 1000)
    monkeypatch.setenv("AUTOAC_DATABASE_URL", f"sqlite:///{tmp_path / 'bad.sqlite3'}")
    assert "restore a backup" in findings(capsys, 1)["database"]["move"]


@POSTGRES
@pytest.mark.usefixtures("environment")
def test_doctor_reports_missing_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert findings(capsys, 1)["runners"]["move"] == "start `autoac worker`"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["worker"], "workers need PostgreSQL"),
        (["keys", "create", "x", "--scope", "everything"], "scope"),
        (["serve", "--host", "0.0.0.0"], "autoac keys create"),
    ],
)
def test_command_that_cannot_work_here_says_what_to_do(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_commands_report_a_database_that_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOAC_DATABASE_URL", "postgresql://me@127.0.0.1:9/none")
    assert main(["keys", "list"]) == 1
    assert "autoac doctor" in capsys.readouterr().err


def test_default_database_is_in_the_data_folder(tmp_path: Path) -> None:
    from autoac.api import Settings

    database = Database(Settings().url)
    assert database.url.database == str(tmp_path / "data" / "autoac" / "service.sqlite3")
    database.close()


def test_client_command_line_runs_service_commands_without_torch(environment: None, tmp_path: Path) -> None:
    code = (
        "import sys; from ac_client.cli.main import main\n"
        "sys.argv[1:] = ['keys', 'list', '--json']\n"
        "try: main()\n"
        "except SystemExit as left: print(left.code, [n in sys.modules for n in ('torch', 'sqlalchemy')])"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["[]", "0 [False, True]"]


def test_exit_codes_are_those_of_the_client() -> None:
    from ac_client.cli import exit_codes as client
    from autoac.api.cli import commands

    for name in ("OK", "ERROR", "USAGE", "INTERRUPTED"):
        assert getattr(commands, name) == getattr(client, name)
