"""Say how much of the host's memory plans may use, and stop using it where that does not pay."""

from __future__ import annotations

import json
import logging
import math
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ac_client.planning.options import ApplyOptions
from ac_client.planning.ranks import Ranks, has_other_ranks
from autoac.planner import Constraints, Policy
from autoac.planner.formats.profile import LinkRates
from autoac.planner.units import GIB
from autoac.profiler import link_of
from autoac.tape.runtime.moves.host_memory import ROUNDING, host_memory

log = logging.getLogger("ac_client")

SHARE = 0.25  # of what the host has free
MOST_NBYTES = 64 * GIB
LEAST_BYTES_PER_US = 8e3  # of the link, in both directions: 8 GB/s
OTHERS_STOP = "another rank moves nothing"
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


class HostBudget:
    """The bytes of the host that plans of one model may use: as passed to `apply`, or found ("auto").

    Args:
        name: of the model, in messages.
        options: as passed to `apply`.
    """

    def __init__(self, name: str, options: ApplyOptions) -> None:
        self._name, self._options = name, options
        passed = options.constraints.host_budget_bytes
        self._nbytes = None if options.finds_host_budget else passed  # None: not looked at yet
        self._agreed: LinkRates | None = None  # with the other ranks

    def agree(self, ranks: Ranks, device: torch.device) -> None:
        """Measure the link at the same time as the other ranks, and take the least of any; divide the host.

        Every rank must call this. If one does not move by itself, no other does.
        """
        finds = self._options.finds_host_budget
        mine = json.dumps([socket.gethostname(), _free_nbytes() if finds and device.type == "cuda" else 0])
        hosts = [json.loads(text) for text in ranks.gather(mine)]
        here = Counter(host for host, _ in hosts)
        if finds:
            self._nbytes = min(_part(free, here[host]) for host, free in hosts)
        link = None
        with suppress(RuntimeError):  # of a budget that was passed: `link` raises it again
            link = self.link(device)
        texts = ranks.gather(link.model_dump_json() if link is not None else "")
        if not all(texts) and finds:
            self.stop(OTHERS_STOP)
        if links := [LinkRates.model_validate_json(text) for text in texts if text]:
            slowest = (min(one.out_bytes_per_us for one in links), min(one.in_bytes_per_us for one in links))
            self._agreed = links[0].model_copy(
                update=dict(zip(("out_bytes_per_us", "in_bytes_per_us"), slowest, strict=True))
            )

    def link(self, device: torch.device) -> LinkRates | None:
        """Return the rates of the link of `device`, measured; None if nothing moves."""
        if self._nbytes is None:
            self._nbytes = _found(device)
        if not self._nbytes:
            return None
        if self._agreed is not None:
            return self._agreed
        if not self._options.finds_host_budget:
            return link_of(device)
        try:
            link = link_of(device)
        except torch.OutOfMemoryError:
            self.stop("the device has no room to measure its link")
            return None
        except RuntimeError as error:  # it pins memory
            self.stop(f"memory of the host cannot be pinned ({error})")
            return None
        slowest = 0.0 if link is None else min(link.out_bytes_per_us, link.in_bytes_per_us)
        if slowest < LEAST_BYTES_PER_US:
            self.stop(f"the link to the host carries {slowest / 1e3:.1f} GB/s, less than 8")
            return None
        return link

    def added_to(self, constraints: Constraints) -> Constraints:
        """Return `constraints` with this budget."""
        return constraints.model_copy(update={"host_budget_bytes": self._nbytes or 0})

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

    def pins_on_all(self, policies: Sequence[Policy], device: torch.device | None, ranks: Ranks) -> bool:
        """Pin what `policies` move, as `pins`; if a rank refuses, all stop. Every rank must call this.

        Return False if `policies` move nevertheless.
        """
        for policy in policies:
            self.pins(policy, device)
        finds = self._options.finds_host_budget
        if not ranks.any(finds and not self._nbytes):
            return True
        if finds:
            self.stop(OTHERS_STOP)
        return not any(policy.moves for policy in policies)

    def stop(self, why: str) -> None:
        """Plan without moves from now on."""
        if self._nbytes != 0:
            log.info("%s: nothing moves to the host, since %s", self._name, why)
        self._nbytes = 0


def _found(device: torch.device) -> int:
    """Return the bytes that plans may use by themselves where ranks do not meet."""
    return 0 if device.type != "cuda" or has_other_ranks() else _part(_free_nbytes(), 1)


def _part(free_nbytes: int, ranks: int) -> int:
    """Return what plans of one of `ranks` ranks may use: a power of two, so that runs find stored plans."""
    nbytes = min(int(SHARE * free_nbytes / ranks), MOST_NBYTES)
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
