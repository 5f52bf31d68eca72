"""The web pages. They hold no data, so they need no key: see `web`."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from autoac.api.errors import NotFound
from autoac.api.routes.openapi_helpers import etag, matches
from autoac.api.web import HEADERS, assets, shell

router = APIRouter(include_in_schema=False)

PAGES = {
    "/": "stored.html",  # profiles and policies
    "/profiles/{digest}": "profile.html",  # its frontier and its policies
    "/policies/{id}": "policy.html",  # memory over the step
    "/difference": "difference.html",  # of two policies
    "/jobs": "jobs.html",  # with their progress
}
"""The template of each page, by path. The page itself reports a digest or an id that does not exist."""


@router.get("/assets/{hash}/{name}")
async def asset(hash: str, name: Annotated[str, Path(max_length=100)]) -> Response:
    """Serve a script or a style. The address has its hash, so browsers may keep it forever."""
    found = assets().get(name)
    if found is None or not found.path.startswith(f"assets/{hash}/"):
        raise NotFound("no such file")
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "ETag": etag(hash)}
    return Response(found.content, media_type=found.media_type, headers=headers | HEADERS)


async def _page(name: str, request: Request) -> Response:
    content = shell(name)
    tag = etag(hashlib.sha256(content).hexdigest()[:16])
    headers = HEADERS | {"Cache-Control": "no-cache", "ETag": tag}
    if matches(request.headers.get("if-none-match"), tag):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="text/html; charset=utf-8", headers=headers)


for _path, _name in PAGES.items():
    router.add_api_route(_path, partial(_page, _name))
