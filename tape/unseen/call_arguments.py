"""Take the arguments of a call apart, so that the call can be made again with other tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class CallArguments:
    """The arguments of a call: distinct tensors, and everything else with placeholders for tensors.

    Attributes:
        tensors: the distinct tensors, in lists and dictionaries too.
        args, kwargs: the arguments, with placeholders.
        needs_grad: for each positional argument, True if it is a tensor that needs a gradient.
        wrapped: True if a tensor is of a subclass other than Parameter.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self.wrapped = False
        positions: dict[int, int] = {}
        self.args = [self._without_tensors(arg, positions) for arg in args]
        self.kwargs = {name: self._without_tensors(arg, positions) for name, arg in kwargs.items()}
        self._requires_grad = [tensor.requires_grad for tensor in self.tensors]
        grad = torch.is_grad_enabled()
        self.needs_grad = tuple(grad and isinstance(arg, Tensor) and arg.requires_grad for arg in args)

    def _without_tensors(self, value: Any, positions: dict[int, int]) -> Any:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            position = positions.setdefault(id(value), len(self.tensors))
            if position == len(self.tensors):
                self.tensors.append(value)
            return Placeholder(position)
        if kind is tuple or kind is list:
            return kind(self._without_tensors(item, positions) for item in value)
        if kind is dict:
            return {key: self._without_tensors(item, positions) for key, item in value.items()}
        self.wrapped |= isinstance(value, Tensor)
        return value

    def release(self) -> None:
        """Forget the tensors, and keep the other arguments. A wrapped call is not made again."""
        self.tensors = []
        if self.wrapped:  # wrapped tensors have no placeholders
            self.args, self.kwargs = [], {}

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return `args` and `kwargs` of the call, with `tensors` put where the call had its own."""
        fresh = [
            tensor.detach().requires_grad_(requires)
            for tensor, requires in zip(tensors, self._requires_grad, strict=True)
        ]
        args = [_fill(arg, fresh) for arg in self.args]
        return args, {name: _fill(arg, fresh) for name, arg in self.kwargs.items()}


class Placeholder(int):
    """The position of a tensor among the tensors of a call."""


def _fill(value: Any, tensors: Sequence[Tensor]) -> Any:
    kind = type(value)
    if kind is Placeholder:
        return tensors[value]
    if kind is tuple or kind is list:
        return kind(_fill(item, tensors) for item in value)
    if kind is dict:
        return {key: _fill(item, tensors) for key, item in value.items()}
    return value
