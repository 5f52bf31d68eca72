"""List every private name of torch that the profiler and the client use, each with its reason.

torch promises nothing about these names, so only the releases that the tests ran under are accepted
(tape/torch_facts/__init__.py). Names keep torch's spelling without the underscore.

Some are only looked up when they are called, because a build without CUDA lacks them, or because importing
them loads a part of torch that the user may not need. Those of torch.compile are in
profiler/compiler/private_compiler.py.

Private attributes are read where they are used, since a call would cost time for each op:

- `Tensor._version`: counts writes in place; tells whether a saved tensor still has the saved contents.
- `Tensor._base`, `_is_view()`: tell views from tensors of their own.
- `Tensor._is_zerotensor()`: forward-mode AD makes such tensors without any memory.
- `Tensor._post_accumulate_grad_hooks`: an optimizer in backward must not step in a profile.
- `UntypedStorage._cdata`: the identity of a storage, also where it has no address.
- `OpOverload._schema`, `_op`, `_op_dk`, `_overloadpacket`: what an op writes; how to call it without Python.
- `OpOverload._uncache_dispatch`: torch.compile remembers the kernels that it has looked up.
- `Module._parameters`, `_modules`, `_backward_hooks`, `_backward_pre_hooks`: read without a user's overrides.
- `Module._compiled_call_impl`: set by `module.compile()`.
- `Optimizer._optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`: a copy of an optimizer must call none;
  and which of them is called first.
- `DistributedDataParallel._module_parameters`, `_static_graph_delay_allreduce_enqueued`,
  `_get_active_ddp_module()`: what it reduces, and switches without a public form (`distributed/ddp.py`).
- `ScriptObject._type`, `ProcessGroup.unbox`: which group an op of `c10d` takes (`process_groups.py`).
- `replicate`'s state (`_ddp`, `_no_sync`, `_init_args`, `_init_kwargs`, `lazy_init`): it has its own DDP.
- FSDP's state, parameter groups and communication: all of it is private (`distributed/fsdp.py`).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import _C, _guards, _ops, nn
from torch._C import _autograd, _functorch, _profiler
from torch._subclasses import fake_tensor as _fake
from torch._subclasses import functional_tensor as _functional
from torch.autograd import forward_ad as _forward_ad
from torch.autograd import function as _function
from torch.autograd import grad_mode as _grad_mode
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils, _python_dispatch, _pytree
from torch.utils import checkpoint as _checkpoint
from torch.utils import weak as _weak

# Ops, and the containers of their arguments.
OpOverload = _ops.OpOverload  # what a dispatch mode is called with
OpOverloadPacket = _ops.OpOverloadPacket  # what users name an op by: torch.ops.aten.mm
HigherOrderOperator = _ops.HigherOrderOperator  # an op with functions inside, such as flex_attention
tree_leaves = _pytree.tree_leaves  # walks containers as torch itself does
containers = _pytree.SUPPORTED_NODES  # that it walks, by type; a named tuple has no entry of its own
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
WeakIdKeyDictionary = _weak.WeakIdKeyDictionary  # keyed by tensors, which compare element by element

# Functions of users. Up to torch 2.13, `Function.apply` calls `apply` of this class, however early it was
# looked up. Since 2.14 it calls nothing in Python but the class of nodes, of which it makes one.
SingleLevelFunction: Any = _function._SingleLevelFunction
BackwardCFunction: Any = _function.BackwardCFunction
# Tells the two forms of forward apart.
is_setup_context_defined: Callable[[Any], bool] = _function._is_setup_context_defined

# Dispatch modes. The stack is pushed and popped for each op, so without torch's Python around it.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
disable_current_modes = _python_dispatch._disable_current_modes  # for our own copies
get_current_dispatch_mode = _python_dispatch._get_current_dispatch_mode
get_current_dispatch_mode_stack = _python_dispatch._get_current_dispatch_mode_stack
len_dispatch_stack = _C._len_torch_dispatch_stack
get_dispatch_stack_at = _C._get_dispatch_stack_at
pop_dispatch_stack = _C._pop_torch_dispatch_stack
push_on_dispatch_stack = _C._push_on_torch_dispatch_stack
storage_use_count: Callable[[int], int] = _C._storage_Use_Count  # tells if the model still holds a storage
DisableTorchDispatch = _C._DisableTorchDispatch  # hides an op of ours from all modes

# Dispatch keys: which kernels run.
DispatchKey = _C.DispatchKey
DispatchKeySet = _C.DispatchKeySet
AutoDispatchBelowAutograd = _C._AutoDispatchBelowAutograd  # recompute builds no graph
ExcludeDispatchKeyGuard = _C._ExcludeDispatchKeyGuard  # recompute runs ops that autocast has already cast
ExcludeDispatchKey = _C._ExcludeDispatchKeyGuard  # the same for a set of keys, in a with-block
ForceDispatchKeyGuard = _C._ForceDispatchKeyGuard  # kernels of one thread: a key that no tensor has
dispatch_include_set = _C._dispatch_tls_local_include_set
dispatch_exclude_set = _C._dispatch_tls_local_exclude_set
parse_dispatch_key = _C._dispatch_key_parse
SetExcludeDispatchKeyGuard = _C._SetExcludeDispatchKeyGuard  # lets a view share a version counter
dispatch_key_is_excluded = _C._dispatch_tls_is_dispatch_key_excluded
set_dispatch_key_excluded = _C._dispatch_tls_set_dispatch_key_excluded  # as the guard, in fewer calls
make_subclass: Callable[..., torch.Tensor] = torch.Tensor._make_subclass  # detaches out of sight of modes

# Tensors without memory, and whether torch is tracing.
FakeTensor = _fake.FakeTensor
FunctionalTensor = _functional.FunctionalTensor  # wraps a fake tensor while torch.compile traces
FakeTensorMode = _fake.FakeTensorMode
unset_fake_temporarily = _fake.unset_fake_temporarily  # runs one op for real
DataDependentOutputException = _fake.DataDependentOutputException  # an op asks for an unknown value
DynamicOutputShapeException = _fake.DynamicOutputShapeException  # or needs one for its output's shape
UnsupportedOperatorException = _fake.UnsupportedOperatorException  # or has no fake kernel
detect_fake_mode = _guards.detect_fake_mode
get_tracing_state = _C._get_tracing_state  # of torch.jit.trace


def is_proxy_tracing() -> bool:
    """Return True if `make_fx` or torch.export traces what runs on this thread."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.PROXY) is not None


