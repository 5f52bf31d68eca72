"""Split backward: input gradients first, weight gradients later, as pipeline schedules run it.

To autograd the two halves are graph tasks with nothing in common, one for the inputs and one for each
group of weights. Here they are parts of one backward pass: what the first made again and the second needs
is kept in between. Nobody can tell that from the tasks alone (a partial backward with `retain_graph=True`
looks the same, and must leave nothing behind), so it is said: by `split_backward`, by torch's
`GraphExecGroup`, or by being called from torch.distributed.pipelining's `stage_backward_input`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Protocol

import torch

from autoac.profiler.torch_facts import private


class Resting(Protocol):
    """What keeps a pass between two parts."""

    def discard_suspended(self) -> None:
        """The pass is over."""


class Split:
    """A stretch of time in which the graph tasks over one region are parts of one backward pass."""

    def __init__(self) -> None:
        self.open = True
        self.graphs: weakref.WeakSet[Resting] = weakref.WeakSet()

    def close(self) -> None:
        """Whatever is still kept goes."""
        self.open = False
        for graph in list(self.graphs):
            graph.discard_suspended()


# In torch's thread-local state, which the engine takes along to its own threads
_KEY = "ac_client.split_backward"


@contextmanager
def split_backward() -> Iterator[None]:
    """Inside, several `backward` or `torch.autograd.grad` calls over one region are one backward pass.

        with ac_client.split_backward():
            dx = torch.autograd.grad(out, x, grad, retain_graph=True)   # the input half
            ...
            dw = torch.autograd.grad(hidden, weights, dhidden)          # the weight half

    Each op is recomputed at most once for all of them. What the first call made again and a later one may
    need stays until autograd lets go of what it saved, at the latest until the end of the block.
    torch.distributed.pipelining's stages need no such block.
    """
    outer = _stated()
    split = Split()
    private.stash_in_tls(_KEY, split)
    try:
        yield
    finally:
        if outer is None:
            private.remove_from_tls(_KEY)
        else:
            private.stash_in_tls(_KEY, outer)
        split.close()


def current_split() -> Split | None:
    """The split backward that the running graph task is a part of."""
    stated = _stated() or _of_group()
    if stated is None and _called_by_a_stage():
        stated = Split()  # never closed: its pass goes with the graph
    return stated


def leaves_gradients() -> bool:
    """Whether the autograd node that is running has a gradient which this graph task does not ask for.

    Such a node may run again for it in another part, and will unpack again.
    """
    node = private.current_autograd_node()
    return node is not None and any(
        not _is_asked_for(following) for following, _ in node.next_functions if following is not None
    )


def _stated() -> Split | None:
    if not private.is_key_in_tls(_KEY):
        return None
    split: Split = private.get_from_tls(_KEY)
    return split


def _of_group() -> Split | None:
    """Return the split backward that torch's GraphExecGroup stands for; it lasts as long as the group."""
    group: object | None = private.get_graph_exec_group()
    if group is None:
        return None
    split = _of_groups.get(group)
    if split is None:
        split = _of_groups[group] = Split()
        weakref.finalize(group, split.close)
    return split


_of_groups: weakref.WeakKeyDictionary[object, Split] = weakref.WeakKeyDictionary()


def _is_asked_for(node: torch.autograd.graph.Node) -> bool:
    try:
        return bool(private.will_engine_execute_node(node))
    except RuntimeError:  # raised for a leaf that autograd.grad was asked for
        return True


def _called_by_a_stage() -> bool:
    """Whether `stage_backward_input` is waiting for the graph task that is running."""
    module = sys.modules.get("torch.distributed.pipelining._backward")
    if module is None:
        return False
    code = module.stage_backward_input.__code__
    # No frame in a local variable: it would be a cycle, and hold what every caller holds.
    if _comes_from(sys._getframe(1), code):
        return True
    if _comes_from(sys._getframe(1), private.engine_run_backward.__code__):
        return False
    # A thread of the engine's own (CUDA): the caller waits in another one.
    return any(_comes_from(other, code) for other in sys._current_frames().values())


def _comes_from(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
