"""Helpers of the routes: documented bodies, parameters, ETags."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Query, Response

from autoac.api.problems import REF

JSON = "application/json"

NO_NUL = r"^[^\x00]*$"  # PostgreSQL stores all characters but this one
Text = Annotated[str | None, Query(max_length=4096, pattern=NO_NUL)]
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]


def etag(value: object) -> str:
    """Return a strong ETag."""
    return f'"{value}"'


def matches(header: str | None, tag: str) -> bool:
    """Return True if an If-None-Match header names `tag`."""
    if header is None:
        return False
    named = [one.strip().removeprefix("W/") for one in header.split(",")]
    return "*" in named or tag in named


def json_text(content: bytes | str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response whose content is JSON already."""
    return Response(content, status, headers, JSON)


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
