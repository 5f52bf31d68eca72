"""Move saved tensors of a compiled graph to the host: four ops in its halves.

NOTE [ Moves in compiled code ]

    forward                                   backward
    t = mm(x, w)                              t' = fetch(token)         before what the trigger needs
    token = leave(t)                          ...
    ...                                       t'' = arrive(t', token)   before the first use
    token' = free(token, t)   before op p     mm(t'', ...)

Forward returns the token in place of `t`: an empty tensor of the host. Its storage refers to the copy, so
memory of the host goes back when autograd lets go of the token. The points are those of NOTE [ Moves ] in
planner/problem/moves.py. `free` and `arrive` return what they are given, so that Inductor keeps their order.
torch's own ops of this kind (`ao::offload`) allocate pinned memory for each copy, rounded to a power of two,
and do not run on a CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from autoac.profiler.joint_graph.joint_graph import is_view, results_of, storages_read
from autoac.tape.runtime.moves.copies import Departure


class PartMove(NamedTuple):
    """A move of the outputs of an op: positions among the ops of forward in a compiled graph."""

    op: int
    free: int  # the op before which they are freed; the number of ops: where forward ends
    fetch: int  # the op whose outputs backward is about to read for the first time when it fetches


def insert_moves(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    ops: Sequence[str],
    own: Collection[str],
    moves: Sequence[PartMove],
    n_outputs: int,
) -> None:
    """Add `moves` to the halves of a cut that saves the outputs of moved ops.

    Args:
        forward, backward: the halves.
        ops: names of the nodes of the ops of forward, in order.
        own: names of the nodes that run in backward alone.
        moves: moves of tensors without symbolic sizes.
        n_outputs: how many outputs of forward are returned; all further outputs are saved for backward.
    """
    made = {node.name: node for node in forward.graph.nodes}
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    reader: dict[str, fx.Node] = {}  # the first node of backward's own, by what it reads: saved or recomputed
    for node in backward.graph.nodes:
        if node.name in own and not is_view(node):
            for read in storages_read(node):
                reader.setdefault(read.name, node)
    output, last = forward.graph.output_node(), backward.graph.output_node()
    for move in sorted(moves):
        end = made[ops[move.free]] if move.free < len(ops) else output
        of = _tensors_of(made[ops[move.fetch]])
        trigger = min(reader.get(tensor.name, last) for tensor in of)
        for tensor in _tensors_of(made[ops[move.op]]):
            if (saved := inputs.get(tensor.name)) is not None:
                token = _leave(forward.graph, tensor, end)
                returned, kept = results_of(forward.graph)[:n_outputs], results_of(forward.graph)[n_outputs:]
                output.args = ((*returned, *(token if out is tensor else out for out in kept)),)
                _come_back(backward.graph, saved, token, trigger, own)
    for half in (forward, backward):
        half.graph.lint()
        half.recompile()


def _tensors_of(op: fx.Node) -> list[fx.Node]:
    return [user for user in op.users if user.target is operator.getitem] or [op]


def _leave(graph: fx.Graph, tensor: fx.Node, end: fx.Node) -> fx.Node:
    """Copy `tensor` out where it is made, and free it before `end`; return the token."""
    value = tensor.meta["val"]
    with value.fake_mode:
        empty = torch.empty(0, dtype=torch.uint8)
    with graph.inserting_after(tensor):
        token = graph.call_function(torch.ops.autoac.leave.default, (tensor,))
    with graph.inserting_before(end):
        freed = graph.call_function(torch.ops.autoac.free.default, (token, tensor))
    token.meta["val"] = freed.meta["val"] = empty
    token.meta["eager_input_vals"] = (value,), {}  # Inductor gives `tensor` these strides
    freed.meta["eager_input_vals"] = (empty, value), {}
    return freed


def _come_back(
    graph: fx.Graph, saved: fx.Node, token: fx.Node, trigger: fx.Node, own: Collection[str]
) -> None:
    """Fetch the tensor that the token `saved` stands for: before `trigger`, or its first use if earlier."""
    value = saved.meta["val"]
    first = min(saved.users)
    begin = min(trigger, first)
    while not _ends_step(begin.prev, own):
        begin = begin.prev
    described = tuple(value.size()), value.stride(), value.dtype, value.device
    with graph.inserting_before(begin):
        fetched = graph.call_function(torch.ops.autoac.fetch.default, (saved, *described))
    with graph.inserting_before(first):
        arrived = graph.call_function(torch.ops.autoac.arrive.default, (fetched, saved))
    saved.replace_all_uses_with(arrived, lambda user: user not in (fetched, arrived))
    fetched.meta["val"] = arrived.meta["val"] = value
    saved.meta["val"] = token.meta["val"]


def _ends_step(node: fx.Node, own: Collection[str]) -> bool:
    """Return True if the nodes right after `node` are those that the next node of `own` needs."""
    if node.op in ("placeholder", "root"):
        return True
    if node.target is operator.getitem:
        of = node.args[0]
        assert isinstance(of, fx.Node)
        return _ends_step(of, own)
    return node.name in own and not is_view(node)


# --- the ops ----------------------------------------------------------------------------------------------

_library = torch.library.Library("autoac", "DEF")
_strides = (torch.Tag.needs_exact_strides,)
_library.define("leave(Tensor t) -> Tensor", tags=_strides)
_library.define("free(Tensor(a) token, Tensor t) -> Tensor(a)", tags=_strides)
_library.define("fetch(Tensor token, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor")
_library.define("arrive(Tensor(a) t, Tensor token) -> Tensor(a)")


def _leave_now(t: Tensor) -> Tensor:
    token = _token(t)
    storage: Any = token.untyped_storage()
    storage.departure = Departure(t, "an op of compiled code", 0)
    storage.copy = storage.departure.copy
    storage.window = t.storage_offset(), t.size(), t.stride()  # Inductor may put more into the storage
    return token


def _free_now(token: Tensor, t: Tensor) -> Tensor:
    storage: Any = token.untyped_storage()
    storage.departure.finish()
    del storage.departure
    return token


def _fetch_now(
    token: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    storage: Any = token.untyped_storage()
    if not hasattr(storage, "copy"):
        raise RuntimeError(
            "a tensor that compiled code has moved to the host came back as another tensor: remove the "
            "saved-tensor hooks that copy tensors (save_on_cpu), or plan without host_budget_gb"
        )
    target: Any
    target, wait = storage.copy.fetch()
    target.wait = wait  # at the latest when the memory is freed: an exception may come before `arrive`
    found = torch.empty(0, dtype=dtype, device=device).set_(target, *storage.window)
    if any(n > 1 and a != b for n, a, b in zip(size, found.stride(), stride, strict=True)):
        raise RuntimeError(
            f"a tensor that compiled code moves to the host must have the strides {list(stride)}, got "
            f"{list(found.stride())}: the backend has chosen others. Plan without host_budget_gb"
        )
    return found


def _arrive_now(t: Tensor, token: Tensor) -> Tensor:
    storage: Any = t.untyped_storage()
    storage.wait()
    del storage.wait
    return t


def _token(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _fake_fetched(
    token: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _first(given: Tensor, _other: Tensor) -> Tensor:
    return given


for _name, _run, _fake in (
    ("leave", _leave_now, _token),
    ("free", _free_now, _first),
    ("fetch", _fetch_now, _fake_fetched),
    ("arrive", _arrive_now, _first),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoac::{_name}", _fake, lib=_library)
