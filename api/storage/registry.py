"""The registry: profiles by their content, policies by version, and the aliases that name policies.

Functions of a connection, so that several make one transaction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import zstandard
from sqlalchemy import (
    BindParameter,
    Connection,
    Select,
    and_,
    bindparam,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from autoac.api.errors import InUse, NotFound, PreconditionFailed
from autoac.api.requests import ParsedProfile
from autoac.api.settings import Settings
from autoac.api.storage.database import now
from autoac.api.storage.tables import (
    alias_moves,
    aliases,
    jobs,
    model_names,
    policies,
    policy_options,
    profiles,
)
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.policy import Policy

ANY = "*"


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
    """Profiles of one fingerprint: what people call them, and their newest frontier."""

    number: int  # of the newest profile
    fingerprint: str
    model: str
    inputs: str  # JSON; this and the next of the newest profile
    parameter_bytes: int
    name: str | None
    named_at: float | None
    named_by: str | None
    frontier: bytes | None  # JSON, as `request.answer` gives it


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """A policy of the registry, without its content. Bytes and microseconds."""

    number: int
    id: str
    model: str
    fingerprint: str
    device: str
    budget_bytes: int
    version: int  # of the policies of this fingerprint and budget
    profile_digest: str
    peak_bytes: int
    recompute_us: float
    step_us: float
    gap: float
    stopped: str
    created_at: float
    created_by: str


@dataclass(frozen=True, slots=True)
class PolicyText:
    """A policy's published form, and its id."""

    id: str
    content: bytes  # zstd

    @property
    def text(self) -> bytes:
        return zstandard.decompress(self.content)


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What a policy was asked for beside its budget, or is looked for with."""

    headroom_bytes: int
    gap: float
    time_limit_s: float
    constraints_digest: str  # "" for none


@dataclass(frozen=True, slots=True)
class Alias:
    """A name for a policy, and who gave it."""

    name: str
    policy_id: str
    revision: int
    moved_at: float
    moved_by: str


@dataclass(frozen=True, slots=True)
class Move:
    """A step in an alias's history; without a policy where it was taken away."""

    number: int
    revision: int
    policy_id: str | None
    moved_at: float
    moved_by: str


_PROFILE = tuple(profiles.c[name] for name in StoredProfile.__slots__)
_POLICY = tuple(policies.c[name] for name in StoredPolicy.__slots__)
_ALIAS = tuple(aliases.c[name] for name in Alias.__slots__)
_MOVE = tuple(alias_moves.c[name] for name in Move.__slots__)


# --- profiles -------------------------------------------------------------------------------------------


def add_profile(connection: Connection, taken: ParsedProfile, who: str) -> bool:
    """Keep a profile; False if it was there. Raises IntegrityError when somebody else stores it right now."""
    if connection.scalar(select(profiles.c.number).where(profiles.c.digest == taken.digest)) is not None:
        return False
    connection.execute(
        insert(profiles).values(
            digest=taken.digest,
            model=taken.model,
            fingerprint=taken.fingerprint,
            device=taken.device,
            ops=taken.ops,
            inputs=json.dumps(taken.inputs),
            parameter_bytes=taken.parameter_bytes,
            plain_bytes=taken.plain_bytes,
            content=taken.content,
            created_at=now(),
            created_by=who,
        )
    )
    return True


def get_profile(connection: Connection, digest: str) -> StoredProfile:
    """Raises: NotFound: there is none."""
    row = connection.execute(select(*_PROFILE).where(profiles.c.digest == digest)).one_or_none()
    if row is None:
        raise NotFound(f"no profile {digest}")
    return StoredProfile(*row)


def profile_text(connection: Connection, digest: str) -> bytes:
    """The published form. Raises: NotFound: there is none."""
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
    """Newest first, those before the number `before`."""
    query = select(*_PROFILE).order_by(profiles.c.number.desc()).limit(limit)
    for column, wanted in (("model", model), ("fingerprint", fingerprint), ("device", device)):
        if wanted is not None:
            query = query.where(profiles.c[column] == wanted)
    if before is not None:
        query = query.where(profiles.c.number < before)
    return [StoredProfile(*row) for row in connection.execute(query)]


