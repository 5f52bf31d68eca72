"""Know the parameters whose memory is there only while a block of the model runs.

Hooks assign `parameter.data` before a block and empty it afterwards: sharded trainers, block swap, weights
that are offloaded layer by layer. No op shows that. An observed step finds these parameters: their storage
is not the one that they had as forward began, or have when it ends. Ops that read them are saved, since a
recompute would have to hold every weight until backward. And autograd saves views of them, as a linear layer
saves its transposed weight; a plain step holds all of these.

Where hooks of backward fill a parameter again, with the same contents, before autograd asks for the view, the
parameter itself is held in place of the view. The first backward observes whether they do.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from autoac.tape.torch_facts import private

MOVES = "it reads a weight that is in memory only while its block runs"

Memory = tuple[int, int]
"""Address and bytes of a storage."""

moving_weights: Any = private.WeakIdKeyDictionary()
"""Parameters that move; True if each backward so far found them filled with what they had in forward."""


def memory_of(tensor: Tensor) -> Memory:
    """Return the address of the storage of `tensor`, and its bytes."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes()


def parameter_of(tensor: Tensor) -> Parameter | None:
    """Return the parameter that `tensor` is, or is a view of; None if there is none."""
    found = tensor if type(tensor) is Parameter else tensor._base
    return found if type(found) is Parameter and memory_of(found) == memory_of(tensor) else None


def moving_base(tensor: Tensor) -> Parameter | None:
    """Return the moving parameter of which `tensor` is a view; None if there is none."""
    if not moving_weights or type(tensor) is Parameter:
        return None
    parameter = parameter_of(tensor)
    return parameter if parameter is not None and parameter in moving_weights else None


def is_refilled(parameter: Parameter) -> bool:
    """Return True if backward finds `parameter` filled with what it had in forward."""
    return bool(moving_weights.get(parameter))


def note_unpack(parameter: Parameter, *, filled: bool) -> None:
    """Note whether backward has found `parameter` filled with what it had in forward."""
    moving_weights[parameter] = filled and moving_weights.get(parameter) is not False
