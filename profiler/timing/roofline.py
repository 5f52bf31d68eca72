"""Estimate how long an op takes on a device, from the datasheet of the device.

The time of an op is a *roofline*: the time of its arithmetic at the device's peak, or of moving its inputs
and outputs at the device's bandwidth, whichever is longer, plus the launch. Peaks are the dense numbers
(without structured sparsity) of the vendors' public datasheets. Real kernels reach the fractions
`flops_efficiency` and `bandwidth_efficiency` of them.

Source of the model: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model",
CACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autoac.profiler.torch_facts.op_facts import OpFacts
from autoac.profiler.torch_facts.op_signature import flops_of, outputs_of, tensors_in

_TERA, _GB = 1e12, 10**9  # datasheets count in decimal units

# Read rows of a table: these move what they return, and not the table.
_GATHERS = {f"aten.{name}" for name in ("embedding", "index_select", "gather", "index", "take")}
# Allocate memory and launch nothing.
_ALLOCATES = {
    f"aten.{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}


@dataclass(frozen=True, slots=True)
class Device:
    """The datasheet of a device, and the fraction of it that kernels reach."""

    name: str
    flops_per_s: Mapping[torch.dtype, float]  # dense peak of matrix products, by type of the operands
    other_flops_per_s: float  # peak for types that are not listed
    bytes_per_s: float  # of its memory
    memory_bytes: int
    launch_us: float = 4.0  # from one small kernel to the next in eager mode
    flops_efficiency: float = 0.7  # of the peak, by a large bf16 product
    bandwidth_efficiency: float = 0.85  # of the bandwidth, by a large copy
    device_type: str = "cuda"  # "cuda" (AMD too) or "cpu": which kernels run
    allocator_rounding: int = 512  # bytes

    def runtime_us(
        self, facts: OpFacts, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> float:
        """Return the estimated run time of one call in microseconds, 0 for a view."""
        name = facts.name.rpartition(".")[0]
        if facts.view or name in _ALLOCATES:
            return 0.0
        flops: float = flops_of(func, args, kwargs, out)
        if "scaled_dot_product" in name and _argument(func, "is_causal", args, kwargs):
            flops /= 2  # torch counts the masked half, which kernels skip
        operands = _operand_type(args, kwargs)
        peak = self.flops_per_s.get(operands, self.other_flops_per_s) if operands else self.other_flops_per_s
        arithmetic_s = flops / (peak * self.flops_efficiency)
        moved = 2 * bytes_moved((), {}, out) if name in _GATHERS else bytes_moved(args, kwargs, out)
        moving_s = moved / (self.bytes_per_s * self.bandwidth_efficiency)
        return self.launch_us + 1e6 * max(arithmetic_s, moving_s)


def _argument(op: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a call passes for an argument of its schema; None if it passes nothing."""
    for i, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            return args[i] if i < len(args) else kwargs.get(name)
    return None


def bytes_moved(args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the bytes of the elements in a call's inputs and outputs.

    An element that appears twice because of a stride of 0 counts once.
    """
    return sum(_distinct_nbytes(t) for t in (*tensors_in(args, kwargs), *outputs_of(out)))


def _distinct_nbytes(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided:
        return 0
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.element_size()


def _operand_type(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the type of the first floating-point operand. Products have operands of one type."""
    for tensor in tensors_in(args, kwargs):
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor.dtype
    return None


def _half(flops_per_s: float) -> Mapping[torch.dtype, float]:
    return MappingProxyType({torch.float16: flops_per_s, torch.bfloat16: flops_per_s})


# float32 is the peak of the ordinary cores: by default torch uses no TF32 for matrix products.

H100 = Device("NVIDIA H100 SXM", _half(989.4 * _TERA), 66.9 * _TERA, 3.35 * _TERA, 80 * _GB)
"""NVIDIA H100 Tensor Core GPU datasheet; dense numbers: H100 architecture white paper, table 2."""

H200 = Device("NVIDIA H200 SXM", _half(989.4 * _TERA), 66.9 * _TERA, 4.8 * _TERA, 141 * _GB)
"""NVIDIA H200 Tensor Core GPU datasheet; an H100 with 141 GB of HBM3e."""

A100 = Device("NVIDIA A100 SXM 80GB", _half(312 * _TERA), 19.5 * _TERA, 2.039 * _TERA, 80 * _GB)
"""NVIDIA A100 Tensor Core GPU datasheet."""

MI300X = Device("AMD Instinct MI300X", _half(1307.4 * _TERA), 163.4 * _TERA, 5.3 * _TERA, 192 * _GB)
"""AMD Instinct MI300X accelerator data sheet."""

L40S = Device("NVIDIA L40S", _half(362.05 * _TERA), 91.6 * _TERA, 0.864 * _TERA, 48 * _GB)
"""NVIDIA L40S datasheet."""

RTX_4090 = Device("NVIDIA GeForce RTX 4090", _half(165.2 * _TERA), 82.6 * _TERA, 1.008 * _TERA, 24 * _GB)
"""NVIDIA Ada GPU architecture white paper, appendix A: half precision with float32 accumulation."""

DATASHEETS = {
    "h100": H100,
    "h200": H200,
    "a100": A100,
    "mi300x": MI300X,
    "l40s": L40S,
    "rtx4090": RTX_4090,
}
"""Datasheets by the short names that commands accept."""
