"""What decides, beside its arguments, what an op computes: the same when it is run again.

It is read for each op that is recorded. All of it may be set for a while by a with-block that is around
forward, or in it, and not around backward: `torch.backends.mkldnn.flags(enabled=False)` chooses other
kernels, whose last bits are others. Not here: the state of generators (profiler/torch_facts/rng.py);
autocast, below which ops are recorded; and the precision of float32 matmuls, which is too slow to read for
each op (docs/semantics.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoac.profiler.torch_facts import private

Ambient = tuple[Any, ...]
"""Whether gradients are on, the default dtype, whether kernels are to be deterministic, what libraries do."""

_grad = torch.is_grad_enabled
_dtype = torch.get_default_dtype  # of what ops make from numbers and integers
_deterministic = private.get_deterministic_algorithms
_mkldnn = private.get_mkldnn_enabled
_mkldnn_deterministic = private.get_mkldnn_deterministic
_cudnn = private.get_cudnn_enabled
_cudnn_deterministic = private.get_cudnn_deterministic
_cudnn_benchmark = private.get_cudnn_benchmark


def _on_cpu() -> Ambient:
    return _grad(), _dtype(), _deterministic(), _mkldnn(), _mkldnn_deterministic()


def _on_gpus_too() -> Ambient:
    return (
        _grad(),
        _dtype(),
        _deterministic(),
        _mkldnn(),
        _mkldnn_deterministic(),
        _cudnn(),
        _cudnn_deterministic(),
        _cudnn_benchmark(),
    )


def _set_deterministic(value: bool) -> None:
    # What would raise has done so in forward.
    private.set_deterministic_algorithms(value, warn_only=True)


_SETTERS: tuple[Callable[[Any], None], ...] = (
    private.set_grad_enabled,
    torch.set_default_dtype,
    _set_deterministic,
    private.set_mkldnn_enabled,
    private.set_mkldnn_deterministic,
    private.set_cudnn_enabled,
    private.set_cudnn_deterministic,
    private.set_cudnn_benchmark,
)

ambient: Callable[[], Ambient] = _on_gpus_too if torch.backends.cuda.is_built() else _on_cpu
"""What is in force now. Called for each op that is recorded."""


class Switches:
    """Puts in force what was for one op after another, and at the end of the with-block what is now.

    Ops leave these switches alone, so from one op to the next only a difference costs anything.
    """

    __slots__ = ("_before", "_now", "_warns")

    def __enter__(self) -> Switches:
        self._before = self._now = ambient()
        return self

    def like(self, then: Ambient) -> None:
        """Put `then` in force."""
        if then != self._now:
            if self._now == self._before:
                self._warns = private.get_deterministic_algorithms_warn_only()
            _change(self._now, then)
            self._now = then

    def __exit__(self, *_: Any) -> None:
        if self._now != self._before:
            _change(self._now, self._before)
            private.set_deterministic_algorithms(_deterministic(), warn_only=self._warns)


def _change(now: Ambient, then: Ambient) -> None:
    for put, old, new in zip(_SETTERS, now, then, strict=False):
        if old != new:
            put(new)
