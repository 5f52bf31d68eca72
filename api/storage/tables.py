"""The tables. A change here needs a migration in `migrations/versions`, as 0005 there says.

Times are seconds since 1970 by the database's clock. `number` counts the rows in the order of their creation,
and lists are paged by it.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}
metadata = MetaData(naming_convention=NAMES)

Number = BigInteger().with_variant(Integer(), "sqlite")  # SQLite increments only INTEGER keys
Digest = String(64)

LIVE = "state IN ('queued', 'running')"

profiles = Table(
    "profiles",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("digest", Digest, nullable=False, unique=True),
    Column("model", Text, nullable=False),
    Column("fingerprint", Digest, nullable=False, index=True),
    Column("device", Text, nullable=False),
    Column("ops", BigInteger, nullable=False),
    Column("inputs", Text, nullable=False, server_default="[]"),  # JSON: "int64[8, 1024]", ...
    Column("parameter_bytes", BigInteger, nullable=False, server_default="0"),
    Column("plain_bytes", BigInteger, nullable=False),
    Column("content", LargeBinary, nullable=False),  # the published form, zstd
    Column("created_at", Double, nullable=False),
    Column("created_by", Text, nullable=False),
    sqlite_autoincrement=True,
)

policies = Table(
    "policies",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("id", Digest, nullable=False, unique=True),  # SHA-256 of the published form
    Column("model", Text, nullable=False),
    Column("fingerprint", Digest, nullable=False),
    Column("device", Text, nullable=False),
    Column("budget_bytes", BigInteger, nullable=False),
    Column("version", Integer, nullable=False),  # counts the policies of one fingerprint and budget
    Column("profile_digest", Digest, nullable=False, index=True),
    Column("peak_bytes", BigInteger, nullable=False),
    Column("recompute_us", Double, nullable=False),
    Column("step_us", Double, nullable=False),
    Column("gap", Double, nullable=False),
    Column("stopped", Text, nullable=False),
    Column("content", LargeBinary, nullable=False),  # the published form, zstd
    Column("created_at", Double, nullable=False),
    Column("created_by", Text, nullable=False),
    # The fingerprint covers model and device, whose names may be too long for an index of PostgreSQL.
    UniqueConstraint("fingerprint", "budget_bytes", "version", name="uq_policies_version"),
    sqlite_autoincrement=True,
)

policy_options = Table(  # options of requests in addition to the budget; one policy may answer several
    "policy_options",
    metadata,
    Column("policy_id", Digest, ForeignKey("policies.id", ondelete="CASCADE"), primary_key=True),
    Column("headroom_bytes", BigInteger, primary_key=True, autoincrement=False),
    Column("gap", Double, primary_key=True),
    Column("time_limit_s", Double, primary_key=True),
    Column("constraints_digest", Digest, primary_key=True),  # "" for none
)

drawings = Table(  # plots of policies, which can be made again from profile and policy
    "drawings",
    metadata,
    Column("policy_id", Digest, ForeignKey("policies.id", ondelete="CASCADE"), primary_key=True),
    Column("drawn_by", Digest, nullable=False),  # `plot_version()`: another release plots again
    Column("drawn_at", Double, nullable=False, index=True),
    Column("nbytes", BigInteger, nullable=False),
    Column("content", LargeBinary, nullable=False),  # JSON, gzip
)

model_names = Table(  # names that people give models; a fingerprint covers shapes and device too
    "model_names",
    metadata,
    Column("fingerprint", Digest, primary_key=True),
    Column("name", Text, nullable=False),
    Column("named_at", Double, nullable=False),
    Column("named_by", Text, nullable=False),
)

aliases = Table(
    "aliases",
    metadata,
    Column("name", String(200), primary_key=True),
    Column("policy_id", Digest, ForeignKey("policies.id"), nullable=False, index=True),
    Column("revision", Integer, nullable=False),
    Column("moved_at", Double, nullable=False),
    Column("moved_by", Text, nullable=False),
)

alias_moves = Table(
    "alias_moves",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("name", String(200), nullable=False),
    Column("revision", Integer, nullable=False),
    Column("policy_id", Digest, nullable=True),  # null: the alias was deleted
    Column("moved_at", Double, nullable=False),
    Column("moved_by", Text, nullable=False),
    UniqueConstraint("name", "revision", name="uq_alias_moves_revision"),
    sqlite_autoincrement=True,
)

jobs = Table(
    "jobs",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    # Hash of kind, profile and options: equal requests share a job.
    Column("request_key", Digest, nullable=False),
    Column("profile_digest", Digest, ForeignKey("profiles.digest"), nullable=False, index=True),
    Column("options", Text, nullable=False),  # JSON
    Column("owner", Text, nullable=False),  # the caller that asked first
    Column("state", String(16), nullable=False),
    Column("accepted", Boolean, nullable=False),  # a client got 202: the job goes on without waiters
    Column("waiters", Integer, nullable=False),  # requests that wait for it now
    Column("attempt", Integer, nullable=False),  # claims so far
    Column("created_at", Double, nullable=False),
    Column("started_at", Double, nullable=True),
    Column("finished_at", Double, nullable=True),
    Column("queue_id", BigInteger, nullable=True),  # the entry of procrastinate that delivers it
    Column("policy_id", Digest, nullable=True),
    Column("result", LargeBinary, nullable=True),  # of a frontier or a minimum peak: JSON, zstd
    Column("problem", Text, nullable=True),  # of a failure: the problem document
    Column("drawing", LargeBinary, nullable=True),  # of a frontier: `policy_plot.outline`
    Index("ix_jobs_state", "state", "number"),
    Index("ix_jobs_request_key", "request_key"),
    Index(
        "uq_jobs_live_request",
        "request_key",
        unique=True,
        sqlite_where=text(LIVE),
        postgresql_where=text(LIVE),
    ),
    sqlite_autoincrement=True,
)

job_events = Table(
    "job_events",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("job_id", String(32), ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("at", Double, nullable=False),
    Column("kind", String(16), nullable=False),  # "state" or "progress"
    Column("data", Text, nullable=False),  # JSON
    sqlite_autoincrement=True,
)

keys = Table(
    "keys",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", Text, nullable=False),
    Column("digest", Digest, nullable=False, unique=True),  # SHA-256 of the key
    Column("scope", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double, nullable=True),
)

audit = Table(
    "audit",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False, index=True),
    Column("who", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    sqlite_autoincrement=True,
)
