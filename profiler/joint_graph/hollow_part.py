"""Profile a compiled graph inside a hollow step: run its joint graph node by node, and hold no activation.

AOTAutograd builds its usual function around two halves that this file supplies in place of compiled ones, so
that everything around the halves is as in training. The halves run the nodes of a cut that saves everything,
in the order and with the frees of the code that torch generates for a graph. Forward records its ops as eager
ops are recorded, by the paths of their modules. It returns empty tensors in place of activations.
Backward makes ones of the right description right before each node that reads such an activation, and frees
them after it: each such node is a step of the profile, which unpacks what the node reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from autoac.profiler.capture.op_recorder import OpRecorder
from autoac.profiler.capture.saved_tensor_recorder import SavedTensorRecorder
from autoac.profiler.compiler import private_compiler
from autoac.profiler.compiler.second_stage import BoxedCall, CompiledPart
from autoac.profiler.joint_graph.cut import cut
from autoac.profiler.joint_graph.decided_part import note_ops
from autoac.profiler.joint_graph.fused_time import shares_of_time
from autoac.profiler.joint_graph.inductor_memory import InductorNodes, call_node, is_channels_last
from autoac.profiler.joint_graph.joint_graph import (
    JointGraph,
    is_op,
    is_view,
    joined,
    module_path,
    never_again,
    results_of,
    storages_read,
)
from autoac.profiler.joint_graph.random_ops import RNG_STATE, without_state
from autoac.profiler.torch_facts.inductor import keep_dynamo_out
from autoac.profiler.torch_facts.op_signature import outputs_of

# Dynamo skips the forwards of torch's own modules, but not what they call: autograd calls `pack` from them.
keep_dynamo_out(SavedTensorRecorder.pack, "it runs while eager ops do", recursively=True)

_HOLLOW = "hollow"  # key of the compiled halves
_RUN = "_autoac_run"  # attribute of the empty tensors by which backward finds its forward


class PartWatch(Protocol):
    """Follow the calls of compiled graphs in a step that is profiled."""

    def ran(self, part: CompiledPart, *, recorded: bool) -> None:
        """Note a call, before the graph runs."""


class HollowParts:
    """Run the compiled graphs of a forward node by node. With a recorder, record them."""

    def __init__(
        self,
        recorder: OpRecorder | None = None,
        saved: SavedTensorRecorder | None = None,
        watch: PartWatch | None = None,
    ) -> None:
        self.recorder, self.saved, self.watch = recorder, saved, watch

    def callable_of(self, part: CompiledPart) -> BoxedCall:
        if self.watch is not None:
            self.watch.ran(part, recorded=self.recorder is not None)
        if (compiled := part.compiled.get(_HOLLOW)) is None:
            halves = _Halves(part)
            compilers = halves.compiled_forward, halves.compiled_backward
            compiled = part.compile(_HOLLOW, halves.partition, compilers)

        def run(args: list[Any]) -> Any:
            if self.recorder is None:
                return compiled(args)
            _runs.append(_Run(self.recorder, self.saved))
            try:
                return compiled(args)
            finally:
                _runs.pop()

        return run


@dataclass(slots=True)
class _Hollow:
    """Describe a tensor that forward saved, for backward."""

    size: Sequence[int]
    stride: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    version: int | None = None  # of the recorder; None: forward is not recorded, or did not make the storage
    content: Tensor | None = None  # of integers and bools, which index and decide

    def tensor(self) -> Tensor:
        if self.content is not None:
            return self.content
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device).fill_(1)


@dataclass(slots=True)
class _Run:
    """One call of a compiled graph."""

    recorder: OpRecorder | None
    saved: SavedTensorRecorder | None
    hollow: dict[str, _Hollow] = field(default_factory=dict)  # by name of the node
    handles: dict[tuple[str, str], int] = field(default_factory=dict)  # saved tensor, by reader and storage

    def copies_of(self, inputs: Mapping[fx.Node, Any], inductor: InductorNodes) -> dict[fx.Node, Tensor]:
        """Return channels-last copies of the inputs that Inductor copies."""
        return {
            node: self.saved.compiled_copy_of(tensor)
            for node, tensor in inputs.items()
            if self.saved is not None and node.name in inductor.channels_last and not is_channels_last(tensor)
        }

    def kernel_of(self, node: fx.Node, inductor: InductorNodes) -> AbstractContextManager[None]:
        """Surround a run of `node`, whose temporaries may be in registers."""
        if self.saved is None or node.name not in inductor.generated:
            return nullcontext()
        return self.saved.one_kernel()


_runs: list[_Run] = []  # those that are in forward


class _Halves:
    """The halves of one compiled graph."""

    def __init__(self, part: CompiledPart) -> None:
        self._part = part
        self._mutated = [info.mutates_data for info in part.metadata.input_info]
        self._never_again: dict[str, str] = {}  # reasons, by name of the node
        self._time_shares: dict[str, float] = {}  # by name of the node
        self._reads: list[tuple[str, str]] = []  # (node of backward, storage of forward that it reads)

    def partition(
        self, module: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut the joint graph where everything is saved."""

        def everything(joint: JointGraph) -> dict[fx.Node, bool]:
            note_ops(self._part, joint)
            self._never_again = never_again(module.graph, joint, self._mutated)
            if self._part.fuses:
                self._time_shares = shares_of_time(joint)
            return dict.fromkeys(joint.ops, True)

        forward, backward = cut(module, num_fwd_outputs, everything)
        made = {node.name for node in forward.graph.nodes if node.op in ("call_function", "placeholder")}
        self._reads = [
            (node.name, read.name)
            for node in backward.graph.nodes
            if not is_view(node)
            for read in storages_read(node)
            if read.name in made
        ]
        return forward, backward

    def compiled_forward(self, module: fx.GraphModule, _inputs: Any) -> BoxedCall:
        """Return the function that runs forward."""
        needed = {storage for _, storage in self._reads}
        outputs = results_of(module.graph)
        names = [getattr(node, "name", "") for node in outputs]
        inductor = InductorNodes.of_forward(module) if self._part.fuses else InductorNodes()
        saved_from = self._first_saved(module)
        steps = _Frees.of(module.graph, saved_from)

        def run(args: list[Any]) -> tuple[Any, ...]:
            call = _runs[-1] if _runs else _Run(None, None)
            env = _placed(module, args)
            args.clear()
            copies = call.copies_of(env, inductor)
            for node, arg in env.items():
                if node.name in needed and node not in copies and isinstance(arg, Tensor):
                    described = _described(arg, call)
                    if described.version is not None:  # the model made it, in an op or another graph
                        call.hollow[node.name] = described
            for node, frees in steps.order:
                with call.kernel_of(node, inductor):
                    env[node] = self._run_op(module, node, env, call)
                if node.name in needed and isinstance(env[node], Tensor):
                    call.hollow[node.name] = _described(
                        env[node], call, channels_last=node.name in inductor.channels_last
                    )
                for dead in frees:
                    del env[dead]
            self._pack(call)
            results = []
            for i, (node, name) in enumerate(zip(outputs, names, strict=True)):
                if i >= saved_from and name in call.hollow:
                    results.append(torch.empty(0, device=call.hollow[name].device))
                    setattr(results[-1], _RUN, call)
                elif i >= saved_from and node in copies:
                    results.append(copies[node])
                else:
                    results.append(env[node] if isinstance(node, fx.Node) else node)
            return tuple(results)

        return _boxed(run)

    def _first_saved(self, module: fx.GraphModule) -> int:
        descriptions = module.graph.output_node().meta["desc"]
        kinds = [type(description).__name__ for description in descriptions]
        return next((i for i, kind in enumerate(kinds) if kind.startswith("SavedForBackwards")), len(kinds))

    def _run_op(self, module: fx.GraphModule, node: fx.Node, env: dict[fx.Node, Any], call: _Run) -> Any:
        recorder = call.recorder
        if recorder is None or not is_op(node):
            return _run(module, node, env)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        outer = recorder.module
        recorder.module = joined(outer, module_path(node))
        try:
            out = recorder.run(node.target, args, without_state(kwargs))
        finally:
            recorder.module = outer
        op = recorder.record.ops[-1]
        op.time_share = self._time_shares.get(node.name, 1.0)
        state: Any = kwargs.get(RNG_STATE)
        if state is not None and (version := recorder.newest.get(state)) is not None:
            op.reads = (*op.reads, version)
            if all(tensor.device == state.device for tensor in outputs_of(out)):
                op.workspace = state.nbytes  # a run from a state keeps the present one
        if node.name in self._never_again:
            op.force_save(self._never_again[node.name])
        return out

    def _pack(self, call: _Run) -> None:
        if call.saved is None:
            return
        for reader, storage in self._reads:
            if (hollow := call.hollow.get(storage)) is not None and hollow.version is not None:
                call.handles[reader, storage] = call.saved.add(hollow.version)

    def compiled_backward(self, module: fx.GraphModule, _inputs: Any) -> BoxedCall:
        """Return the function that runs backward."""
        inductor = InductorNodes.of_backward(module) if self._part.fuses else InductorNodes()
        steps = _Frees.of(module.graph)

        def run(args: list[Any]) -> tuple[Any, ...]:
            found = (getattr(arg, _RUN, None) for arg in args)
            call = next((run for run in found if run is not None), _Run(None, None))
            env = _placed(module, args)
            args.clear()
            hollow = {node for node in env if node.name in call.hollow}
            for node in hollow:
                del env[node]
            lazy = dict.fromkeys(hollow)
            for node, frees in steps.order:
                if is_view(node) and any(arg in lazy for arg in node.all_input_nodes):
                    lazy[node] = None
                else:
                    _run_step(module, node, env, lazy, call, frees, inductor)
            gradients = tuple(_run_step(module, module.graph.output_node(), env, lazy, call, (), inductor))
            env.clear()  # a function that calls itself refers to it until the next garbage collection
            return gradients

        return _boxed(run)


