"""Price ops as a fusing compiler runs them.

An op that is fused with its neighbors exchanges values with them in registers. Only what a kernel reads from
memory and writes there costs time. So a fused op counts the share of its bytes that it exchanges with ops
that are not fused. The fused ops are those of torch's own list, which its partitioner recomputes for free:

    mm -> mul -> tanh -> mm        mul counts what it reads of mm, tanh what it writes for mm: a half each

A share applies to the run time that the op has alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoac.profiler.compiler import private_compiler
from autoac.profiler.joint_graph.joint_graph import JointGraph, is_op, is_view, op_of, storages_read


def shares_of_time(joint: JointGraph) -> dict[str, float]:
    """Return by the name of each fused op of forward the share of its run time that remains."""
    outputs = {node for node in joint.outputs if isinstance(node, fx.Node)}
    is_fused = private_compiler.fusible_by_compilers()
    return {node.name: _share(node, outputs, is_fused) for node in joint.ops if is_fused(node)}


def _share(node: fx.Node, outputs: set[fx.Node], is_fused: Callable[[fx.Node], bool]) -> float:
    reads = storages_read(node)
    crossing = sum(_nbytes(read) for read in reads if not is_fused(op_of(read)))
    written = _nbytes(node)
    if _leaves_kernel(node, outputs, is_fused):
        crossing += written
    total = sum(map(_nbytes, reads)) + written
    return crossing / total if total else 1.0


def _leaves_kernel(node: fx.Node, outputs: set[fx.Node], is_fused: Callable[[fx.Node], bool]) -> bool:
    """Return True if forward returns what `node` writes, or an op that is not fused reads it."""
    stack, seen = [node], {node}
    while stack:
        value = stack.pop()
        if value in outputs:
            return True
        for user in value.users:
            if is_op(user) and not is_fused(user):
                return True
            if is_view(user) and user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def _nbytes(node: fx.Node) -> int:
    value: Any = node.meta.get("val")
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return sum(
        private_compiler.size_hint(tensor.numel()) * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    )
