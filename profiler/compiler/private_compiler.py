"""Wrap the private names of torch.compile that a plan for compiled models needs.

A compiled step is planned between the two stages of AOTAutograd, for which torch has no hook. All of this is
looked up when it is called, since importing Dynamo takes seconds.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import _guards

from autoac.tape.errors import COMPILED_SINCE, UnsupportedTorch
from autoac.tape.torch_facts import minor_version
from autoac.tape.torch_facts.private import HigherOrderOperator


def check_version() -> None:
    """Check that this torch is one in which compiled models can be planned.

    Raises:
        UnsupportedTorch: it is not.
    """
    if not is_tested():
        raise UnsupportedTorch(
            torch.__version__,
            "a plan for compiled code replaces parts of torch.compile, which differ between versions",
            "a compiled model",
            oldest=COMPILED_SINCE,
            otherwise="plan the model without torch.compile",
        )


def is_tested() -> bool:
    """Return True if the names of this file were tested with the torch that is installed."""
    return minor_version() >= COMPILED_SINCE


def aot_graph_compile() -> Any:
    """Return the module in which AOTAutograd's second stage is looked up."""
    from torch._functorch._aot_autograd import graph_compile

    return graph_compile


def without_analysis_of_first_call() -> AbstractContextManager[Any]:
    """Leave out the mode with which torch looks for aliases in the first call of compiled code.

    Under a mode, each op makes one more tensor of its number, which no later step has.
    """
    from torch._functorch import config

    name = "check_custom_op_aliasing"  # not in each torch
    return config.patch({name: False}) if hasattr(config, name) else nullcontext()


def replace_second_stage(replacement: Callable[..., Any], resumes: Callable[[], bool]) -> None:
    """Have AOTAutograd call `replacement` as its second stage.

    Args:
        replacement: has the second stage of torch as its `__wrapped__`.
        resumes: True while the graph of that second stage went through `compute_scalars_as_tensors`, which
            works only once.
    """
    module = aot_graph_compile()
    tensorify = module._apply_tensorify_python_scalars

    @functools.wraps(tensorify)
    def tensorify_once(graph: Any) -> None:
        if not resumes():
            tensorify(graph)

    module._apply_tensorify_python_scalars = tensorify_once
    module.aot_stage2_autograd = replacement


def compute_scalars_as_tensors(module: Any) -> None:
    """Run the pass with which the second stage begins, on Python floats that the graph gets as inputs.

    It raises an exception for floats that must be constants. Dynamo catches it, and traces the frame again.
    """
    aot_graph_compile()._apply_tensorify_python_scalars(module)


def wrap_callback(replaced: Callable[[Any], Any]) -> None:
    """Apply `replaced` to the callback that a compiled function is about to hand to Dynamo."""
    from torch._dynamo import eval_frame as frames

    callback_from_stance = frames._callback_from_stance
    cast("Any", frames)._callback_from_stance = lambda callback: replaced(callback_from_stance(callback))


def reset_code_with(module_class: type, *, but: Any) -> None:
    """Have Dynamo forget code that checks for modules of a class, except that of the code object `but`."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
    from torch._dynamo.convert_frame import input_codes

    checks = f"{id(module_class)})"
    for tracked in list(input_codes.seen):
        code = tracked()
        if code is None or code is but:
            continue
        parts = [
            part
            for entry in _debug_get_cache_entry_list(code)
            for part in cast("Any", entry.guard_manager).code_parts
        ]
        if any("___check_type_id" in part and checks in part for part in parts):
            reset_code(code)


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


def no_donated_buffers(metadata: Any) -> AbstractContextManager[Any]:
    """Have the second stage note no saved tensors that backward may write over.

    Code with such tensors refuses `retain_graph=True`.
    """
    from torch._functorch import config

    metadata.bw_donated_idxs = []
    return cast("Any", config).patch(donated_buffer=False)  # type: ignore[no-any-return]


def reporting_compiler(compiler: Any, report: Callable[[], None]) -> Any:
    """Return a compiler of forward that calls `report` if its code cannot free its inputs while it runs."""
    from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
    from torch._functorch._aot_autograd.utils import make_boxed_func

    if isinstance(compiler, SerializableAOTDispatchCompiler):  # Inductor
        return compiler
    unpacks = make_boxed_func(len).__code__

    def compile_and_report(graph: Any, inputs: Any) -> Any:
        code = compiler(graph, inputs)
        if not hasattr(code, "_boxed_call") or getattr(code, "__code__", None) is unpacks:
            report()
        return code

    return compile_and_report


def suppresses_errors() -> bool:
    """Return True if code that a backend cannot compile runs without the backend."""
    from torch._dynamo import config

    return cast("Any", config).suppress_errors is True


def compilers_that_run_ops() -> tuple[Any, Any]:
    """Return compilers of forward and backward that run a graph op by op, as the backend `aot_eager` does."""
    from torch._dynamo.backends.debugging import boxed_nop

    return boxed_nop, boxed_nop


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

    Each layer of BERT makes the same attention mask, for example. The graph gets new nodes of the same names.

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


def functions_with_rng_state() -> tuple[Any, Any]:
    """Return two functions that run an op: one returns the generator's state too, one begins from a state."""
    from torch._prims import rng_prims

    return rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state


def is_size_node(node: Any) -> bool:
    """Return True if a node of a graph is arithmetic on sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def fusible_by_compilers() -> Callable[[Any], bool]:
    """Return a function that is True for nodes that torch's partitioner expects a compiler to fuse."""
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list().is_fusible


def generated_by_inductor() -> Callable[[Any], bool]:
    """Return a function that is True for nodes for which Inductor generates code instead of a kernel call."""
    from torch._functorch.partitioners import get_default_op_list
    from torch._inductor.lowering import fallbacks, lowerings

    runs_alone = get_default_op_list().is_compute_intensive
    return lambda node: node.target in lowerings and node.target not in fallbacks and not runs_alone(node)


def is_elementwise(node: Any) -> bool:
    """Return True if a node computes each number by itself, from the numbers at the same place."""
    return torch.Tag.pointwise in node.target.tags or node.target is torch.ops.aten.full.default


def nodes_laid_out_channels_last(module: Any) -> Iterable[Any]:
    """Return the nodes of a forward graph that Inductor lays out for 2d convolutions, if it does so."""
    from torch._inductor.graph import GraphLowering

    if not GraphLowering.decide_layout_opt(module, is_inference=False):
        return ()
    unbound: Any = GraphLowering.find_nodes_prefer_channels_last
    return cast("Iterable[Any]", unbound(SimpleNamespace(module=module)))


def size_hint(size: Any) -> int:
    """Return a size. Of a symbolic size, return the value it was traced with, or 0 if that is not known."""
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    return optimization_hint(size, fallback=0)
