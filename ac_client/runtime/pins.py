"""Pins: what a user insists on for all ops of a module, in regions and in plans."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from ac_client.runtime.nested_policies import ConstantPolicy, PolicyFrame
from ac_client.runtime.policy_context import active
from ac_client.runtime.region import Region
from autoac.profiler.torch_facts.module_paths import ModuleHook
from autoac.profiler.torch_facts.module_pins import MUST_RECOMPUTE, MUST_SAVE, drop_pin, set_pin

_WORDS = {
    MUST_SAVE: CheckpointPolicy.MUST_SAVE,
    MUST_RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE,
}


class Pin:
    """A pin on one module. `remove()` takes it off."""

    def __init__(self, module: nn.Module, word: str, file: str, line: int) -> None:
        self._module = module
        policy = ConstantPolicy(_WORDS[word], f"the pin {word} of {type(module).__name__}")
        self._frame = PolicyFrame(policy, file, line)
        self._inside: list[Region | None] = []  # of the calls in progress
        self._handles = [
            module.register_forward_pre_hook(ModuleHook(self._enter), prepend=True),
            module.register_forward_hook(ModuleHook(self._leave), always_call=True),
        ]
        set_pin(module, word)

    def remove(self) -> None:
        """Take the pin off. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        drop_pin(self._module)

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        region = active.region
        self._inside.append(region)
        if region is not None:
            region.push_policy(self._frame)

    def _leave(self, _module: nn.Module, _args: Any, _out: Any) -> None:
        region = self._inside.pop() if self._inside else None
        if region is not None and active.region is region:
            region.pop_policy(self._frame)


def pin(module: nn.Module, policy: str | CheckpointPolicy) -> Pin:
    """Insist that what runs inside `module`'s forward is saved, or run again, whatever policies say.

    Holds in `save_recompute_policy` regions and in plans: pin before the model is planned. Inside a pinned
    module a policy that insists on the opposite is an error.

    An op that writes in place over a saved value is saved with it. So in plans the pin "must_recompute"
    takes along the ops that made what such an op writes over, also in other modules.

    Args:
        module: a part of a model, or all of it.
        policy: "must_save" or "must_recompute", torch's words for them, or a Policy's "save", "recompute".

    Raises:
        ValueError: `policy` is neither.
        PolicyConflict, PinConflict: from a forward, where a policy or another pin insists on the opposite.
        ConflictingPins: from a forward that is planned, where an op pinned "must_recompute" writes over the
            output of one pinned "must_save".
    """
    word = policy.name.lower() if isinstance(policy, CheckpointPolicy) else policy
    word = {"save": MUST_SAVE, "recompute": MUST_RECOMPUTE}.get(word, word)  # as policies say
    if word not in _WORDS:
        raise ValueError(f'cannot pin {policy!r}: use "must_save" or "must_recompute"')
    caller = sys._getframe(1)
    return Pin(module, word, caller.f_code.co_filename, caller.f_lineno)
