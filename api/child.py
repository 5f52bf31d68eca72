"""The program that solves one request: `python -m autoac.api.child PARENT MEMORY TIME_LIMIT`.

It reads a decoded request from stdin and writes to stdout a pickle of the policy's JSON, or of the
error that the planner raised. It ends with its parent, and within its memory.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import sys
from collections.abc import Sequence

from autoac.api.errors import ServiceError, SolverDied
from autoac.api.request import Planner, answer
from autoac.planner.errors import PlannerError
from autoac.planner.plan import plan
from autoac.planner.units import format_bytes

PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str], plan: Planner = plan) -> None:
    """Solve the request on stdin."""
    parent, memory, most_seconds = int(argv[0]), int(argv[1]), float(argv[2])
    end_with(parent)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    faulthandler.enable()  # a crash in native code says where, in the service's log
    outlet = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a solver prints from C belongs in the log, not in the answer
    outcome: str | Exception
    try:
        outcome = answer(sys.stdin.buffer.read(), most_seconds=most_seconds, plan=plan)
    except (PlannerError, ServiceError) as error:
        outcome = error
    except MemoryError:
        outcome = SolverDied(f"the solver needed more than {format_bytes(memory)} of memory")
    with outlet:
        pickle.dump(outcome, outlet)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, be it by SIGKILL; Linux only.

    Without it, a service that was killed would leave its solves burning.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
