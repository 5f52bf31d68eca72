"""What the policies of a model were made for: a file beside them, by which a later run sees what changed.

A policy knows names and decisions. The lock knows the step as well: sizes, FLOPs and what reads what, a line
for each op, so that a change is told by the layer that it is in. Times are not in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoac.planner.formats.profile import Count, Environment, Name, Profile, StaticBytes, describe
from autoac.planner.report.by_module import folded
from autoac.planner.units import format_bytes

FORMAT: Final = "autoac.lock"
VERSION: Final = 1

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\.json$", max_length=200)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Seen = tuple[Count, Count, Annotated[str, Field(max_length=64)]]
"""Of an op: bytes that it makes, FLOPs, and a digest of what it reads, its flags, and what autograd keeps."""


class UnreadableLock(Exception):
    """The file is no lock of a version that is known here."""


class Lock(BaseModel):
    """One model's step, and the policies that were made for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["autoac.lock"] = FORMAT
    version: Literal[1] = VERSION
    name: Name  # in autoac.toml
    device: Name  # in autoac.toml
    model: Name  # the class
    planned_on: Name  # the device that the policies are for
    fingerprint: Sha256  # of the step as it is seen without the device; see observed.py
    digest: Sha256  # of the profile that the policies were last found good by
    inputs: tuple[Name, ...]
    environment: Environment
    static: StaticBytes
    gradient_nbytes: Count
    optimizer_workspace_nbytes: Count
    asked: dict[str, Any]  # settings that a plan depends on, by key of autoac.toml
    policies: dict[FileName, Sha256]  # of the text of each file
    ops: dict[Name, Seen]

    @classmethod
    def of(
        cls,
        name: str,
        device: str,
        seen: Profile,
        made_from: Profile,
        asked: Mapping[str, Any],
        policies: Mapping[str, str],
    ) -> Lock:
        """The lock of policies.

        Args:
            name, device, asked: as autoac.toml has them.
            seen: the step as it is seen without the device.
            made_from: the profile that the policies are good by; the same one for an estimated device.
            policies: SHA-256 of the text of each policy, by file name.
        """
        return cls(
            name=name,
            device=device,
            model=seen.model,
            planned_on=made_from.environment.device_name,
            fingerprint=seen.fingerprint,
            digest=made_from.digest,
            inputs=seen.inputs,
            environment=seen.environment,
            static=seen.static,
            gradient_nbytes=seen.gradient_nbytes,
            optimizer_workspace_nbytes=seen.optimizer_workspace_nbytes,
            asked=dict(asked),
            policies=dict(sorted(policies.items())),
            ops=seen_ops(seen),
        )

    def to_json(self) -> str:
        """The text of the file: one op to a line, the same text for the same lock."""
        head = json.dumps(self.model_dump(mode="json", exclude={"ops"}), indent=1).removesuffix("\n}")
        ops = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in self.ops.items())
        return f'{head},\n "ops": {{\n{ops}\n }}\n}}\n'

    @classmethod
    def from_json(cls, text: str | bytes) -> Lock:
        """Read the file.

        Raises:
            UnreadableLock: it is none, or of another version.
        """
        try:
            return cls.model_validate(json.loads(text))
        except ValidationError as error:
            raise UnreadableLock("; ".join(describe(error, 2))) from None
        except (ValueError, RecursionError) as error:
            raise UnreadableLock(f"not JSON: {error}") from None


def sha256(text: bytes) -> str:
    """Of a file's text."""
    return hashlib.sha256(text).hexdigest()


def seen_ops(profile: Profile) -> dict[str, Seen]:
    """A row for each op of a step, by key, in execution order. A new op changes no row but its readers'."""
    keys, ops, values = profile.keys(), profile.ops, profile.values
    made = [0] * len(keys)
    for storage, op, previous in zip(values.storage, values.op, values.previous, strict=True):
        if previous < 0:
            made[op] += profile.storages.nbytes[storage]
    kept = [0] * len(keys)  # saved tensors of what it wrote
    for value in profile.saved.value:
        kept[values.op[value]] += 1
    rows: dict[str, Seen] = {}
    for op, (key, reads) in enumerate(zip(keys, ops.reads.rows(), strict=True)):
        must_save = ops.must_save[op]
        rest = [
            [keys[values.op[value]] for value in reads],
            ops.flags[op],
            profile.reasons[must_save] if must_save >= 0 else "",
            kept[op],
        ]
        rows[key] = (made[op], ops.flops[op], sha256(json.dumps(rest).encode())[:8])
    return rows


