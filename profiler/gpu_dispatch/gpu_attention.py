"""Choose the kernel of attention as a GPU would, for fake tensors, and call it.

`scaled_dot_product_attention` tries cuDNN's kernel, flash attention, the memory-efficient kernel and plain
matrix products, in an order that depends on the device and on the version of cuDNN, and takes the first
whose conditions hold. Their outputs for backward have different sizes.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h (torch 2.13).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda as _flags
from torch.nn import functional as F

from autoac.profiler.timing.roofline import Device
from autoac.tape.torch_facts import private

_aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_FLASH_HEAD = 256
_LARGEST_CUDNN_HEAD = 128
_LARGEST_CUDNN_SIZE = 65535  # of the batch, and of the heads
_MASK_ALIGNMENT = 8  # elements: the efficient kernel needs rows of a mask aligned to this


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one call of `scaled_dot_product_attention`, as torch names them."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def run(self, device: Device) -> Any:
        """Run the kernel that `device` would run."""
        fits = self._fits_fused_kernels()
        can_run_cudnn = fits and self._can_run_cudnn(device)
        if can_run_cudnn and _is_hopper_or_blackwell(device) and device.cudnn > 91500:
            return self._cudnn()
        if fits and self._can_run_flash(device):
            return self._flash()
        if fits and self._can_run_efficient():
            return self._efficient()
        return self._cudnn() if can_run_cudnn and not _flags.math_sdp_enabled() else self._math()

    def _fits_fused_kernels(self) -> bool:
        query, key, value = self.query, self.key, self.value
        tensors = (query, key, value, *(() if self.attn_mask is None else (self.attn_mask,)))
        return (
            query.dim() == key.dim() == value.dim() == 4
            and query.shape[0] == key.shape[0] == value.shape[0]
            and query.dtype == key.dtype == value.dtype
            and bool(query.shape[2])
            and bool(key.shape[2])
            and all(t.stride(-1) == 1 for t in tensors)
        )

    def _heads_match(self, *, grouped: bool, same: bool = True) -> bool:
        """Return True if a kernel accepts these numbers of heads.

        Args:
            grouped: the kernel lets several query heads share one head of key and value.
            same: if `grouped`, key and value must have equally many heads.
        """
        queries, keys, values = (tensor.shape[1] for tensor in (self.query, self.key, self.value))
        if self.enable_gqa and grouped:
            return (keys == values or not same) and queries % keys == 0 and queries % values == 0
        return queries == keys == values

    def _trains(self) -> bool:
        return any(tensor.requires_grad for tensor in (self.query, self.key, self.value))

    def _can_run_cudnn(self, device: Device) -> bool:
        version, query, key = device.cudnn, self.query, self.key
        deterministic = private.get_deterministic_algorithms()
        if deterministic and not private.get_deterministic_algorithms_warn_only():
            return False
        heads = query.shape[3], self.value.shape[3]
        largest = _LARGEST_CUDNN_HEAD
        if heads == (192, 128) and _is_hopper_or_blackwell(device) and version >= 91100:
            largest = 192
        return (
            version >= 90000
            and _flags.cudnn_sdp_enabled()
            and query.dtype in _HALF
            and (16 * self.dropout_p).is_integer()
            and not (self.dropout_p and 91100 < version < 91400)
            and self._is_mask_of_cudnn()
            and self._heads_match(grouped=True, same=False)
            and all(head <= largest and head % 8 == 0 for head in heads)
            and key.shape[2] > 1
            and not (self.dropout_p and query.shape[2] == 1)
            and max(query.shape[:2]) <= _LARGEST_CUDNN_SIZE
        )

    def _is_mask_of_cudnn(self) -> bool:
        mask = self.attn_mask
        if mask is None:
            return True
        sizes = (*self.query.shape[:3], self.key.shape[2])[-mask.dim() :]
        fits = all(mine in (1, size) for mine, size in zip(mask.shape, sizes, strict=True))
        return not mask.requires_grad and mask.dim() in (2, 4) and fits

    def _can_run_flash(self, device: Device) -> bool:
        head = self.query.shape[3]
        small = device.capability is not None and (8, 6) <= device.capability <= (8, 9)
        small = small or (device.capability is not None and device.capability[0] == 12)
        if small and self._trains() and head > 192 and (self.dropout_p or head <= 224):
            return False
        return (
            _flags.flash_sdp_enabled()
            and self.attn_mask is None
            and self.query.dtype in _HALF
            and head == self.key.shape[3] == self.value.shape[3] <= _LARGEST_FLASH_HEAD
            and not (self.is_causal and self.query.shape[2] != self.key.shape[2])
            and self._heads_match(grouped=True)
        )

    def _can_run_efficient(self) -> bool:
        half = self.query.dtype in _HALF
        heads = self.query.shape[3], self.value.shape[3]
        return (
            _flags.mem_efficient_sdp_enabled()
            and (half or self.query.dtype is torch.float32)
            and self.query.shape[3] == self.key.shape[3]
            and all(head and head % (8 if half else 4) == 0 for head in heads)
            and self._heads_match(grouped=False)
        )

    def _cudnn(self) -> Any:
        return _aten._scaled_dot_product_cudnn_attention(
            self.query,
            self.key,
            self.value,
            self._added_mask(),
            self._trains(),
            self.dropout_p,
            self.is_causal,
            False,
            scale=self.scale,
        )[0]

    def _flash(self) -> Any:
        query, key, value, head = self.query, self.key, self.value, self.query.shape[3]
        scale = self.scale if self.scale is not None else head**-0.5
        if padding := -head % 8:  # the kernel needs heads of a multiple of 8
            query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention(
            query, key, value, self.dropout_p, self.is_causal, False, scale=scale
        )[0]
        return out[..., :head] if padding else out

    def _efficient(self) -> Any:
        mask = self._added_mask()
        if mask is not None:
            if padding := -mask.shape[-1] % _MASK_ALIGNMENT:
                mask = F.pad(mask, (0, padding))[..., : mask.shape[-1]]
            mask = mask.expand(*self.query.shape[:3], self.key.shape[2])
        return _aten._scaled_dot_product_efficient_attention(
            self.query,
            self.key,
            self.value,
            mask,
            self._trains(),
            self.dropout_p,
            self.is_causal,
            scale=self.scale,
        )[0]

    def _math(self) -> Any:
        return _aten._scaled_dot_product_attention_math(
            self.query,
            self.key,
            self.value,
            self._added_mask(),
            self.dropout_p,
            self.is_causal,
            None,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )[0]

    def _added_mask(self) -> Tensor | None:
        """Return the mask as numbers to add, 0 or minus infinity where it is a bool."""
        mask, dtype = self.attn_mask, self.query.dtype
        if mask is None or mask.dtype is not torch.bool:
            return mask
        none = torch.scalar_tensor(float("-inf"), dtype=dtype)
        return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype), none)


def _is_hopper_or_blackwell(device: Device) -> bool:
    return device.capability is not None and device.capability[0] in (9, 10)