def is_transforming() -> bool:
    """Return True inside of torch.func's transforms and of forward-mode AD, whose tensors have no storage."""
    return _functorch.peek_interpreter_stack() is not None or _forward_ad._current_level >= 0


peek_interpreter_stack: Callable[[], Any] = _functorch.peek_interpreter_stack  # the transform that runs

# Tensors of torch.func's transforms, also after them; and those of the older vmap, of `is_grads_batched`.
is_functorch_wrapped: Callable[[torch.Tensor], bool] = _functorch.is_functorch_wrapped_tensor
is_batched: Callable[[torch.Tensor], bool] = _functorch.is_legacy_batchedtensor


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Run the body outside of the transforms of torch.func that are running."""
    stack = []
    try:
        while _functorch.peek_interpreter_stack() is not None:
            stack.append(_functorch.pop_dynamic_layer_stack())
        yield
    finally:
        while stack:
            _functorch.push_dynamic_layer_stack(stack.pop())


def has_kernel(name: str, key: str) -> bool:
    """Return True if the op `name` has a kernel of its own for a dispatch key, other than a fallthrough."""
    return _C._dispatch_has_kernel_for_dispatch_key(
        name, key
    ) and not _C._dispatch_kernel_for_dispatch_key_is_fallthrough(name, key)


def keys_excluded_by_caller() -> Any:
    """Return the dispatch keys that the caller of an op excludes; None where no dispatch mode was called.

    torch takes a snapshot of the keys where it enters the dispatcher. Only restoring it shows it.
    """
    snapshot = _restored_snapshot()
    try:
        snapshot.__enter__()
    except RuntimeError:
        return None
    excluded = dispatch_exclude_set()
    snapshot.__exit__(None, None, None)
    return excluded


_restored_snapshot: Any = _C._RestorePythonTLSSnapshot  # type: ignore[attr-defined]  # no stub


private_use_device: Callable[[], str] = _C._get_privateuse1_backend_name  # for which torch has no name


def current_stream() -> int:
    """Return a number that identifies the current stream of the current device. Makes no object on CUDA."""
    if _raw_stream is not None:
        return _raw_stream(_C._cuda_getDevice())
    return _C._accelerator_getStream(-1).stream_id


_raw_stream: Callable[[int], int] | None = getattr(_C, "_cuda_getCurrentRawStream", None)

# Choice of kernels for attention.
get_flash_sdp_enabled, set_flash_sdp_enabled = _C._get_flash_sdp_enabled, _C._set_sdp_use_flash
get_mem_efficient_sdp_enabled = _C._get_mem_efficient_sdp_enabled
set_mem_efficient_sdp_enabled = _C._set_sdp_use_mem_efficient
get_math_sdp_enabled, set_math_sdp_enabled = _C._get_math_sdp_enabled, _C._set_sdp_use_math
get_cudnn_sdp_enabled, set_cudnn_sdp_enabled = _C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn

# Tensors.
neg_view = torch._neg_view  # what takes the place of a saved tensor is lazily negated where that is
set_conj, set_neg = _C._set_conj, _C._set_neg  # rebuild a view with its lazy bits
unsafe_preserve_version_counter = _grad_mode._unsafe_preserve_version_counter  # hides what is put back

# Autograd.
current_graph_task_id = _C._current_graph_task_id  # which backward is running; -1: none
current_graph_task_keeps_graph = _C._autograd._get_current_graph_task_keep_graph  # retain_graph=True
current_autograd_node = _C._current_autograd_node  # which node unpacks
get_graph_exec_group = _C._get_graph_exec_group  # `register_multi_grad_hook` and pipelines set it
will_engine_execute_node = _C._will_engine_execute_node  # whether a partial backward comes to a node
execution_engine: Any = torch.autograd.Variable._execution_engine  # runs backward, and calls back after it
EXECUTION_ENGINE = torch.autograd.Variable, "_execution_engine"  # under which all calls find the engine
engine_run_backward = torch.autograd.graph._engine_run_backward  # its frame shows that backward runs
top_saved_tensors_default_hooks = _autograd._top_saved_tensors_default_hooks  # hooks around ours
set_grad_enabled = _C._set_grad_enabled  # unlike the public one, makes no object
get_sequence_nr = _autograd._get_sequence_nr  # how many nodes autograd has made on this thread

# Modules and optimizers.
foreach_supported_types = _optimizer._foreach_supported_types  # which tensors an optimizer updates at once
get_foreach_kernels_supported_devices = _foreach_utils._get_foreach_kernels_supported_devices  # and where
STEP_HOOKS_OF_ALL_OPTIMIZERS: tuple[dict[int, Any], ...] = (
    _optimizer._global_optimizer_pre_hooks,  # `register_optimizer_step_pre_hook`
    _optimizer._global_optimizer_post_hooks,
)


# State of a thread that autograd takes along to the threads of its devices.
is_key_in_tls = _C._is_key_in_tls
get_from_tls = _C._get_obj_in_tls


def stash_in_tls(key: str, value: Any) -> None:
    """Put a value into the state of this thread."""
    if torch.__version__.startswith("2.11."):  # takes a reference that it does not count
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _C._stash_obj_in_tls(key, value)


def remove_from_tls(key: str) -> None:
    """Remove a value from the state of this thread; up to torch 2.12, leave None in its place."""
    remove = getattr(_C, "_remove_obj_from_tls", None)
    if remove is None:
        stash_in_tls(key, None)
    else:
        remove(key)


# Fake steps of a GPU.
registrations_for_dispatch_key: Callable[[str], list[str]] = _C._dispatch_get_registrations_for_dispatch_key
scoped_library: Callable[..., AbstractContextManager[Any]] = torch.library._scoped_library  # for a with-block
from_functional_tensor: Callable[[Any], Any] = torch._from_functional_tensor  # the fake tensor that it wraps

# Flags of the process by which kernels are chosen: the public accessors are slow, or check and warn.
get_deterministic_algorithms = _C._get_deterministic_algorithms
get_deterministic_algorithms_warn_only = _C._get_deterministic_algorithms_warn_only
set_deterministic_algorithms = _C._set_deterministic_algorithms
get_mkldnn_enabled, set_mkldnn_enabled = _C._get_mkldnn_enabled, _C._set_mkldnn_enabled
get_mkldnn_deterministic = _C._get_mkldnn_deterministic
set_mkldnn_deterministic = _C._set_mkldnn_deterministic
get_cudnn_enabled, set_cudnn_enabled = _C._get_cudnn_enabled, _C._set_cudnn_enabled
get_cudnn_deterministic = _C._get_cudnn_deterministic
set_cudnn_deterministic = _C._set_cudnn_deterministic
get_cudnn_benchmark, set_cudnn_benchmark = _C._get_cudnn_benchmark, _C._set_cudnn_benchmark

# torch.profiler: its public form neither records marks alone nor lets a mark pass unseen by modes.
DeviceType = _autograd.DeviceType
RecordScope = _profiler.RecordScope
AllocationFields = _profiler._ExtraFields_Allocation
OpFields = _profiler._ExtraFields_TorchOp
profiler_enabled = _autograd._profiler_enabled
prepare_profiler = _autograd._prepare_profiler
enable_profiler: Callable[..., None] = _autograd._enable_profiler  # the stub lacks its scopes
disable_profiler: Callable[[], Any] = _autograd._disable_profiler
begin_range: Callable[[str], Any] = _autograd._record_function_with_args_enter  # no op, so no mode sees it
end_range: Callable[[Any], None] = _autograd._record_function_with_args_exit
record_ranges: Callable[[bool], None] = _autograd._enable_record_function  # that begin on this thread

# torch.utils.checkpoint. All its callers look up the generator when they are called (own_checkpoints.py), up
# to torch 2.13 by the second name.
checkpoint_generator: Any = getattr(_checkpoint, "_checkpoint_without_reentrant_generator_impl", None) or (
    _checkpoint._checkpoint_without_reentrant_generator
)
COMPOSABLE_CHECKPOINT = "torch.distributed._composable.checkpoint_activation"  # imports it by name


def checkpoint_debugs(debug: bool) -> bool:
    """Return True if a checkpoint called with `debug` records its ops for error messages."""
    enabled = _checkpoint._checkpoint_debug_enabled
    return debug if enabled is None else enabled


determinism_checks = list(_checkpoint._allowed_determinism_checks_to_fns)  # that torch's checkpoint accepts
# The classes of the two contexts that `create_selective_checkpoint_contexts` makes.
selective_context_classes = (_checkpoint._CachingTorchDispatchMode, _checkpoint._CachedTorchDispatchMode)

# Dynamo: imports none of its Python, which takes seconds.
get_eval_frame_callback = _C._dynamo.eval_frame.get_eval_frame_callback  # whether it compiles what runs
set_eval_frame = _C._dynamo.eval_frame.set_eval_frame
set_code_exec_strategy = _C._dynamo.eval_frame.set_code_exec_strategy  # keeps it out of some code
FrameExecStrategy = _C._dynamo.eval_frame._FrameExecStrategy
FRAME_SKIPPED = _C._dynamo.eval_frame._FrameAction.SKIP
FRAME_TRACED = _C._dynamo.eval_frame._FrameAction.DEFAULT


def compiled_autograd_off() -> AbstractContextManager[None]:
    """Run backward in eager mode, even where compiled autograd is active, which would trace it."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return nullcontext() if module is None else module._disable()


