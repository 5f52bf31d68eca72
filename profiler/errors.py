"""What can go wrong while profiling.

ProfilerError
+-- ProfilerBusy      torch.profiler is already running on this thread
+-- NothingToProfile  the step has no gradient to compute
+-- PinConflict       a module is pinned one way and one inside it the other way
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


class PinConflict(ProfilerError):
    """A module is pinned one way and one inside it the other way."""

    def __init__(self, outer: str, outer_pin: str, inner: str, inner_pin: str) -> None:
        self.outer, self.outer_pin, self.inner, self.inner_pin = outer, outer_pin, inner, inner_pin
        super().__init__(
            f"{inner} is pinned {inner_pin} inside {outer}, which is pinned {outer_pin}; unpin one of them"
        )

    def __reduce__(self) -> tuple[type[PinConflict], tuple[str, str, str, str]]:
        return PinConflict, (self.outer, self.outer_pin, self.inner, self.inner_pin)
