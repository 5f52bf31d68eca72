"""Compile a held-back graph for given decisions: for each op of forward, whether its outputs are saved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from autoac.profiler.compiler.second_stage import BoxedCall, CompiledPart
from autoac.profiler.joint_graph.cut import cut
from autoac.profiler.joint_graph.joint_graph import JointGraph, module_path, never_again, simplify
from autoac.profiler.joint_graph.random_ops import restore_states
from autoac.tape.torch_facts.op_facts import facts_of

OpName = tuple[str, str]
"""The path of a module, from the outermost module of its graph, and the name of an op."""

InsertMoves = Callable[
    [fx.GraphModule, fx.GraphModule, Sequence[str], Collection[str], Sequence[Any], int], None
]

_DYNAMIC = "dynamic"  # key of `CompiledPart.notes`
_OPS = "ops"  # key of `CompiledPart.notes`


def note_ops(part: CompiledPart, joint: JointGraph) -> None:
    """Remember the ops of forward of `part`, as they are after the backend's passes over the joint graph."""
    values = (node.meta.get("val") for node in joint.forward)
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    part.notes[_DYNAMIC] = any(isinstance(n, torch.SymInt) for tensor in tensors for n in tensor.size())
    part.notes[_OPS] = [(module_path(node), facts_of(node.target).name_in_keys) for node in joint.ops]


def ops_of(part: CompiledPart) -> Sequence[OpName]:
    """Return the ops of forward for which a policy has decisions, in order."""
    if _OPS not in part.notes:

        def list_ops(module: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_options: Any) -> Any:
            simplify(module, num_fwd_outputs)
            note_ops(part, JointGraph.of(module.graph, num_fwd_outputs))
            raise _Listed

        try:
            part.compile(_Listed, list_ops)
        except _Listed:
            pass
    return [(module, op) for module, op in part.notes[_OPS]]


class _Listed(Exception):
    """Stops the second stage once the ops are known."""


def is_dynamic(part: CompiledPart) -> bool:
    """Return True if `part` has symbols for sizes."""
    ops_of(part)
    return bool(part.notes[_DYNAMIC])


def compile_decided(
    part: CompiledPart, saved: tuple[bool, ...], moves: tuple[Any, ...], insert: InsertMoves
) -> BoxedCall:
    """Return the code of `part` that saves the ops for which `saved` has True, and what must be saved.

    Args:
        part: the graph.
        saved: by op of forward.
        moves: moves of tensors to the host. The code is found again by `saved` and `moves`.
        insert: adds `moves` to forward and backward; called with the names of the ops of forward, those of
            the nodes that run in backward alone, the moves, and how many outputs forward returns.
    """

    def partition(
        module: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        names: list[str] = []
        own: set[str] = set()

        def is_saved(joint: JointGraph) -> dict[fx.Node, bool]:
            names.extend(node.name for node in joint.ops)
            own.update(node.name for node in joint.backward)
            mutated = [info.mutates_data for info in part.metadata.input_info]
            forced = never_again(module.graph, joint, mutated)
            assert len(joint.ops) == len(saved), "the backend's passes gave another joint graph"
            return {node: save or node.name in forced for node, save in zip(joint.ops, saved, strict=True)}

        forward, backward = cut(module, num_fwd_outputs, is_saved)
        if moves:
            insert(forward, backward, names, own, moves, num_fwd_outputs)
        restore_states(forward, backward)
        return forward, backward

    return part.decided((saved, moves), partition)
