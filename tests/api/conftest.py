"""Fixtures of the service's tests. `service_fakes` beside this file has what they are made of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # the import mode adds no folder by itself

from service_fakes import chain_profile

from autoac.planner.profile import Profile


@pytest.fixture(scope="session")
def profile() -> Profile:
    """A step of three ops and three backward steps."""
    return chain_profile()


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AUTOAC_TOKEN", "AUTOAC_HOST", "AUTOAC_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def anyio_backend() -> str:
    """The event loop that uvicorn uses."""
    return "asyncio"
