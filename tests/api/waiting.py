"""Waiting for what other threads and processes do, with generous limits."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(holds: Callable[[], Any], seconds: float = 120) -> Any:
    """What `holds` gives once it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = holds()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"it did not come true within {seconds:g} s")


def listening(service: subprocess.Popen[bytes], log: Path) -> str:
    """Where a process of the service listens, from its log."""

    def address() -> Any:
        assert service.poll() is None, log.read_text()
        return re.search(r"running on (http://\S+)", log.read_text())

    return str(until(address)[1])
