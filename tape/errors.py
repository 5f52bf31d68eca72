"""Define the errors of profiling.

ProfilerError
+-- ProfilerBusy      torch.profiler is already running on this thread, or a step is half done
+-- NothingToProfile  the step has no gradient to compute
+-- CannotProfile     the model cannot run a step that leaves it unchanged
|   +-- CannotCapture a step is captured into a CUDA graph before its plan is final
+-- CannotFake        an op needs values, or a kernel, that a fake step does not have
+-- PinConflict       a module and a module inside it have different pins
+-- UnsupportedTorch  torch is too old or too new; an ImportError too
"""

from __future__ import annotations

from autoac.planner.errors import PickledError

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)
"""The minor versions of torch that are supported, as in pyproject.toml; docs/versions.md says more."""

COMPILED_SINCE = (2, 13)
"""The first of them with which compiled models can be planned."""


class ProfilerError(PickledError):
    """Base of all errors of the profiler."""


class ProfilerBusy(ProfilerError):
    """No step can be profiled now: torch.profiler is running on this thread, or for another reason."""

    def __init__(
        self,
        why: str = "torch.profiler is running on this thread, and a profile needs it to measure memory: "
        "profile the model outside the other profiler's range",
    ) -> None:
        super().__init__(why)


class NothingToProfile(ProfilerError):
    """The step has no gradient to compute."""


class CannotProfile(ProfilerError):
    """The model cannot run a step that leaves it unchanged."""

    refused = "{} cannot be profiled"

    def __init__(self, where: str, why: str, instead: str) -> None:
        self.where, self.why, self.instead = where, why, instead
        super().__init__(f"{self.refused.format(where)}: {why}; {instead}")


class CannotCapture(CannotProfile):
    """A step is captured into a CUDA graph, and its plan is not final or cannot be captured."""

    refused = "a step of {} cannot be captured into a CUDA graph"

    def __init__(
        self,
        where: str,
        why: str,
        instead: str = "run one more training step before the capture, on a batch of the same shape",
    ) -> None:
        super().__init__(where, why, instead)


class CannotFake(ProfilerError):
    """An op needs values, or a kernel, that a fake step does not have."""

    def __init__(self, op: str, why: str) -> None:
        self.op, self.why = op, why
        super().__init__(
            f"{op} cannot run on tensors without memory ({why}). Profile the model on its own device, "
            "without `on`"
        )


class PinConflict(ProfilerError):
    """A module and a module inside it have different pins."""

    def __init__(self, outer: str, outer_pin: str, inner: str, inner_pin: str) -> None:
        self.outer, self.outer_pin, self.inner, self.inner_pin = outer, outer_pin, inner, inner_pin
        super().__init__(
            f"{inner} is pinned {inner_pin} inside {outer}, which is pinned {outer_pin}; unpin one of them"
        )


class UnsupportedTorch(ProfilerError, ImportError):
    """This version of torch is not supported by autoac, or by a part of it.

    Attributes:
        installed: the version of torch.
        why: the reason.
        feature: the part of autoac that does not support it; "" for all of autoac.
    """

    def __init__(
        self,
        installed: str,
        why: str,
        feature: str = "",
        *,
        oldest: tuple[int, int] = OLDEST_TORCH,
        otherwise: str = "",
    ) -> None:
        self.installed, self.why, self.feature = installed, why, feature
        (first, last), (_, newest) = oldest, NEWEST_TORCH
        super().__init__(
            f"torch must be {first}.{last} to {first}.{newest}{f' for {feature}' if feature else ''}, got "
            f"{installed}: {why}. Install 'torch>={first}.{last},<{first}.{newest + 1}', or a version of "
            f"autoac that was tested with this torch{f'; or {otherwise}' if otherwise else ''}"
        )