# --- what changed ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moved:
    """Modules whose ops changed, all in the same way."""

    name: str  # "blocks.0-3.mlp"; "" outside all modules
    modules: tuple[str, ...]
    new: tuple[str, ...]  # ops in each
    gone: tuple[str, ...]
    other: tuple[str, ...]  # what is different about ops that stayed, in words


def changed_step(before: Lock, after: Lock) -> list[str]:
    """What differs between two steps beside their ops, in words."""
    told = []
    pairs = [
        ("the model is a", before.model, after.model),
        ("the batch is", ", ".join(before.inputs), ", ".join(after.inputs)),
        ("device is", before.device, after.device),
        *(
            (f"{name} is", getattr(before.environment, name), getattr(after.environment, name))
            for name in Environment.model_fields
        ),
    ]
    told += [f"{what} {now}, was {was}" for what, was, now in pairs if was != now]
    sizes = [
        *(
            (name.replace("_", " "), getattr(before.static, name), getattr(after.static, name))
            for name in StaticBytes.model_fields
        ),
        ("gradients of the step", before.gradient_nbytes, after.gradient_nbytes),
        ("the optimizer's workspace", before.optimizer_workspace_nbytes, after.optimizer_workspace_nbytes),
    ]
    told += [f"{what}: {_bytes(now, was)}" for what, was, now in sizes if was != now]
    return told


def changed_ops(before: Mapping[str, Seen], after: Mapping[str, Seen]) -> tuple[Moved, ...]:
    """The modules whose ops are other ones, or of other sizes, layers that changed alike told once.

    What merely reads another op than before is told only where nothing else is.
    """
    direct = tuple(_moved(before, after, reads=False))
    return direct or tuple(_moved(before, after, reads=True))


def _moved(before: Mapping[str, Seen], after: Mapping[str, Seen], *, reads: bool) -> Iterator[Moved]:
    modules: dict[str, tuple[list[str], list[str], list[str]]] = {}

    def at(key: str) -> tuple[list[str], list[str], list[str]]:
        return modules.setdefault(key.rpartition("/")[0], ([], [], []))

    for key in after:
        if key not in before:
            at(key)[0].append(_op(key))
    for key, was in before.items():
        now = after.get(key)
        if now is None:
            at(key)[1].append(_op(key))
        elif now[:2] != was[:2]:
            nbytes, flops = (now[0], was[0]), (now[1], was[1])
            parts = [f"makes {_bytes(*nbytes)}"] if nbytes[0] != nbytes[1] else []
            parts += [f"takes {_flops(flops[0])}, was {_flops(flops[1])}"] if flops[0] != flops[1] else []
            at(key)[2].append(f"{_op(key)} {' and '.join(parts)}")
        elif reads and now != was:
            at(key)[2].append(f"{_op(key)} reads other ops, or other tensors of it are kept for backward")

    def signature(module: str) -> object:
        return tuple(tuple(part) for part in modules[module])

    for name, paths in folded(modules, signature):
        new, gone, other = modules[paths[0]]
        yield Moved(name, paths, tuple(new), tuple(gone), tuple(other))


def _op(key: str) -> str:
    name = key.rpartition("/")[2].removeprefix("aten.")
    return name.removesuffix("#0")


def _bytes(now: int, was: int) -> str:
    """Two sizes; in whole bytes where they would read alike."""
    texts = format_bytes(now), format_bytes(was)
    return "{}, was {}".format(*texts if texts[0] != texts[1] else (f"{now} B", f"{was} B"))


def _flops(flops: int) -> str:
    for unit, size in (("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops} FLOP"
