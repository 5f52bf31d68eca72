"""Read the lock and the policies of a model from the folder, and find files that the config does not list."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ac_client.regenerate.config import Config, lock_file, policy_file
from ac_client.regenerate.lock import EDITED, Lock, UnreadableLock, sha256
from autoac.planner import PlannerError, Policy


@dataclass(frozen=True, slots=True)
class StoredPolicies:
    """The lock and the policies of one model, as they are in the policy folder."""

    lock: Lock | None
    why_no_lock: str
    policies: dict[str, Policy] = field(default_factory=dict)  # by file name
    broken: dict[str, str] = field(default_factory=dict)  # file name -> why the file must be written again

    @classmethod
    def read(cls, folder: Path, name: str, files: Iterable[str]) -> StoredPolicies:
        """Read the lock and the policies of model `name`, as far as they are readable."""
        path = folder / lock_file(name)
        lock, why_no_lock = None, ""
        try:
            lock = Lock.from_json(path.read_bytes())
        except FileNotFoundError:
            why_no_lock = "nothing was planned yet"
        except UnreadableLock as error:
            why_no_lock = f"{path.name} cannot be read: {error}"
        policies: dict[str, Policy] = {}
        broken: dict[str, str] = {}
        for file in files:
            try:
                text = (folder / file).read_bytes()
                policies[file] = Policy.from_json(text)
            except FileNotFoundError:
                if lock is not None:
                    broken[file] = "the file does not exist"
                continue
            except PlannerError as error:
                broken[file] = " ".join(str(error).split())
                continue
            if lock is not None and lock.policies.get(file) != sha256(text):
                broken[file] = EDITED.format(path.name)
        return cls(lock, why_no_lock, policies, broken)

    def reasons(self, file: str) -> tuple[str, ...]:
        """Return why `file` alone must be written again; empty if the file is intact."""
        return (self.broken[file],) if file in self.broken else ()


def stale_files(config: Config, folder: Path, only: Sequence[str]) -> Iterator[Path]:
    """Find files that a lock names and `autoac.toml` does not. Files that no lock names are not ours."""
    listed = {lock_file(name) for name in config.models}
    current = {policy_file(n, gb) for n, table in config.models.items() for gb in table.budgets_gb}
    for path in sorted(folder.glob("*.lock.json")):
        try:
            lock = Lock.from_json(path.read_bytes())
        except UnreadableLock:
            continue
        if path.name != lock_file(lock.name) or (only and lock.name not in only):
            continue
        for file in lock.policies:
            if file not in current and file.startswith(f"{lock.name}-") and (folder / file).is_file():
                yield folder / file
        if path.name not in listed:
            yield path
