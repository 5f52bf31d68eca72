"""Keys of callers and their scopes. A key is shown once, when it is created; the database has its SHA-256."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from threading import Lock
from typing import Any

from cachetools import TTLCache
from sqlalchemy import Connection, Row, func, select, update

from autoac.api.errors import InUse, Unauthorised
from autoac.api.settings import Settings
from autoac.api.storage.database import Database, insert_once, now, only_row
from autoac.api.storage.tables import keys

PREFIX = "autoac_"
MOST_REMEMBERED = 10_000  # guessed keys must not fill the memory
REMEMBER_S = 5.0  # a revoked key may work for so long on a replica that has just seen it


class Scope(IntEnum):
    """The rights of a key. Each scope includes the ones before it."""

    READ = 1  # read everything
    PLAN = 2  # store profiles, solve, cancel jobs of its own
    ADMIN = 3  # delete, cancel any job

    @property
    def word(self) -> str:
        """Return the scope as commands, tables and messages write it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. Jobs, profiles and policies have its `name`: of a key, the key's own."""

    name: str
    scope: Scope


TOKEN = Caller("token", Scope.ADMIN)
LOOPBACK = Caller("loopback", Scope.ADMIN)

_SHOWN = ("id", "name", "scope", "created_at", "revoked_at")
_COLUMNS = tuple(keys.c[name] for name in _SHOWN)


def digest_of(secret: str) -> str:
    """Return the SHA-256. A key is 256 random bits, so neither salt nor a slow hash would make it safer."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create_key(connection: Connection, name: str, scope: Scope) -> tuple[Row[Any], str]:
    """Create a key; return it and its secret, which is not stored anywhere.

    Raises:
        InUse: another caller has this name. Jobs belong to names, so that two callers never share one.
    """
    id, secret = secrets.token_hex(6), PREFIX + secrets.token_urlsafe(32)
    row = {"id": id, "name": name, "digest": digest_of(secret), "scope": scope.word, "created_at": now()}
    if name in (TOKEN.name, LOOPBACK.name) or not insert_once(connection, keys, row):
        raise InUse(f"another caller is called {name}: choose another name, or revoke that key first")
    return get_key(connection, id), secret


def get_key(connection: Connection, id: str) -> Row[Any]:
    """Return a key, without its secret.

    Raises:
        NotFound: the key does not exist.
    """
    missing = f"no key {id}; `autoac keys list` shows all keys"
    return only_row(connection, select(*_COLUMNS).where(keys.c.id == id), missing)


def list_keys(connection: Connection) -> Sequence[Row[Any]]:
    """Return all keys, revoked ones too, oldest first."""
    return connection.execute(select(*_COLUMNS).order_by(keys.c.created_at)).all()


def revoke_key(connection: Connection, id: str) -> Row[Any]:
    """Revoke a key.

    Raises:
        NotFound: the key does not exist.
    """
    get_key(connection, id)
    connection.execute(
        update(keys).where(keys.c.id == id, keys.c.revoked_at.is_(None)).values(revoked_at=now())
    )
    return get_key(connection, id)


def any_key(connection: Connection) -> bool:
    """Return True if a key was ever created. From then on, requests on loopback need a key too."""
    return bool(connection.scalar(select(func.count()).select_from(keys)))


class Authenticator:
    """Find the caller of a request by its secret, and cache the result for a few seconds."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings, self._database = settings, database
        token = settings.token
        self._token = None if token is None else digest_of(token.get_secret_value())
        self._known: TTLCache[str | None, Caller | None] = TTLCache(MOST_REMEMBERED, REMEMBER_S)
        self._lock = Lock()

    def caller(self, secret: str | None) -> Caller:
        """Return the caller with this secret; without a secret, the caller on loopback.

        Raises:
            Unauthorised: the request needs a key and has none, or an unknown one.
        """
        digest = None if secret is None else digest_of(secret)
        try:
            found = self._remembered(digest)
        except KeyError:
            found = self._look_up(digest)
            with self._lock:
                self._known[digest] = found
        if found is None:
            raise Unauthorised(
                "this service needs a key as a bearer token: Authorization: Bearer KEY"
                if secret is None
                else "the key is unknown or was revoked; `autoac keys create` creates one"
            )
        return found

    def cached(self, secret: str | None) -> Caller | None:
        """Return the caller with this secret if it is in the cache. Never waits for the database."""
        with suppress(KeyError):
            return self._remembered(None if secret is None else digest_of(secret))
        return None

    def _remembered(self, digest: str | None) -> Caller | None:
        """Return the caller in the cache, or None if the cache knows that there is none.

        Raises:
            KeyError: the cache does not know.
        """
        if digest is not None and self._token is not None and secrets.compare_digest(digest, self._token):
            return TOKEN
        with self._lock:
            return self._known[digest]

    def _look_up(self, digest: str | None) -> Caller | None:
        if digest is None and (self._token is not None or not self._settings.on_loopback):
            return None
        with self._database.read() as connection:
            if digest is None:
                return None if any_key(connection) else LOOPBACK
            row = connection.execute(
                select(keys.c.name, keys.c.digest, keys.c.scope).where(
                    keys.c.digest == digest, keys.c.revoked_at.is_(None)
                )
            ).one_or_none()
        if row is None or not secrets.compare_digest(row.digest, digest):
            return None
        return Caller(row.name, Scope[row.scope.upper()])
