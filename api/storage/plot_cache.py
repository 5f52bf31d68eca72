"""Store the plot of each policy, so that its page opens as quickly on every replica.

A plot can be made again from profile and policy, so the oldest ones are deleted to limit their bytes.
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
    """Return the SHA-256 of the code that plots, since another release may plot a policy otherwise."""
    digest = hashlib.sha256()
    sources = [*Path(autoac.planner.__path__[0]).rglob("*.py"), Path(policy_plot.__file__)]
    for source in sorted(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def read_plot(connection: Connection, policy: str) -> bytes | None:
    """Return the plot of a policy, or None if this release has not stored one."""
    return connection.scalar(
        select(drawings.c.content).where(
            drawings.c.policy_id == policy, drawings.c.drawn_by == plot_version()
        )
    )


def store_plot(connection: Connection, policy: str, plot: bytes, most_bytes: int) -> None:
    """Store the plot of a policy, then delete the oldest plots beyond `most_bytes` in total.

    Do nothing if the policy was deleted, or if another transaction stores a plot of it at the same time.
    """
    connection.execute(delete(drawings).where(drawings.c.policy_id == policy))
    with suppress(IntegrityError), connection.begin_nested():
        connection.execute(
            insert(drawings).values(
                policy_id=policy, drawn_by=plot_version(), drawn_at=now(), nbytes=len(plot), content=plot
            )
        )
    newest_first = (drawings.c.drawn_at.desc(), drawings.c.policy_id)
    held = select(
        drawings.c.policy_id, func.sum(drawings.c.nbytes).over(order_by=newest_first).label("so_far")
    ).subquery()
    beyond = select(held.c.policy_id).where(held.c.so_far > most_bytes)
    connection.execute(delete(drawings).where(drawings.c.policy_id.in_(beyond)))
