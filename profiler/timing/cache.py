"""Cache run times on disk, so that the same model gets the same times again, and thus the same plan.

The cache is an SQLite file, which processes may share. It has the median and spread of each kind of op on
each machine, and the run times of backward for each profile. Only numbers and hashes are in it.
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

from autoac.tape.capture.op_timer import OpTime

log = logging.getLogger("autoac.profiler")

METHOD = 2
"""How run times are measured. A new number for each change, so that times of two methods never mix."""

VARIABLE = "AUTOAC_TIMES"
"""Environment variable: path of the file; `1`: the default path; empty or `0`: no file."""

_SCHEMA = """
create table if not exists ops (
    key text primary key, runtime_us real not null, spread_us real not null, samples integer not null
) without rowid;
create table if not exists steps (key text primary key, runtimes_us text not null) without rowid;
"""

_MOST_VARIABLES = 500  # in one query


def default_path() -> Path:
    """Return the default path of the file: under `XDG_CACHE_HOME`, as torch does it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autoac" / "times.sqlite3"


class Times:
    """The cache in the file at `path`. An entry is never replaced, since new times would change plans.

    A file that cannot be read or written is ignored with a warning, and times are measured again.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._warned = False

    @classmethod
    def of_environment(cls) -> Times | None:
        """Return the cache named by the environment variable AUTOAC_TIMES; None if it is not set."""
        named = os.environ.get(VARIABLE, "")
        if named in ("", "0"):
            return None
        return cls(default_path() if named == "1" else named)

    def ops(self, machine: str, signatures: Iterable[Hashable]) -> dict[Hashable, OpTime]:
        """Return the run times of ops on `machine` that the cache has, by signature."""
        keys = {_key(machine, signature): signature for signature in signatures}
        times: dict[Hashable, OpTime] = {}
        with self._open() as file:
            if file is None:
                return times
            names = list(keys)
            for i in range(0, len(names), _MOST_VARIABLES):
                some = names[i : i + _MOST_VARIABLES]
                marks = ",".join("?" * len(some))
                query = f"select key, runtime_us, spread_us, samples from ops where key in ({marks})"
                for key, runtime, spread, samples in file.execute(query, some):
                    times[keys[key]] = (_checked_us(runtime), _checked_us(spread), int(samples))
        return times

    def keep_ops(self, machine: str, measured: Mapping[Hashable, OpTime]) -> None:
        """Add run times of ops, by signature."""
        rows = [(_key(machine, signature), *values) for signature, values in measured.items()]
        with self._open() as file:
            if file is not None:
                file.executemany("insert or ignore into ops values (?, ?, ?, ?)", rows)

    def backward(self, machine: str, step: Hashable, n: int) -> list[float] | None:
        """Return the run times of the `n` backward steps in microseconds; None if the cache has none."""
        runtimes: list[float] = []
        with self._open() as file:
            if file is None:
                return None
            key = _key(machine, step)
            row = file.execute("select runtimes_us from steps where key = ?", (key,)).fetchone()
            runtimes = [_checked_us(us) for us in json.loads(row[0])] if row is not None else []
        return runtimes if len(runtimes) == n and n else None

    def keep_backward(self, machine: str, step: Hashable, runtimes_us: Sequence[float]) -> None:
        """Store the run time of each step of a backward, for later profiles on this machine."""
        with self._open() as file:
            if file is not None:
                row = (_key(machine, step), json.dumps(list(runtimes_us)))
                file.execute("insert or ignore into steps values (?, ?)", row)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection | None]:
        """Open the file, and commit at the end. Yield None if the file is unusable."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = sqlite3.connect(self.path, timeout=5)
            file.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            self._warn("run times are measured again: the cache file %s cannot be opened: %s", error)
            yield None
            return
        try:
            yield file
            file.commit()
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._warn("run times are measured again: the cache file %s cannot be read or written: %s", error)
        finally:
            file.close()

    def _warn(self, message: str, error: Exception) -> None:
        """Log `message` once. A profile opens the file several times."""
        if not self._warned:
            self._warned = True
            log.warning(message, self.path, error)


def machine(device: torch.device, device_name: str) -> str:
    """Name everything but the op that run times depend on: device, torch, and the CPU's model and threads."""
    if device.type != "cpu":
        return f"{device_name}, torch {torch.__version__}"
    return f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def processor() -> str:
    """Return the name of the CPU."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:  # not all of them: there are 30 for each of hundreds of cores
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _checked_us(us: Any) -> float:
    if not 0 <= (time := float(us)) < math.inf:
        raise ValueError(f"a run time must be a finite number of microseconds of at least 0, got {us!r}")
    return time


def _key(machine: str, subject: Hashable) -> str:
    return hashlib.sha256(f"{METHOD}\n{machine}\n{subject!r}".encode()).hexdigest()
