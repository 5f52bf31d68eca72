"""The step of a listed model, seen without its device and, where plans are made from measurements, on it.

NOTE [ Seen ]

Whether a model changed is asked of a fake step (profiler/steps/fake.py), which allocates nothing and needs
no GPU, so a check can run anywhere. For an estimated device that step is also what plans are made from. For
the local one it is a stand-in that only identifies the model: a fake step for STAND_IN, whatever the local
device is, so that every machine sees the same. A model that cannot take a fake step is seen by a hollow one
where it is; then the device and its number of threads belong to what is seen.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ac_client.cli.output import Case, CommandError, call, case_of, load_function
from ac_client.regenerate.config import LOCAL, ModelTable, is_float, tensor_of
from autoac.planner.formats.profile import Profile
from autoac.profiler import DATASHEETS, CannotFake, ProfilerError, device_name, device_of, observe
from autoac.profiler.timing.roofline import Device

STAND_IN = DATASHEETS["h100"]


class Observed:
    """The step of one listed model; profiles are made when they are asked for, once."""

    def __init__(self, name: str, table: ModelTable, folder: Path) -> None:
        """
        Raises:
            CommandError: the entry cannot be called, or returns no model.
        """
        self.name, self.table = name, table
        self._case = _case(table, folder)
        self._seen: Profile | None = None
        self._measured: Profile | None = None

    @property
    def estimated(self) -> bool:
        """Whether the device need not be here."""
        return self.table.device != LOCAL

    @property
    def here(self) -> str:
        """The name of the local device, on which the entry put the model."""
        case = self._case
        return device_name(device_of(case.model, case.args, case.kwargs))

    def seen(self) -> Profile:
        """The step as every machine sees it. See NOTE [ Seen ]."""
        if self._seen is None:
            try:
                self._seen = self._on(DATASHEETS[self.table.device] if self.estimated else STAND_IN)
            except CannotFake as error:
                if self.estimated:
                    raise CommandError(
                        f'{error}: set device = "{LOCAL}" in [models.{self.name}], and plan where it trains'
                    ) from error
                self._seen = self.measured()
        return self._seen

    def measured(self) -> Profile:
        """The step that plans are made from: for the local device one that runs there."""
        if self.estimated:
            return self.seen()
        if self._measured is None:
            self._measured = self._on(None)
        return self._measured

    def _on(self, device: Device | None) -> Profile:
        case = self._case
        local = device_of(case.model, case.args, case.kwargs)
        with contextlib.redirect_stdout(sys.stderr), _autocast(device, local, self.table.autocast):
            try:
                return observe(
                    case.model, case.args, case.kwargs, loss=case.loss, optimizer=case.optimizer, on=device
                )
            except ProfilerError:
                raise
            except Exception as error:  # anything that the user's model does
                raise CommandError(
                    f"a training step of {self.table.entry} raised {type(error).__name__}: {error}"
                ) from error


def _case(table: ModelTable, folder: Path) -> Case:
    """What the entry returns, with the file's batch in place of its own if the file has one."""
    with contextlib.redirect_stdout(sys.stderr):  # results of ours go to stdout, and the user's prints do not
        function = load_function(table.entry, str(folder))
        with torch.device("meta") if table.meta else contextlib.nullcontext():
            returned = call(function, table.entry)
    if isinstance(returned, nn.Module):
        if table.inputs is None:
            raise CommandError(
                f"{table.entry} returned a model without a batch; return (model, batch), or add "
                'inputs = ["int64[8, 128]"] to its table'
            )
        case = Case(returned)
    else:
        case = case_of(returned, table.entry)
    if table.inputs is None:
        return case
    local = None if table.device != LOCAL else device_of(case.model)
    if isinstance(table.inputs, Mapping):
        return replace(
            case, args=(), kwargs={name: _tensor(text, local) for name, text in table.inputs.items()}
        )
    return replace(case, args=tuple(_tensor(text, local) for text in table.inputs), kwargs={})


def _tensor(spelled: str, device: torch.device | None) -> Tensor:
    """A tensor of ones; without a device, a floating-point one that has no memory.

    Integer and bool tensors have values in either case: models look at them (NOTE [ Known values ] in
    profiler/steps/fake.py). Ones are in range as indices, and as a mask they hide nothing.
    """
    name, shape = tensor_of(spelled)
    if device is None:
        device = torch.device("meta" if is_float(name) else "cpu")
    return torch.ones(shape, dtype=getattr(torch, name), device=device)


@contextlib.contextmanager
def _autocast(device: Device | None, local: torch.device, dtype: str | None) -> Iterator[None]:
    """The table's autocast, also for a device that is not here, where torch.autocast would be off."""
    if dtype is None:
        yield
        return
    kind: torch.dtype = getattr(torch, dtype)
    if device is None:
        with torch.autocast(local.type, dtype=kind):
            yield
        return
    before = torch.is_autocast_enabled(device.device_type), torch.get_autocast_dtype(device.device_type)
    try:
        torch.set_autocast_enabled(device.device_type, True)
        torch.set_autocast_dtype(device.device_type, kind)
        yield
    finally:
        torch.set_autocast_enabled(device.device_type, before[0])
        torch.set_autocast_dtype(device.device_type, before[1])