def _boxed(run: Any) -> BoxedCall:
    run._boxed_call = True
    return run  # type: ignore[no-any-return]


def _run_step(
    module: fx.GraphModule,
    node: fx.Node,
    env: dict[fx.Node, Any],
    lazy: Mapping[fx.Node, None],
    call: _Run,
    frees: Sequence[fx.Node],
    inductor: InductorNodes,
) -> Any:
    """Run a node of backward on stand-ins of what forward saved."""
    reads = [arg for arg in storages_read(node) if arg in lazy]
    stand_ins: dict[fx.Node, Any] = {}
    handles = [call.handles.get((node.name, read.name)) for read in reads]
    for read, handle in zip(reads, handles, strict=True):
        hollow = call.hollow[read.name]
        if call.saved is None or handle is None:
            stand_ins[read] = hollow.tensor()
        else:
            stand_ins[read] = call.saved.unpack_as(
                handle, hollow.tensor, f"{module_path(node)}/{node.target}", made=hollow.content is None
            )

    def value(arg: Any) -> Any:
        if arg in env:
            return env[arg]
        if arg in stand_ins:
            return stand_ins[arg]
        return call_node(arg, fx.node.map_arg(arg.args, value), fx.node.map_arg(arg.kwargs, value))

    if node.op == "output":
        out = fx.node.map_arg(results_of(module.graph), value)
    else:
        with call.kernel_of(node, inductor):
            out = env[node] = _run(module, node, env, value)
        if call.saved is not None and node.name in inductor.in_registers:
            call.saved.hide(out)
    for dead in frees:
        env.pop(dead, None)
    stand_ins.clear()
    for handle in handles:
        if call.saved is not None and handle is not None:
            call.saved.note_drop(handle)
    return out


