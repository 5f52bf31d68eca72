"""Estimate how long an op takes on a device, from the datasheet of the device.

The time of an op is a *roofline*: the time of its arithmetic at the device's peak, or of moving its inputs
and outputs at the device's bandwidth, whichever is longer, plus the launch. Peaks are the dense numbers
(without structured sparsity) of the vendors' public datasheets. Real kernels reach a part of them, their
*efficiency*, which depends on the kind of kernel (`KernelKind`) and is the same for both peaks.

For example, `x @ w` of two bf16 matrices of 4096 rows and columns on an H100 is 137 GFLOP, or 0.139 ms at
989.4 TFLOP/s. Moving 100 MB takes 0.030 ms. A product reaches 0.5 of the peak, so the op takes
0.139 / 0.5 ms + 4 us = 0.282 ms.

Source of the model: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model",
CACM 52(4), 2009. Datasheets and efficiencies, with their sources, are in datasheets.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autoac.tape.torch_facts.op_facts import OpFacts
from autoac.tape.torch_facts.op_signature import flops_of, outputs_of, tensors_in

# Read rows of a table: these move what they return, and not the table.
_GATHERS = {f"aten.{name}" for name in ("embedding", "index_select", "gather", "index", "take")}
# Copies that lack torch's tag for pointwise ops.
_COPIES = {
    f"aten.{name}" for name in ("copy_", "_to_copy", "cat", "stack", "fill_", "native_dropout", "bernoulli_")
}


class KernelKind(StrEnum):
    """Kinds of kernel that reach different parts of a device's peaks."""

    PRODUCT = "product"  # of matrices, and convolution
    ATTENTION = "attention"  # fused: flash, memory-efficient
    CUDNN_ATTENTION = "cuDNN attention"
    NORM = "norm"  # norms, softmax, reductions: what combines the numbers of a row
    POINTWISE = "pointwise"  # also copies
    OTHER = "other"  # gathers, sorts, pooling


def kind_of(func: Any, name: str, flops: float) -> KernelKind:
    """Return the kind of kernel that runs op `func`, which is called `name` and does `flops`."""
    if "_attention" in name:
        return KernelKind.CUDNN_ATTENTION if "cudnn" in name else KernelKind.ATTENTION
    if flops:
        return KernelKind.PRODUCT
    tags = getattr(func, "tags", ())  # a higher-order op has none
    if torch.Tag.pointwise in tags or name in _COPIES:
        return KernelKind.POINTWISE
    if torch.Tag.reduction in tags or "norm" in name or "softmax" in name:
        return KernelKind.NORM
    return KernelKind.OTHER


COPY_US = 10.0  # from the launch of a copy to its first byte; small copies took 7 to 9 on an H200


@dataclass(frozen=True, slots=True)
class Device:
    """The datasheet of a device, and the fraction of its peaks that kernels of each kind reach.

    Invariant: `efficiency` has every kind.
    """

    name: str
    flops_per_s: Mapping[torch.dtype, float]  # dense peak of matrix products, by type of the operands
    other_flops_per_s: float  # peak for types that are not listed
    bytes_per_s: float  # of its memory
    memory_bytes: int
    launch_us: float = 4.0  # from one small kernel to the next in eager mode
    # Part of the peaks, in (0, 1].
    efficiency: Mapping[KernelKind, float] = field(default_factory=lambda: DATASHEETS["a100"].efficiency)
    device_type: str = "cuda"  # "cuda" (AMD too) or "cpu": which kernels run
    allocator_rounding: int = 512  # bytes
    capability: tuple[int, int] | None = None  # of CUDA; None: not NVIDIA's
    cudnn: int = 0  # version of cuDNN: 92000 is 9.20.0, 0 is none
    link_bytes_per_s: float = 0.0  # to the host, with both directions busy; 0: not known
    workspace_nbytes: int = 0  # that cuBLAS or hipBLASLt keeps for each thread and stream

    def runtime_us(
        self, facts: OpFacts, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> float:
        """Return the estimated run time of one call in microseconds, 0 for a view."""
        name = facts.name.rpartition(".")[0]
        if facts.view or facts.blank:
            return 0.0  # launches nothing
        flops: float = flops_of(func, args, kwargs, out)
        if "scaled_dot_product" in name and _argument(func, "is_causal", args, kwargs):
            flops /= 2  # torch counts the masked half, which kernels skip
        operands = _operand_type(args, kwargs)
        peak = self.flops_per_s.get(operands, self.other_flops_per_s) if operands else self.other_flops_per_s
        moved = 2 * bytes_moved((), {}, out) if name in _GATHERS else bytes_moved(args, kwargs, out)
        at_peak_s = max(flops / peak, moved / self.bytes_per_s)
        return self.launch_us + 1e6 * at_peak_s / self.efficiency[kind_of(func, name, flops)]


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


def workspace_of(capability: tuple[int, int]) -> int:
    """Return the bytes that cuBLAS keeps for each thread and stream on a GPU of NVIDIA.

    `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp (torch 2.13); the environment
    variable CUBLAS_WORKSPACE_CONFIG changes it.
    """
    return 32 << 20 if capability == (9, 0) else (2 * 4096 + 8 * 16) << 10


CUDNN_OF_WHEELS = 92000
"""The version of cuDNN that torch 2.13 brings along with CUDA 13."""


def _device(sheet: Mapping[str, Any]) -> Device:
    """Return the device of an entry in datasheets.toml. Only NVIDIA's have a capability."""
    capability = (sheet["capability"][0], sheet["capability"][1]) if "capability" in sheet else None
    peaks = dict.fromkeys((torch.float16, torch.bfloat16), sheet["half_flops_per_s"])
    if "float8_flops_per_s" in sheet:
        fnuz = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # of AMD's CDNA3
        types = (torch.float8_e4m3fn, torch.float8_e5m2) if capability else fnuz
        peaks |= dict.fromkeys(types, sheet["float8_flops_per_s"])
    return Device(
        name=sheet["name"],
        flops_per_s=MappingProxyType(peaks),
        other_flops_per_s=sheet["float32_flops_per_s"],
        bytes_per_s=sheet["bytes_per_s"],
        memory_bytes=sheet["memory_mib"] << 20,
        efficiency=MappingProxyType({kind: sheet["efficiency"][kind] for kind in KernelKind}),
        capability=capability,
        cudnn=CUDNN_OF_WHEELS if capability else 0,
        link_bytes_per_s=sheet["link_bytes_per_s"],
        workspace_nbytes=workspace_of(capability) if capability else sheet["workspace_mib"] << 20,
    )


_TEXT = files("autoac.profiler.timing").joinpath("datasheets.toml").read_text("utf-8")
DATASHEETS: dict[str, Device] = {key: _device(sheet) for key, sheet in tomllib.loads(_TEXT).items()}
"""Datasheets by the short names that commands accept."""
