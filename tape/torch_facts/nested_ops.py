"""Call an op whose kernel calls other ops as torch does where no dispatch mode is active.

Autocast and autograd are dispatch keys above the key of the modes, so torch excludes both where a mode calls
an op. Without a mode they are excluded only if the op has a kernel of its own for them:

- Without an autocast rule, the kernel runs its ops under the caller's autocast: a matrix product inside it
  computes in bfloat16.
- Without an autograd kernel, as after `Library.impl(name, function, "CPU")` alone, the kernel runs its ops
  under autograd, which gives the op its gradient.

`NestedOp` includes these keys again. The keys of the caller are in the snapshot that torch takes when it
enters the dispatcher. torch takes no snapshot for ops that the Python of a decomposed op calls. If that
Python switches autocast on or off, these ops still run under the autocast of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.op_signature import tensors_in

_AUTOCAST_DEVICES = {
    "AutocastCPU": "cpu",
    "AutocastCUDA": "cuda",
    "AutocastXPU": "xpu",
    "AutocastMPS": "mps",
    "AutocastHPU": "hpu",
    "AutocastPrivateUse1": private.private_use_device(),
}

_AUTOGRAD_KEYS = ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView")

_AUTOGRAD_KERNELS = ("Autograd", "AutogradCPU", "AutogradCUDA", "AutogradXPU", "AutogradPrivateUse1")


def _key_set(names: Sequence[str]) -> Any:
    keys = private.DispatchKeySet(private.DispatchKey.Undefined)
    for name in names:
        keys = keys | private.DispatchKeySet(private.parse_dispatch_key(name))
    return keys


AUTOCAST = _key_set(list(_AUTOCAST_DEVICES))
"""The dispatch keys of autocast."""

_AUTOGRAD = _key_set(_AUTOGRAD_KEYS)


class NestedOp:
    """Call an op from a dispatch mode.

    The kernel of the op runs under the autocast and autograd of the mode's caller.
    """

    def __init__(self, op: Any) -> None:
        self._call: Callable[..., Any] = op._op
        self._name: str = op.name()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        excluded = private.keys_excluded_by_caller()
        if excluded is None:  # no mode calls
            return self._call(*args, **kwargs)
        included = _key_set(self._casting(excluded))
        if self._builds_graph(args, kwargs):
            included = included | (_AUTOGRAD - excluded)
        with _including(included):
            return self._call(*args, **kwargs)

    def rerun(self) -> Callable[..., Any]:
        """Return a function for backward that calls the op under the present autocast. Use this in a mode."""
        excluded = private.keys_excluded_by_caller()
        casting = self._casting(excluded) if excluded is not None else []
        return _ReplayUnderAutocast(self._call, casting) if casting else self._call

    def _casting(self, excluded: Any) -> list[str]:
        """Return the autocast keys under which the kernel runs."""
        return [
            key
            for key in _AUTOCAST_DEVICES
            if not excluded.has(private.parse_dispatch_key(key)) and not private.has_kernel(self._name, key)
        ]

    def _builds_graph(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True if autograd records the ops in the kernel in place of the op."""
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors_in(args, kwargs)):
            return False
        return not any(private.has_kernel(self._name, key) for key in _AUTOGRAD_KERNELS)


class _ReplayUnderAutocast:
    """Call an op in backward under the autocast that was on in forward."""

    def __init__(self, call: Callable[..., Any], casting: Sequence[str]) -> None:
        self._call = call
        self._keys = _key_set(casting)
        devices = [_AUTOCAST_DEVICES[key] for key in casting]
        self._dtypes = [(device, torch.get_autocast_dtype(device)) for device in devices]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cached = torch.is_autocast_cache_enabled()
        dtypes = [(device, torch.get_autocast_dtype(device)) for device, _ in self._dtypes]
        torch.set_autocast_cache_enabled(False)  # no end of an autocast would clear it
        try:
            for device, dtype in self._dtypes:
                torch.set_autocast_dtype(device, dtype)
            with _including(self._keys):
                return self._call(*args, **kwargs)
        finally:
            for device, dtype in dtypes:
                torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(cached)


def _including(keys: Any) -> Any:
    """Return a context in which `keys` are not excluded."""
    return private.ForceDispatchKeyGuard(
        private.dispatch_include_set(), private.dispatch_exclude_set() - keys
    )