def _run(module: fx.GraphModule, node: Any, env: dict[fx.Node, Any], value: Any = None) -> Any:
    if node.op == "get_attr":
        found: Any = module
        for name in str(node.target).split("."):
            found = getattr(found, name)
        return found
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value or env.__getitem__)
    return call_node(node, args, without_state(kwargs))


def _placed(module: fx.GraphModule, args: Sequence[Any]) -> dict[fx.Node, Any]:
    return dict(zip(module.graph.find_nodes(op="placeholder"), args, strict=True))


def _described(tensor: Tensor, call: _Run, *, channels_last: bool = False) -> _Hollow:
    like = tensor
    if channels_last:
        like = torch.empty_like(tensor, device="meta", memory_format=torch.channels_last)
    hollow = _Hollow(tensor.size(), like.stride(), tensor.dtype, tensor.device)
    recorder, saved = call.recorder, call.saved
    if recorder is not None:
        hollow.version = recorder.newest.get(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        hollow.content = tensor.clone() if saved is None else saved.copy_of(tensor)
    return hollow


@dataclass(frozen=True, slots=True)
class _Frees:
    """The nodes of a graph in order, each with the nodes that nothing reads after it.

    Generated code frees these right after the node (`delete_unused_values` in torch/fx/graph.py).
    """

    order: list[tuple[fx.Node, tuple[fx.Node, ...]]]

    @classmethod
    def of(cls, graph: fx.Graph, n_outputs: int | None = None) -> _Frees:
        """Return the order of `graph`, as if it had only its first `n_outputs` outputs, and its inputs."""
        outputs = results_of(graph)
        returned = {node for node in outputs[:n_outputs] if isinstance(node, fx.Node)}
        returned |= {node for node in outputs if isinstance(node, fx.Node) and node.op == "placeholder"}
        last: dict[fx.Node, list[fx.Node]] = {}
        sizes = filter(private_compiler.is_size_node, graph.nodes)  # no memory, and views read them late
        seen = returned | set(sizes)
        for node in reversed(list(graph.nodes)):
            if node.op == "output":
                continue
            if node.op == "call_function" and node not in seen:
                last.setdefault(node, []).append(node)
            for arg in node.all_input_nodes:
                if arg not in seen:
                    seen.add(arg)
                    last.setdefault(node, []).append(arg)
        run = (node for node in graph.nodes if node.op not in ("placeholder", "output"))
        return cls([(node, tuple(last.get(node, ()))) for node in run])
