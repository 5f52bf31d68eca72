"""Wait for other threads and processes, with generous limits."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(holds: Callable[[], Any], seconds: float = 120) -> Any:
    """Return the result of `holds` once it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = holds()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"the condition must hold within {seconds:g} s")


def listening(service: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address of a service from its log."""

    def address() -> Any:
        assert service.poll() is None, log.read_text()
        return re.search(r"running on (http://\S+)", log.read_text())

    return str(until(address)[1])
