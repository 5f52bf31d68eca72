"""Read the key that names an op in profiles, policies and reports.

    layers.3.mlp/aten.mm.default#1
    ------------ --------------- -
    module       op              occurrence: the second `aten.mm.default` in that module

An op with use groups may run several times in backward. From the second run on, the key ends with "@" and the
number of the run: "...mm.default#1@2".

Which kernel computes attention or a norm depends on the device and its libraries. Such an op has the name
that models call it by (`aten.batch_norm.default`), so that a policy holds wherever the op runs.

A module's path may contain "/" and "#": `nn.ModuleDict({"a/b": ...})`. The name of an op contains neither.
So a key is split at its last "/". No other file takes keys apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

ROOT = "."
"""The path of the model itself."""

_KERNELS = {
    "aten.scaled_dot_product_attention.default": (
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
    ),
    "aten.batch_norm.default": (
        "aten.native_batch_norm.default",
        "aten.cudnn_batch_norm.default",
        "aten.miopen_batch_norm.default",
    ),
    "aten.rms_norm.default": ("aten._fused_rms_norm.default",),
    "aten.grid_sampler.default": ("aten.grid_sampler_2d.default", "aten.cudnn_grid_sampler.default"),
}
_NAME_OF_KERNEL = {kernel: name for name, kernels in _KERNELS.items() for kernel in kernels}

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a number standing alone in a module path


def name_in_keys(op: str) -> str:
    """Return the name that keys have for `op`, which equivalent kernels share.

    >>> name_in_keys("aten.cudnn_batch_norm.default"), name_in_keys("aten.mm.default")
    ('aten.batch_norm.default', 'aten.mm.default')
    """
    return _NAME_OF_KERNEL.get(op, op)


def kernels_of(name: str) -> tuple[str, ...]:
    """Return the ops that have the name `name` in keys: several for equivalent kernels."""
    return _KERNELS.get(name, (name,))


@dataclass(frozen=True, slots=True)
class OpKey:
    """The parts of an op's key.

    >>> OpKey.parse("layers.3.mlp/aten.mm.default#1")
    OpKey(module='layers.3.mlp', op='aten.mm.default', occurrence=1, run=1)
    """

    module: str  # "layers.3.mlp"; "." is the model itself
    op: str  # "aten.mm.default"
    occurrence: int | None = 0  # how often the op ran in the module before; None in a name without "#"
    run: int = 1  # which of the runs in backward, if the op has use groups

    @classmethod
    def parse(cls, key: str) -> OpKey:
        """Return the parts of `key`. A text without "/" is the name of an op outside of all modules."""
        module, _, name = key.rpartition("/")
        rest, mark, number = name.rpartition("@")
        name, run = (rest, int(number)) if mark and number.isdecimal() else (name, 1)
        op, mark, occurrence = name.rpartition("#")
        if mark and occurrence.isdecimal():
            return cls(module, op, int(occurrence), run)
        return cls(module, name, None, run)

    def __str__(self) -> str:
        run = "" if self.run == 1 else f"@{self.run}"
        return f"{self.module}/{self.op}" + ("" if self.occurrence is None else f"#{self.occurrence}") + run

    @property
    def short_op(self) -> str:
        """Return the op as reports show it: `mm.default`."""
        return self.op.removeprefix("aten.")

    @property
    def label(self) -> str:
        """Return the op and its occurrence as reports show them: `mm.default#1` is the second call."""
        run = "" if self.run == 1 else f"@{self.run}"
        return self.short_op + ("" if self.occurrence is None else f"#{self.occurrence}") + run

    def block(self, depth: int = 1) -> str:
        """Return the path of the block around the op, `depth` blocks deep; "" if there is none.

        >>> OpKey.parse("encoder.layers.3.experts.0.up/aten.mm.default#1").block()
        'encoder.layers.3'
        >>> OpKey.parse("encoder.layers.3.experts.0.up/aten.mm.default#1").block(2)
        'encoder.layers.3.experts.0'
        """
        ends = [match.end() for match in NUMBER.finditer(self.module)]
        return self.module[: ends[depth - 1]] if depth <= len(ends) else ""


def spans_by_module(modules: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """Return, for each module, the spans [begin, end) of ops in which it or one of its submodules runs.

    Consecutive calls of a module share one span.

    Args:
        modules: the module of each op.

    >>> spans_by_module(["a", "a.b", ".", "a"])
    {'a': [(0, 2), (3, 4)], 'a.b': [(1, 2)]}
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    begins: dict[str, int] = {}
    for i, module in enumerate([*modules, ROOT]):
        enclosing = _enclosing(module) if i < len(modules) else []
        for path in [path for path in begins if path not in enclosing]:
            spans.setdefault(path, []).append((begins.pop(path), i))
        for path in enclosing:
            begins.setdefault(path, i)
    return spans


def _enclosing(module: str) -> list[str]:
    """Return the paths of the modules around `module`, itself included."""
    if module == ROOT:
        return []
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
