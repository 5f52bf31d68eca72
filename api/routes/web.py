"""The web pages. They hold no data, so they need no key: see `web`."""

from __future__ import annotations

import hashlib
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from autoac.api.errors import NotFound
from autoac.api.routes.openapi_helpers import etag, matches
from autoac.api.web import HEADERS, assets, shell

router = APIRouter(include_in_schema=False)

Segment = Annotated[str, Path(max_length=200)]
"""A fingerprint or an id in a page's address. The page itself reports one that does not exist."""


@router.get("/")
async def registry(request: Request) -> Response:
    """Serve the registry: models, policies, aliases."""
    return _page(request, "registry.html")


@router.get("/models/{fingerprint}")
async def model(request: Request, fingerprint: Segment) -> Response:
    """Serve a model's page: its frontier and its policies."""
    return _page(request, "model.html")


@router.get("/policies/{id}")
async def policy(request: Request, id: Segment) -> Response:
    """Serve a policy's page: memory over the step and the decision on each op."""
    return _page(request, "policy.html")


@router.get("/difference")
async def difference(request: Request) -> Response:
    """Serve the comparison of two policies."""
    return _page(request, "difference.html")


@router.get("/jobs")
async def jobs(request: Request) -> Response:
    """Serve the jobs with their progress."""
    return _page(request, "jobs.html")


@router.get("/assets/{hash}/{name}")
async def asset(hash: str, name: Annotated[str, Path(max_length=100)]) -> Response:
    """Serve a script or a style. The address has its hash, so browsers may keep it forever."""
    found = assets().get(name)
    if found is None or not found.path.startswith(f"assets/{hash}/"):
        raise NotFound("no such file")
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "ETag": etag(hash)}
    return Response(found.content, media_type=found.media_type, headers=headers | HEADERS)


def _page(request: Request, name: str) -> Response:
    content = shell(name)
    tag = etag(hashlib.sha256(content).hexdigest()[:16])
    headers = HEADERS | {"Cache-Control": "no-cache", "ETag": tag}
    if matches(request.headers.get("if-none-match"), tag):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="text/html; charset=utf-8", headers=headers)
