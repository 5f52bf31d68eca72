"""Tell what a stage of torch.distributed.pipelining does, by the frames of its threads."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from autoac.tape.torch_facts import private


def infers_metadata() -> bool:
    """Return True if a stage runs its module to find out what it returns.

    Since torch 2.13 a stage that was made without `input_args` does so once before its schedule begins, by
    one real forward and backward, which are not a training step.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    inference = getattr(getattr(stages, "PipelineStage", None), "_forward_metadata_inference", None)
    return inference is not None and _is_called_from(sys._getframe(1), inference.__code__)


def is_input_half() -> bool:
    """Return True if `stage_backward_input` waits for the running graph task."""
    module = sys.modules.get("torch.distributed.pipelining._backward")
    if module is None:
        return False
    code = module.stage_backward_input.__code__
    # A frame in a local variable would be a cycle, and keep alive the variables of every caller.
    if _is_called_from(sys._getframe(1), code):
        return True
    if _is_called_from(sys._getframe(1), private.engine_run_backward.__code__):
        return False
    # This is a thread of the engine (CUDA), and the caller waits in another thread.
    return any(_is_called_from(other, code) for other in sys._current_frames().values())


def _is_called_from(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
