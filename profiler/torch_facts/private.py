"""List every private name of torch that the profiler and the client use, each with its reason.

torch promises nothing about these names, so a new release of torch is checked against this file first. Names
keep torch's spelling without the underscore. Some are only looked up when they are called, because a build
without CUDA lacks them, or because importing them loads a part of torch that the user may not need.

Private attributes are read where they are used, since a call would cost time for each op:

- `Tensor._version`: counts writes in place; tells whether a saved tensor still has the saved contents.
- `Tensor._base`, `_is_view()`: tell views from tensors of their own.
- `Tensor._is_zerotensor()`: forward-mode AD makes such tensors without any memory.
- `UntypedStorage._cdata`: the identity of a storage, also where it has no address.
- `OpOverload._schema`, `_op`, `_op_dk`, `_overloadpacket`: what an op writes; how to call it without Python.
- `Module._parameters`, `_modules`, `_backward_hooks`, `_backward_pre_hooks`: read without a user's overrides.
- `Module._compiled_call_impl`: set by `module.compile()`.
- `Optimizer._optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`: a copy of an optimizer must call none.
- `DistributedDataParallel._module_parameters`, `_static_graph_delay_allreduce_enqueued`,
  `_get_active_ddp_module()`: what it reduces, and switches without a public form (`distributed/ddp.py`).
- FSDP's state, parameter groups and communication: all of it is private (`distributed/fsdp.py`).
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import _C, _guards, _ops, nn
from torch._C import _autograd, _profiler
from torch._subclasses import fake_tensor as _fake
from torch.autograd import function as _function
from torch.autograd import grad_mode as _grad_mode
from torch.nn.modules import module as _modules
from torch.nn.utils import parametrize as _parametrize
from torch.nn.utils import stateless as _stateless
from torch.optim import optimizer as _optimizer
from torch.utils import _foreach_utils, _python_dispatch, _pytree

# Ops, and the containers of their arguments.
OpOverload = _ops.OpOverload  # what a dispatch mode is called with
OpOverloadPacket = _ops.OpOverloadPacket  # what users name an op by: torch.ops.aten.mm
HigherOrderOperator = _ops.HigherOrderOperator  # an op with functions inside, such as flex_attention
tree_leaves = _pytree.tree_leaves  # walks containers as torch itself does
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only

# Dispatch modes. The stack is pushed and popped for each op, so without torch's Python around it.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
disable_current_modes = _python_dispatch._disable_current_modes  # for our own copies
get_current_dispatch_mode = _python_dispatch._get_current_dispatch_mode
get_current_dispatch_mode_stack = _python_dispatch._get_current_dispatch_mode_stack
len_dispatch_stack = _C._len_torch_dispatch_stack
get_dispatch_stack_at = _C._get_dispatch_stack_at
pop_dispatch_stack = _C._pop_torch_dispatch_stack
push_on_dispatch_stack = _C._push_on_torch_dispatch_stack
DisableTorchDispatch = _C._DisableTorchDispatch  # hides an op of ours from all modes
DisableTorchFunctionSubclass = _C.DisableTorchFunctionSubclass  # and from tensor subclasses

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
registrations_for_dispatch_key = _C._dispatch_get_registrations_for_dispatch_key  # lists of autocast
SetExcludeDispatchKeyGuard = _C._SetExcludeDispatchKeyGuard  # lets a view share a version counter
dispatch_key_is_excluded = _C._dispatch_tls_is_dispatch_key_excluded
scoped_library = torch.library._scoped_library  # kernels that last as long as a with-block

# Tensors without memory, and whether torch is tracing.
FakeTensor = _fake.FakeTensor
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


def current_stream() -> int:
    """Return what tells the current stream of the current device from others: no object is made on CUDA."""
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
len_torch_function_stack = _C._len_torch_function_stack  # modes such as `with torch.device(...)`

# Tensors.
neg_view = torch._neg_view  # a stand-in is lazily negated where the saved tensor is
set_conj, set_neg = _C._set_conj, _C._set_neg  # rebuild a view with its lazy bits
unsafe_preserve_version_counter = _grad_mode._unsafe_preserve_version_counter  # hides a restored gather

# Autograd.
current_graph_task_id = _C._current_graph_task_id  # which backward is running; -1: none
current_graph_task_keeps_graph = _C._autograd._get_current_graph_task_keep_graph  # retain_graph=True
current_autograd_node = _C._current_autograd_node  # which node unpacks
get_graph_exec_group = _C._get_graph_exec_group  # `register_multi_grad_hook` and pipelines set it
will_engine_execute_node = _C._will_engine_execute_node  # whether a partial backward comes to a node
execution_engine: Any = torch.autograd.Variable._execution_engine  # calls back when a backward is over
engine_run_backward = torch.autograd.graph._engine_run_backward  # its frame shows the arguments of backward
top_saved_tensors_default_hooks = _autograd._top_saved_tensors_default_hooks  # hooks around ours
set_grad_enabled = _C._set_grad_enabled  # unlike the public one, makes no object
HookMixin = _function._HookMixin  # C++ registers hooks of nodes through it

# Modules and optimizers.
reparametrize_module = _stateless._reparametrize_module  # functional_call ends before backward
foreach_supported_types = _optimizer._foreach_supported_types  # which tensors an optimizer updates at once
get_foreach_kernels_supported_devices = _foreach_utils._get_foreach_kernels_supported_devices  # and where
FORWARD_HOOKS_OF_ALL_MODULES: tuple[dict[int, Any], ...] = (
    _modules._global_forward_hooks,
    _modules._global_forward_pre_hooks,
)
HOOKS_OF_ALL_MODULES: tuple[dict[int, Any], ...] = (
    _modules._global_backward_hooks,  # `register_module_full_backward_hook`
    _modules._global_backward_pre_hooks,
)


def parametrization_cache() -> dict[Any, Any]:
    """Return what `torch.nn.utils.parametrize.cached()` holds, which replaces the dictionary when it ends."""
    return _parametrize._cache


# State of a thread that autograd takes along to the threads of its devices.
stash_in_tls = _C._stash_obj_in_tls
remove_from_tls = _C._remove_obj_from_tls
is_key_in_tls = _C._is_key_in_tls
get_from_tls = _C._get_obj_in_tls

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
EventType = _profiler._EventType
profiler_enabled = _autograd._profiler_enabled
prepare_profiler = _autograd._prepare_profiler
enable_profiler: Callable[..., None] = _autograd._enable_profiler  # the stub lacks its scopes
disable_profiler: Callable[[], Any] = _autograd._disable_profiler
begin_range: Callable[..., Any] = torch.ops.profiler._record_function_enter_new.default._op
end_range: Callable[..., Any] = torch.ops.profiler._record_function_exit._RecordFunction._op

# Dynamo: imports none of its Python, which takes seconds.
eval_frame = _C._dynamo.eval_frame


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


def compiled_graph_class() -> Any:
    """Return the class of Inductor's compiled code, which has no hook around its calls. Imports Inductor."""
    from torch._inductor.output_code import CompiledFxGraph

    return CompiledFxGraph


