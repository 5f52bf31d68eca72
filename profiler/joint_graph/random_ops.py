"""Recompute ops of compiled code that draw random numbers: backward draws from the state of forward.

A joint graph gets one more op before each op that draws: it takes the state of the generator, and the drawing
op reads it. So the rules for all ops say how long a state is held:

    joint graph                         forward that is compiled            backward, if it recomputes y
    s = rng_state(device)               s, y = run_and_save_rng_state(      y = run_with_rng_state(
    y = dropout(x, 0.1, rng_state=s)        dropout, x, 0.1)                    s, dropout, x, 0.1)

Both functions are torch's, as is the restriction that they know one generator for each kind of device: that
of the current device. Inductor replaces such ops by its own before this file sees a graph: they compute
random numbers from a seed, and can run again as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autoac.profiler.compiler.private_compiler import functions_with_rng_state
from autoac.tape.torch_facts.op_facts import facts_of
from autoac.tape.torch_facts.op_signature import outputs_of
from autoac.tape.torch_facts.private import OpOverload

RNG_STATE = "rng_state"
"""Name of the argument that a drawing op has in a joint graph in addition to its own."""

_NBYTES = {"cpu": torch.get_rng_state().numel(), "cuda": 16}  # of a generator's state, by kind of device


@torch.library.custom_op("autoac::rng_state", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _rng_state(device: torch.device) -> Tensor:
    """Return the state of the default generator of `device`, in the CPU's memory."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


@_rng_state.register_fake
def _(device: torch.device) -> Tensor:
    return torch.empty(_NBYTES[device.type], dtype=torch.uint8)


_TAKE = torch.ops.autoac.rng_state.default


def add_states(graph: fx.Graph, forward: Iterable[fx.Node]) -> None:
    """Have the nodes of `forward` that draw read the state of their generator, which a new node takes."""
    for node in forward:
        device = _restorable_device(node)
        if device is None:
            continue
        with graph.inserting_before(node):
            state = graph.call_function(_TAKE, (device,))
        state.meta = {name: value for name, value in node.meta.items() if name.endswith("nn_module_stack")}
        state.meta["val"] = torch.empty(_NBYTES[device.type], dtype=torch.uint8)  # fake, as all here
        node.kwargs = {**node.kwargs, RNG_STATE: state}


def _restorable_device(node: fx.Node) -> torch.device | None:
    """Return the device from whose default generator `node` draws; None if it draws from another or none."""
    if not isinstance(node.target, OpOverload) or node.target is _TAKE:
        return None
    if not facts_of(node.target).draws(node.args, node.kwargs) or node.kwargs.get("generator") is not None:
        return None
    if not node.all_input_nodes and "device" not in node.kwargs:
        return None  # torch's functions find no device: Inductor's seeds
    devices = {tensor.device for tensor in outputs_of(node.meta.get("val"))} - {torch.device("cpu")}
    if len(devices) > 1 or any(device.type not in _NBYTES for device in devices):
        return None
    for device in devices:
        current = torch.get_device_module(device).current_device()
        return device if device.index == current else None
    return torch.device("cpu")


def restore_states(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Have forward return the states that backward needs, and backward draw from them."""
    first, again = functions_with_rng_state()
    for node in forward.graph.find_nodes(op="call_function", target=_TAKE):
        (draw,) = (user for user in node.users if user.op == "call_function")
        with forward.graph.inserting_before(draw):
            both = forward.graph.call_function(first, (draw.target, *draw.args), without_state(draw.kwargs))
            state = forward.graph.call_function(getitem, (both, 0))
            drawn = forward.graph.call_function(getitem, (both, 1))
        both.meta["val"] = (node.meta["val"], draw.meta["val"])
        state.meta, drawn.meta = node.meta, draw.meta
        draw.replace_all_uses_with(drawn)
        forward.graph.erase_node(draw)
        node.replace_all_uses_with(state)
        forward.graph.erase_node(node)
    for draw in [node for node in backward.graph.nodes if RNG_STATE in node.kwargs]:
        with backward.graph.inserting_before(draw):
            args = (draw.kwargs[RNG_STATE], draw.target, *draw.args)
            drawn = backward.graph.call_function(again, args, without_state(draw.kwargs))
        drawn.meta = draw.meta
        draw.replace_all_uses_with(drawn)
        backward.graph.erase_node(draw)
    forward.recompile()
    backward.recompile()


def without_state(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the named arguments that an op takes, of those that its node has."""
    return {name: value for name, value in kwargs.items() if name != RNG_STATE}
