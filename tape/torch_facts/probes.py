"""Try how torch behaves before a feature relies on it, since a name may stay while its meaning changes.

A probe is a function that returns True if torch behaves as the feature needs. It takes milliseconds, and
runs once in a process, at the first use of the feature. Probes run in a thread of their own: no mode, hook,
autocast or transform of the caller is active there, and grad mode is on. They compute on the CPU.

The probe of the checkpoints of a model's own code is in tape/checkpoints/own_checkpoints.py, and that of
FSDP in tape/distributed/fsdp.py.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoac.tape.errors import NEWEST_TORCH, UnsupportedTorch
from autoac.tape.torch_facts import minor_version, private, rng

log = logging.getLogger(__name__)

Probe = Callable[[], bool]


@functools.cache
def check(feature: str, *probes: Probe, otherwise: str = "") -> None:
    """Run the probes of a feature, whose names must be there.

    Args:
        feature: as in `private`; "" for what every planned step needs.
        otherwise: the way to do without the feature.

    Raises:
        UnsupportedTorch: torch lacks a name, or a probe failed.
    """
    if feature:
        private.require(feature)
    for probe in probes:
        if (cause := _failure(probe)) is not None:
            raise UnsupportedTorch(
                torch.__version__,
                f"it behaves differently: the probe {probe.__name__} failed"
                + (f" ({type(cause).__name__}: {cause})" if str(cause) else ""),
                feature,
                otherwise=otherwise,
            ) from cause


@functools.cache
def check_torch() -> None:
    """Run the probes of what every planned step needs; warn about a torch that is newer than all tested ones.

    Raises:
        UnsupportedTorch: a probe failed.
    """
    check("", saved_tensor_is_packed_once, mode_sees_op_of_rerun, replayed_dropout_draws_same_numbers)
    if minor_version() > NEWEST_TORCH:
        log.warning(
            "torch %s is newer than the releases that this autoac was tested with, up to %d.%d; in what was "
            "tried now, it behaves like them",
            torch.__version__,
            *NEWEST_TORCH,
        )


def saved_tensor_is_packed_once() -> bool:
    """Return True if hooks pack a saved tensor once, and what they return is unpacked in backward."""
    packed: list[Tensor] = []
    unpacked: list[int] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach())
        return len(packed) - 1

    def unpack(number: int) -> Tensor:
        unpacked.append(number)
        return packed[number]

    x = _ones().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = x.exp()
    out.sum().backward()
    return len(packed) == 1 and unpacked == [0] and x.grad is not None and torch.equal(x.grad, out)


def mode_sees_op_of_rerun() -> bool:
    """Return True if a dispatch mode that is entered in backward sees an op that runs there."""
    watch = _Watch()

    def rerun(_node: int) -> Tensor:
        with watch:
            return _ones().exp()

    x = _ones().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda _tensor: 0, rerun):
        out = x.exp()
    out.sum().backward()
    return torch.ops.aten.exp.default in watch.seen and x.grad is not None and torch.equal(x.grad, out)


def function_calls_are_seen() -> bool:
    """Return True if a dispatch mode sees a call of a Function, once `watch_functions` has run."""

    class Cloned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

    Cloned.__module__ = "__main__"  # a Function of a user
    with _Watch() as watch:
        Cloned.apply(_ones().requires_grad_())  # type: ignore[no-untyped-call]
    return Cloned in watch.seen


def replayed_dropout_draws_same_numbers() -> bool:
    """Return True if dropout drops the same numbers again from a generator that is put back."""
    state = rng.capture_generator(torch.default_generator)
    with rng.generator_at(state):
        first, _ = torch.ops.aten.native_dropout.default(_ones(64), 0.5, True)
        state.restore()
        again, _ = torch.ops.aten.native_dropout.default(_ones(64), 0.5, True)
    return torch.equal(first, again) and 0 < int(first.count_nonzero()) < 64


class _Watch(private.TorchDispatchMode):
    """Note the ops and Functions that run under the mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports Dynamo, which takes seconds

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(op)
        return op(*args, **(kwargs or {}))

    def run_function(self, cls: type, args: Any, kwargs: Any, apply: Callable[..., Any]) -> Any:
        self.seen.append(cls)
        return apply(*args, **kwargs)


def _ones(numbers: int = 2) -> Tensor:
    return torch.ones(numbers, dtype=torch.float32, device="cpu")


def _failure(probe: Probe) -> Exception | None:
    """Run a probe in a thread of its own. Return why it failed; None if it passed."""
    causes: list[Exception | None] = []

    def run() -> None:
        try:
            causes.append(None if probe() else RuntimeError())
        except Exception as error:  # noqa: BLE001 - whatever torch raises is a difference
            causes.append(error)

    thread = threading.Thread(target=run, name=f"autoac {probe.__name__}", daemon=True)
    thread.start()
    thread.join()
    return causes[0] if causes else RuntimeError("it ended early")
