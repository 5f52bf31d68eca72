"""Tell matmuls, attention kernels and random ops by the names of their overloads."""

from __future__ import annotations


def is_attention(overload: str) -> bool:
    """Return True for a fused attention kernel."""
    return "attention" in overload and "backward" not in overload


def is_matmul(overload: str) -> bool:
    """Return True for a matrix product or a convolution, compute-intensive ops in torch's partitioner."""
    return overload.split(".")[1:2] in (
        ["mm"],
        ["addmm"],
        ["bmm"],
        ["baddbmm"],
        ["_scaled_mm"],
        ["_grouped_mm"],
        ["convolution"],
        ["convolution_overrideable"],
        ["cudnn_convolution"],
        ["mkldnn_convolution"],
    )


def is_random(overload: str) -> bool:
    """Return True if the op draws random numbers."""
    return any(
        word in overload for word in ("dropout", "bernoulli", "rand", "normal_", "uniform_", "exponential")
    )
