"""Add the routes that profiles and policies have in common: the text, facts about it, its deletion."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from fastapi import APIRouter, Request, Response
from sqlalchemy import Connection, Table

from autoac.api.routes.access import Admin, Reader, ServiceOf
from autoac.api.routes.openapi_helpers import Digest, etag, gives, json_text, matches
from autoac.api.routes.views import View
from autoac.api.storage.records import get_row, get_text

Remove = Callable[[Connection, str], None]


def add_routes(router: APIRouter, table: Table, model: str, view: type[View], remove: Remove) -> None:
    """Add the routes of one kind of stored document.

    Args:
        router: the routes of the kind; its prefix is their address.
        table: where the documents are.
        model: the schema of a document.
        view: facts about a document.
        remove: deletes one.
    """
    one = table.info["one"]

    @router.get(
        "/{id}",
        summary=f"A {one}",
        response_class=Response,
        responses={
            200: gives(model, f"The {one}, in its published form", "ETag"),
            304: {"description": "As If-None-Match says"},
        },
    )
    async def get_one(request: Request, id: Digest, service: ServiceOf, caller: Reader) -> Response:
        """Get the published form. It never changes, so the id, its digest, is the ETag."""
        headers = {"ETag": etag(id), "Cache-Control": "private, max-age=31536000, immutable"}
        text = service.texts.get(id)
        if text is None:
            text = await service.read(lambda connection: get_text(connection, table, id))
            with suppress(ValueError):  # larger than the cache
                service.texts[id] = text
        if matches(request.headers.get("if-none-match"), etag(id)):
            return Response(status_code=304, headers=headers)
        return json_text(text, headers=headers)

    @router.get("/{id}/about", summary=f"Facts about a {one}", response_model=view)
    async def get_about(id: Digest, service: ServiceOf, caller: Reader) -> View:
        """Get what a list shows: sizes, times, and who asked for it when."""
        return await service.read(lambda connection: view.of(get_row(connection, table, id)))

    @router.delete("/{id}", status_code=204, summary=f"Delete a {one}")
    async def delete_one(id: Digest, service: ServiceOf, caller: Admin) -> Response:
        """Delete it for good."""
        await service.write(lambda connection: remove(connection, id))
        service.texts.pop(id, None)
        return Response(status_code=204)
