"""Let procrastinate deliver jobs: drop leases and runners, name the entry that delivers each job"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("runners")
    op.drop_column("jobs", "lease_until")
    op.drop_column("jobs", "runner")
    op.add_column("jobs", sa.Column("queue_id", sa.BigInteger(), nullable=True))
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        _install_procrastinate(connection)
        _deliver_live_jobs(connection)


def _install_procrastinate(connection: sa.Connection) -> None:
    """Create procrastinate's tables unless an earlier release did."""
    from procrastinate.schema import SchemaManager

    if connection.scalar(sa.text("SELECT to_regclass('procrastinate_jobs')")) is None:
        connection.exec_driver_sql(SchemaManager.get_schema().replace("%", "%%"))


def _deliver_live_jobs(connection: sa.Connection) -> None:
    """Replace the wake-ups of earlier releases by an entry for each live job."""
    from procrastinate import App, SyncPsycopgConnector

    connection.execute(sa.text("DELETE FROM procrastinate_jobs WHERE task_name = 'autoac.solve'"))
    live = "state IN ('queued', 'running')"
    app = App(connector=SyncPsycopgConnector())
    for id in connection.scalars(sa.text(f"SELECT id FROM jobs WHERE {live} ORDER BY number")).all():
        entry = app.configure_task(
            "autoac.run_job",
            queue="autoac-jobs",
            queueing_lock=id,
            connection=connection.connection.driver_connection,
        )
        connection.execute(
            sa.text("UPDATE jobs SET state = 'queued', queue_id = :queue_id WHERE id = :id"),
            {"queue_id": entry.defer(job_id=id), "id": id},
        )


def downgrade() -> None:
    op.drop_column("jobs", "queue_id")
    op.add_column("jobs", sa.Column("runner", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("lease_until", sa.Double(), nullable=True))
    op.create_table(
        "runners",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_runners")),
    )
