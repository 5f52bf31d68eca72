"""The drawings that are kept, each beside its policy, so that a page opens as quickly on every replica.

A drawing says nothing that profile and policy do not, so any of them may go; the oldest do.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from sqlalchemy import Connection, delete, func, insert, select
from sqlalchemy.exc import IntegrityError

import autoac.planner
from autoac.api import policy_plot
from autoac.api.storage.database import now
from autoac.api.storage.tables import drawings


@lru_cache(maxsize=1)
def plot_version() -> str:
    """Return the SHA-256 of the code that draws: another release may draw a policy otherwise."""
    digest = hashlib.sha256()
    sources = [*Path(autoac.planner.__path__[0]).rglob("*.py"), Path(policy_plot.__file__)]
    for source in sorted(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def read_plot(connection: Connection, policy: str) -> bytes | None:
    """The drawing of a policy, as `drawing.draw` gives it; None where this release has none of it."""
    return connection.scalar(
        select(drawings.c.content).where(
            drawings.c.policy_id == policy, drawings.c.drawn_by == plot_version()
        )
    )


def store_plot(connection: Connection, policy: str, drawn: bytes, most_bytes: int) -> None:
    """Keep the drawing of a policy in place of any other of it, and of all drawings the newest `most_bytes`.

    Where the policy was deleted, or somebody else keeps a drawing of it right now, nothing is done.
    """
    connection.execute(delete(drawings).where(drawings.c.policy_id == policy))
    with suppress(IntegrityError), connection.begin_nested():
        connection.execute(
            insert(drawings).values(
                policy_id=policy, drawn_by=plot_version(), drawn_at=now(), nbytes=len(drawn), content=drawn
            )
        )
    newest_first = (drawings.c.drawn_at.desc(), drawings.c.policy_id)
    held = select(
        drawings.c.policy_id, func.sum(drawings.c.nbytes).over(order_by=newest_first).label("so_far")
    ).subquery()
    beyond = select(held.c.policy_id).where(held.c.so_far > most_bytes)
    connection.execute(delete(drawings).where(drawings.c.policy_id.in_(beyond)))
