"""Name policies by aliases, and keep the history of each alias.

Functions of a connection, so that several make one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from autoac.api.errors import NotFound, PreconditionFailed
from autoac.api.storage.database import newest_first, now, only_row
from autoac.api.storage.policy_registry import get_policy
from autoac.api.storage.tables import alias_moves, aliases


def get_alias(connection: Connection, name: str) -> Row[Any]:
    """Return an alias.

    Raises:
        NotFound: the alias does not exist.
    """
    return only_row(connection, select(aliases).where(aliases.c.name == name), f"no alias {name}")


def move_alias(
    connection: Connection, name: str, policy: str, who: str, *, expected: int | None
) -> tuple[Row[Any], bool]:
    """Point an alias at a policy; return the alias, and True if it is new.

    Args:
        connection: a write transaction.
        name: the alias.
        policy: the policy's id.
        who: the caller that moves it.
        expected: the revision that the alias must have; None if it must not exist.

    Raises:
        NotFound: the policy does not exist.
        PreconditionFailed: the alias is not at the expected revision.
    """
    get_policy(connection, policy)
    values = {"policy_id": policy, "moved_at": now(), "moved_by": who}
    if expected is None:
        # Revisions go on counting after a deletion, so that an old one never matches a new alias.
        newest = connection.scalar(select(func.max(alias_moves.c.revision)).where(alias_moves.c.name == name))
        revision = (newest or 0) + 1
        try:
            with connection.begin_nested():
                connection.execute(insert(aliases).values(name=name, revision=revision, **values))
        except IntegrityError:
            raise PreconditionFailed(
                f"the alias {name} exists already; send If-Match with its ETag"
            ) from None
    else:
        revision = expected + 1
        moved = connection.execute(
            update(aliases)
            .where(aliases.c.name == name, aliases.c.revision == expected)
            .values(revision=revision, **values)
        )
        if not moved.rowcount:
            raise PreconditionFailed(f"the alias {name} is not at revision {expected} any more; get it again")
    _note_move(connection, name, revision, policy, who)
    return get_alias(connection, name), expected is None


def remove_alias(connection: Connection, name: str, who: str, *, expected: int | None) -> None:
    """Delete an alias; if `expected` is given, only at that revision.

    Raises:
        NotFound: the alias does not exist.
        PreconditionFailed: the alias is at another revision.
    """
    found = get_alias(connection, name)
    revision = found.revision if expected is None else expected
    gone = connection.execute(delete(aliases).where(aliases.c.name == name, aliases.c.revision == revision))
    if not gone.rowcount:
        raise PreconditionFailed(f"the alias {name} is not at revision {revision} any more; get it again")
    _note_move(connection, name, revision + 1, None, who)


def _note_move(connection: Connection, name: str, revision: int, policy: str | None, who: str) -> None:
    try:
        connection.execute(
            insert(alias_moves).values(
                name=name, revision=revision, policy_id=policy, moved_at=now(), moved_by=who
            )
        )
    except IntegrityError:
        raise PreconditionFailed(
            f"the alias {name} is being moved by another request; get it again"
        ) from None


def list_aliases(
    connection: Connection, *, after: str | None = None, policy: str | None = None, limit: int
) -> Sequence[Row[Any]]:
    """Return aliases in order of their names, starting after the name `after`."""
    query = select(aliases).order_by(aliases.c.name).limit(limit)
    if after is not None:
        query = query.where(aliases.c.name > after)
    if policy is not None:
        query = query.where(aliases.c.policy_id == policy)
    return connection.execute(query).all()


def alias_history(
    connection: Connection, name: str, *, before: int | None = None, limit: int
) -> Sequence[Row[Any]]:
    """Return the moves of an alias, newest first.

    Raises:
        NotFound: there never was such an alias.
    """
    query = select(alias_moves).where(alias_moves.c.name == name)
    found = connection.execute(newest_first(query, alias_moves.c.number, before, limit)).all()
    if not found and before is None:
        raise NotFound(f"no alias {name}")
    return found
