"""Record and restore the global flags of torch that decide, with its arguments, what an op computes.

A flag may be set by a with-block that is around forward, or inside it, and not around backward:
`torch.backends.mkldnn.flags(enabled=False)` selects other kernels, whose last bits differ. So each recorded
op notes the flags, and its replay restores them. Not included: generator states
(tape/torch_facts/rng.py); autocast, because ops are recorded below it; the precision of float32
matmuls, which is too slow to read for each op (docs/semantics.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.rng import UsedGenerators

Flags = tuple[Any, ...]
"""Grad mode, default dtype, deterministic algorithms, then the flags of oneDNN and cuDNN; as in _FLAGS."""


def _set_deterministic(value: bool) -> None:
    # An op that raises under this flag has raised in forward.
    private.set_deterministic_algorithms(value, warn_only=True)


_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (torch.is_grad_enabled, private.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),  # of what ops make from Python numbers
    (private.get_deterministic_algorithms, _set_deterministic),
    (private.get_mkldnn_enabled, private.set_mkldnn_enabled),
    (private.get_mkldnn_deterministic, private.set_mkldnn_deterministic),
    (private.get_cudnn_enabled, private.set_cudnn_enabled),
    (private.get_cudnn_deterministic, private.set_cudnn_deterministic),
    (private.get_cudnn_benchmark, private.set_cudnn_benchmark),
)
_grad, _dtype, _deterministic, _mkldnn, _mkldnn_deterministic, *_of_cudnn = (get for get, _ in _FLAGS)


def _cpu_flags() -> Flags:
    return _grad(), _dtype(), _deterministic(), _mkldnn(), _mkldnn_deterministic()


def _cpu_and_gpu_flags() -> Flags:
    return *_cpu_flags(), *(get() for get in _of_cudnn)


current_flags: Callable[[], Flags] = _cpu_and_gpu_flags if torch.backends.cuda.is_built() else _cpu_flags
"""Return the flags in force. Called for each op that is recorded."""


class FlagSwitcher:
    """Set the flags of one op after another; restore the caller's flags at the end of the with-block.

    Ops do not change flags, so only a difference between two ops costs anything.

    Attributes:
        current: the flags in force.
        drawn: the generators that ops draw from, whose states are restored too.
    """

    __slots__ = ("_before", "_warns", "current", "drawn")

    def __enter__(self) -> FlagSwitcher:
        self.drawn = UsedGenerators()
        self._before = self.current = current_flags()
        return self

    def set(self, flags: Flags) -> None:
        """Switch torch's global flags to `flags`, which are not the `current` ones."""
        if self.current == self._before:
            self._warns = private.get_deterministic_algorithms_warn_only()
        _switch(self.current, flags)
        self.current = flags

    def __exit__(self, *_: Any) -> None:
        self.drawn.restore()
        if self.current != self._before:
            _switch(self.current, self._before)
            private.set_deterministic_algorithms(_deterministic(), warn_only=self._warns)


def _switch(current: Flags, target: Flags) -> None:
    for (_, put), old, new in zip(_FLAGS, current, target, strict=False):
        if old != new:
            put(new)
