"""Wait for a condition that other threads or processes bring about: no test sleeps for it."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class NotInTime(AssertionError):
    """The condition did not hold in time."""


def until(holds: Callable[[], Any], seconds: float = 120, every: float = 0.02) -> Any:
    """Return the result of `holds` once it is true. Call it again after `every` seconds.

    Raises:
        NotInTime: it did not become true; the last attempt was made after the time was over.
    """
    end = time.monotonic() + seconds
    while True:
        last = time.monotonic() > end
        result = holds()
        if result:
            return result
        if last:
            raise NotInTime(f"the condition must hold within {seconds:g} s")
        time.sleep(every)


def is_running(pid: int) -> bool:
    """Return True if a process runs. A zombie does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def engine_lets_go(device: Any) -> None:
    """Have autograd's thread of a device drop the last node that it ran.

    It does so after backward has returned, at the latest before it runs another backward. A plan that is made
    until then counts what that node holds as another tensor on the device.
    """
    import torch

    nothing = torch.zeros(0, device=device, requires_grad=True)
    (nothing * 1).backward(torch.zeros_like(nothing))


def listening(service: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address of a service from its log."""

    def address() -> Any:
        assert service.poll() is None, log.read_text()
        return re.search(r"running on (http://\S+)", log.read_text())

    return str(until(address)[1])
