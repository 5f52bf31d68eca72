"""Create the tables

The number is 0005 because five migrations made the same tables before the first release: a database at 0005
is one of this release, however it came about.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = None
branch_labels = None
depends_on = None

LIVE = "state IN ('queued', 'running')"


def number() -> sa.Column[int]:
    """Return the key that counts rows; SQLite increments only INTEGER keys."""
    return sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True)


def upgrade() -> None:
    op.create_table(
        "profiles",
        number(),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False, index=True),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("ops", sa.BigInteger, nullable=False),
        sa.Column("inputs", sa.Text, nullable=False, server_default="[]"),
        sa.Column("parameter_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("plain_bytes", sa.BigInteger, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "policies",
        number(),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("budget_bytes", sa.BigInteger, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("profile_digest", sa.String(64), nullable=False, index=True),
        sa.Column("peak_bytes", sa.BigInteger, nullable=False),
        sa.Column("recompute_us", sa.Double, nullable=False),
        sa.Column("step_us", sa.Double, nullable=False),
        sa.Column("gap", sa.Double, nullable=False),
        sa.Column("stopped", sa.Text, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", sa.Text, nullable=False),
        sa.UniqueConstraint("fingerprint", "budget_bytes", "version", name="uq_policies_version"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "policy_options",
        sa.Column(
            "policy_id", sa.String(64), sa.ForeignKey("policies.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("headroom_bytes", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("gap", sa.Double, primary_key=True),
        sa.Column("time_limit_s", sa.Double, primary_key=True),
        sa.Column("constraints_digest", sa.String(64), primary_key=True),
    )
    op.create_table(
        "drawings",
        sa.Column(
            "policy_id", sa.String(64), sa.ForeignKey("policies.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("drawn_by", sa.String(64), nullable=False),
        sa.Column("drawn_at", sa.Double, nullable=False, index=True),
        sa.Column("nbytes", sa.BigInteger, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "model_names",
        sa.Column("fingerprint", sa.String(64), primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("named_at", sa.Double, nullable=False),
        sa.Column("named_by", sa.Text, nullable=False),
    )
    op.create_table(
        "aliases",
        sa.Column("name", sa.String(200), primary_key=True),
        sa.Column("policy_id", sa.String(64), sa.ForeignKey("policies.id"), nullable=False, index=True),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("moved_at", sa.Double, nullable=False),
        sa.Column("moved_by", sa.Text, nullable=False),
    )
    op.create_table(
        "alias_moves",
        number(),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.Column("policy_id", sa.String(64)),
        sa.Column("moved_at", sa.Double, nullable=False),
        sa.Column("moved_by", sa.Text, nullable=False),
        sa.UniqueConstraint("name", "revision", name="uq_alias_moves_revision"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "jobs",
        number(),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("request_key", sa.String(64), nullable=False),
        sa.Column(
            "profile_digest", sa.String(64), sa.ForeignKey("profiles.digest"), nullable=False, index=True
        ),
        sa.Column("options", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("accepted", sa.Boolean, nullable=False),
        sa.Column("waiters", sa.Integer, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("finished_at", sa.Double),
        sa.Column("queue_id", sa.BigInteger),
        sa.Column("policy_id", sa.String(64)),
        sa.Column("result", sa.LargeBinary),
        sa.Column("problem", sa.Text),
        sa.Column("drawing", sa.LargeBinary),
        sa.Index("ix_jobs_state", "state", "number"),
        sa.Index("ix_jobs_request_key", "request_key"),
        sa.Index(
            "uq_jobs_live_request",
            "request_key",
            unique=True,
            sqlite_where=sa.text(LIVE),
            postgresql_where=sa.text(LIVE),
        ),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "job_events",
        number(),
        sa.Column(
            "job_id", sa.String(32), sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False, index=True
        ),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("data", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("scope", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
    )
    op.create_table(
        "audit",
        number(),
        sa.Column("at", sa.Double, nullable=False, index=True),
        sa.Column("who", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        _install_procrastinate(connection)


def _install_procrastinate(connection: sa.Connection) -> None:
    """Create procrastinate's tables, unless something else in this database uses it already."""
    from procrastinate.schema import SchemaManager

    if connection.scalar(sa.text("SELECT to_regclass('procrastinate_jobs')")) is None:
        connection.exec_driver_sql(SchemaManager.get_schema().replace("%", "%%"))
