"""Load a model, its batch and its optimizer by the name of a function, as `MODULE:FUNCTION`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from ac_client.errors import CommandError
from autoac.planner import Profile
from autoac.profiler import Device, device_of, link_of, observe


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """A model and what one training step of it takes."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Any] | None = None
    optimizer: torch.optim.Optimizer | None = None
    accumulates: int | None = None  # gradients exist before a forward: True, or how many micro-batches add up

    @property
    def device(self) -> torch.device:
        """Return the device on which the model is."""
        return device_of(self.model, self.args, self.kwargs)

    def observe(
        self, on: Device | None, autocast: torch.dtype | None, *, compiled: bool = False, link: bool = True
    ) -> Profile:
        """Return the profile of a step.

        Args:
            on: the datasheet of a device; None to run the step on that of the model.
            autocast: the type that the step is cast to.
            compiled: of `torch.compile(model)`.
            link: with the link of the device to its host.
        """
        found = observe(
            torch.compile(self.model) if compiled else self.model,  # type: ignore[arg-type]
            self.args,
            self.kwargs,
            loss=self.loss,
            optimizer=self.optimizer,
            on=on,
            autocast=autocast,
            accumulates=True if self.accumulates else None,
        )
        return found.model_copy(update={"link": link_of(on or self.device)}) if link else found


def load_function(name: str, folder: str) -> Callable[[], Any]:
    """Return the function that `MODULE:FUNCTION` names; `folder` is searched for MODULE first.

    Raises:
        CommandError: MODULE or FUNCTION cannot be imported, or is not callable.
    """
    module_name, _, function_name = name.partition(":")
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)
    try:
        function: Any = importlib.import_module(module_name)
        for part in function_name.split("."):
            function = getattr(function, part)
    except Exception as error:  # anything that the user's module raises
        raise CommandError(f"{name}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise CommandError(
            f"{name} is of type {type(function).__name__}; name a function that returns a model"
        )
    return cast("Callable[[], Any]", function)


def call_function(function: Callable[..., Any], name: str, *args: Any) -> Any:
    """Call the user's function; turn whatever it raises into a CommandError, except for want of memory."""
    try:
        return function(*args)
    except torch.OutOfMemoryError:  # `fit` then tries smaller sizes
        raise
    except Exception as error:  # anything that the user's function raises
        raise CommandError(f"{name}: {type(error).__name__}: {error}") from error


def setup_from(returned: Any, name: str) -> TrainingSetup:
    """Read a TrainingSetup from the value that the user's function returned.

    Raises:
        CommandError: the value has none of the forms that `autoac profile` accepts.
    """
    keys = tuple(TrainingSetup.__dataclass_fields__)
    match returned:
        case Mapping() if "model" in returned and set(returned) <= set(keys):
            setup = TrainingSetup(**returned)
        case (model, batch):
            setup = _with_batch(model, batch)
        case (model, args, kwargs):
            setup = TrainingSetup(model, args, kwargs)
        case (model, args, kwargs, loss):
            setup = TrainingSetup(model, args, kwargs, loss)
        case _:
            raise CommandError(
                f"{name} returned {type(returned).__name__}; it should return (model, batch), "
                "(model, args, kwargs), (model, args, kwargs, loss), or a dict with the keys "
                + ", ".join(keys)
            )
    if not isinstance(setup.model, nn.Module):
        raise CommandError(
            f"{name} returned a model of type {type(setup.model).__name__}, not torch.nn.Module"
        )
    if not isinstance(setup.args, tuple | list) or not isinstance(setup.kwargs, Mapping):
        raise CommandError(f"{name} returned args or kwargs that are not a tuple and a dict")
    if setup.optimizer is not None and not isinstance(setup.optimizer, torch.optim.Optimizer):
        raise CommandError(
            f"{name} returned an optimizer of type {type(setup.optimizer).__name__}, "
            "not torch.optim.Optimizer"
        )
    return replace(setup, args=tuple(setup.args))


def _with_batch(model: Any, batch: Any) -> TrainingSetup:
    """Pass a batch as a training loop would: keyword arguments, arguments, or the one argument."""
    match batch:
        case Mapping():
            return TrainingSetup(model, (), batch)
        case tuple() | list():
            return TrainingSetup(model, tuple(batch))
        case _:
            return TrainingSetup(model, (batch,))
