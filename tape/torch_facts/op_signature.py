"""Read the tensors, the signature and the arithmetic of one call of an op off its arguments and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from autoac.tape.torch_facts.storage_table import has_storage

Args = Sequence[Any]
"""The positional arguments of an op or a Function."""

Kwargs = Mapping[str, Any]
"""Its keyword arguments, by name."""

_aten = torch.ops.aten
_QUERY_OF: dict[Any, int] = {
    _aten._scaled_dot_product_flash_attention: 0,
    _aten._scaled_dot_product_efficient_attention: 0,
    _aten._scaled_dot_product_cudnn_attention: 0,
    _aten._scaled_dot_product_flash_attention_backward: 1,
    _aten._scaled_dot_product_efficient_attention_backward: 1,
    _aten._scaled_dot_product_cudnn_attention_backward: 1,
}
"""The position of the query among the arguments; keys and values follow."""


def tensors_in(args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
    """Yield the tensors among the arguments of an op, also those in lists and in lists of lists."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from tensors_in(arg, {})
    if kwargs:
        yield from tensors_in(tuple(kwargs.values()), {})


def outputs_of(out: Any) -> Iterator[Tensor]:
    """Yield the tensors that an op returned, in order."""
    return tensors_in(out if isinstance(out, (list, tuple)) else (out,), {})


def signature_of(name: str, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """Return op, types, shapes and strides of a call. Calls with equal signatures do the same work."""

    def describe(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            if arg.is_nested:  # has no shape where its layout is strided
                return ("nested", arg.dtype, arg.numel())
            if not has_storage(arg):
                return (str(arg.layout), arg.dtype, tuple(arg.shape))
            return (arg.dtype, tuple(arg.shape), arg.stride())
        if isinstance(arg, (list, tuple)):
            return tuple(describe(item) for item in arg)
        if isinstance(arg, torch.UntypedStorage):  # whose repr has every byte
            return ("storage", arg.nbytes())
        return repr(arg) if not isinstance(arg, torch.Generator) else "generator"

    return (name, *(describe(a) for a in args), *((k, describe(v)) for k, v in sorted(kwargs.items())))


def flops_of(op: Any, args: Args, kwargs: Kwargs, out: Any) -> int:
    """Return the floating-point operations of a call, as torch counts them; 0 without a formula."""
    packet = getattr(op, "_overloadpacket", None)
    if packet is torch.ops.aten._grouped_mm:  # torch has no formula for it
        a, b = args[0], args[1]
        groups = len(a) if a.dim() == b.dim() == 3 else 1
        return int(2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1])
    count = flop_registry.get(packet)
    if count is None:
        return 0
    if packet is torch.ops.aten.convolution_backward and args[9] > 1:
        # torch counts the gradient of the weight as if there were one group
        of_input, of_weight = (
            count(*args[:10], [i == j and wanted for j, wanted in enumerate(args[10])], out_val=out)
            for i in (0, 1)
        )
        return int(of_input + of_weight / args[9])
    # The formulas of products do not take the type of the output.
    counted: list[Any] = [arg for arg in args if not isinstance(arg, torch.dtype)]
    if (first := _QUERY_OF.get(packet)) is not None and counted[first].dim() == 4:
        # Kernels compute with as many heads of keys as of queries, and torch up to 2.12 counts no fewer.
        heads = counted[first].shape[1]
        for i in (first + 1, first + 2):
            batch, _, *rest = counted[i].shape
            counted[i] = torch.Size((batch, heads, *rest))
    try:
        return int(count(*counted, **kwargs, out_val=out))
    except (AssertionError, ValueError):  # shapes that torch runs and does not count
        return 0
