"""Note which process groups the collectives of a profiled forward communicate over."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.op_facts import OpFacts

Groups = dict[tuple[int, ...], Any]
"""Process groups by their ranks, which are numbered as in the whole job."""

# Only two ranks of the group take part, so these say nothing about the others.
_POINT_TO_POINT = ("send", "isend", "recv_", "irecv", "recv_any_source_", "batch_p2p_ops")


class _Noted(threading.local):
    groups: Groups | None = None


_noted = _Noted()


@contextmanager
def noting_groups() -> Iterator[Groups]:
    """Collect the process groups of the collectives that are recorded on this thread.

    Point-to-point ops are left out, because only two ranks of their group take part.
    """
    before, _noted.groups = _noted.groups, {}
    try:
        yield _noted.groups
    finally:
        _noted.groups = before


def note_groups(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Note the groups among the arguments of a collective."""
    if _noted.groups is None or facts.name.split(".")[1] in _POINT_TO_POINT:
        return
    for arg in (*args, *kwargs.values()):
        _note(_group_of(arg))


def note_mesh(tensor: torch.Tensor) -> None:
    """Note the groups of the mesh over which `tensor` is distributed, if it is a DTensor.

    All ranks of a mesh run the same ops on its DTensors. Recorders do not see the collectives in these ops.
    """
    mesh = getattr(tensor, "device_mesh", None)
    if _noted.groups is not None and isinstance(mesh, DeviceMesh):
        for group in mesh.get_all_groups():
            _note(group)


def _note(group: Any) -> None:
    if _noted.groups is not None and group is not None:
        _noted.groups[tuple(sorted(dist.get_process_group_ranks(group)))] = group


def _group_of(arg: Any) -> Any:
    """Return the process group that an argument of an op is, or names; None if there is none."""
    if isinstance(arg, dist.ProcessGroup):
        return arg
    if isinstance(arg, torch.ScriptObject):
        is_group = arg._type().qualified_name().endswith(".c10d.ProcessGroup")
        return private.unboxed_group(arg) if is_group else None
    return private.process_group_named(arg) if isinstance(arg, str) else None
