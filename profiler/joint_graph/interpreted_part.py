"""Profile a compiled graph: run its joint graph node by node, in an observed step or in a fake one.

AOTAutograd builds its usual function around two halves that this file supplies in place of compiled ones, so
that everything around the halves is as in training. The halves run the nodes of a cut that saves everything,
in the order and with the frees of the code that torch generates for a graph. Forward records its ops as eager
ops are recorded, by the paths of their modules. It returns empty tensors in place of activations, by which
backward finds what it needs: each node that reads an activation is a step of the profile, which unpacks what
the node reads right before it, and drops it after it.

The region of the step runs the ops of forward, and gives a handle for each read, as it does for what autograd
saves. In an observed step, unpacking a handle recomputes the activation.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx

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
from autoac.tape.capture.saved_tensor_recorder import SavedEvent
from autoac.tape.capture.step_tape import STAND_IN, StepTape
from autoac.tape.torch_facts.op_signature import outputs_of
from autoac.tape.torch_facts.private import current_graph_task_keeps_graph

_INTERPRETED = "interpreted"  # key of the compiled halves


class InterpretedParts:
    """Run the compiled graphs of a step node by node.

    The region of the step runs the ops of forward, so backward recomputes them, each before the node that
    reads it. Nothing is compiled: numbers are those of the graphs run op by op.
    """

    def __init__(self, tape: StepTape) -> None:
        self._tape = tape

    def callable_of(self, part: CompiledPart) -> BoxedCall:
        halves, call = _Halves(part), _Run(self._tape)
        compilers = halves.compiled_forward, halves.compiled_backward
        with self._tape.hiding():
            interpreted = part.compile(_INTERPRETED, halves.partition, compilers)

        def run(args: list[Any]) -> Any:
            before, _running.call = _running.call, call
            try:
                with private_compiler.without_analysis_of_first_call():
                    return interpreted(args)
            finally:
                _running.call = before

        return run


class _Run:
    """One call of a compiled graph."""

    def __init__(self, tape: StepTape) -> None:
        self.recorder, self.saved = tape.recorder, tape.saved
        self.tape = tape
        self._handles: dict[tuple[str, str], Any] = {}  # by reader and storage
        self._numbers: dict[tuple[str, str], int] = {}  # of saved tensors
        self._channels_last: set[str] = set()  # storages of this layout in compiled code
        self._devices: dict[str, torch.device] = {}  # by storage
        self._events: list[SavedEvent] = []  # of the node that runs

    def save(
        self, name: str, tensor: Tensor, readers: Sequence[str], *, made: bool, channels_last: bool
    ) -> None:
        """Note that `readers` in backward read `tensor`.

        Args:
            made: the graph has made the tensor. Otherwise, the model may have.
            channels_last: of this layout in compiled code.
        """
        version = self.recorder.newest.get(tensor)
        if not made and version is None:
            return
        self._devices[name] = tensor.device
        if channels_last:
            self._channels_last.add(name)
        for reader in readers:
            self._handles[reader, name] = self.tape.region.handle_of(tensor)
            if version is not None:
                self._numbers[reader, name] = version

    def end_forward(self, reads: Sequence[tuple[str, str]]) -> None:
        """Record what was saved, by reader and storage."""
        for read in reads:
            if (version := self._numbers.get(read)) is not None:
                self._numbers[read] = self.saved.add(version)
        self.tape.region.end_graph()

    def device_of(self, name: str) -> torch.device | None:
        """Return the device of the tensor of this name; None if `save` has not noted it."""
        return self._devices.get(name)

    def unpack(self, reader: str, storage: str, label: str) -> Tensor:
        """Return a saved tensor for the node `reader`, whose name in the profile is `label`."""
        handle, number = self._handles[reader, storage], self._numbers.get((reader, storage))

        def unpack() -> Tensor:
            tensor: Tensor = handle.unpack()
            if storage in self._channels_last and not is_channels_last(tensor):
                tensor = tensor.clone(memory_format=torch.channels_last)
            return tensor

        if number is None:
            return unpack()
        tensor, event = self.tape.unpack_compiled(number, unpack, label)
        if event is not None:
            self._events.append(event)
        return tensor

    def drop(self, reader: str, storages: Sequence[str]) -> None:
        """Note that the node `reader` has run, and frees what it unpacked."""
        self.tape.end_node(self._events)
        self._events.clear()
        if current_graph_task_keeps_graph():
            return
        for storage in storages:
            self._handles.pop((reader, storage), None)
            if (number := self._numbers.get((reader, storage))) is not None:
                self.saved.note_drop(number)


def _copies_of(inputs: Mapping[fx.Node, Any], inductor: InductorNodes) -> dict[fx.Node, Tensor]:
    """Return channels-last copies of the inputs that Inductor copies, as its code does in each step."""
    return {
        node: tensor.detach().clone(memory_format=torch.channels_last)
        for node, tensor in inputs.items()
        if node.name in inductor.channels_last and not is_channels_last(tensor)
    }


def _kernel_of(call: _Run | None, node: fx.Node, inductor: InductorNodes) -> AbstractContextManager[None]:
    """Surround a run of `node`, whose temporaries may be in registers."""
    if call is None or node.name not in inductor.generated:
        return nullcontext()
    return call.saved.one_kernel()


class _Running(threading.local):
    call: _Run | None = None  # that is in forward


_running = _Running()


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
        readers: dict[str, list[str]] = {}  # in backward, by storage
        for reader, storage in self._reads:
            readers.setdefault(storage, []).append(reader)
        outputs = results_of(module.graph)
        names = [getattr(node, "name", "") for node in outputs]
        inductor = InductorNodes.of_forward(module) if self._part.fuses else InductorNodes()
        saved_from = self._first_saved(module)
        steps = _with_frees(module.graph, saved_from)

        def run(args: list[Any]) -> tuple[Any, ...]:
            call = _running.call
            assert call is not None
            env = _placed(module, args)
            args.clear()
            copies = _copies_of(env, inductor)

            def save(node: fx.Node, *, made: bool, channels_last: bool = False) -> None:
                if node.name in readers and isinstance(tensor := env[node], Tensor):
                    call.save(node.name, tensor, readers[node.name], made=made, channels_last=channels_last)

            for node in env:
                if node not in copies:
                    save(node, made=False)
            for node, frees in steps:
                with _kernel_of(call, node, inductor):
                    env[node] = self._run_op(module, node, env, call)
                save(node, made=True, channels_last=node.name in inductor.channels_last)
                for dead in frees:
                    del env[dead]
            call.end_forward(self._reads)
            results = []
            for i, (node, name) in enumerate(zip(outputs, names, strict=True)):
                device = call.device_of(name) if i >= saved_from else None
                if device is not None:
                    results.append(torch.empty(0, device=device))
                    setattr(results[-1], STAND_IN, call)
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
        if not is_op(node):
            return _run(module, node, env)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        outer = recorder.module
        recorder.module = joined(outer, module_path(node))
        try:
            plain = _plain(args), _plain(without_state(kwargs))
            out = call.tape.run_compiled(node.target, *plain, self._never_again.get(node.name, ""))
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

    def compiled_backward(self, module: fx.GraphModule, _inputs: Any) -> BoxedCall:
        """Return the function that runs backward."""
        inductor = InductorNodes.of_backward(module) if self._part.fuses else InductorNodes()
        steps = _with_frees(module.graph)

        def run(args: list[Any]) -> tuple[Any, ...]:
            found = (getattr(arg, STAND_IN, None) for arg in args)
            call = next((run for run in found if run is not None), None)
            env = _placed(module, args)
            args.clear()
            lazy = dict.fromkeys(node for node in env if call and call.device_of(node.name) is not None)
            for node in lazy:
                del env[node]
            for node, frees in steps:
                if is_view(node) and any(arg in lazy for arg in node.all_input_nodes):
                    lazy[node] = None
                else:
                    _run_step(module, node, env, lazy, call, frees, inductor)
            gradients = tuple(_run_step(module, module.graph.output_node(), env, lazy, call, (), inductor))
            env.clear()  # a function that calls itself refers to it until the next garbage collection
            return gradients

        return _boxed(run)


def _plain(value: Any) -> Any:
    """Return arguments of a node in lists, tuples and dicts of Python's own, as an op gets them elsewhere."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _boxed(run: Any) -> BoxedCall:
    run._boxed_call = True
    return run  # type: ignore[no-any-return]


