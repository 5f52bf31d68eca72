"""The profiles of a model by size: profiled at a few sizes, and joined everywhere else.

Knots (planner/sizes/profile_by_size.py) are profiled with the requested bytes, and one of them as the
allocator of the device rounds. A size that is asked for by itself becomes a knot, if it lies on their curves.
Sizes with other ops, such as a batch of 1, have a profile of their own. So has every size of steps that run
for real where the allocator rounds: what they request is not known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from ac_client.arguments import check_unplanned
from ac_client.model_loader import TrainingSetup, call_function, setup_from
from ac_client.planning.batch_shape import shape_of
from autoac.planner import Profile, ProfileBySize
from autoac.planner.formats.policy_set import Shape
from autoac.planner.sizes.profile_by_size import stream_of
from autoac.profiler import Device, KernelKind
from autoac.profiler.static_memory import optimizer_step_us

log = logging.getLogger("ac_client.fit")

Make = Callable[[int], Any]
"""Takes a size; returns the model and its batch, as the function of `autoac profile` does."""


class ProfiledSizes:
    """The profiles of one model on one device, by size.

    Args:
        device: a datasheet, for fake profiles; None for steps that run for real.
        accumulates: if gradients exist before a forward; None: as a batch's setup says.

    Attributes:
        accumulates: the same, as far as it is known: 0 or False if none exist.
        joined: the profiles by size through the knots of one op stream; None before there are two.
        shapes: of the batches that were built, by size.
        runs: steps run for real.
        autocast: the type that steps are cast to.
        optimizer_us: that a step of the optimizer takes; 0 without one, None before the first profile.
    """

    def __init__(
        self, make: Make, device: Device | None, autocast: torch.dtype | None, accumulates: int | None = None
    ) -> None:
        self._make = make
        self._device = device
        self.runs = device is None
        self.autocast = autocast
        self.accumulates = accumulates
        self.optimizer_us: float | None = None
        self._knots: dict[int, Profile] = {}
        self._profiled: dict[int, Profile] = {}
        self.joined: ProfileBySize | None = None
        self.shapes: dict[int, Shape] = {}

    @property
    def profiled(self) -> tuple[int, ...]:
        """Return the sizes that have a profile of their own."""
        return tuple(sorted(self._profiled))

    @property
    def optimizer_us_of_batch(self) -> float:
        """Return the time of the optimizer's step that a batch has to bear."""
        return (self.optimizer_us or 0.0) / max(1, self.accumulates or 1)

    def join(self, *sizes: int) -> None:
        """Make knots of `sizes`. Only those with the ops of the first call's largest one count.

        A model whose ops are others in another step of the same size is not joined.
        """
        for size in sizes:
            if size not in self._knots:
                with suppress(torch.OutOfMemoryError):  # raised by `at`, where it matters
                    self._knots[size] = self._knot(size)
        if any(knot.environment.allocator_rounding != 1 for knot in self._knots.values()) or not self._knots:
            return
        of_stream = self._knots[max(self._knots)] if self.joined is None else self.joined.rounded
        stream = stream_of(of_stream)
        alike = {size: knot for size, knot in self._knots.items() if stream_of(knot) == stream}
        if len(alike) > 1 and stream_of(rounded := self.profile(min(alike))) == stream:
            self.joined = ProfileBySize.of(alike, (min(alike), rounded))

    def _knot(self, size: int) -> Profile:
        if self._device is None:
            return self.profile(size)
        return self._observe(size, replace(self._device, allocator_rounding=1))

    def profile(self, size: int) -> Profile:
        """Return the profile of `size` itself."""
        if size not in self._profiled:
            self._profiled[size] = self._as_knot(size) or self._observe(size, self._device)
        return self._profiled[size]

    def _as_knot(self, size: int) -> Profile | None:
        """Make a knot of `size`; return its profile as the allocator rounds, or None if it is on no curve."""
        joined = self.joined
        if self._device is None or joined is None or joined.measured_only or size < joined.sizes[0]:
            return None
        self.join(size)
        joined = self.joined or joined
        return joined.at(size) if size in joined.sizes and not joined.measured_only else None

    def at(self, size: int) -> Profile:
        """Return the profile of `size`, joined where that is possible."""
        if size in self._profiled:
            return self._profiled[size]
        joined = self.joined
        if joined is None or joined.measured_only:  # bytes that no curve through the knots has
            return self.profile(size)
        if size < joined.sizes[0] or (size in self._knots and size not in joined.sizes):
            return self.profile(size)
        return joined.at(size)

    def setup(self, size: int) -> TrainingSetup:
        """Return the model and a batch of `size`."""
        name = getattr(self._make, "__name__", type(self._make).__name__)
        return setup_from(call_function(self._make, f"{name}({size})", size), name)

    def _observe(self, size: int, device: Device | None) -> Profile:
        if device is None and torch.cuda.is_available():
            torch.cuda.empty_cache()  # so that room does not depend on the sizes before
        if size not in self.shapes:
            log.info("profiling a step of size %d", size)
        setup = self.setup(size)
        if self.runs:
            check_unplanned(setup.model, may_checkpoint=True)  # a profile is one of the plain model
        self.shapes[size] = shape_of(setup.args, setup.kwargs)
        if self.accumulates is None:
            self.accumulates = setup.accumulates
        found = replace(setup, accumulates=None).observe(device, self.autocast)
        if self.optimizer_us is None:
            self.optimizer_us = self._optimizer_us(setup, found)
        return found

    def _optimizer_us(self, setup: TrainingSetup, found: Profile) -> float:
        """Return how long the optimizer's step takes: on this machine, or by the bytes that it moves."""
        optimizer, device = setup.optimizer, self._device
        if optimizer is None:
            return 0.0
        if device is None:
            return optimizer_step_us(optimizer, setup.device)
        gradients = found.static.gradients + found.gradient_nbytes  # read, as parameters are, which it writes
        moved = 3 * gradients + 2 * found.static.optimizer_state
        return 1e6 * moved / (device.bytes_per_s * device.efficiency[KernelKind.POINTWISE])
