"""Store profiles by their content, and list the models that they are of.

Functions of a connection, so that several make one transaction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import zstandard
from sqlalchemy import Connection, Row, Select, delete, func, insert, select

from autoac.api.errors import NotFound
from autoac.api.requests import ParsedProfile
from autoac.api.storage.database import newest_first, now, only_row
from autoac.api.storage.tables import jobs, model_names, profiles

_PROFILE = tuple(column for column in profiles.c if column is not profiles.c.content)


def add_profile(connection: Connection, profile: ParsedProfile, who: str) -> bool:
    """Store a profile; return False if it was stored already.

    Raises:
        IntegrityError: another transaction stores it at the same time.
    """
    if connection.scalar(select(profiles.c.number).where(profiles.c.digest == profile.digest)) is not None:
        return False
    connection.execute(
        insert(profiles).values(
            asdict(profile) | {"inputs": json.dumps(profile.inputs), "created_at": now(), "created_by": who}
        )
    )
    return True


def get_profile(connection: Connection, digest: str) -> Row[Any]:
    """Return a profile without its content.

    Raises:
        NotFound: the profile does not exist.
    """
    return only_row(connection, select(*_PROFILE).where(profiles.c.digest == digest), f"no profile {digest}")


def profile_text(connection: Connection, digest: str) -> bytes:
    """Return the published form of a profile.

    Raises:
        NotFound: the profile does not exist.
    """
    query = select(profiles.c.content).where(profiles.c.digest == digest)
    return zstandard.decompress(only_row(connection, query, f"no profile {digest}").content)


def list_profiles(
    connection: Connection, wanted: Mapping[str, str | None], *, before: int | None = None, limit: int
) -> Sequence[Row[Any]]:
    """Return profiles, newest first, starting below the number `before`.

    `wanted` has values of columns; None matches all.
    """
    query = newest_first(select(*_PROFILE), profiles.c.number, before, limit)
    for column, value in wanted.items():
        if value is not None:
            query = query.where(profiles.c[column] == value)
    return connection.execute(query).all()


def list_models(
    connection: Connection, *, fingerprint: str | None = None, before: int | None = None, limit: int
) -> Sequence[Row[Any]]:
    """Return models, newest first, starting below the number `before`.

    A row has the newest profile, the name that a person gave the model, and its newest frontier with its job.
    """
    newest = select(func.max(profiles.c.number).label("number")).group_by(profiles.c.fingerprint)
    if fingerprint is not None:
        newest = newest.where(profiles.c.fingerprint == fingerprint)
    numbers = newest.subquery()
    of_model = profiles.alias()
    frontier = (
        select()
        .select_from(jobs)
        .join(of_model, of_model.c.digest == jobs.c.profile_digest)
        .where(
            of_model.c.fingerprint == profiles.c.fingerprint,
            jobs.c.kind == "frontier",
            jobs.c.state == "succeeded",
        )
        .order_by(jobs.c.number.desc())
        .limit(1)
        .correlate(profiles)
    )
    query: Select[Any] = (
        select(
            profiles.c.number,
            profiles.c.fingerprint,
            profiles.c.model,
            profiles.c.inputs,
            profiles.c.parameter_bytes,
            model_names.c.name,
            model_names.c.named_at,
            model_names.c.named_by,
            frontier.add_columns(jobs.c.result).scalar_subquery().label("frontier"),
            frontier.add_columns(jobs.c.id).scalar_subquery().label("frontier_job"),
        )
        .join(numbers, numbers.c.number == profiles.c.number)
        .outerjoin(model_names, model_names.c.fingerprint == profiles.c.fingerprint)
    )
    return connection.execute(newest_first(query, profiles.c.number, before, limit)).all()


def get_model(connection: Connection, fingerprint: str) -> Row[Any]:
    """Return a model.

    Raises:
        NotFound: no profile has this fingerprint.
    """
    found = list_models(connection, fingerprint=fingerprint, limit=1)
    if not found:
        raise NotFound(
            f"no profile has the fingerprint {fingerprint}; POST the profile to /v1/profiles first"
        )
    return found[0]


def name_model(connection: Connection, fingerprint: str, name: str | None, who: str) -> Row[Any]:
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
