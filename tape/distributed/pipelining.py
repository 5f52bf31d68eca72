"""Tell what a stage of torch.distributed.pipelining does, by the frames of its threads."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.module_paths import frames_from

# Of the classes whose objects hold tensors: a stage, its buffers, and operations that send or receive.
HOLDERS = ("torch.distributed.pipelining.stage", "torch.distributed.distributed_c10d")
PART_OF_TORCH = os.path.join("torch", "distributed", "pipelining", "")


def infers_metadata() -> bool:
    """Return True if a stage runs its module to find out what it returns.

    Since torch 2.13 a stage that was made without `input_args` does so once before its schedule begins, by
    one real forward and backward, which are not a training step.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    inference = getattr(getattr(stages, "PipelineStage", None), "_forward_metadata_inference", None)
    return inference is not None and _is_called_from(sys._getframe(1), inference.__code__)


def nodes_of_weight_half() -> list[torch.autograd.graph.Node]:
    """Return where the weight half begins if `stage_backward_input` waits for the running graph task."""
    module = sys.modules.get("torch.distributed.pipelining._backward")
    if module is None:
        return []
    code = module.stage_backward_input.__code__
    found = _groups_at(sys._getframe(1), code)
    if not found and not _is_called_from(sys._getframe(1), private.engine_run_backward.__code__):
        # This is a thread of the engine (CUDA), and the caller waits in another thread.
        found = next(filter(None, (_groups_at(one, code) for one in sys._current_frames().values())), [])
    return [node for group in found for node in group["intermediates"]]


def _groups_at(frame: FrameType, code: CodeType) -> list[dict[str, Any]]:
    """Return the groups of weights of the caller of `frame` that runs `code`."""
    # A frame in a local variable would be a cycle, and keep alive the variables of every caller.
    return next((f.f_locals["param_groups"] for f in frames_from(frame) if f.f_code is code), [])


def held_by_schedule(*, losses: bool) -> list[Tensor]:
    """Return what the schedule that runs holds: batches, targets, outputs, and buffers to receive into.

    Args:
        losses: of microbatches count, too.
    """
    looked_at, found, rest = set[int](), list[Tensor](), list[Any]()
    frame = sys._getframe(1) if HOLDERS[0] in sys.modules else None
    while frame is not None:  # without a function call for each
        if PART_OF_TORCH in frame.f_code.co_filename:
            rest += (names := frame.f_locals).values()
            if isinstance(names, dict):  # before Python 3.13: a copy, which the frame keeps
                names.clear()
        frame = frame.f_back
    while rest:
        if id(one := rest.pop()) in looked_at:
            continue
        looked_at.add(id(one))
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, dict):
            rest += one.values()
        elif isinstance(one, (list, tuple)):
            rest += one
        elif type(one).__module__ in HOLDERS:
            rest += getattr(one, "__dict__", {}).values()
        elif losses and type(one).__module__ == "torch.distributed.pipelining.schedules":
            rest += getattr(one, "_internal_losses", ())
    return found


def _is_called_from(frame: FrameType, code: CodeType) -> bool:
    return any(caller.f_code is code for caller in frames_from(frame))
