"""Run a script on several ranks: processes that communicate over gloo, or as if over NCCL."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

# What most scripts import. Ranks are forks of one process that has imported it.
_IMPORTED = ["rank_setups", "benchmarks.models.tiny"]

_BEGIN = """
if backend == "standin":
    from standin import cuda, library
    gpu = cuda.load(library.library())
import torch
import torch.distributed as dist
torch.set_num_threads(1)
if backend == "standin":
    torch.cuda.set_device(rank)
if backend == "fake":
    import torch.testing._internal.distributed.fake_pg
dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=world)
"""


def outputs_of_ranks(
    script: str,
    store: Path,
    world: int = 2,
    timeout: float = 300,
    backend: str = "gloo",
    only: Sequence[int] | None = None,
) -> list[str]:
    """Return the output of each rank.

    The script can use `rank`, `world`, torch and dist, and import from tests and from the root.

    Args:
        store: a file through which the ranks meet; must not exist.
        timeout: seconds for all of them.
        backend: "gloo"; "standin": each rank has a device of the stand-in, `gpu`; "fake": ranks that send
            nothing, and so hold nothing for longer.
        only: these ranks, of those that send nothing, which need no others.

    Raises:
        AssertionError: a rank failed; has its stderr.
    """
    # The stand-in must be loaded before torch is imported.
    start = multiprocessing.get_context("spawn") if backend == "standin" else _forks()
    with tempfile.TemporaryDirectory() as folder:
        numbers = range(world) if only is None else only
        written = [(Path(folder) / f"out{rank}", Path(folder) / f"errors{rank}") for rank in numbers]
        given = {"world": world, "store": str(store), "backend": backend}
        ranks = [
            start.Process(target=_run, args=(script, *map(str, files), {"rank": rank, **given}))
            for rank, files in zip(numbers, written, strict=True)
        ]
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:  # else each rank would import what was started from the command line
            for process in ranks:
                process.start()
        finally:
            sys.modules["__main__"] = main
        _wait(ranks, timeout)
        for number, process, (_, errors) in zip(numbers, ranks, written, strict=True):
            code, ended = process.exitcode, -signal.SIGKILL  # by us
            assert code in (0, ended), f"rank {number} ended with {code}:\n{errors.read_text()[-3000:]}"
        assert all(process.exitcode == 0 for process in ranks), f"not done after {timeout} seconds"
        return [out.read_text() for out, _ in written]


@functools.cache
def _forks() -> BaseContext:
    """Start the process that ranks are forks of."""
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(_IMPORTED)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # it ignores ours
        forkserver.ensure_running()
    return start


def _run(script: str, out: str, errors: str, names: dict[str, Any]) -> None:
    """Run the script in this process as the file `__main__`, and end the process."""
    for descriptor, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), descriptor)
    warnings.simplefilter("ignore")
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(names)
    code = 1
    try:
        exec(compile(_BEGIN + script, "<script>", "exec"), vars(main))
        main.dist.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001 - the parent shows it
        traceback.print_exc()
    # Gloo's threads may release a tensor while the interpreter shuts down, which ends the process by SIGABRT
    # (pytorch pull request 179291). The script's work is done, so it exits without shutting down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(ranks: Sequence[BaseProcess], timeout: float) -> None:
    """Wait until all ranks ended, or one failed, since the others then wait for it forever."""
    running, end = {process.sentinel: process for process in ranks}, time.monotonic() + timeout
    failed = False
    while running and not failed and time.monotonic() < end:
        for sentinel in wait(list(running), max(0.0, end - time.monotonic())):
            process = running.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            failed |= bool(process.exitcode)
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