def fsdp_param_group_class() -> Any:
    """Return the class that gathers, frees and reduces the parameters of an FSDP unit. Imports FSDP."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return FSDPParamGroup


def fsdp_mesh_classes() -> tuple[Any, Any]:
    """Return the classes of a mesh over which FSDP shards, and of one that also replicates. Imports FSDP."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    return FSDPMeshInfo, HSDPMeshInfo


# AOTAutograd: a compiled step is planned between its two stages, for which torch has no hook. All of this
# imports Dynamo, which takes seconds.


def aot_graph_compile() -> Any:
    """Return the module in which AOTAutograd's second stage is looked up."""
    from torch._functorch._aot_autograd import graph_compile

    return graph_compile


def reset_code_caches() -> None:
    """Have Dynamo forget all code that it compiled in this process."""
    import torch._dynamo

    torch._dynamo.reset_code_caches()


def anything_traced() -> bool:
    """Return True if Dynamo has compiled code in this process."""
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    return convert_frame is not None and bool(convert_frame.input_codes.seen)


def graphs_loaded_from_cache() -> int:
    """Return how many graphs AOTAutograd has found compiled on disk."""
    from torch._dynamo.utils import counters

    return counters["aot_autograd"]["autograd_cache_hit"]


@functools.cache
def named_partitioner(name: str) -> Any:
    """Return a value of Inductor's `custom_partitioner_fn` that makes its caches depend on `name`."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Named(CustomPartitionerFn):
        def __init__(self) -> None:
            self.name = name

        def __call__(self, gm: Any, joint_inputs: Any, **options: Any) -> Any:
            from torch._functorch.partitioners import min_cut_rematerialization_partition

            return min_cut_rematerialization_partition(gm, joint_inputs, **options)

        def uuid(self) -> Any:
            return name

        def __reduce__(self) -> Any:  # Inductor pickles its configuration into its keys
            return named_partitioner, (name,)

    return Named()


def compiler_configs() -> list[Any]:
    """Return the modules of configuration that surround the second stage, as far as they are loaded."""
    names = ("torch._functorch.config", "torch._inductor.config")
    return [sys.modules[name] for name in names if name in sys.modules]


def config_values(module: Any) -> dict[str, Any]:
    """Return the values of a module of configuration, by name. Only read."""
    values: dict[str, Any] = module.get_config_copy()
    return values


def tracing_context() -> Any:
    """Return what Dynamo and AOTAutograd note about the frame that is compiled."""
    return _guards.TracingContext.try_get()


def compile_context() -> Any:
    """Return the identity of the compilation that is running."""
    return _guards.CompileContext.try_get()


def compile_contexts(tracing: Any, compiling: Any) -> list[Any]:
    """Return the contexts that Dynamo and `compile_fx` enter around AOTAutograd."""
    from torch._dynamo import compiled_autograd
    from torch._dynamo import config as dynamo_config
    from torch._dynamo.utils import preserve_rng_state
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    contexts = [
        _use_lazy_graph_module(cast("Any", dynamo_config).use_lazy_graph_module),
        _guards.tracing(tracing),
        _guards.compile_context(compiling),
        compiled_autograd._disable(),
        preserve_rng_state(),
    ]
    if tracing is not None and (virtualized := sys.modules.get("torch._inductor.virtualized")) is not None:
        contexts.append(virtualized.V.set_fake_mode(tracing.fake_mode))
    return contexts


def second_stage_contexts(fake_mode: Any) -> list[Any]:
    """Return the contexts that `create_aot_state` enters around the second stage."""
    from torch._decomp.decompositions_for_rng import PhiloxStateTracker
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

    contexts = [
        torch.autograd.set_multithreading_enabled(False),
        fake_mode,
        enable_python_dispatcher(),
        PhiloxStateTracker(),
        _disable_saved_tensors_hooks_during_tracing(),
    ]
    if (virtualized := sys.modules.get("torch._inductor.virtualized")) is not None:
        contexts.append(virtualized.V.set_fake_mode(fake_mode))
    return contexts


def adds_guards(tracing: Any) -> bool:
    """Return True if AOTAutograd's first stage has added guards, which its cache does not store."""
    return tracing is None or bool(tracing.guards_context.aotautograd_guards)


