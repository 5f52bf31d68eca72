"""The tables. A change here needs another revision in `migrations/versions`, as 0001 there says.

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
IN_USE = "revoked_at IS NULL"

profiles = Table(
    "profiles",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("id", Digest, nullable=False, unique=True),  # the digest of the published form
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
    info={"one": "profile"},
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
    Index("ix_policies_fingerprint_budget_bytes", "fingerprint", "budget_bytes"),
    sqlite_autoincrement=True,
    info={"one": "policy"},
)

policy_options = Table(  # options of requests in addition to the budget; one policy may answer several
    "policy_options",
    metadata,
    Column("policy_id", Digest, ForeignKey("policies.id", ondelete="CASCADE"), primary_key=True),
    Column("gap", Double, primary_key=True),
    Column("time_limit_s", Double, primary_key=True),
    Column("constraints_digest", Digest, primary_key=True),  # "" for none
)

jobs = Table(
    "jobs",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    # Hash of kind, profile and options: equal requests share a job.
    Column("request_key", Digest, nullable=False),
    Column("profile_digest", Digest, ForeignKey("profiles.id"), nullable=False, index=True),
    Column("options", Text, nullable=False),  # JSON
    Column("owner", String(100), nullable=False),  # the caller that asked first
    Column("turn", Integer, nullable=False),  # jobs start in this order: NOTE [ Turns ] in job_requests.py
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
    Index("ix_jobs_state", "state", "turn", "number"),
    Index("ix_jobs_owner_turn", "owner", "turn"),
    Index("ix_jobs_turn", "turn"),
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
    Column("name", String(100), nullable=False),
    Column("digest", Digest, nullable=False, unique=True),  # SHA-256 of the key
    Column("scope", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double, nullable=True),
    Index("uq_keys_live_name", "name", unique=True, sqlite_where=text(IN_USE), postgresql_where=text(IN_USE)),
)
