"""Create the tables

The tables are those of `tables.py`. Until there is a release, they change in place, and the revision is a
digest of them, so that a database with other tables is refused. The first migration after that must also
write out here the tables as they were before; a test fails until it does.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from autoac.api.storage.tables import metadata

revision = "7783059842600e85"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    metadata.create_all(connection)
    if connection.dialect.name == "postgresql":
        _install_procrastinate(connection)


def _install_procrastinate(connection: sa.Connection) -> None:
    """Create procrastinate's tables, unless something else in this database uses it already."""
    from procrastinate.schema import SchemaManager

    if connection.scalar(sa.text("SELECT to_regclass('procrastinate_jobs')")) is None:
        connection.exec_driver_sql(SchemaManager.get_schema().replace("%", "%%"))
