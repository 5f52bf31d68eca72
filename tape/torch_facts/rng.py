"""Find the generator that an op draws from, and restore the states of generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from autoac.tape.torch_facts.op_signature import tensors_in


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """A generator and one of its states.

    The state is bytes: a tensor would count as device memory if the device is the CPU.
    """

    generator: torch.Generator
    state: bytes

    def restore(self) -> None:
        """Set the generator to this state."""
        self.generator.set_state(torch.frombuffer(bytearray(self.state), dtype=torch.uint8))


def capture_generator(generator: torch.Generator) -> GeneratorState:
    """Return `generator` with the state that it has now."""
    return GeneratorState(generator, generator.get_state().numpy().tobytes())


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that ops on `device` draw from if none is passed to them."""
    if device.type in ("cpu", "meta"):  # nothing is drawn on meta, which has no generator
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    generator: torch.Generator = module.default_generators[index]
    return generator


def generator_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    """Return the generator that an op with these arguments draws from."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    for tensor in tensors_in(args, kwargs):
        return default_generator(tensor.device)
    return default_generator(torch.device(kwargs.get("device") or "cpu"))


def as_compiled(op: Any) -> Callable[..., Tensor] | None:
    """Return a call of one of Inductor's random ops that draws as its code does; None for another op.

    Called by torch, the op that makes seeds draws twice from the generator of the device, and an op that has
    a seed draws from that generator, too, in place of numbers that the seed alone decides.
    """
    own: Callable[..., Tensor] | None = _DRAWS.get(op._schema.name)

    if own is None:
        return None

    def call(*args: Any, **kwargs: Any) -> Tensor:
        if all(type(tensor) is Tensor for tensor in tensors_in(args, {})):
            return own(*args)
        fake: Tensor = op(*args, **kwargs)
        return fake

    return call


def _seeds(*count_and_device: Any) -> Tensor:
    *count, device = count_and_device
    return torch.randint(2**63 - 1, count, device=device)


def _random(size: Sequence[int], seed: Tensor, mode: str) -> Tensor:
    draw: Callable[..., Tensor] = getattr(torch, mode)
    return draw(size, generator=_seeded(seed), device=seed.device, dtype=torch.float32)


def _randint(low: int, high: int, size: Sequence[int], seed: Tensor) -> Tensor:
    return torch.randint(low, high, size, generator=_seeded(seed), device=seed.device)


def _seeded(seed: Tensor) -> torch.Generator:
    return torch.Generator(seed.device).manual_seed(int(seed))


_DRAWS: dict[str, Callable[..., Tensor]] = {
    "prims::inductor_seed": _seeds,
    "prims::inductor_seeds": _seeds,
    "prims::inductor_random": _random,
    "prims::inductor_randint": _randint,
}


class UsedGenerators:
    """The generators that ops drew from, each with its state before the first draw."""

    def __init__(self) -> None:
        self._states: dict[int, GeneratorState] = {}

    @classmethod
    def of_defaults(cls, device: torch.device) -> UsedGenerators:
        """Return the default generators for the CPU and for `device`."""
        used = cls()
        used.keep(torch.default_generator)
        used.keep(default_generator(device))
        return used

    def keep(self, generator: torch.Generator) -> None:
        """Note `generator`, from which an op is about to draw."""
        if id(generator) not in self._states:
            self._states[id(generator)] = capture_generator(generator)

    def restore(self) -> None:
        """Set each generator to its state before the first draw."""
        for state in self._states.values():
            state.restore()


@contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Put the default generators of torch, for the CPU and `device`, of Python and numpy back at the end."""
    of_torch = UsedGenerators.of_defaults(device)
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        of_torch.restore()
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
