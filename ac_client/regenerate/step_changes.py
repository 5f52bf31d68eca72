"""Say what changed between the steps of two locks: sizes of the step, and ops by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ac_client.regenerate.lock import Lock, OpSummary
from autoac.planner.formats.op_key import OpKey
from autoac.planner.formats.profile import Environment, StaticBytes
from autoac.planner.report.by_module import fold_paths
from autoac.planner.units import format_bytes


@dataclass(frozen=True, slots=True)
class ChangedLayer:
    """Modules whose ops changed: the same ops are new, gone or different in each of them."""

    name: str  # "blocks.0-3.mlp"; "" outside all modules
    modules: tuple[str, ...]
    new: tuple[str, ...]  # ops in each
    gone: tuple[str, ...]
    other: tuple[str, ...]  # changes of ops that stayed, in words


@dataclass(slots=True)
class _ModuleChanges:
    new: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)


def changed_step(before: Lock, after: Lock) -> list[str]:
    """Describe each difference between two steps that is not in their ops."""
    facts = [
        ("the model is a", before.model, after.model),
        ("the batch is", ", ".join(before.inputs), ", ".join(after.inputs)),
        ("device is", before.device, after.device),
        *(
            (f"{name} is", getattr(before.environment, name), getattr(after.environment, name))
            for name in Environment.model_fields
        ),
    ]
    sizes = [
        *(
            (name.replace("_", " "), getattr(before.static, name), getattr(after.static, name))
            for name in StaticBytes.model_fields
        ),
        ("gradients of the step", before.gradient_nbytes, after.gradient_nbytes),
        ("the optimizer's workspace", before.optimizer_workspace_nbytes, after.optimizer_workspace_nbytes),
    ]
    return [
        *(f"{subject} {now}, was {was}" for subject, was, now in facts if was != now),
        *(f"{subject}: {_bytes(now, was)}" for subject, was, now in sizes if was != now),
    ]


def changed_layers(
    before: Mapping[str, OpSummary], after: Mapping[str, OpSummary]
) -> tuple[ChangedLayer, ...]:
    """Return the modules whose ops or sizes changed. Layers with the same changes share an entry.

    An op with the same sizes and FLOPs, but with other inputs or saved tensors, counts only if nothing else
    in the step changed.
    """
    direct = tuple(_changed(before, after, reads=False))
    return direct or tuple(_changed(before, after, reads=True))


def _changed(
    before: Mapping[str, OpSummary], after: Mapping[str, OpSummary], *, reads: bool
) -> Iterator[ChangedLayer]:
    modules: dict[str, _ModuleChanges] = {}

    def changes_at(key: str) -> _ModuleChanges:
        return modules.setdefault(OpKey.parse(key).module, _ModuleChanges())

    for key in after:
        if key not in before:
            changes_at(key).new.append(_op_name(key))
    for key, was in before.items():
        now = after.get(key)
        if now is None:
            changes_at(key).gone.append(_op_name(key))
        elif now[:2] != was[:2]:
            parts = [f"allocates {_bytes(now[0], was[0])}"] if now[0] != was[0] else []
            parts += [f"takes {_flops(now[1])}, was {_flops(was[1])}"] if now[1] != was[1] else []
            changes_at(key).other.append(f"{_op_name(key)} {' and '.join(parts)}")
        elif reads and now != was:
            changes_at(key).other.append(
                f"{_op_name(key)}: other inputs, or autograd saves other tensors of it"
            )

    def signature(module: str) -> object:
        changes = modules[module]
        return tuple(changes.new), tuple(changes.gone), tuple(changes.other)

    for name, paths in fold_paths(modules, signature):
        changes = modules[paths[0]]
        yield ChangedLayer(name, paths, tuple(changes.new), tuple(changes.gone), tuple(changes.other))


def _op_name(key: str) -> str:
    return OpKey.parse(key).label.removesuffix("#0")


def _bytes(now: int, was: int) -> str:
    """Format two sizes, in whole bytes if the rounded texts would be equal."""
    texts = format_bytes(now), format_bytes(was)
    return "{}, was {}".format(*texts if texts[0] != texts[1] else (f"{now} B", f"{was} B"))


def _flops(flops: int) -> str:
    for unit, size in (("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6)):
        if flops >= size:
            return f"{flops / size:.3g} {unit}"
    return f"{flops} FLOP"
