"""What can go wrong with a planning service.

    RemoteError
    +-- ServiceUnavailable   away, overloaded or broken: plan in this process instead
    +-- ServiceRefused       it refused: a wrong key, a wrong address, a body too large

What the planner itself has to say about a profile or a budget comes back as the planner's own errors.
"""

from __future__ import annotations


class RemoteError(Exception):
    """Base of what can go wrong with a service, apart from what can go wrong in the planner."""


class ServiceUnavailable(RemoteError):
    """The service cannot be reached, is overloaded, or answers nonsense. Another try may succeed."""


class ServiceRefused(RemoteError):
    """The service understood the request and refused it; only another request can succeed."""
