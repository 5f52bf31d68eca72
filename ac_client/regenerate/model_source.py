"""Load a listed model and profile its step, on the device or without it.

NOTE [ Identity step ]

Two profiles have two purposes. `identity` says whether the model changed; it comes from a fake step
(profiler/fake_step.py), which allocates nothing and needs no GPU, so that a check can run anywhere.
`profile` is what plans are made from.

- For an estimated device the two are the same.
- For the local device the identity is a fake step for IDENTITY_DEVICE, whatever the local device is, so that
  every machine computes the same one. Its run times are not used.
- A model that cannot take a fake step is identified by its step on the local device; then the device and its
  number of threads belong to the identity, but not the model of a CPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from ac_client.errors import CommandError
from ac_client.model_loader import TrainingSetup, call_function, load_function, setup_from
from ac_client.regenerate.config import FLOATS, LOCAL, ModelTable, tensor_of
from autoac.planner.formats.profile import Profile
from autoac.profiler import (
    DATASHEETS,
    CannotFake,
    Device,
    ProfilerError,
    device_name,
    device_of,
)

IDENTITY_DEVICE = DATASHEETS["h100"]


class ModelSource:
    """One listed model. Each of its two profiles is made once, when it is first used."""

    def __init__(self, name: str, table: ModelTable, folder: Path) -> None:
        """Load the model.

        Raises:
            CommandError: the entry cannot be called, or does not return a model.
        """
        self.name, self.table = name, table
        self._setup = _load_setup(table, folder)

    @property
    def is_estimated(self) -> bool:
        """Return True if plans are made from a datasheet, so that the device need not be here."""
        return self.table.device != LOCAL

    @property
    def local_device_name(self) -> str:
        """Return the name of the device on which the entry put the model."""
        return device_name(self._setup.device)

    @cached_property
    def identity(self) -> Profile:
        """The step that identifies the model on every machine. See NOTE [ Identity step ]."""
        try:
            return self._observe(DATASHEETS[self.table.device] if self.is_estimated else IDENTITY_DEVICE)
        except CannotFake as error:
            if self.is_estimated:
                raise CommandError(
                    f'{error}: set device = "{LOCAL}" in [models.{self.name}], and plan on the machine '
                    "that trains the model"
                ) from error
            return _on_any_cpu(self.profile)

    @cached_property
    def profile(self) -> Profile:
        """The step that plans are made from; for the local device it runs there."""
        return self.identity if self.is_estimated else self._observe(None)

    def _observe(self, device: Device | None) -> Profile:
        dtype = getattr(torch, self.table.autocast) if self.table.autocast is not None else None
        with contextlib.redirect_stdout(sys.stderr):
            try:
                return self._setup.observe(device, dtype, link=self.table.constraints.host_budget_gb > 0)
            except ProfilerError:
                raise
            except Exception as error:  # anything that the user's model raises
                raise CommandError(
                    f"a training step of {self.table.entry} raised {type(error).__name__}: {error}"
                ) from error


def _load_setup(table: ModelTable, folder: Path) -> TrainingSetup:
    """Call the entry; use the batch of the file, if it has one, instead of the entry's own."""
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for our results, not for the user's prints
        function = load_function(table.entry, str(folder))
        with torch.device("meta") if table.meta else contextlib.nullcontext():
            returned = call_function(function, table.entry)
    if isinstance(returned, nn.Module):
        if table.inputs is None:
            raise CommandError(
                f"{table.entry} returned a model without a batch; return (model, batch), or add "
                'inputs = ["int64[8, 128]"] to its table'
            )
        setup = TrainingSetup(returned)
    else:
        setup = setup_from(returned, table.entry)
    if table.inputs is None:
        return setup
    local = None if table.device != LOCAL else device_of(setup.model)
    if isinstance(table.inputs, Mapping):
        kwargs = {name: _tensor(text, local) for name, text in table.inputs.items()}
        return replace(setup, args=(), kwargs=kwargs)
    return replace(setup, args=tuple(_tensor(text, local) for text in table.inputs), kwargs={})


def _on_any_cpu(profile: Profile) -> Profile:
    """Return `profile` without the name of the CPU that it was measured on, if it was one."""
    environment = profile.environment
    if environment.device_type != "cpu":
        return profile
    return profile.model_copy(update={"environment": environment.model_copy(update={"device_name": "cpu"})})


def _tensor(text: str, device: torch.device | None) -> Tensor:
    """Return a tensor of ones; without a device, a floating-point one allocates no memory.

    Integer and bool tensors always have values, since models read them (NOTE [ Known values ] in
    tape/capture/known_values.py). Ones are in range as indices, and as a mask they hide nothing.
    """
    name, shape = tensor_of(text)
    if device is None:
        device = torch.device("meta" if name in FLOATS else "cpu")
    return torch.ones(shape, dtype=getattr(torch, name), device=device)
