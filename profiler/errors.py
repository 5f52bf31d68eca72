"""What can go wrong while profiling.

ProfilerError
+-- ProfilerBusy      torch.profiler is already running on this thread
+-- NothingToProfile  the step has no gradient to compute
"""

from __future__ import annotations


class ProfilerError(Exception):
    """Base of all errors of the profiler."""


class ProfilerBusy(ProfilerError):
    """torch.profiler is already running on this thread, and two cannot."""

    def __init__(self) -> None:
        super().__init__(
            "torch.profiler is running on this thread, and memory is measured with it: "
            "profile the model outside of the other profiler's range"
        )


class NothingToProfile(ProfilerError):
    """The step has no gradient to compute."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
