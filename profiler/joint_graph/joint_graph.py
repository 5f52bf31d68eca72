"""Sort the nodes of AOTAutograd's joint graph: ops of forward, views, and what runs in backward alone.

For `y = gelu(x @ w); loss = y.sum()` the joint graph is:

    node                 kind              storage
    x, w                 inputs            their own
    tangent              gradient          its own
    mm(x, w)             op of forward     its own
    gelu(mm)             op of forward     its own
    sum(gelu)            op of forward     its own
    expand(tangent)      backward          the tangent's
    gelu_backward(.)     backward          its own; reads the storage of mm
    t(x)                 backward          a view: of x
    mm_1(t, .)           backward          its own; reads the storage of x

A node runs in forward if an output of forward needs it and it depends on no gradient. Everything else runs
in backward. A *view* has the storage of its base, costs nothing, and is made again wherever it is needed. One
thing is decided for each op of forward: whether its outputs are saved.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from autoac.profiler.compiler.private_compiler import is_size_node, merge_equal_nodes
from autoac.profiler.joint_graph.random_ops import RNG_STATE, add_states
from autoac.tape.torch_facts.module_paths import ROOT
from autoac.tape.torch_facts.op_facts import facts_of, old_statistics
from autoac.tape.torch_facts.private import HigherOrderOperator, OpOverload


@dataclass(frozen=True, slots=True)
class JointGraph:
    """The nodes of AOTAutograd's joint graph, divided into those of forward and those of backward.

    Invariant: `forward` and `backward` have no node in common, and each is in the order of the graph.
    """

    forward: tuple[fx.Node, ...]  # nodes that run in forward, views included
    backward: tuple[fx.Node, ...]  # nodes that run in backward alone, views included
    outputs: tuple[object, ...]  # of forward: nodes and constants
    gradients: tuple[object, ...]  # of backward

    @classmethod
    def of(cls, graph: fx.Graph, num_fwd_outputs: int) -> JointGraph:
        """Return the sorted nodes of `graph`, whose first outputs are those of forward."""
        results = tuple(_flat(graph.output_node().args))
        outputs, gradients = results[:num_fwd_outputs], results[num_fwd_outputs:]
        late = _depend_on_gradients(graph)
        effects = [node for node in graph.nodes if node not in late and _has_effect(node)]
        in_forward = _needed_by([*_nodes(outputs), *effects], stop=late)
        in_forward |= {node for node in graph.nodes if is_item_of_op(node) and node.args[0] in in_forward}
        after = _needed_by(
            [*_nodes(gradients), *(node for node in late if _has_effect(node))], stop=in_forward
        )
        return cls(
            tuple(node for node in graph.nodes if node in in_forward and node.op != "placeholder"),
            tuple(node for node in graph.nodes if node in after and node.op != "placeholder"),
            outputs,
            gradients,
        )

    @property
    def ops(self) -> list[fx.Node]:
        """Return the ops of forward for which a policy has a decision, in order."""
        return [node for node in self.forward if is_op(node)]


def simplify(module: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Remove dead nodes from a joint graph, merge nodes of forward that compute the same, add RNG states.

    Backward stays as it is. It often computes a cheap value of forward again, such as the inner part of a
    GELU. Merged, that value would be one more tensor to save, and plans would take far longer to find.
    """
    module.graph.eliminate_dead_code()
    joint = JointGraph.of(module.graph, num_fwd_outputs)
    merge_equal_nodes(module, apart=[node for node in joint.backward if node.op == "call_function"])
    add_states(module.graph, JointGraph.of(module.graph, num_fwd_outputs).ops)


def results_of(graph: fx.Graph) -> tuple[Any, ...]:
    """Return the outputs of `graph`: nodes and constants."""
    outputs: Any = graph.output_node().args[0]
    return tuple(outputs)


def is_op(node: fx.Node) -> bool:
    """Return True if `node` computes on tensors: not a view, an item of a tuple, or arithmetic on sizes."""
    if node.op != "call_function" or not isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return False
    return not facts_of(node.target).view and not is_size_node(node)


def is_view(node: fx.Node) -> bool:
    """Return True if `node` has the storage of another node, or is arithmetic on sizes: it costs nothing."""
    return node.op in ("call_function", "get_attr") and not is_op(node)


def storages_read(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose storages `node` reads, through views: inputs, ops, and items of ops.

    They are listed in the order of the arguments.
    """
    found: dict[fx.Node, None] = {}
    stack = list(reversed(node.all_input_nodes))
    while stack:
        arg = stack.pop()
        if arg.op == "placeholder" or is_op(arg) or is_item_of_op(arg):
            found[arg] = None
        else:
            stack.extend(reversed(arg.all_input_nodes))
    return list(found)


def is_item_of_op(node: fx.Node) -> bool:
    """Return True if `node` takes one of several outputs of an op."""
    return node.target is operator.getitem and is_op(node.args[0])  # type: ignore[arg-type]


def op_of(node: fx.Node) -> fx.Node:
    """Return the op that wrote the storage of `node`, an op or an item of one."""
    return node.args[0] if is_item_of_op(node) else node  # type: ignore[return-value]


def never_again(graph: fx.Graph, joint: JointGraph, mutated: Sequence[bool]) -> dict[str, str]:
    """Return why ops of forward cannot run again in backward, by the names of their nodes.

    Args:
        mutated: for each input of forward, True if forward writes it.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder" and "primals" in str(node.target)]
    written = {node for node, writes in zip(inputs, mutated, strict=False) if writes}
    reasons: dict[str, str] = {}
    for node in joint.ops:
        facts = facts_of(node.target)
        unread = old_statistics(facts.name, node.args)
        if facts.never_recomputed or facts.collective or facts.mutates or _has_effect(node):
            reasons[node.name] = "collective" if facts.collective else facts.must_save or "it has an effect"
        elif facts.draws(node.args, node.kwargs) and RNG_STATE not in node.kwargs:
            reasons[node.name] = "it draws random numbers inside compiled code"
        elif any(read in written for read in storages_read(node) if read not in unread):
            reasons[node.name] = "it reads an input that forward writes"
    return reasons


def module_path(node: fx.Node) -> str:
    """Return the path of the module that ran `node`, from the outermost module of its graph."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ROOT
    paths = [entry[0] for entry in stack.values()]
    inner = paths[-1].removeprefix(paths[0]).removeprefix(".")
    return inner or ROOT


def joined(outer: str, inner: str) -> str:
    """Return the path of `inner` in the module at `outer`."""
    if inner == ROOT:
        return outer
    return inner if outer == ROOT else f"{outer}.{inner}"


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _nodes(values: Iterable[object]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def is_gradient(node: fx.Node) -> bool:
    """Return True if `node` is a gradient that backward starts from."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def _depend_on_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on a gradient, or are placed in backward for an effect."""
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        tag = node.meta.get("partitioner_tag")
        placed = tag == "must_be_in_backward" or (tag == "is_backward" and _has_effect(node))
        if is_gradient(node) or placed or any(arg in late for arg in node.all_input_nodes):
            late.add(node)
    return late


def _has_effect(node: fx.Node) -> bool:
    """Return True if `node` runs although nothing reads its output."""
    return node.op == "call_function" and node.is_impure(impure_random=False)


def _needed_by(roots: Iterable[fx.Node], stop: Iterable[fx.Node]) -> set[fx.Node]:
    """Return `roots` and everything that they depend on, up to the nodes of `stop`."""
    stopped = set(stop)
    found: set[fx.Node] = set()
    stack = [node for node in roots if node not in stopped]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(arg for arg in node.all_input_nodes if arg not in stopped)
    return found
