"""Store and find profiles and policies. The id of each is the digest of its published form.

Functions of a connection, so that several make one transaction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import zstandard
from sqlalchemy import BindParameter, Connection, Row, Select, Table, bindparam, delete, exists, or_, select

from autoac.api.errors import NotFound
from autoac.api.requests import ParsedProfile
from autoac.api.storage.database import insert_once, now, only_row
from autoac.api.storage.tables import policies, policy_options, profiles
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.policy import Policy


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Options of a policy request in addition to the budget; also the filter that finds its policies.

    A policy answers a request with these options if its own are the same, and if its solver reached the gap
    or had at least as much time.
    """

    gap: float
    time_limit_s: float
    constraints_digest: str  # "" for none

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> PolicyOptions:
        """Return what is stored of the options of a policy job (`requests.PolicyRequest.options`)."""
        rules = options["constraints"]
        digest = "" if rules is None else Constraints.model_validate(rules).digest
        return cls(options["gap"], options["time_limit_s"], digest)


def add_profile(connection: Connection, profile: ParsedProfile, who: str) -> bool:
    """Store a profile; return False if it was stored already."""
    row = asdict(profile) | {"inputs": json.dumps(profile.inputs), "created_at": now(), "created_by": who}
    row["id"] = row.pop("digest")
    return not _is_stored(connection, profiles, row["id"]) and insert_once(connection, profiles, row)


def add_policy(connection: Connection, text: str, who: str, options: PolicyOptions) -> str:
    """Store a policy that was planned under `options` and return its id. The same text is stored once."""
    policy, content = Policy.from_json(text), text.encode()
    id = hashlib.sha256(content).hexdigest()
    if not _is_stored(connection, policies, id):
        predicted = policy.predicted
        row = {name: getattr(policy, name) for name in ("model", "fingerprint", "device", "budget_bytes")}
        row |= {name: getattr(predicted, name) for name in ("peak_bytes", "recompute_us", "step_us", "gap")}
        row |= {"id": id, "profile_digest": policy.profile_digest, "stopped": policy.stopped}
        row |= {"content": zstandard.compress(content), "created_at": now(), "created_by": who}
        insert_once(connection, policies, row)
    insert_once(connection, policy_options, {"policy_id": id} | asdict(options))
    return id


def _is_stored(connection: Connection, table: Table, id: str) -> bool:
    return connection.scalar(select(table.c.number).where(table.c.id == id)) is not None


def get_text(connection: Connection, table: Table, id: str) -> bytes:
    """Return the published form of a profile or a policy.

    Raises:
        NotFound: it does not exist.
    """
    row = only_row(connection, select(table.c.content).where(table.c.id == id), _missing(table, id))
    return zstandard.decompress(row.content)


def get_row(connection: Connection, table: Table, id: str) -> Row[Any]:
    """Return a profile or a policy without its content.

    Raises:
        NotFound: it does not exist.
    """
    return only_row(connection, select(*_shown(table)).where(table.c.id == id), _missing(table, id))


def list_rows(
    connection: Connection,
    table: Table,
    wanted: Mapping[str, str | int | None],
    options: PolicyOptions | None = None,
    *,
    before: int | None = None,
    limit: int,
) -> Sequence[Row[Any]]:
    """Return profiles or policies without their content, newest first, starting below the number `before`.

    Args:
        connection: a transaction.
        table: which of the two.
        wanted: values of columns; None matches all.
        options: list only policies that answer a request with these options.
        before: the number of the last row of the page before.
        limit: the most rows to return.
    """
    given = {name: value for name, value in wanted.items() if value is not None}
    values = given | {"limit": limit} | ({} if before is None else {"before": before})
    values |= {} if options is None else {f"asked_{name}": value for name, value in asdict(options).items()}
    query = _list_query(table, frozenset(given), before is not None, options is not None)
    return connection.execute(query, values).all()


@lru_cache(maxsize=64)  # building such a query takes five times as long as running it
def _list_query(table: Table, given: frozenset[str], before: bool, with_options: bool) -> Select[Any]:
    query = select(*_shown(table)).order_by(table.c.number.desc()).limit(bindparam("limit"))
    for name in sorted(given):
        query = query.where(table.c[name] == bindparam(name))
    if before:
        query = query.where(table.c.number < bindparam("before"))
    if with_options:
        asked = policy_options.c
        gap: BindParameter[float] = bindparam("asked_gap")
        query = query.where(
            exists().where(
                asked.policy_id == policies.c.id,
                asked.gap == gap,
                asked.constraints_digest == bindparam("asked_constraints_digest"),
                or_(asked.time_limit_s >= bindparam("asked_time_limit_s"), policies.c.gap <= gap),
            )
        )
    return query


def delete_row(connection: Connection, table: Table, id: str) -> None:
    """Delete a profile or a policy.

    Raises:
        NotFound: it does not exist.
    """
    if not connection.execute(delete(table).where(table.c.id == id)).rowcount:
        raise NotFound(_missing(table, id))


def _shown(table: Table) -> list[Any]:
    return [column for column in table.c if column is not table.c.content]


def _missing(table: Table, id: str) -> str:
    return f"no {table.info['one']} {id}"
