"""Run times on disk, so that the same model gets the same times again, and the same plan.

A file of SQLite: the median and spread of each kind of op on each machine, and what backward took for
each kind of step. Only numbers and hashes are in it. Processes may share it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import platform
import sqlite3
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("autoac.profiler")

VARIABLE = "AUTOAC_TIMES"
"""Environment variable: path of the file; `1` for the usual one; empty or `0`: no file."""

_SCHEMA = """
create table if not exists ops (
    key text primary key, runtime_us real not null, spread_us real not null, samples integer not null
) without rowid;
create table if not exists steps (key text primary key, runtimes_us text not null) without rowid;
"""

_AT_ONCE = 500  # variables in one query

Measured = tuple[float, float, int]
"""Median and median absolute deviation in microseconds, and how many samples they are of."""


def usual_path() -> Path:
    """Where the file is if nothing else is said: as torch itself keeps things, under `XDG_CACHE_HOME`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autoac" / "times.sqlite3"


class Times:
    """Run times kept in the file at `path`. What was written first stays: times that move move plans.

    A file that cannot be read or written is left alone, with a warning: then times are measured anew.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._told = False

    @classmethod
    def of_environment(cls) -> Times | None:
        """The file that the environment names; None if it names none."""
        named = os.environ.get(VARIABLE, "")
        if named in ("", "0"):
            return None
        return cls(usual_path() if named == "1" else named)

    def ops(self, machine: str, signatures: Iterable[Hashable]) -> dict[Hashable, Measured]:
        """What is known of ops on `machine`, by signature."""
        keys = {_key(machine, signature): signature for signature in signatures}
        found: dict[Hashable, Measured] = {}
        with self._open() as file:
            if file is None:
                return found
            names = list(keys)
            for i in range(0, len(names), _AT_ONCE):
                some = names[i : i + _AT_ONCE]
                marks = ",".join("?" * len(some))
                query = f"select key, runtime_us, spread_us, samples from ops where key in ({marks})"
                for key, runtime, spread, samples in file.execute(query, some):
                    found[keys[key]] = (_time(runtime), _time(spread), int(samples))
        return found

    def keep_ops(self, machine: str, measured: Mapping[Hashable, Measured]) -> None:
        """Write down ops that are not known yet."""
        rows = [(_key(machine, signature), *values) for signature, values in measured.items()]
        with self._open() as file:
            if file is not None:
                file.executemany("insert or ignore into ops values (?, ?, ?, ?)", rows)

    def backward(self, machine: str, step: Hashable, n: int) -> list[float] | None:
        """What each of the `n` backward steps took, in microseconds; None if it is not known."""
        runtimes: list[float] = []
        with self._open() as file:
            if file is None:
                return None
            key = _key(machine, step)
            row = file.execute("select runtimes_us from steps where key = ?", (key,)).fetchone()
            runtimes = [_time(us) for us in json.loads(row[0])] if row is not None else []
        return runtimes if len(runtimes) == n and n else None

    def keep_backward(self, machine: str, step: Hashable, runtimes_us: Sequence[float]) -> None:
        """Write down a backward that is not known yet."""
        with self._open() as file:
            if file is not None:
                row = (_key(machine, step), json.dumps(list(runtimes_us)))
                file.execute("insert or ignore into steps values (?, ?)", row)

    def clear(self) -> None:
        """Forget everything: after what was measured on a busy machine, say."""
        with self._open() as file:
            if file is not None:
                file.executescript("delete from ops; delete from steps;")

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection | None]:
        """The file, and what is written in it at the end; None if it is not usable."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = sqlite3.connect(self.path, timeout=5)
            file.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            self._warn("run times are measured anew: %s cannot be used: %s", error)
            yield None
            return
        try:
            yield file
            file.commit()
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._warn("run times in %s were not read or kept: %s", error)
        finally:
            file.close()

    def _warn(self, said: str, error: Exception) -> None:
        """Once: a profile opens the file several times."""
        if not self._told:
            self._told = True
            log.warning(said, self.path, error)


def machine(device: torch.device, device_name: str) -> str:
    """What run times depend on beside the op: device, torch, and on the CPU the processor and threads."""
    if device.type != "cpu":
        return f"{device_name}, torch {torch.__version__}"
    return f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def processor() -> str:
    """What the processor calls itself."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _time(us: Any) -> float:
    """Raises: ValueError, TypeError: it is no number of microseconds."""
    if not 0 <= (time := float(us)) < math.inf:
        raise ValueError(f"{time} is no time")
    return time


def _key(machine: str, what: Hashable) -> str:
    return hashlib.sha256(f"{machine}\n{what!r}".encode()).hexdigest()