def clear_cublas_workspaces() -> None:
    """Free what cuBLAS keeps between calls for this thread. Only a build with CUDA has the function."""
    _C._cuda_clearCublasWorkspaces()


def sleep_of(device: torch.device) -> Callable[[int], None] | None:
    """Return a function that keeps the current stream busy for some cycles; None if torch has none."""
    return getattr(_C, "_cuda_sleep", None) if device.type == "cuda" else None


def optimized_module_class() -> type[nn.Module] | None:
    """Return the class of what `torch.compile(module)` returns; None if nothing has loaded Dynamo yet."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return None if dynamo is None else dynamo.OptimizedModule


# Looked up by a call, which imports the module.
# Inductor's compiled code, which has no hook around its calls.
compiled_graph_class = partial(resolve_name, "torch._inductor.output_code:CompiledFxGraph")
# Gathers, frees and reduces the parameters of an FSDP unit.
fsdp_param_group_class = partial(
    resolve_name, "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"
)
# Finds out how an op on DTensors shards its outputs.
sharding_propagator = partial(resolve_name, "torch.distributed.tensor._sharding_prop:ShardingPropagator")
functional_collectives = partial(resolve_name, "torch.distributed._functional_collectives")


def graph_of_function(cls: Any) -> Any:
    """Return AOTAutograd's facts about the compiled graph that a Function runs; None for other Functions."""
    return cls.metadata if hasattr(cls, "_aot_id") else None


