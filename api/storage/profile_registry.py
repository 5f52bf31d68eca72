"""Store profiles by their content, and list the models that they are of.

Functions of a connection, so that several make one transaction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import zstandard
from sqlalchemy import Connection, delete, func, insert, select

from autoac.api.errors import NotFound
from autoac.api.requests import ParsedProfile
from autoac.api.storage.database import now
from autoac.api.storage.tables import jobs, model_names, profiles


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A profile of the registry, without its content."""

    number: int
    digest: str
    model: str
    fingerprint: str
    device: str
    ops: int
    inputs: str  # JSON
    parameter_bytes: int
    plain_bytes: int
    created_at: float
    created_by: str


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The profiles of one fingerprint: the name that a person gave them, and their newest frontier."""

    number: int  # of the newest profile
    fingerprint: str
    model: str
    inputs: str  # JSON; this and the next of the newest profile
    parameter_bytes: int
    name: str | None  # None: the class's name serves
    named_at: float | None
    named_by: str | None
    frontier: bytes | None  # JSON, as `requests.answer` returns it


_PROFILE = tuple(profiles.c[name] for name in StoredProfile.__slots__)


def add_profile(connection: Connection, profile: ParsedProfile, who: str) -> bool:
    """Store a profile; return False if it was stored already.

    Raises:
        IntegrityError: another transaction stores it at the same time.
    """
    if connection.scalar(select(profiles.c.number).where(profiles.c.digest == profile.digest)) is not None:
        return False
    connection.execute(
        insert(profiles).values(
            digest=profile.digest,
            model=profile.model,
            fingerprint=profile.fingerprint,
            device=profile.device,
            ops=profile.ops,
            inputs=json.dumps(profile.inputs),
            parameter_bytes=profile.parameter_bytes,
            plain_bytes=profile.plain_bytes,
            content=profile.content,
            created_at=now(),
            created_by=who,
        )
    )
    return True


def get_profile(connection: Connection, digest: str) -> StoredProfile:
    """Return a profile without its content.

    Raises:
        NotFound: the profile does not exist.
    """
    row = connection.execute(select(*_PROFILE).where(profiles.c.digest == digest)).one_or_none()
    if row is None:
        raise NotFound(f"no profile {digest}")
    return StoredProfile(*row)


def profile_text(connection: Connection, digest: str) -> bytes:
    """Return the published form of a profile.

    Raises:
        NotFound: the profile does not exist.
    """
    content = connection.scalar(select(profiles.c.content).where(profiles.c.digest == digest))
    if content is None:
        raise NotFound(f"no profile {digest}")
    return zstandard.decompress(content)


def list_profiles(
    connection: Connection,
    *,
    model: str | None = None,
    fingerprint: str | None = None,
    device: str | None = None,
    before: int | None = None,
    limit: int,
) -> list[StoredProfile]:
    """Return profiles, newest first, starting below the number `before`."""
    query = select(*_PROFILE).order_by(profiles.c.number.desc()).limit(limit)
    for column, wanted in (("model", model), ("fingerprint", fingerprint), ("device", device)):
        if wanted is not None:
            query = query.where(profiles.c[column] == wanted)
    if before is not None:
        query = query.where(profiles.c.number < before)
    return [StoredProfile(*row) for row in connection.execute(query)]


def list_models(
    connection: Connection, *, fingerprint: str | None = None, before: int | None = None, limit: int
) -> list[StoredModel]:
    """Return models, newest first, starting below the number `before`."""
    newest = select(func.max(profiles.c.number).label("number")).group_by(profiles.c.fingerprint)
    if fingerprint is not None:
        newest = newest.where(profiles.c.fingerprint == fingerprint)
    numbers = newest.subquery()
    query = (
        select(
            profiles.c.number,
            profiles.c.fingerprint,
            profiles.c.model,
            profiles.c.inputs,
            profiles.c.parameter_bytes,
            model_names.c.name,
            model_names.c.named_at,
            model_names.c.named_by,
        )
        .join(numbers, numbers.c.number == profiles.c.number)
        .outerjoin(model_names, model_names.c.fingerprint == profiles.c.fingerprint)
        .order_by(profiles.c.number.desc())
        .limit(limit)
    )
    if before is not None:
        query = query.where(profiles.c.number < before)
    rows = connection.execute(query).all()
    frontiers = _newest_frontiers(connection, [row.fingerprint for row in rows])
    return [StoredModel(*row, frontiers.get(row.fingerprint)) for row in rows]


def _newest_frontiers(connection: Connection, fingerprints: Sequence[str]) -> dict[str, bytes]:
    newest = (
        select(func.max(jobs.c.number))
        .join(profiles, profiles.c.digest == jobs.c.profile_digest)
        .where(
            profiles.c.fingerprint.in_(fingerprints), jobs.c.kind == "frontier", jobs.c.state == "succeeded"
        )
        .group_by(profiles.c.fingerprint)
    )
    found = connection.execute(
        select(profiles.c.fingerprint, jobs.c.result)
        .join(profiles, profiles.c.digest == jobs.c.profile_digest)
        .where(jobs.c.number.in_(newest))
    )
    return {row.fingerprint: zstandard.decompress(row.result) for row in found}


def get_model(connection: Connection, fingerprint: str) -> StoredModel:
    """Return a model.

    Raises:
        NotFound: no profile has this fingerprint.
    """
    found = list_models(connection, fingerprint=fingerprint, limit=1)
    if not found:
        raise NotFound(f"no profile has the fingerprint {fingerprint}; PUT the profile to /v1/profiles first")
    return found[0]


def name_model(connection: Connection, fingerprint: str, name: str | None, who: str) -> StoredModel:
    """Name a model, or delete its name. The last call wins.

    Raises:
        NotFound: no profile has this fingerprint.
    """
    get_model(connection, fingerprint)
    connection.execute(delete(model_names).where(model_names.c.fingerprint == fingerprint))
    if name is not None:
        connection.execute(
            insert(model_names).values(fingerprint=fingerprint, name=name, named_at=now(), named_by=who)
        )
    return get_model(connection, fingerprint)
