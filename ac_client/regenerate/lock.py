"""The lock: a file next to a model's policies with the step they were planned for.

A policy contains only names and decisions. The lock contains a line for each op of the step, with its sizes,
its FLOPs and what it reads, so that a later run can say in which layer the model changed. It has no times.
This module imports the formats alone, so that `autoac validate` is fast.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoac.planner.formats.base import Count, Name, complaints, read_json
from autoac.planner.formats.profile import Environment, Profile, StaticBytes

FORMAT: Final = "autoac.lock"
VERSION: Final = 1
EDITED: Final = "the text differs from the one that {} was written with: edited by hand, or merged?"

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.json$", max_length=200)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
OpSummary = tuple[Count, Count, Annotated[str, Field(max_length=64)]]
"""Allocated bytes of an op, its FLOPs, and a digest of its inputs, its flags and its saved tensors."""


class UnreadableLock(Exception):
    """The file is not a lock, or is a lock of another version."""


class Lock(BaseModel):
    """One model's step, and the policies that were planned for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["autoac.lock"] = FORMAT
    version: Literal[1] = VERSION
    name: Name  # in autoac.toml
    device: Name  # in autoac.toml
    model: Name  # the class
    planned_on: Name  # the device that the policies are for
    fingerprint: Sha256  # of the identifying step; see model_source.py
    digest: Sha256  # of the profile by which the policies were last judged good
    inputs: tuple[Name, ...]
    environment: Environment
    static: StaticBytes
    gradient_nbytes: Count
    optimizer_workspace_nbytes: Count
    asked: dict[str, Any]  # settings that a plan depends on, by key of autoac.toml
    policies: dict[FileName, Sha256]  # of the text of each file
    ops: dict[Name, OpSummary]

    @classmethod
    def of(
        cls,
        name: str,
        device: str,
        identity: Profile,
        planned_from: Profile,
        plan_settings: Mapping[str, Any],
        policies: Mapping[str, str],
    ) -> Lock:
        """Build the lock of a model's policies.

        Args:
            name, device, plan_settings: from autoac.toml.
            identity: the step that identifies the model on every machine.
            planned_from: the profile that plans are made from; `identity` itself for an estimated device.
            policies: SHA-256 of the text of each policy, by file name.
        """
        return cls(
            name=name,
            device=device,
            model=identity.model,
            planned_on=planned_from.environment.device_name,
            fingerprint=identity.fingerprint,
            digest=planned_from.digest,
            inputs=identity.inputs,
            environment=identity.environment,
            static=identity.static,
            gradient_nbytes=identity.gradient_nbytes,
            optimizer_workspace_nbytes=identity.optimizer_workspace_nbytes,
            asked=dict(plan_settings),
            policies=dict(sorted(policies.items())),
            ops=op_summaries(identity),
        )

    def to_json(self) -> str:
        """Return the text of the file: one op to a line, the same text for the same lock."""
        head = json.dumps(self.model_dump(mode="json", exclude={"ops"}), indent=1).removesuffix("\n}")
        ops = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in self.ops.items())
        return f'{head},\n "ops": {{\n{ops}\n }}\n}}\n'

    @classmethod
    def from_json(cls, text: str | bytes) -> Lock:
        """Read the text of a lock.

        Raises:
            UnreadableLock: the text is not a lock, or is a lock of another version.
        """
        try:
            return cls.model_validate(read_json(text))
        except ValidationError as error:
            raise UnreadableLock("; ".join(complaints(error, 2))) from None
        except ValueError as error:
            raise UnreadableLock(f"not JSON: {error}") from None


def sha256(text: bytes) -> str:
    """Return the SHA-256 of a file's text in hexadecimal."""
    return hashlib.sha256(text).hexdigest()


def op_summaries(profile: Profile) -> dict[str, OpSummary]:
    """Return a row for each op, by key, in execution order. A new op changes only its readers' rows."""
    keys, ops, versions = profile.keys(), profile.ops, profile.values
    allocated = [0] * len(keys)
    for storage, op, previous in zip(versions.storage, versions.op, versions.previous, strict=True):
        if previous < 0:
            allocated[op] += profile.storages.nbytes[storage]
    n_saved = [0] * len(keys)  # saved tensors of what the op wrote
    for version in profile.saved.value:
        n_saved[versions.op[version]] += 1
    rows: dict[str, OpSummary] = {}
    for op, (key, reads) in enumerate(zip(keys, ops.reads.rows(), strict=True)):
        must_save = ops.must_save[op]
        rest = [
            [keys[versions.op[version]] for version in reads],
            ops.flags[op],
            profile.reasons[must_save] if must_save >= 0 else "",
            n_saved[op],
        ]
        rows[key] = (allocated[op], ops.flops[op], sha256(json.dumps(rest).encode())[:8])
    return rows
