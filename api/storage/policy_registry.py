"""Store policies by the content of their text, with the options they were planned for.

Functions of a connection, so that several make one transaction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import zstandard
from sqlalchemy import (
    BindParameter,
    Connection,
    Row,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
)
from sqlalchemy.exc import IntegrityError

from autoac.api.errors import InUse
from autoac.api.storage.database import now, only_row
from autoac.api.storage.tables import aliases, policies, policy_options
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.policy import Policy


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Options of a policy request in addition to the budget; also the filter that finds its policies."""

    headroom_bytes: int
    gap: float
    time_limit_s: float
    constraints_digest: str  # "" for none


@dataclass(frozen=True, slots=True)
class PolicyFilter:
    """Select the policies of a list; None matches all.

    With `options`, only policies match that answer a request with these options: the same headroom, gap and
    constraints, and a solver that reached the gap or had at least as much time.
    """

    model: str | None
    fingerprint: str | None
    device: str | None
    budget_bytes: int | None
    options: PolicyOptions | None


_POLICY = tuple(column for column in policies.c if column is not policies.c.content)


def policy_id(text: bytes) -> str:
    """Return the id of a policy: the SHA-256 of its published form."""
    return hashlib.sha256(text).hexdigest()


def options_of(options: Mapping[str, Any]) -> PolicyOptions:
    """Return the options of a policy job (`requests.PolicyRequest.options`) in the form that is stored."""
    rules = options["constraints"]
    return PolicyOptions(
        headroom_bytes=options["headroom_bytes"],
        gap=options["gap"],
        time_limit_s=options["time_limit_s"],
        constraints_digest="" if rules is None else Constraints.model_validate(rules).digest,
    )


def add_policy(connection: Connection, text: str, who: str, options: PolicyOptions) -> str:
    """Store a policy that was planned under `options` and return its id. The same text is stored once."""
    id = _add_text(connection, text, who)
    row = {"policy_id": id} | {name: getattr(options, name) for name in options.__slots__}
    same = and_(*(policy_options.c[name] == value for name, value in row.items()))
    if connection.scalar(select(policy_options.c.policy_id).where(same)) is None:
        with (
            suppress(IntegrityError),
            connection.begin_nested(),
        ):  # another transaction stored the same options
            connection.execute(insert(policy_options).values(**row))
    return id


def _add_text(connection: Connection, text: str, who: str) -> str:
    policy, content = Policy.from_json(text), text.encode()
    id = policy_id(content)
    same = and_(policies.c.fingerprint == policy.fingerprint, policies.c.budget_bytes == policy.budget_bytes)
    for _ in range(100):
        if connection.scalar(select(policies.c.number).where(policies.c.id == id)) is not None:
            return id
        newest = connection.scalar(select(func.max(policies.c.version)).where(same)) or 0
        try:
            with connection.begin_nested():
                connection.execute(
                    insert(policies).values(
                        id=id,
                        model=policy.model,
                        fingerprint=policy.fingerprint,
                        device=policy.device,
                        budget_bytes=policy.budget_bytes,
                        version=newest + 1,
                        profile_digest=policy.profile_digest,
                        peak_bytes=policy.predicted.peak_bytes,
                        recompute_us=policy.predicted.recompute_us,
                        step_us=policy.predicted.step_us,
                        gap=policy.predicted.gap,
                        stopped=policy.stopped,
                        content=zstandard.compress(content),
                        created_at=now(),
                        created_by=who,
                    )
                )
            return id
        except IntegrityError:  # another transaction took this version, or stored the same text
            continue
    raise AssertionError("a policy could not be stored: another one took its version first, 100 times")


def policy_text(connection: Connection, id: str) -> bytes:
    """Return the published form of a policy.

    Raises:
        NotFound: the policy does not exist.
    """
    row = only_row(connection, select(policies.c.content).where(policies.c.id == id), f"no policy {id}")
    return zstandard.decompress(row.content)


def get_policy(connection: Connection, id: str) -> Row[Any]:
    """Return a policy without its content.

    Raises:
        NotFound: the policy does not exist.
    """
    return only_row(connection, select(*_POLICY).where(policies.c.id == id), f"no policy {id}")


def list_policies(
    connection: Connection, wanted: PolicyFilter, *, before: int | None = None, limit: int
) -> Sequence[Row[Any]]:
    """Return policies, newest first, starting below the number `before`."""
    matched = {name: getattr(wanted, name) for name in wanted.__slots__ if name != "options"}
    given = {name: value for name, value in (matched | {"before": before}).items() if value is not None}
    values = given | {"limit": limit}
    options = wanted.options
    if options is not None:
        values |= {f"asked_{name}": getattr(options, name) for name in options.__slots__}
    query = _policies_query(frozenset(given), options is not None)
    return connection.execute(query, values).all()


@lru_cache(maxsize=64)  # building such a query takes five times as long as running it
def _policies_query(given: frozenset[str], with_options: bool) -> Select[Any]:
    query = select(*_POLICY).order_by(policies.c.number.desc()).limit(bindparam("limit"))
    for name in sorted(given - {"before"}):
        query = query.where(policies.c[name] == bindparam(name))
    if "before" in given:
        query = query.where(policies.c.number < bindparam("before"))
    if with_options:
        asked = policy_options.c
        gap: BindParameter[float] = bindparam("asked_gap")
        query = query.where(
            exists().where(
                asked.policy_id == policies.c.id,
                asked.headroom_bytes == bindparam("asked_headroom_bytes"),
                asked.gap == gap,
                asked.constraints_digest == bindparam("asked_constraints_digest"),
                or_(asked.time_limit_s >= bindparam("asked_time_limit_s"), policies.c.gap <= gap),
            )
        )
    return query


def delete_policy(connection: Connection, id: str) -> None:
    """Delete a policy.

    Raises:
        NotFound: the policy does not exist.
        InUse: an alias names it.
    """
    get_policy(connection, id)
    name = connection.scalar(select(aliases.c.name).where(aliases.c.policy_id == id).limit(1))
    if name is not None:
        raise InUse(f"the alias {name} names policy {id}; move it or delete it first")
    connection.execute(delete(policies).where(policies.c.id == id))
