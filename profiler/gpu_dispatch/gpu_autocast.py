"""Apply a GPU's autocast to fake tensors, which claim to be on the CPU.

CUDA casts by other lists than the CPU: softmax, norms and most losses run in 32 bits. `gpu_autocast` makes
the state of autocast for "cuda" hold for every tensor of this thread. Its kernels sit at a dispatch key of
autocast that no device uses any more, which is included on this thread alone, and cast as
aten/src/ATen/autocast_mode.h does (torch 2.13). Where the CPU's list has the same cast, the CPU's kernel
does it, with torch's cache of cast parameters.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoac.profiler.gpu_dispatch.gpu_kernels import aten_op
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.private import DispatchKey, tree_leaves, tree_map_only

_NAME = "AutocastIPU"
_KEY = private.parse_dispatch_key(_NAME)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# CUDA's lists of ops, by what is cast. Every other op of CUDA's autocast runs in 32 bits.
_REDUCED = _names(  # to the type of autocast
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv "
    "linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell "
    "_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "_scaled_dot_product_flash_attention scaled_dot_product_attention"
)
_TYPED = _names(  # nothing, but the op computes in 32 bits unless a type is passed
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
)
_WIDEST = _names(  # to the widest type among the operands
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
)
_NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
_LEFT_OUT = {"binary_cross_entropy", "cudnn_convolution", "cudnn_convolution_transpose"}


@contextlib.contextmanager
def gpu_autocast() -> Iterator[None]:
    """Have `torch.autocast("cuda")`, around this context or inside it, hold for the tensors of this thread.

    Inside, `torch.autocast("cpu")` means the same, since models pass the device of their tensors, and so do
    questions about the state of autocast.
    """
    include = private.dispatch_include_set() | private.DispatchKeySet(_KEY)
    exclude = private.dispatch_exclude_set().remove(_KEY)
    casts: dict[int, tuple[Tensor, Tensor]] = {}
    dtype = torch.get_autocast_dtype("cpu")
    with (
        private.scoped_library("_", "IMPL") as fallbacks,
        private.scoped_library("aten", "IMPL") as library,
        _autocast_of_any_device(casts),
        private.ForceDispatchKeyGuard(include, exclude),
    ):
        fallbacks.fallback(torch.library.fallthrough_kernel, _NAME)
        for name, kernel in _kernels(casts).items():
            library.impl(name, kernel, _NAME, with_keyset=True)
        try:
            yield
        finally:
            torch.set_autocast_dtype("cpu", dtype)


@contextlib.contextmanager
def _autocast_of_any_device(casts: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Have this thread make an autocast for "cuda" where one for "cuda" or "cpu" is asked for.

    The state of the CPU's autocast is that of "cuda" then: torch's checkpoint restores both.
    """
    thread, init, clear = threading.get_ident(), torch.autocast.__init__, torch.clear_autocast_cache
    is_enabled, dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype

    def device_asked(device_type: str) -> str:
        return "cuda" if threading.get_ident() == thread and device_type == "cpu" else device_type

    def init_for_gpu(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        ours = threading.get_ident() == thread and device_type in ("cpu", "cuda")
        if ours and dtype is None:
            dtype = torch.get_autocast_dtype("cuda")
        # Without a GPU, torch would switch off an autocast for "cuda".
        init(self, "cpu" if ours else device_type, dtype, enabled, cache_enabled)
        if ours:
            self.device = "cuda"

    def clear_both() -> None:
        casts.clear()
        clear()

    torch.autocast.__init__ = init_for_gpu  # type: ignore[method-assign]
    torch.clear_autocast_cache = clear_both
    torch.is_autocast_enabled = lambda device_type="cuda": is_enabled(device_asked(device_type))
    torch.get_autocast_dtype = lambda device_type: dtype_of(device_asked(device_type))
    try:
        yield
    finally:
        torch.autocast.__init__ = init  # type: ignore[method-assign]
        torch.clear_autocast_cache = clear
        torch.is_autocast_enabled, torch.get_autocast_dtype = is_enabled, dtype_of
        clear_both()


def _kernels(casts: dict[int, tuple[Tensor, Tensor]]) -> dict[str, Callable[..., Any]]:
    """Return a kernel for each op of torch that CUDA's autocast casts, by the op's name.

    Other libraries, such as torchvision, have kernels for their own ops. These ops get uncast tensors.
    """
    on_cuda, on_cpu = (
        {
            name.removeprefix("aten::")
            for name in private.registrations_for_dispatch_key(key)
            if name.startswith("aten::")
        }
        for key in ("AutocastCUDA", "AutocastCPU")
    )
    kernels: dict[str, Callable[..., Any]] = {}
    for name in on_cuda - _LEFT_OUT:
        run: Callable[..., Any] = _in_32_bits
        if name in _REDUCED:
            run = _as_on_cpu if name in on_cpu else partial(_reduced, casts)
        elif name in _TYPED:
            run = _typed
        elif name in _WIDEST:
            run = _widest
        elif name in _NORMS:
            run = _norm
        kernels[name] = partial(_if_enabled, aten_op(name), run)
    return kernels


def _if_enabled(op: Any, run: Callable[..., Any], keys: Any, *args: Any, **kwargs: Any) -> Any:
    # Dynamo's dispatcher in Python would come back here from `redispatch`, so the key is excluded.
    with private.ExcludeDispatchKey(private.DispatchKeySet(_KEY)):
        if not torch.is_autocast_enabled("cuda"):
            return op(*args, **kwargs)
        return run(op, keys.remove(_KEY), args, kwargs)


def _as_on_cpu(op: Any, keys: Any, args: Any, kwargs: Any) -> Any:
    torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
    return op.redispatch(keys.add(DispatchKey.AutocastCPU), *args, **kwargs)


def _reduced(casts: dict[int, tuple[Tensor, Tensor]], op: Any, _keys: Any, args: Any, kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("cuda")

    def cast(tensor: Tensor) -> Tensor:
        if not _is_cast(tensor) or tensor.dtype is dtype:
            return tensor
        kept = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not (kept and tensor.dtype is torch.float32 and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        if id(tensor) not in casts:
            casts[id(tensor)] = (tensor, tensor.to(dtype))  # the first keeps its id from being used again
        return casts[id(tensor)][1]

    return _call(op, cast, args, kwargs)


def _in_32_bits(op: Any, _keys: Any, args: Any, kwargs: Any) -> Any:
    return _cast_all(op, args, kwargs, torch.float32)


def _widest(op: Any, _keys: Any, args: Any, kwargs: Any) -> Any:
    types = [t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and _is_cast(t)]
    wide = torch.float32 in types
    return _cast_all(op, args, kwargs, torch.float32 if wide else torch.get_autocast_dtype("cuda"))


def _cast_all(op: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    return _call(op, lambda t: t.to(dtype) if _is_cast(t) else t, args, kwargs)


def _call(op: Any, cast: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> Any:
    """Call `op` on cast operands. The last one is cast first, as by the compiler that torch is built with."""
    named = {name: tree_map_only(Tensor, cast, kwargs[name]) for name in reversed(kwargs)}
    positional = [tree_map_only(Tensor, cast, arg) for arg in reversed(args)]
    return op(*reversed(positional), **named)


def _typed(op: Any, _keys: Any, args: Any, kwargs: Any) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    values = dict(zip(names, args, strict=False)) | kwargs
    if _is_cast(values[names[0]]) and values.get("dtype") is None:
        values["dtype"] = torch.float32
    return op(**values)


def _norm(op: Any, _keys: Any, args: Any, kwargs: Any) -> Any:
    name = _NORMS[op.name().removeprefix("aten::")]
    if not _is_cast(args[0]):
        return op(*args, **kwargs)
    return getattr(torch.ops.aten.norm, name)(*args, **kwargs, dtype=torch.float32)


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64
