"""Delete the policies and profiles that the settings do not keep.

Functions of a connection, so that several make one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, select

from autoac.api.settings import Settings
from autoac.api.storage.database import now
from autoac.api.storage.tables import aliases, jobs, policies, profiles


@dataclass(frozen=True, slots=True)
class Pruned:
    """Ids of policies and digests of profiles that are deleted."""

    policies: Sequence[str]
    profiles: Sequence[str]


def prunable(connection: Connection, settings: Settings) -> Pruned:
    """Return the policies and profiles that the settings no longer keep.

    Policies go by age and by count, but never while an alias names them. Profiles go at the same age once no
    policy and no job needs them.
    """
    named = select(aliases.c.policy_id)
    gone: set[str] = set()
    if settings.keep_policies_days is not None:
        old = policies.c.created_at < now() - settings.keep_policies_days * 86_400
        gone |= set(connection.scalars(select(policies.c.id).where(old, policies.c.id.not_in(named))))
    if settings.keep_policies_count is not None:
        rank = func.row_number().over(
            partition_by=(policies.c.fingerprint, policies.c.budget_bytes),
            order_by=policies.c.number.desc(),
        )
        ranked = select(policies.c.id, rank.label("rank")).subquery()
        many = ranked.c.rank > settings.keep_policies_count
        gone |= set(connection.scalars(select(ranked.c.id).where(many, ranked.c.id.not_in(named))))
    unused: list[str] = []
    if settings.keep_policies_days is not None:
        kept = {
            digest
            for id, digest in connection.execute(select(policies.c.id, policies.c.profile_digest))
            if id not in gone
        }
        old_profiles = connection.scalars(
            select(profiles.c.digest).where(
                profiles.c.created_at < now() - settings.keep_policies_days * 86_400,
                profiles.c.digest.not_in(select(jobs.c.profile_digest)),
            )
        )
        unused = [digest for digest in old_profiles if digest not in kept]
    return Pruned(sorted(gone), sorted(unused))


def prune(connection: Connection, settings: Settings) -> Pruned:
    """Delete and return what `prunable` returns."""
    found = prunable(connection, settings)
    values: Any
    for table, column, values in (
        (policies, policies.c.id, found.policies),
        (profiles, profiles.c.digest, found.profiles),
    ):
        for start in range(0, len(values), 500):
            connection.execute(delete(table).where(column.in_(values[start : start + 500])))
    return found
