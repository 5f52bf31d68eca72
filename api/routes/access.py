"""Check that a caller may use a route: dependencies of the routes, which never look at the path.

NOTE [ Names of this machine ]

On loopback no key is needed. A web page can make its own name resolve to 127.0.0.1 (DNS rebinding). A browser
on this machine then lets the page read the service's answers. Such a request has the page's name in its Host
header, and it has no key. So a request without a key must name this machine as its host.
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
    """A dependency that returns the caller, who must have a scope.

    It is one dependency, not a tree of three: walking a tree costs FastAPI almost as much as a small answer.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.model, self.scheme_name = _BEARER.model, _BEARER.scheme_name  # for the OpenAPI document

    async def __call__(self, request: Request) -> Caller:
        """Return the caller.

        Raises:
            Unauthorised: the request needs a key and has none, or an unknown one.
            Forbidden: the key has a smaller scope.
            OtherHost: the request has no key and names another machine as its host, or several hosts.
        """
        service, given = await service_of(request), await _BEARER(request)
        secret = None if given is None else given.credentials
        caller = service.authenticator.cached(secret)
        if caller is None:
            caller = await to_thread.run_sync(service.authenticator.caller, secret)
        request.scope["state"]["caller"] = caller.name
        hosts = request.headers.getlist("host") or [""]
        if caller is LOOPBACK and (len(hosts) > 1 or not service.settings.answers_to(hosts[0])):
            raise OtherHost(
                "without a key the service answers only under localhost, 127.0.0.1 and the like; use such a "
                "name, add yours to AUTOAC_ALLOWED_HOSTS, or create a key with `autoac keys create NAME`"
            )
        if caller.scope < self.scope:
            raise Forbidden(f"the key must have the scope {self.scope.word}, got {caller.scope.word}")
        return caller


Reader = Annotated[Caller, Depends(Needs(Scope.READ))]
Planner = Annotated[Caller, Depends(Needs(Scope.PLAN))]
Admin = Annotated[Caller, Depends(Needs(Scope.ADMIN))]
