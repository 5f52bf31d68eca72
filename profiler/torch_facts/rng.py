"""Generator states: which generator an op draws from, and putting states back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from autoac.profiler.torch_facts.op_signature import tensors_in


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """A generator and the state that it had.

    As bytes: a tensor would count as device memory where the device is the CPU.
    """

    generator: torch.Generator
    state: bytes

    def restore(self) -> None:
        """Put the generator back to this state."""
        self.generator.set_state(torch.frombuffer(bytearray(self.state), dtype=torch.uint8))


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that ops on `device` draw from when they are given none."""
    if device.type in ("cpu", "meta"):  # on meta nothing is drawn, and there is no generator
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator


def generator_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    """The generator that an op with these arguments draws from."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    for tensor in tensors_in(args, kwargs):
        return default_generator(tensor.device)
    return default_generator(torch.device(kwargs.get("device") or "cpu"))


def capture_generator(generator: torch.Generator) -> GeneratorState:
    """The state of `generator` now."""
    return GeneratorState(generator, generator.get_state().numpy().tobytes())


@contextmanager
def generator_at(state: GeneratorState) -> Iterator[None]:
    """Run with the generator in `state`, and leave it where it was."""
    now = capture_generator(state.generator)
    state.restore()
    try:
        yield
    finally:
        now.restore()


class DefaultGenerators:
    """The default generators of the CPU, of `device`, of Python and of numpy as they are now."""

    def __init__(self, device: torch.device) -> None:
        self._states = [capture_generator(torch.default_generator)]
        if device.type not in ("cpu", "meta"):
            self._states.append(capture_generator(default_generator(device)))
        self._of_python, self._of_numpy = random.getstate(), numpy.random.get_state()

    def restore(self) -> None:
        """Put them back to that."""
        for state in self._states:
            state.restore()
        random.setstate(self._of_python)
        numpy.random.set_state(self._of_numpy)


@contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Leave the default generators of the CPU, of `device`, of Python and of numpy where they were."""
    before = DefaultGenerators(device)
    try:
        yield
    finally:
        before.restore()
