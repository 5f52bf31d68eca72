"""Find the profile of a compiled step that an earlier process recorded, so that its plan stays the same.

Run times differ from profile to profile, so a new profile would give a slightly different plan, and all code
would be compiled again. A step is known if its forward is one compiled graph and nothing else. The key of the
graph in torch's caches stands for the graph's code and inputs; the *circumstances* for everything else in a
profile. A warm-up forward finds the key, and stops before anything runs.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from autoac.planner.formats.profile import Profile
from autoac.profiler.compiler.second_stage import CompiledPart

log = logging.getLogger("autoac.profiler")


class StepKnown(BaseException):
    """Stops a forward of a step whose profile is known. No `except Exception` of a model catches it."""

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self.profile = profile


class KnownStep:
    """Looks for the profile of one step, and stores it if there is none.

    Args:
        model: whose step it is.
        circumstances: what the profile depends on, other than the model and its compiled graph.
    """

    def __init__(self, model: nn.Module, circumstances: Iterable[object]) -> None:
        text = "\n".join(map(repr, [*_facts_of_model(model), *circumstances]))
        self._name = f"profile {hashlib.sha256(text.encode()).hexdigest()}"
        self._parts: list[CompiledPart] = []

    def ran(self, part: CompiledPart, *, recorded: bool) -> None:
        """Note a call of a compiled graph.

        Raises:
            StepKnown: an earlier process recorded this step.
        """
        if recorded:
            self._parts.append(part)
        elif (text := part.notes.get(self._name)) is not None:
            try:
                known = Profile.model_validate_json(text)
            except ValueError as error:
                log.warning("the step is profiled again: its stored profile is invalid: %s", error)
            else:
                raise StepKnown(known)

    def keep(self, profile: Profile) -> None:
        """Store the profile of the step, if one compiled graph was its whole forward."""
        if len(self._parts) == 1 and len(profile.ops) == len(self._parts[0].notes["ops"]):
            self._parts[0].notes[self._name] = profile.model_dump_json()
            self._parts[0].keep_notes()


def _facts_of_model(model: nn.Module) -> Iterable[object]:
    """Return what tells the model from others: its modules, their code, and its tensors."""
    for path, module in model.named_modules():
        code: Any = getattr(type(module).forward, "__code__", None)
        facts = (code.co_code, code.co_names) if code is not None else ()
        yield path, type(module).__qualname__, module.training, facts
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield name, tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad
