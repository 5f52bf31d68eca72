"""Cut a joint graph where a save set says, and run what backward recomputes as late as the schedule does.

The cut saves the tensor that an op allocated, never a view of it: views are made again in backward, for
free. It saves items, not tuples. What backward needs of an op that is not saved is computed in backward, from
what is saved, in the order of NOTE [ Rules of the schedule ] (planner/memory/schedule.py): a burst right
before the node that reads it, in the order of forward, and only of what this node needs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from autoac.profiler.compiler import private_compiler
from autoac.profiler.joint_graph.joint_graph import (
    JointGraph,
    is_gradient,
    is_item_of_op,
    is_op,
    is_view,
    op_of,
    simplify,
    storages_read,
)


def cut(
    module: fx.GraphModule, num_fwd_outputs: int, is_saved: Callable[[JointGraph], dict[fx.Node, bool]]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the modules of forward and backward.

    Args:
        module: the joint graph, which is simplified.
        num_fwd_outputs: how many of its outputs forward returns.
        is_saved: returns for each op of forward whether its outputs are saved.
    """
    simplify(module, num_fwd_outputs)
    joint = JointGraph.of(module.graph, num_fwd_outputs)
    saved, sizes = _saved_nodes(joint, is_saved(joint))
    names = {node.name for node in joint.backward}
    forward, backward = private_compiler.extract_forward_and_backward(module, saved, sizes, num_fwd_outputs)
    _order(forward, {node.name for node in joint.forward})
    _order(backward, names)
    return forward, backward


def _saved_nodes(joint: JointGraph, is_saved: dict[fx.Node, bool]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the tensors and the sizes that backward gets from forward."""
    forward = set(joint.forward)
    tensors: dict[fx.Node, None] = {}
    sizes: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    stack = [arg for node in reversed(joint.backward) for arg in reversed(node.all_input_nodes)]
    stack += [node for node in joint.gradients if isinstance(node, fx.Node)]
    in_backward = set(joint.backward)
    while stack:
        node = stack.pop()
        if node in seen or node in in_backward:
            continue
        seen.add(node)
        if private_compiler.is_size_node(node):
            sizes[node] = None
        elif node.op == "placeholder":
            if not is_gradient(node):
                tensors[node] = None
        elif node in forward and (is_op(node) or is_item_of_op(node)) and is_saved.get(op_of(node), True):
            tensors[node] = None
        else:
            stack.extend(reversed(node.all_input_nodes))
    return list(tensors), list(sizes)


def _order(module: fx.GraphModule, own: set[str]) -> None:
    """Reorder the graph of a half: `own` nodes keep their order, other nodes and views come when needed.

    Args:
        module: forward or backward.
        own: names of the nodes that define the order; other nodes run when they are needed.
    """
    graph = module.graph
    position = {node: i for i, node in enumerate(graph.nodes)}
    placed = {node for node in graph.nodes if node.op == "placeholder"}
    order: list[fx.Node] = []

    def place(node: fx.Node) -> None:
        placed.add(node)
        order.append(node)
        for user in node.users:  # an item that is taken late would keep the whole tuple alive
            if user.target is operator.getitem and user not in placed:
                place(user)

    for node in list(graph.nodes):
        if node.op == "output" or (node.name in own and not is_view(node) and node not in placed):
            for burst in _bursts(node, placed, position):
                for needed in burst:
                    if needed not in placed:
                        place(needed)
            if node.op != "output":
                place(node)
    last = next((node for node in reversed(list(graph.nodes)) if node.op == "placeholder"), graph._root)
    for node in order:
        last.append(node)
        last = node
    graph.lint()
    module.recompile()


def _bursts(node: fx.Node, placed: set[fx.Node], position: dict[fx.Node, int]) -> Iterator[list[fx.Node]]:
    """Yield for each storage that `node` reads what has to run first, then the views that `node` needs."""
    for read in storages_read(node):
        yield _missing([read], placed, position)
    yield _missing(node.all_input_nodes, placed, position)


def _missing(roots: list[Any], placed: set[fx.Node], position: dict[fx.Node, int]) -> list[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in placed and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return sorted(found, key=position.__getitem__)
