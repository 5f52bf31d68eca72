"""Follow the stream that ops run on, and order the accesses of streams to memory that backward needs.

NOTE [ Streams ]

Autograd runs each node of backward on the stream that its op ran on in forward, and orders the gradients
between streams, but not the tensors that a replay makes or holds. So nothing that a replay makes crosses
streams:

1. A storage version that is read on another stream than the one that made it is saved, in the profile as in
   a region. Each replay then makes its tensors on the stream that reads and frees them.
2. Replays read the sources that their ops read in forward. The stream waited for these in forward. A node may
   hold the last reference to memory of another stream, so it calls `record_stream` for its own stream.
3. A private copy of a source (`Source.keep_copy` in tape/runtime) is made on the stream of the writer.
   Its readers wait for the copy.

With a single stream, this costs one check for each op on a device that has streams, and nothing on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoac.tape.torch_facts import private


def has_streams() -> bool:
    """Return True if this process uses a device whose ops may run on several streams."""
    device = torch.accelerator.current_accelerator()
    return device is not None and device.type != "mps" and torch.get_device_module(device).is_initialized()


def is_capturing() -> bool:
    """Return True if work on the current stream is captured into a CUDA graph, and does not run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class StreamsSeen:
    """The streams on which the recorded ops of this process ran.

    Attributes:
        several: True once there was more than one. Stays True, because a module that runs without the mode
            shows its streams in its first step only.
    """

    several = False


streams_seen = StreamsSeen()


def hold_for_current_stream(tensor: Tensor) -> None:
    """Keep the memory of `tensor` from being allocated again before the current stream is done with it."""
    if tensor.device.type != "cpu":
        unseen = private.DisableTorchDispatch()
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
        del unseen


def event_on(tensor: Tensor) -> torch.Event | None:
    """Return an event after the work launched so far on the current stream of the device of `tensor`."""
    if tensor.device.type == "cpu":
        return None
    return torch.accelerator.current_stream(tensor.device).record_event()


def wait_for(event: torch.Event, tensor: Tensor) -> None:
    """Have the current stream wait for `event` before it reads `tensor`."""
    torch.accelerator.current_stream(tensor.device).wait_event(event)
    hold_for_current_stream(tensor)
