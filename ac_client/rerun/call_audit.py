"""Watch a call that is recorded op by op, and decide if later calls may be recorded as one op.

A rerun repeats what the module does besides computing its output. So the audited call must not have had a
side effect that a rerun would repeat, and must have read nothing that may differ when it runs again:

- It read all its tensor arguments; an argument that no op reads would be held for nothing. It read no other
  tensors but its parameters, its buffers and tensors that it made, and wrote only to tensors that it made.
- The Python objects that its modules refer to are unchanged, and so are Python's and numpy's generators.
- Nothing that it made is alive afterwards except its outputs.
- Its modules have no hooks but ours, are not compiled and not sharded; no modes or hooks are around it.
"""

from __future__ import annotations

import pickle
import random
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ac_client.rerun.recorded_call import CallSite, arguments_of
from ac_client.runtime.nodes import NodeVersion, UnsupportedTensor
from ac_client.runtime.region import Region
from autoac.profiler.restore.module_state import ModuleState
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.inductor import is_compiled
from autoac.profiler.torch_facts.module_paths import ModuleHook
from autoac.profiler.torch_facts.op_facts import facts_of, updates_statistics, written_tensors
from autoac.profiler.torch_facts.op_signature import outputs_of, tensors_in
from autoac.profiler.torch_facts.private import TorchDispatchMode, tree_leaves
from autoac.profiler.torch_facts.storage_table import has_storage


class CallAudit(TorchDispatchMode):
    """The audit of one call, a dispatch mode that is entered when the call begins.

    Attributes:
        path: of the module.
    """

    def __init__(
        self, path: str, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], region: Region
    ) -> None:
        """Begin the audit.

        Raises:
            UnsupportedTensor: calls of the module cannot be recorded as one op.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.path = path
        self._modules = list(module.modules())
        self._arguments = arguments_of(args, kwargs).tensors
        self._region = region
        self._fails = private.len_torch_function_stack() > 0 or not all(map(_is_simple, self._modules))
        if self._fails or not torch.is_grad_enabled() or any(private.FORWARD_HOOKS_OF_ALL_MODULES):
            raise UnsupportedTensor
        own = [t for m in self._modules for t in (*m._parameters.values(), *m._buffers.values())]
        self._own = [tensor for tensor in own if tensor is not None]
        if not all(map(has_storage, (*self._own, *self._arguments))):
            raise UnsupportedTensor
        self._outside = {_address(tensor) for tensor in (*self._own, *self._arguments)}
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._read: set[int] = set()
        self._policies = region.policies_pushed
        self._module = module
        self._state = ModuleState(module, copy=Tensor.detach)
        self._generators = _python_generators()
        self._counters = [tensor._version for tensor in self._own]
        self.__enter__()  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, as `Region` does."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        facts, named = facts_of(func), kwargs or {}
        out = facts.call(*args, **named)
        if facts.view or self._fails:
            return out
        read = {_address(tensor) for tensor in tensors_in(args, named) if has_storage(tensor)}
        written = {_address(tensor) for tensor in written_tensors(facts, args, named) if has_storage(tensor)}
        self._read |= read
        self._fails = (
            bool(read - self._outside - self._made.keys())
            or bool(written & self._outside)
            or facts.opaque
            or facts.collective
            or updates_statistics(facts, args, named)
            or any(isinstance(value, torch.Generator) for value in (*args, *named.values()))
            or not all(has_storage(tensor) for tensor in (*tensors_in(args, named), *outputs_of(out)))
        )
        for tensor in outputs_of(out):
            if has_storage(tensor) and _address(tensor) not in self._outside:
                self._made[_address(tensor)] = weakref.ref(tensor.untyped_storage())
        return out

    def close(self) -> None:
        """Remove the mode."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def site(self, output: Any, end: int) -> CallSite | None:
        """Return what is needed to record later calls at this position in forward as one op.

        Return None if the audit failed, and the calls must be recorded op by op.

        Args:
            output: the result of the audited call.
            end: position in the policy's list of ops of the first op after the call.
        """
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and has_storage(leaf)]
        alive = {address for address, ref in self._made.items() if ref() is not None}
        if (
            self._fails
            or alive - {_address(leaf) for leaf in leaves}
            or {_address(tensor) for tensor in self._arguments} - self._read
            or self._generators != _python_generators()
            or self._region.policies_pushed != self._policies
            or self._counters != [tensor._version for tensor in self._own]
            or not self._state.equals(ModuleState(self._module, copy=Tensor.detach))
        ):
            return None
        return CallSite(
            self.path,
            end,
            tuple(map(weakref.ref, self._modules)),
            sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self._modules),
            tuple(self._is_saved(leaf) for leaf in tree_leaves(output)),
        )

    def _is_saved(self, leaf: Any) -> bool:
        if not isinstance(leaf, Tensor) or not has_storage(leaf):
            return False
        return type(self._region.storages.origin(leaf)) is not NodeVersion


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _python_generators() -> bytes:
    return pickle.dumps((random.getstate(), numpy.random.get_state()))


def _is_simple(module: nn.Module) -> bool:
    hooks: Iterable[Any] = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return (
        all(type(hook) is ModuleHook for hook in hooks)
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and not is_compiled(module)
        and not isinstance(module, torch.jit.ScriptModule)
        and not hasattr(module, "unshard")
        and all(p is None or type(p) is Parameter for p in module._parameters.values())
    )
