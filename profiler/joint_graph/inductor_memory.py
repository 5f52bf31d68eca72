"""State where the memory of Inductor's code differs from that of nodes that run one by one.

- Inductor runs 2d convolutions on channels-last tensors. What a graph computes has that layout from the
  start, but an input has its layout already, so forward copies the batch and weights, and saves the copies.
- A node for which Inductor generates code keeps its temporaries in registers.
- An elementwise node with one reader runs where it is read: until then, what it reads is live. If code is
  generated for the reader, too, the value itself takes no memory.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoac.profiler.compiler import private_compiler
from autoac.profiler.joint_graph.joint_graph import is_op, is_view
from autoac.tape.torch_facts.private import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class InductorNodes:
    """Names of nodes in one half of a cut whose memory differs from that of nodes that run one by one.

    There are none unless Inductor compiles the graph, which fuses nodes.
    """

    generated: Set[str] = frozenset()  # they hold nothing but their outputs
    in_registers: Set[str] = frozenset()  # only the kernel that computes them reads them
    channels_last: Set[str] = frozenset()  # of forward

    @classmethod
    def of_forward(cls, module: fx.GraphModule) -> InductorNodes:
        """Return the nodes of forward."""
        laid_out = {
            node.name
            for node in private_compiler.nodes_laid_out_channels_last(module)
            if isinstance(value := node.meta.get("val"), Tensor) and value.dim() == 4
        }
        return cls(_generated(module.graph), channels_last=laid_out)

    @classmethod
    def of_backward(cls, module: fx.GraphModule) -> InductorNodes:
        """Return the nodes of backward, and move elementwise ones to their readers."""
        generated = _generated(module.graph)
        return cls(generated, _sink_into_readers(module.graph, generated))


def _generated(graph: fx.Graph) -> set[str]:
    is_generated = private_compiler.generated_by_inductor()
    return {node.name for node in graph.nodes if node.op == "call_function" and is_generated(node)}


def _sink_into_readers(graph: fx.Graph, generated: Set[str]) -> set[str]:
    """Move each elementwise node with one reader to it. Return those whose readers are `generated`."""
    in_registers = set()
    for node in reversed(list(graph.nodes)):
        if len(node.users) != 1 or not isinstance(node.target, OpOverload):
            continue
        reader = next(iter(node.users))
        elementwise = node.name in generated and private_compiler.is_elementwise(node)
        if reader.op == "call_function" and (elementwise or not is_op(node)):
            reader.prepend(node)
            if elementwise and _behind_views(reader).name in generated:
                in_registers.add(node.name)
    return in_registers


def _behind_views(node: fx.Node) -> fx.Node:
    """Return `node`, or the op that alone reads it through views."""
    while is_view(node) and len(node.users) == 1:
        node = next(iter(node.users))
    return node


def is_channels_last(tensor: Tensor) -> bool:
    """Return True if `tensor` needs no copy to be channels-last."""
    return tensor.is_contiguous(memory_format=torch.channels_last)


def call_node(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Run `node`. Where it is traced as a view, a tensor of another layout may need a copy."""
    if node.target in (aten.view.default, aten._unsafe_view.default):
        return args[0].reshape(args[1])
    return node.target(*args, **kwargs)  # type: ignore[operator]
