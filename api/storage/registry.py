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
    """A policy's id and its published form."""

    id: str
    content: bytes  # zstd

    @property
    def text(self) -> bytes:
        """Return the published form."""
        return zstandard.decompress(self.content)


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Options of a policy request in addition to the budget; also the filter that finds its policies."""

    headroom_bytes: int
    gap: float
    time_limit_s: float
    constraints_digest: str  # "" for none


@dataclass(frozen=True, slots=True)
class Alias:
    """A name for a policy. It may move to another policy; `revision` counts its moves."""

    name: str
    policy_id: str
    revision: int
    moved_at: float
    moved_by: str


@dataclass(frozen=True, slots=True)
class Move:
    """A step in an alias's history; `policy_id` is None where the alias was deleted."""

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
        NotFound: there is no such profile.
    """
    row = connection.execute(select(*_PROFILE).where(profiles.c.digest == digest)).one_or_none()
    if row is None:
        raise NotFound(f"no profile {digest}")
    return StoredProfile(*row)


def profile_text(connection: Connection, digest: str) -> bytes:
    """Return the published form of a profile.

    Raises:
        NotFound: there is no such profile.
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


# --- models ---------------------------------------------------------------------------------------------


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
        NotFound: there is no profile of this fingerprint.
    """
    found = list_models(connection, fingerprint=fingerprint, limit=1)
    if not found:
        raise NotFound(f"no profile has the fingerprint {fingerprint}; PUT the profile to /v1/profiles first")
    return found[0]


def name_model(connection: Connection, fingerprint: str, name: str | None, who: str) -> StoredModel:
    """Name a model, or delete its name. The last call wins.

    Raises:
        NotFound: there is no profile of this fingerprint.
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
    raise AssertionError("a hundred others stored a policy of the same model in the meantime")


def read_policy(connection: Connection, id: str) -> PolicyText | None:
    """Return a policy's text, or None if there is no such policy."""
    content = connection.scalar(select(policies.c.content).where(policies.c.id == id))
    return None if content is None else PolicyText(id, content)


def get_policy(connection: Connection, id: str) -> StoredPolicy:
    """Return a policy without its content.

    Raises:
        NotFound: there is no such policy.
    """
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
    """Return policies, newest first, starting below the number `before`.

    With `options`, return only those that answer a request with these options: the same headroom, gap and
    constraints, and a solver that reached the gap or had at least as much time.
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
        NotFound: there is no such policy.
        InUse: an alias names it.
    """
    get_policy(connection, id)
    name = connection.scalar(select(aliases.c.name).where(aliases.c.policy_id == id).limit(1))
    if name is not None:
        raise InUse(f"the alias {name} names policy {id}; move it or delete it first")
    connection.execute(delete(policies).where(policies.c.id == id))


# --- aliases --------------------------------------------------------------------------------------------


def get_alias(connection: Connection, name: str) -> Alias:
    """Return an alias.

    Raises:
        NotFound: there is no such alias.
    """
    row = connection.execute(select(*_ALIAS).where(aliases.c.name == name)).one_or_none()
    if row is None:
        raise NotFound(f"no alias {name}")
    return Alias(*row)


def move_alias(
    connection: Connection, name: str, policy: str, who: str, *, expected: int | None
) -> tuple[Alias, bool]:
    """Point an alias at a policy; return the alias, and True if it is new.

    Args:
        connection: a write transaction.
        name: the alias.
        policy: the policy's id.
        who: the caller that moves it.
        expected: the revision that the alias must have; None if it must not exist.

    Raises:
        NotFound: there is no such policy.
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
        NotFound: there is no such alias.
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
) -> list[Alias]:
    """Return aliases in order of their names, starting after the name `after`."""
    query = select(*_ALIAS).order_by(aliases.c.name).limit(limit)
    if after is not None:
        query = query.where(aliases.c.name > after)
    if policy is not None:
        query = query.where(aliases.c.policy_id == policy)
    return [Alias(*row) for row in connection.execute(query)]


def alias_history(connection: Connection, name: str, *, before: int | None = None, limit: int) -> list[Move]:
    """Return the moves of an alias, newest first.

    Raises:
        NotFound: there never was such an alias.
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
