"""Run a model on tensors without memory, but for those whose values it may look at.

NOTE [ Known values ]
Models look at values: whether a mask is all ones, the largest position. So only floating-point tensors are
fake. Integer and bool tensors are real if they are from the batch, from buffers or made from nothing
(`arange`). Ops that read only such tensors run for real, so a model finds the values that it would find in
training and takes the same path. (If the tensor that says that no sequence is packed were fake, transformers
would build attention masks that it does without in training.) The output of an op that reads a fake tensor
(the choice of a router) is fake: looking at its values raises CannotFake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autoac.tape.distributed.wrapped_tensors import wraps_others
from autoac.tape.errors import CannotFake
from autoac.tape.torch_facts.op_facts import OpFacts, facts_of, written_tensors
from autoac.tape.torch_facts.op_signature import Args, Kwargs, outputs_of, tensors_in
from autoac.tape.torch_facts.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    TorchDispatchMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from autoac.tape.torch_facts.storage_table import StorageTable, has_storage

MOST_KNOWN_NBYTES = 2**30
"""Integer tensors that an op makes from nothing are real up to this size."""


class KnownValues(TorchDispatchMode):
    """Run ops on fake tensors, under a FakeTensorMode, or for real where all that they read is known.

    Args:
        kernels: return the outputs of ops, in place of torch's own fake kernels.

    Attributes:
        notes: how the step differs from a real one.
    """

    def __init__(self, kernels: Mapping[Any, Callable[..., Any]] = MappingProxyType({})) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: dict[str, None] = {}
        self._kernels = kernels
        self._known: StorageTable[bool] = StorageTable()  # floating-point tensors computed from known ones

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # called very often
            return func(*args, **kwargs)
        if any(map(wraps_others, types)):
            return NotImplemented  # the ops on what they wrap come one by one
        return self._run(facts_of(func), func, args, kwargs)

    def _run(self, facts: OpFacts, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an op for real if it reads only known tensors, else on fake tensors."""
        inputs = list(tensors_in(args, kwargs))
        if not all(map(self._is_known, inputs)):
            try:
                out = self._kernels.get(func, func)(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise CannotFake(facts.name, "it depends on values that are not known") from error
            except UnsupportedOperatorException as error:
                raise CannotFake(facts.name, "torch has no fake kernel of it") from error
            if any(map(is_real, written_tensors(facts, args, kwargs))):
                self.notes[f"{facts.name} wrote over values that the model may look at"] = None
                return args[0] if facts.in_place else out  # not the fake tensor that torch made of it
            return out
        if inputs:
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
            for tensor in outputs_of(out):
                if not is_integral(tensor) and has_storage(tensor):
                    self._known.set(tensor, True)
            return out
        out = func(*args, **kwargs)
        if all(is_integral(t) and t.nbytes <= MOST_KNOWN_NBYTES for t in outputs_of(out)):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return out

    def _is_known(self, tensor: Tensor) -> bool:
        return is_real(tensor) and (is_integral(tensor) or self._known.get(tensor) is not None)


def copy_if_known(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor whose values are known, else a fake tensor. See NOTE [ Known values ]."""
    if is_real(tensor) and is_integral(tensor):
        with unset_fake_temporarily():
            return tensor.clone()
    return fake_like(tensor)


def fake_like(tensor: Tensor) -> Tensor:
    """Return a fake tensor with the size, strides and type of `tensor`, on the CPU."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")


def is_integral(tensor: Tensor) -> bool:
    """Return True for integer and bool tensors, which index and decide."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def is_real(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.device.type == "cpu"
