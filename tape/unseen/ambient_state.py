"""Capture the state around a call, and put it in force again.

The state is generators, autocast, flags of attention, the precision of float32 matmuls, and whether
checkpoints are plain calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from autoac.tape.checkpoints.own_checkpoints import checkpoints_are_plain, plain_checkpoints
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.rng import UsedGenerators

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]

# Read for each call, in addition to the flags of global_flags.py: a rerun chooses its kernels again.
_SETTINGS: tuple[_Setting, ...] = (
    (private.get_flash_sdp_enabled, private.set_flash_sdp_enabled),
    (private.get_mem_efficient_sdp_enabled, private.set_mem_efficient_sdp_enabled),
    (private.get_math_sdp_enabled, private.set_math_sdp_enabled),
    (private.get_cudnn_sdp_enabled, private.set_cudnn_sdp_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)


class AmbientState:
    """The state around a call that decides, with its arguments and attributes, what the call computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generators = UsedGenerators.of_defaults(device)
        cached = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached)
            for kind in dict.fromkeys(("cpu", device.type))
        ]
        self._plain = checkpoints_are_plain()
        self._settings = [get() for get, _ in _SETTINGS]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put the state in force while the body runs; then restore the present state."""
        with ExitStack() as stack:
            stack.callback(UsedGenerators.of_defaults(self._device).restore)
            self._generators.restore()
            for kind, enabled, dtype, cached in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached)
                    )
            if self._plain:
                stack.enter_context(plain_checkpoints())
            for (get, put), value in zip(_SETTINGS, self._settings, strict=True):
                if (now := get()) != value:
                    put(value)
                    stack.callback(put, now)
            yield
