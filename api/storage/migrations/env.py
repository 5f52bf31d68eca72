"""Run Alembic over the connection that `Database.upgrade` passes to it."""

from __future__ import annotations

from alembic import context

from autoac.api.storage.tables import metadata


def include_name(name: str | None, kind: str, parents: object) -> bool:
    """Return True for our tables; procrastinate has tables of its own."""
    return kind != "table" or name in metadata.tables


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    include_name=include_name,
)
with context.begin_transaction():
    context.run_migrations()
