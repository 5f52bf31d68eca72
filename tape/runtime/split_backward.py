"""Recognize a split backward: input gradients first, weight gradients later, as in pipeline schedules.

To autograd the two halves are unrelated graph tasks, one for the inputs and one for each group of weights.
Here they are parts of one backward pass, and recomputed tensors that the second half needs stay cached in
between. The tasks alone do not show that they belong together: a partial backward with `retain_graph=True`
looks the same and must leave nothing behind. So one of these must show it: `split_backward`, or torch's
`GraphExecGroup`. The stages of torch.distributed.pipelining have many microbatches between their halves, so
there each half recomputes what it needs, and nothing stays in between.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.module_paths import frames_from


class Split:
    """A period during which all graph tasks over one region are parts of one backward pass.

    Attributes:
        graphs: those of regions that keep a pass between two parts of the split backward.
    """

    def __init__(self) -> None:
        self.open = True
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def close(self) -> None:
        """End the period, and free the passes that were kept for further parts."""
        self.open = False
        for graph in list(self.graphs):
            graph.discard_suspended()


# In torch's thread-local state, which the engine copies to its own threads.
_KEY = "ac_client.split_backward"
UNCOUNTED = """backward is split: what its second half reads of a forward is in no plan. Leave \
Constraints(headroom_bytes=...) for it: this step and later steps may go over the limit"""


@contextmanager
def split_backward() -> Iterator[None]:
    """Make the `backward` and `torch.autograd.grad` calls in the body parts of one backward pass.

        with ac_client.split_backward():
            dx = torch.autograd.grad(out, x, grad, retain_graph=True)   # the input half
            ...
            dw = torch.autograd.grad(hidden, weights, dhidden)          # the weight half

    Each op is recomputed at most once for all of them. A recomputed tensor that a later call may need stays
    until autograd drops its saved tensors, at the latest until the end of the block.
    """
    outer = _declared()
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
    """Return the split backward that the running graph task is a part of; None outside any."""
    return _declared() or _of_group()


def leaves_gradients() -> bool:
    """Return True if this graph task skips a gradient of the running autograd node.

    Such a node may run again for that gradient in another part, and will unpack again.
    """
    node = private.current_autograd_node()
    return node is not None and any(
        not _is_requested(following) for following, _ in node.next_functions if following is not None
    )


def is_nested_backward() -> bool:
    """Return True if a hook or a Function of backward runs the graph task."""
    code = private.engine_run_backward.__code__
    calls = sum(frame.f_code is code for frame in frames_from(sys._getframe(1)))
    # A thread of the engine has no caller: each call of backward on it is nested.
    return calls + isinstance(threading.current_thread(), threading._DummyThread) > 1


def _declared() -> Split | None:
    split: Split | None = private.get_from_tls(_KEY) if private.is_key_in_tls(_KEY) else None
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


def _is_requested(node: torch.autograd.graph.Node) -> bool:
    try:
        return bool(private.will_engine_execute_node(node))
    except RuntimeError:  # raised for a leaf passed to autograd.grad
        return True