# --- models ---------------------------------------------------------------------------------------------


def list_models(
    connection: Connection, *, fingerprint: str | None = None, before: int | None = None, limit: int
) -> list[StoredModel]:
    """Newest first, those before the number `before`."""
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
    """Raises: NotFound: there is no profile of it."""
    found = list_models(connection, fingerprint=fingerprint, limit=1)
    if not found:
        raise NotFound(f"no profile of the fingerprint {fingerprint}")
    return found[0]


def name_model(connection: Connection, fingerprint: str, name: str | None, who: str) -> StoredModel:
    """Call a model `name`, or by none; who comes last is right.

    Raises:
        NotFound: there is no profile of it.
    """
    get_model(connection, fingerprint)
    connection.execute(delete(model_names).where(model_names.c.fingerprint == fingerprint))
    if name is not None:
        connection.execute(
            insert(model_names).values(fingerprint=fingerprint, name=name, named_at=now(), named_by=who)
        )
    return get_model(connection, fingerprint)


# --- policies -------------------------------------------------------------------------------------------


def policy_id(text: bytes) -> str:
    """The id of a policy: SHA-256 of its published form."""
    return hashlib.sha256(text).hexdigest()


def options_of(options: Mapping[str, Any]) -> PolicyOptions:
    """What a job for a policy was asked for, from its options (`request.PolicyRequest.options`)."""
    rules = options["constraints"]
    return PolicyOptions(
        headroom_bytes=options["headroom_bytes"],
        gap=options["gap"],
        time_limit_s=options["time_limit_s"],
        constraints_digest="" if rules is None else Constraints.model_validate(rules).digest,
    )


def add_policy(connection: Connection, text: str, who: str, options: PolicyOptions) -> str:
    """Keep a policy that this service made for `options`, and give its id; the same text is kept once."""
    id = _add_text(connection, text, who)
    row = {"policy_id": id} | {name: getattr(options, name) for name in options.__slots__}
    alike = and_(*(policy_options.c[name] == value for name, value in row.items()))
    if connection.scalar(select(policy_options.c.policy_id).where(alike)) is None:
        with suppress(IntegrityError), connection.begin_nested():  # somebody else noted the same
            connection.execute(insert(policy_options).values(**row))
    return id


def _add_text(connection: Connection, text: str, who: str) -> str:
    policy, content = Policy.from_json(text), text.encode()
    id = policy_id(content)
    alike = and_(policies.c.fingerprint == policy.fingerprint, policies.c.budget_bytes == policy.budget_bytes)
    for _ in range(100):
        if connection.scalar(select(policies.c.number).where(policies.c.id == id)) is not None:
            return id
        newest = connection.scalar(select(func.max(policies.c.version)).where(alike)) or 0
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
        except IntegrityError:  # somebody else took this version, or stored the same text
            continue
    raise AssertionError("a hundred others stored a policy of the same model in the meantime")


def read_policy(connection: Connection, id: str) -> PolicyText | None:
    """A policy's text; None if there is none."""
    content = connection.scalar(select(policies.c.content).where(policies.c.id == id))
    return None if content is None else PolicyText(id, content)


def get_policy(connection: Connection, id: str) -> StoredPolicy:
    """Raises: NotFound: there is none."""
    row = connection.execute(select(*_POLICY).where(policies.c.id == id)).one_or_none()
    if row is None:
        raise NotFound(f"no policy {id}")
    return StoredPolicy(*row)


def list_policies(
    connection: Connection,
    *,
    model: str | None = None,
    fingerprint: str | None = None,
    device: str | None = None,
    budget_bytes: int | None = None,
    options: PolicyOptions | None = None,
    before: int | None = None,
    limit: int,
) -> list[StoredPolicy]:
    """Newest first, those before the number `before`.

    With `options` only those that a request with these options would have been answered with: the same
    headroom, gap and constraints, and a solver that reached the gap or had no less time.
    """
    wanted = {
        "model": model,
        "fingerprint": fingerprint,
        "device": device,
        "budget_bytes": budget_bytes,
        "before": before,
    }
    given = {name: value for name, value in wanted.items() if value is not None}
    values = given | {"limit": limit}
    if options is not None:
        values |= {f"asked_{name}": getattr(options, name) for name in options.__slots__}
    query = _policies_query(frozenset(given), options is not None)
    return [StoredPolicy(*row) for row in connection.execute(query, values)]