def process_group_named(name: str) -> Any:
    """Return the process group that functional collectives know by `name`; None if there is none."""
    try:
        return resolve_name("torch._C._distributed_c10d:_resolve_process_group")(name)
    except (LookupError, RuntimeError, ValueError):
        return None


def unboxed_group(boxed: Any) -> Any:
    """Return the process group in a `ScriptObject`."""
    return resolve_name("torch.distributed:ProcessGroup.unbox")(boxed)


def replicate_states(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Return the modules in `model` that `replicate` was called on, each with its state there."""
    if "torch.distributed._composable.replicate" not in sys.modules:
        return []
    key = resolve_name("torch.distributed._composable.contract:STATE_KEY")
    state_of = resolve_name("torch.distributed._composable.replicate:replicate.state")
    contracted = [module for module in model.modules() if key in module.__dict__]
    states = ((module, state_of(module)) for module in contracted)
    return [(module, state) for module, state in states if state is not None]


def default_store() -> Any:
    """Return the store of the job, by which ranks find each other."""
    return resolve_name("torch.distributed.distributed_c10d:_get_default_store")()


def device_of_group(group: Any) -> torch.device:
    """Return the device on which a process group communicates."""
    return torch.device(resolve_name("torch.distributed.distributed_c10d:_get_object_coll_device")(group))


def fake_store() -> Any:
    """Return a store for the process group that sends nothing. Its module registers the backend "fake"."""
    return resolve_name("torch.testing._internal.distributed.fake_pg:FakeStore")()
