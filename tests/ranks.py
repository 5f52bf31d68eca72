"""Run a script on several ranks: processes that communicate over gloo, or as if over NCCL."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from waiting import NotInTime, until

_BEGIN = """
import os
import sys
rank, world, backend = int(sys.argv[2]), int(sys.argv[3]), sys.argv[5]
sys.path += [sys.argv[1], os.path.dirname(sys.argv[1])]
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
dist.init_process_group(backend, init_method="file://" + sys.argv[4], rank=rank, world_size=world)
"""

# Gloo's threads may release a tensor while the interpreter shuts down, which ends the process by SIGABRT
# (pytorch pull request 179291). The script's work is done, so it exits without shutting down.
_END = """
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""


def outputs_of_ranks(
    script: str, store: Path, world: int = 2, timeout: float = 120, backend: str = "gloo"
) -> list[str]:
    """Return the output of each rank.

    The script can use `rank`, `world`, torch and dist, and import from tests and from the root.

    Args:
        store: a file through which the ranks meet; must not exist.
        timeout: seconds for all of them.
        backend: "gloo"; "standin": each rank has a device of the stand-in, `gpu`; "fake": ranks that send
            nothing, and so hold nothing for longer.

    Raises:
        AssertionError: a rank failed; has its stderr.
    """
    command = [sys.executable, "-W", "ignore", "-c", _BEGIN + script + _END, str(Path(__file__).parent)]
    with contextlib.ExitStack() as files:
        outs, errors = (
            [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world)] for _ in range(2)
        )
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world), str(store), backend],
                stdout=outs[rank],
                stderr=errors[rank],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(world)
        ]
        _wait(ranks, timeout)
        for number, (rank, written) in enumerate(zip(ranks, errors, strict=True)):
            written.seek(0)
            code = rank.returncode
            assert code in (0, _ENDED), f"rank {number} ended with {code}:\n{written.read()[-3000:]}"
        assert all(rank.returncode == 0 for rank in ranks), f"not done after {timeout} seconds"
        for out in outs:
            out.seek(0)
        return [out.read() for out in outs]


_ENDED = -signal.SIGKILL  # by us


def _wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> None:
    """Wait until all ranks ended, or one failed, since the others then wait for it forever."""

    def over() -> bool:
        codes = [rank.poll() for rank in ranks]
        return None not in codes or any(codes)

    try:
        with contextlib.suppress(NotInTime):
            until(over, timeout)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