@lru_cache(maxsize=64)  # to put such a query together takes five times as long as to ask it
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
    """Raises: NotFound: there is none. InUse: an alias names it."""
    get_policy(connection, id)
    name = connection.scalar(select(aliases.c.name).where(aliases.c.policy_id == id).limit(1))
    if name is not None:
        raise InUse(f"the alias {name} names policy {id}; move it or delete it first")
    connection.execute(delete(policies).where(policies.c.id == id))


# --- aliases --------------------------------------------------------------------------------------------


def get_alias(connection: Connection, name: str) -> Alias:
    """Raises: NotFound: there is none."""
    row = connection.execute(select(*_ALIAS).where(aliases.c.name == name)).one_or_none()
    if row is None:
        raise NotFound(f"no alias {name}")
    return Alias(*row)


def move_alias(
    connection: Connection, name: str, policy: str, who: str, *, expected: int | None
) -> tuple[Alias, bool]:
    """Have an alias name a policy; the alias, and whether it is new.

    Args:
        connection: a transaction that writes.
        name: of the alias.
        policy: the policy's id.
        who: moves it.
        expected: the revision that it must be at; None: it must not be there.

    Raises:
        NotFound: there is no such policy.
        PreconditionFailed: the alias is not as expected.
    """
    get_policy(connection, policy)
    values = {"policy_id": policy, "moved_at": now(), "moved_by": who}
    if expected is None:
        # A name that was taken away goes on counting, so that an old revision never matches a new alias.
        newest = connection.scalar(select(func.max(alias_moves.c.revision)).where(alias_moves.c.name == name))
        revision = (newest or 0) + 1
        try:
            with connection.begin_nested():
                connection.execute(insert(aliases).values(name=name, revision=revision, **values))
        except IntegrityError:
            raise PreconditionFailed(
                f"the alias {name} is there already; send If-Match with its ETag"
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
    """Take an alias away; `expected`: the revision that it must be at, if that matters.

    Raises:
        NotFound: there is none.
        PreconditionFailed: it is at another revision.
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
        raise PreconditionFailed(f"the alias {name} is being moved by somebody else; get it again") from None


def list_aliases(
    connection: Connection, *, after: str | None = None, policy: str | None = None, limit: int
) -> list[Alias]:
    """By name, those after the name `after`."""
    query = select(*_ALIAS).order_by(aliases.c.name).limit(limit)
    if after is not None:
        query = query.where(aliases.c.name > after)
    if policy is not None:
        query = query.where(aliases.c.policy_id == policy)
    return [Alias(*row) for row in connection.execute(query)]


def alias_history(connection: Connection, name: str, *, before: int | None = None, limit: int) -> list[Move]:
    """Where an alias has been, newest first.

    Raises:
        NotFound: there never was one.
    """
    query = select(*_MOVE).where(alias_moves.c.name == name)
    if before is not None:
        query = query.where(alias_moves.c.number < before)
    found = [
        Move(*row) for row in connection.execute(query.order_by(alias_moves.c.number.desc()).limit(limit))
    ]
    if not found and before is None:
        raise NotFound(f"no alias {name}")
    return found


# --- retention ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pruned:
    """What retention takes away: ids of policies, digests of profiles."""

    policies: Sequence[str]
    profiles: Sequence[str]


def prunable(connection: Connection, settings: Settings) -> Pruned:
    """What the settings say to forget: policies by age and by count, never one that an alias names, and
    profiles as old that no policy and no job needs."""
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
    """Forget what `prunable` names."""
    found = prunable(connection, settings)
    values: Any
    for table, column, values in (
        (policies, policies.c.id, found.policies),
        (profiles, profiles.c.digest, found.profiles),
    ):
        for start in range(0, len(values), 500):
            connection.execute(delete(table).where(column.in_(values[start : start + 500])))
    return found
