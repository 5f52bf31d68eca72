"""Estimate how long an op takes on a device, from the datasheet of the device.

The time of an op is a *roofline*: the time of its arithmetic at the device's peak, or of moving its inputs
and outputs at the device's bandwidth, whichever is longer, plus the launch. Peaks are the dense numbers
(without structured sparsity) of the vendors' public datasheets. Real kernels reach a part of them, their
*efficiency*, which depends on the kind of kernel (`KernelKind`) and is the same for both peaks.

For example, `x @ w` of two bf16 matrices of 4096 rows and columns on an H100 is 137 GFLOP, or 0.139 ms at
989.4 TFLOP/s. Moving 100 MB takes 0.030 ms. A product reaches 0.5 of the peak, so the op takes
0.139 / 0.5 ms + 4 us = 0.282 ms.

Source of the model: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model",
CACM 52(4), 2009. Sources of the efficiencies are given where they are defined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autoac.tape.torch_facts.op_facts import OpFacts
from autoac.tape.torch_facts.op_signature import flops_of, outputs_of, tensors_in

_TERA = 1e12  # datasheets count in decimal units

# Read rows of a table: these move what they return, and not the table.
_GATHERS = {f"aten.{name}" for name in ("embedding", "index_select", "gather", "index", "take")}
# Allocate memory and launch nothing.
_ALLOCATES = {
    f"aten.{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
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


def _efficiencies(
    product: float, attention: float, cudnn_attention: float, norm: float = 0.35, pointwise: float = 0.85
) -> Mapping[KernelKind, float]:
    return MappingProxyType(
        {
            KernelKind.PRODUCT: product,
            KernelKind.ATTENTION: attention,
            KernelKind.CUDNN_ATTENTION: cudnn_attention,
            KernelKind.NORM: norm,
            KernelKind.POINTWISE: pointwise,
            KernelKind.OTHER: 0.6,
        }
    )


# Sources, for large operands:
# - Products and norms are fitted to published training throughput (benchmarks/published.py). On the best
#   shapes, products reach 0.87 of the peak on A100, 0.80 on H100 (0.71 in float8) and 0.51 on MI300X (Bekman,
#   "Machine Learning Engineering", table of "maximum achievable matmul FLOPS"); in a training step, 0.7 on
#   A100 and 0.5 on H100. Norms read their operands twice, which `bytes_moved` counts once.
# - Attention, forward and head sizes 64 to 128: FlashAttention-2 reaches 0.5 to 0.73 on A100 (Dao,
#   arXiv:2307.08691). On H100 the same kernel reaches 0.33 to 0.37 and cuDNN's 0.42 to 0.6 (Shah et al.,
#   arXiv:2407.08608, figure 5). MI300X has no such table, so it gets H100's number.
# - Pointwise: a copy reaches 0.9 of the bandwidth of an H100; kernels with several operands reach less.
# - In a layer as wide as Llama 8B's (`benchmarks.gpu_quarter --only "wide layer"`), an H200 reached 0.81 in
#   products, 0.63 in cuDNN's attention, 0.55 in norms and 0.70 in pointwise kernels. In a whole step of 12
#   narrower layers (benchmarks.gpu_quarter, Llama large, plain: 143.0 ms), 0.75 in products fits.
# - The link to the host reaches 0.8 of each direction of PCIe 5.0 x16 (63 GB/s) and 4.0 x16 (31.5 GB/s) with
#   both busy: an H200 measured 50.0 GB/s in each (`link_of`), and 55 in one alone.
# - Other kernels are too diverse for a source. 0.6 is an assumption.
AMPERE = _efficiencies(0.7, 0.6, 0.6)
HOPPER = _efficiencies(0.5, 0.35, 0.5)
H200_MEASURED = _efficiencies(0.75, 0.35, 0.63, norm=0.55, pointwise=0.70)
CDNA3 = _efficiencies(0.5, 0.35, 0.35)


PCIE_4, PCIE_5 = 25e9, 50e9  # bytes/s
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
    efficiency: Mapping[KernelKind, float] = field(default_factory=lambda: AMPERE)
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
        if facts.view or name in _ALLOCATES:
            return 0.0
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


_HALF = (torch.float16, torch.bfloat16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOAT8_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # of AMD's CDNA3


def _peaks(
    half: float, float8: float = 0.0, types: Sequence[torch.dtype] = _FLOAT8
) -> Mapping[torch.dtype, float]:
    """Return peaks in FLOP/s by type, from TFLOP/s; a device without float8 units lists no float8."""
    eighths = dict.fromkeys(types, float8 * _TERA) if float8 else {}
    return MappingProxyType(dict.fromkeys(_HALF, half * _TERA) | eighths)


def _mib(count: int) -> int:
    return count << 20


def workspace_of(capability: tuple[int, int]) -> int:
    """Return the bytes that cuBLAS keeps for each thread and stream on a GPU of NVIDIA.

    `parseChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp (torch 2.13); the environment
    variable CUBLAS_WORKSPACE_CONFIG changes it.
    """
    return 32 << 20 if capability == (9, 0) else (2 * 4096 + 8 * 16) << 10


CUDNN_OF_WHEELS = 92000
"""The version of cuDNN that torch 2.13 brings along with CUDA 13."""


# float32 is the peak of the ordinary cores: by default torch uses no TF32 for matrix products. Memory is
# what torch reports as `total_memory`: nominal "GB" are GiB, less what the driver and error correction take.

H100 = Device(
    "NVIDIA H100 SXM",
    _peaks(989.4, 1978.9),
    66.9e12,
    3.35e12,
    _mib(81_090),
    efficiency=HOPPER,
    capability=(9, 0),
    cudnn=CUDNN_OF_WHEELS,
    workspace_nbytes=workspace_of((9, 0)),
    link_bytes_per_s=PCIE_5,
)
"""NVIDIA H100 Tensor Core GPU datasheet; dense numbers: H100 architecture white paper, table 2."""

H200 = replace(
    H100,
    name="NVIDIA H200 SXM",
    bytes_per_s=4.8e12,
    memory_bytes=_mib(143_156),
    efficiency=H200_MEASURED,
)
"""NVIDIA H200 Tensor Core GPU datasheet; an H100 with 141 GB of HBM3e."""

A100 = Device(
    "NVIDIA A100 SXM 80GB",
    _peaks(312),
    19.5e12,
    2.039e12,
    _mib(81_050),
    capability=(8, 0),
    cudnn=CUDNN_OF_WHEELS,
    workspace_nbytes=workspace_of((8, 0)),
    link_bytes_per_s=PCIE_4,
)
"""NVIDIA A100 Tensor Core GPU datasheet."""

MI300X = Device(
    "AMD Instinct MI300X",
    _peaks(1307.4, 2614.9, _FLOAT8_FNUZ),
    163.4e12,
    5.3e12,
    _mib(196_592),
    efficiency=CDNA3,
    workspace_nbytes=128 << 20,
    link_bytes_per_s=PCIE_5,
)
"""AMD Instinct MI300X accelerator data sheet."""

L40S = Device(
    "NVIDIA L40S",
    _peaks(362.05, 733),
    91.6e12,
    0.864e12,
    _mib(45_589),
    capability=(8, 9),
    cudnn=CUDNN_OF_WHEELS,
    workspace_nbytes=workspace_of((8, 9)),
    link_bytes_per_s=PCIE_4,
)
"""NVIDIA L40S datasheet."""

RTX_4090 = replace(
    L40S,
    name="NVIDIA GeForce RTX 4090",
    flops_per_s=_peaks(165.2, 330.3),
    other_flops_per_s=82.6e12,
    bytes_per_s=1.008e12,
    memory_bytes=_mib(24_563),
)
"""NVIDIA Ada GPU architecture white paper, appendix A: float32 accumulation."""

DATASHEETS = {
    "h100": H100,
    "h200": H200,
    "a100": A100,
    "mi300x": MI300X,
    "l40s": L40S,
    "rtx4090": RTX_4090,
}
"""Datasheets by the short names that commands accept."""