def _run_step(
    module: fx.GraphModule,
    node: fx.Node,
    env: dict[fx.Node, Any],
    lazy: Mapping[fx.Node, None],
    call: _Run | None,
    frees: Sequence[fx.Node],
    inductor: InductorNodes,
) -> Any:
    """Run a node of backward on what forward saved, or on stand-ins of it."""
    label = f"{module_path(node)}/{node.target}"
    reads = [arg for arg in storages_read(node) if arg in lazy]
    unpacked: dict[fx.Node, Any] = {}
    if call is not None:
        unpacked |= {read: call.unpack(node.name, read.name, label) for read in reads}

    def value(arg: Any) -> Any:
        if arg in env:
            return env[arg]
        if arg in unpacked:
            return unpacked[arg]
        return call_node(arg, fx.node.map_arg(arg.args, value), fx.node.map_arg(arg.kwargs, value))

    if node.op == "output":
        out = fx.node.map_arg(results_of(module.graph), value)
    else:
        with _kernel_of(call, node, inductor):
            out = env[node] = _run(module, node, env, value)
        if call is not None and node.name in inductor.in_registers:
            call.saved.hide(out)
    for dead in frees:
        env.pop(dead, None)
    unpacked.clear()
    if call is not None:
        call.drop(node.name, [read.name for read in reads])
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


def _with_frees(graph: fx.Graph, n_outputs: int | None = None) -> list[tuple[fx.Node, list[fx.Node]]]:
    """Return the nodes of `graph` in order, each with the nodes that nothing reads after it.

    Generated code frees these right after the node (`delete_unused_values` in torch/fx/graph.py).

    Args:
        n_outputs: the order is as if the graph had only its first `n_outputs` outputs, and its inputs.
    """
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
    return [(node, last.get(node, [])) for node in run]
