"""Pin a module: save or recompute all its ops, in regions and in plans, whatever the policies say."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from autoac.tape.runtime.nested_policies import ConstantPolicy, PolicyFrame
from autoac.tape.runtime.policy_context import active
from autoac.tape.runtime.region import Region
from autoac.tape.torch_facts.module_paths import ModuleHook
from autoac.tape.torch_facts.module_pins import MUST_RECOMPUTE, MUST_SAVE, pins

_DECISIONS = {MUST_SAVE: CheckpointPolicy.MUST_SAVE, MUST_RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE}


class Pin:
    """A pin on one module, until `remove()` is called."""

    def __init__(self, module: nn.Module, decision: str, file: str, line: int) -> None:
        self._module = module
        policy = ConstantPolicy(_DECISIONS[decision], f"the pin {decision} of {type(module).__name__}")
        self._frame = PolicyFrame(policy, file, line)
        self._regions: list[Region | None] = []  # one for each call in progress
        self._handles = [
            module.register_forward_pre_hook(ModuleHook(self._enter), prepend=True),
            module.register_forward_hook(ModuleHook(self._leave), always_call=True),
        ]
        pins[module] = decision

    def remove(self) -> None:
        """Remove the pin. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        pins.pop(self._module, None)

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        region = active.region
        self._regions.append(region)
        if region is not None:
            region.push_policy(self._frame)

    def _leave(self, _module: nn.Module, _args: Any, _out: Any) -> None:
        region = self._regions.pop() if self._regions else None
        if region is not None and active.region is region:
            region.pop_policy(self._frame)


def pin(module: nn.Module, policy: str | CheckpointPolicy) -> Pin:
    """Save or recompute all ops in the forward of `module`, whatever the policies say.

    A pin applies in `save_recompute_policy` regions and in plans; pin a module before its model is planned.
    A policy that insists on the opposite inside a pinned module is an error.

    An op that writes in place to a saved tensor must be saved with it. So in plans, "must_recompute" also
    applies to the ops whose outputs a pinned op overwrites, even if they are in other modules.

    Args:
        module: a part of a model, or the whole model.
        policy: "must_save" or "must_recompute", also as torch's CheckpointPolicy; or "save" or "recompute",
            as in policies.

    Raises:
        ValueError: `policy` is none of these.
        PolicyConflict, PinConflict: from a forward, if a policy or another pin insists on the opposite.
        ConflictingPins: from a planned forward, if an op pinned "must_recompute" overwrites the output of an
            op pinned "must_save".
    """
    decision = policy.name.lower() if isinstance(policy, CheckpointPolicy) else policy
    decision = {"save": MUST_SAVE, "recompute": MUST_RECOMPUTE}.get(decision, decision)
    if decision not in _DECISIONS:
        raise ValueError(f'policy must be "must_save" or "must_recompute", got {policy!r}')
    caller = sys._getframe(1)
    return Pin(module, decision, caller.f_code.co_filename, caller.f_lineno)
