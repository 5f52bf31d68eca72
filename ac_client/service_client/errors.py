"""Errors of a planning service and of the way to it.

    RemoteError
    +-- ServiceUnavailable   away, overloaded or broken: plan in this process instead
    +-- ServiceRefused       it refused: a wrong key, a wrong address, a body too large

If the planner there refuses a profile or a budget, the planner's own error is raised here.
"""

from __future__ import annotations

from autoac.planner.units import printable


class RemoteError(Exception):
    """Base of the errors of a service, other than those of the planner."""

    def __str__(self) -> str:
        return printable(super().__str__())  # it repeats what the service says


class ServiceUnavailable(RemoteError):
    """The service cannot be reached, is overloaded, or answers nonsense. Another try may succeed."""


class ServiceRefused(RemoteError):
    """The service understood the request and refused it; only another request can succeed."""
