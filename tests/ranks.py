"""Scripts that run on several ranks: processes of their own that talk over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_BEGIN = """
import os
import sys
import torch
import torch.distributed as dist

rank, world = int(sys.argv[2]), int(sys.argv[3])
sys.path.append(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=rank, world_size=world)
"""

# Gloo's threads may still let go of a tensor when the interpreter is half gone, and then end the process
# by SIGABRT (pytorch pull request 179291): the script's work is done, so it leaves without taking down.
_END = """
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""


def told_by_ranks(script: str, store: Path, world: int = 2, timeout: float = 120) -> list[str]:
    """What each rank prints.

    The script finds `rank`, `world`, torch and dist ready, and the folder tests on its path.

    Args:
        store: where the ranks meet; must not exist.
        timeout: seconds for all of them.

    Raises:
        AssertionError: a rank did not end well; with what it wrote to stderr.
    """
    command = [sys.executable, "-W", "ignore", "-c", _BEGIN + script + _END, str(Path(__file__).parent)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world)
    ]
    try:
        told = [rank.communicate(timeout=timeout) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    for number, (process, (_, errors)) in enumerate(zip(ranks, told, strict=True)):
        assert process.returncode == 0, f"rank {number} ended with {process.returncode}:\n{errors[-3000:]}"
    return [out for out, _ in told]
