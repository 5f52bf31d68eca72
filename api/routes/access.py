"""Who may ask: dependencies of routers and routes. Never decided by looking at a path.

NOTE [ Names of this machine ]

On loopback no key is needed. A page on the web can make its own name stand for 127.0.0.1 (DNS rebinding),
and the browser of somebody on this machine then lets it read what the service answers. Such a request has the
page's name in its Host header. So who has no key must ask under a name of this machine; a page has no key.
"""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from fastapi.security.base import SecurityBase

from autoac.api.errors import Forbidden, OtherHost
from autoac.api.service import Service, service_of
from autoac.api.storage.keys import LOOPBACK, Caller, Scope

ServiceOf = Annotated[Service, Depends(service_of)]
_BEARER = HTTPBearer(auto_error=False)


class Needs(SecurityBase):
    """A dependency that gives the caller, who must have a scope.

    One dependency and not a tree of three: to walk one costs FastAPI a good part of what a small answer does.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.model, self.scheme_name = _BEARER.model, _BEARER.scheme_name  # as the OpenAPI says it

    async def __call__(self, request: Request) -> Caller:
        """Raises: Unauthorised: no key, or none that is known. Forbidden: one of a smaller scope.
        OtherHost: no key is needed, but not under this name."""
        service, given = await service_of(request), await _BEARER(request)
        secret = None if given is None else given.credentials
        caller = service.authenticator.remembered(secret)
        if caller is None:
            caller = await to_thread.run_sync(service.authenticator.caller, secret)
        request.scope["state"]["caller"] = caller.name
        if caller is LOOPBACK and not service.settings.answers_to(request.headers.get("host", "")):
            raise OtherHost(
                "no key is needed here because only this machine reaches the service, so it answers to "
                "localhost and 127.0.0.1; ask there, name yours in AUTOAC_ALLOWED_HOSTS, or make "
                "a key with `autoac keys create NAME`"
            )
        if caller.scope < self.scope:
            raise Forbidden(
                f"this needs a key with the scope {self.scope.word}; yours has {caller.scope.word}"
            )
        return caller


Reader = Annotated[Caller, Depends(Needs(Scope.READ))]
Planner = Annotated[Caller, Depends(Needs(Scope.PLAN))]
Admin = Annotated[Caller, Depends(Needs(Scope.ADMIN))]
