"""Test that log lines go to the current stderr."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator

import pytest
import structlog

from autoac.api.telemetry.logs import configure, log


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_replaced_stderr_is_not_written_to_after_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    configure()
    log.info("one")
    monkeypatch.setattr(sys, "stderr", second)
    assert json.loads(first.getvalue())["event"] == "one"
    first.close()
    log.info("two", status=200)
    written = json.loads(second.getvalue())
    assert (written["event"], written["level"], written["status"]) == ("two", "info", 200)