def wrap_cache_lookup(entry: Callable[[Any], Any], lookup: Callable[[Any], Any]) -> None:
    """Wrap the function by which backends call AOTAutograd, and its lookup in the cache on disk."""
    from torch._dynamo.backends import common
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    backends, cache = cast("Any", common), cast("Any", AOTAutogradCache)
    backends.aot_module_simplified = entry(backends.aot_module_simplified)
    cache.try_load = staticmethod(lookup(cache.try_load))


def code_on_disk(key: str, args: list[Any], config: Any, extra: Any) -> Any:
    """Return the code that AOTAutograd's cache on disk has under `key`; None if it has none."""
    from torch._functorch._aot_autograd import autograd_cache

    found = autograd_cache.AOTAutogradCache._lookup(key, True, False, args, {}, config)
    if found is None:
        return None
    try:
        return found[0].wrap_post_compile(args, config, autograd_cache.create_fx_config(extra))
    except autograd_cache.FXGraphCacheMiss:
        return None


def compiler_cache_dir() -> Path:
    """Return the folder of torch's caches of compiled code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def copied_graph_module(module: Any) -> Any:
    """Return a module with a copy of the graph, and the same constants."""
    from torch.fx._lazy_graph_module import _make_graph_module

    graph = torch.fx.Graph()
    copied: Any = graph.graph_copy(module.graph, {}, return_output_node=True)
    output, old = copied
    graph.output(output).meta = copy.copy(old.meta)
    return _make_graph_module(module, graph)


def has_passes_before_cut(module: Any) -> bool:
    """Return True if AOTAutograd itself would change a joint graph before its cut."""
    from torch._functorch import config

    if callable(cast("Any", config).joint_custom_pass):
        return True
    return any(isinstance(node.target, HigherOrderOperator) for node in module.graph.nodes)


_OWN = "_autoac_own"  # keyword argument that tells a node from equal ones


def merge_equal_nodes(module: Any, *, apart: Iterable[Any]) -> None:
    """Compute once what several nodes of a graph compute, as torch's own partitioner does.

    Each layer of BERT makes the same attention mask, for example. Nodes are new objects of the same names.

    Args:
        module: holds the graph.
        apart: nodes that stay as they are.
    """
    from torch._functorch import config
    from torch._functorch.compile_utils import fx_graph_cse

    if not config.cse:
        return
    for number, node in enumerate(apart):
        node.kwargs = {**node.kwargs, _OWN: number}  # equal to no other node
    module.graph = fx_graph_cse(module.graph)
    for node in module.graph.nodes:
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != _OWN}


def extract_forward_and_backward(
    module: Any, saved: list[Any], sizes: list[Any], num_fwd_outputs: int
) -> tuple[Any, Any]:
    """Cut a joint graph at the nodes `saved` and `sizes`, in the calling convention of AOTAutograd."""
    from torch._functorch.partitioners import _extract_fwd_bwd_modules

    return _extract_fwd_bwd_modules(module, saved, saved_sym_nodes=sizes, num_fwd_outputs=num_fwd_outputs)


def is_size_node(node: Any) -> bool:
    """Return True if a node of a graph is arithmetic on sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def fusible_by_compilers() -> Callable[[Any], bool]:
    """Return a function that is True for nodes that torch's partitioner expects a compiler to fuse."""
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list().is_fusible


def size_hint(size: Any) -> int:
    """Return a size, of a symbolic one the value that it was traced with, and 0 if that is not known."""
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    return optimization_hint(size, fallback=0)
