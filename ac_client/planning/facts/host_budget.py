"""Say how much of the host's memory plans may use, and stop using it where that does not pay."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch
import torch.distributed as dist

from ac_client.planning.options import ApplyOptions
from autoac.planner import Constraints, Policy
from autoac.planner.formats.profile import LinkRates
from autoac.planner.units import GIB
from autoac.profiler import link_of
from autoac.tape.runtime.moves.host_memory import ROUNDING, host_memory

log = logging.getLogger("ac_client")

SHARE = 0.25  # of what the host has free
MOST_NBYTES = 64 * GIB
LEAST_BYTES_PER_US = 8e3  # of the link, in both directions: 8 GB/s
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


class HostBudget:
    """The bytes of the host that plans of one model may use: as passed to `apply`, or found ("auto").

    Args:
        name: of the model, in messages.
        options: as passed to `apply`.
    """

    def __init__(self, name: str, options: ApplyOptions) -> None:
        self._name, self._options = name, options
        passed = options.constraints.host_budget_bytes if options.constraints is not None else 0
        self._nbytes = None if options.finds_host_budget else passed  # None: not looked at yet

    def link(self, device: torch.device) -> LinkRates | None:
        """Return the rates of the link of `device`, measured; None if nothing moves."""
        if self._nbytes is None:
            self._nbytes = _found(device)
        if not self._nbytes:
            return None
        if not self._options.finds_host_budget:
            return link_of(device)
        try:
            link = link_of(device)
        except RuntimeError as error:  # it pins memory
            self.stop(f"memory of the host cannot be pinned ({error})")
            return None
        slowest = 0.0 if link is None else min(link.out_bytes_per_us, link.in_bytes_per_us)
        if slowest < LEAST_BYTES_PER_US:
            self.stop(f"the link to the host carries {slowest / 1e3:.1f} GB/s, less than 8")
            return None
        return link

    def added_to(self, constraints: Constraints | None) -> Constraints | None:
        """Return `constraints` with this budget."""
        if constraints is None and not self._nbytes:
            return None
        return (constraints or Constraints()).model_copy(update={"host_budget_bytes": self._nbytes or 0})

    def pins(self, policy: Policy, device: torch.device | None) -> bool:
        """Pin what `policy` moves to the host; return False, and stop, if the host refuses.

        A budget that was passed is left to the forward, which then raises.
        """
        if not policy.moves or device is None or not self._options.finds_host_budget:
            return True
        try:
            host_memory.reserve(policy.predicted.moved_bytes + ROUNDING * len(policy.moves), device)
        except MemoryError as error:
            self.stop(f"memory of the host cannot be pinned ({error})")
            return False
        return True

    def stop(self, why: str) -> None:
        """Plan without moves from now on."""
        if self._nbytes != 0:
            log.info("%s: nothing moves to the host, since %s", self._name, why)
        self._nbytes = 0


def _found(device: torch.device) -> int:
    """Return the bytes that plans may use by themselves: a power of two, so that runs find stored plans."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if device.type != "cuda" or several:
        return 0
    nbytes = min(int(SHARE * _free_nbytes()), MOST_NBYTES)
    return 1 << (nbytes.bit_length() - 1) if nbytes > 0 else 0


def _free_nbytes() -> int:
    """Return the memory that the host has free for this process, in its container."""
    free = math.inf
    if MEMINFO.exists():
        fields = dict(line.split(":") for line in MEMINFO.read_text("utf-8").splitlines())
        free = 1024 * int(fields["MemAvailable"].split()[0])
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and (most := limit.read_text("utf-8").strip()) != "max":
        free = min(free, int(most) - int(used.read_text("utf-8")))
    return 0 if free == math.inf else max(0, int(free))
