"""Helpers of the routes: documented bodies, parameters, ETags."""

from __future__ import annotations

import gzip
import re
from typing import Annotated, Any

from anyio import to_thread
from fastapi import Path, Query, Request, Response

from autoac.api.errors import MalformedRequest, PreconditionRequired
from autoac.api.problems import REF

JSON = "application/json"

NO_NUL = r"^[^\x00]*$"  # PostgreSQL stores all characters but this one
Text = Annotated[str | None, Query(max_length=4096, pattern=NO_NUL)]
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
AliasName = Annotated[
    str,
    Path(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._@+-]*(/[A-Za-z0-9][A-Za-z0-9._@+-]*){0,3}$",
        max_length=200,
        description="Such as llama-8b@h100/production.",
    ),
]


def etag(value: object) -> str:
    """Return a strong ETag."""
    return f'"{value}"'


def matches(header: str | None, tag: str) -> bool:
    """Return True if an If-None-Match header names `tag`."""
    if header is None:
        return False
    named = [one.strip().removeprefix("W/") for one in header.split(",")]
    return "*" in named or tag in named


def expected_revision(if_match: str | None, if_none_match: str | None) -> int | None:
    """Return the revision that a change expects, or None if it expects no alias yet.

    Raises:
        PreconditionRequired: the request has neither header.
        MalformedRequest: the headers are not valid.
    """
    if if_none_match is not None and if_none_match.strip() == "*" and if_match is None:
        return None
    if if_match is None:
        raise PreconditionRequired(
            "send If-Match with the alias's ETag, or If-None-Match: * to create an alias"
        )
    found = re.fullmatch(r'\s*"([0-9]{1,9})"\s*', if_match)
    if found is None or if_none_match is not None:
        raise MalformedRequest(["header.if-match: must be one ETag of this alias"])
    return int(found[1])


def json_text(content: bytes | str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response whose content is JSON already."""
    return Response(content, status, headers, JSON)


async def gzipped(request: Request, content: bytes, headers: dict[str, str]) -> Response:
    """Return a response with gzipped JSON, unpacked for a client that does not accept it."""
    headers = headers | {"Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return json_text(content, headers=headers | {"Content-Encoding": "gzip"})
    return json_text(await to_thread.run_sync(gzip.decompress, content), headers=headers)


def body_of(model: str) -> dict[str, Any]:
    """Return `openapi_extra=` of a route that reads its body itself."""
    return {
        "requestBody": {
            "required": True,
            "description": "May be sent with Content-Encoding: zstd.",
            "content": {JSON: {"schema": {"$ref": REF.format(model=model)}}},
        }
    }


def gives(model: str, description: str, *headers: str) -> dict[str, Any]:
    """Document a successful answer whose body is a published format."""
    schemas = {name: {"schema": {"type": "string"}} for name in headers}
    return {
        "description": description,
        "headers": schemas,
        "content": {JSON: {"schema": {"$ref": REF.format(model=model)}}},
    }
