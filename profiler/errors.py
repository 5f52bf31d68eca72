"""What can go wrong while profiling.

ProfilerError
+-- ProfilerBusy      torch.profiler is already running on this thread
|   +-- ShardsInUse   FSDP holds gradients that are not reduced yet
+-- NothingToProfile  the step has no gradient to compute
+-- CannotProfile     the model cannot take a step that leaves it as it was
+-- CannotFake        an op needs values, or a kernel, that a fake step does not have
+-- Unsteady          the model did not do the same twice
+-- PinConflict       a module is pinned one way and one inside it the other way
"""

from __future__ import annotations


class ProfilerError(Exception):
    """Base of all errors of the profiler."""


class ProfilerBusy(ProfilerError):
    """torch.profiler is already running on this thread, and two cannot. Later a step can be profiled."""

    def __init__(self) -> None:
        super().__init__(
            "torch.profiler is running on this thread, and memory is measured with it: "
            "profile the model outside of the other profiler's range"
        )


class ShardsInUse(ProfilerBusy):
    """FSDP holds gradients that are not reduced yet, which a profiled step would add to."""

    def __init__(self, where: str) -> None:
        self.where = where
        ProfilerError.__init__(
            self,
            f"{where} holds gradients that set_requires_gradient_sync(False) has kept from being reduced: "
            "profile the model before the first of these steps, or after the last",
        )

    def __reduce__(self) -> tuple[type[ShardsInUse], tuple[str]]:
        return ShardsInUse, (self.where,)


class NothingToProfile(ProfilerError):
    """The step has no gradient to compute."""

    def __init__(self, why: str) -> None:
        super().__init__(why)


class CannotProfile(ProfilerError):
    """The model cannot take a step that leaves it as it was."""

    def __init__(self, where: str, why: str, instead: str) -> None:
        self.where, self.why, self.instead = where, why, instead
        super().__init__(f"{where} cannot be profiled: {why}; {instead}")

    def __reduce__(self) -> tuple[type[CannotProfile], tuple[str, str, str]]:
        return CannotProfile, (self.where, self.why, self.instead)


class CannotFake(ProfilerError):
    """An op needs values, or a kernel, that a fake step does not have."""

    def __init__(self, op: str, why: str) -> None:
        self.op, self.why = op, why
        super().__init__(
            f"{op} cannot run on tensors without memory: {why}. A profile of the model where it is, without "
            "`on`, runs it"
        )

    def __reduce__(self) -> tuple[type[CannotFake], tuple[str, str]]:
        return CannotFake, (self.op, self.why)


class Unsteady(ProfilerError):
    """The model did not do the same in two steps on one batch."""

    def __init__(self, where: str, first: str, second: str) -> None:
        self.where, self.first, self.second = where, first, second
        super().__init__(
            f"two steps on the same batch differ at {where}: first {first}, then {second}; "
            "profile the model in mode 'hollow', which takes one"
        )

    def __reduce__(self) -> tuple[type[Unsteady], tuple[str, str, str]]:
        return Unsteady, (self.where, self.first, self.second)


class PinConflict(ProfilerError):
    """A module is pinned one way and one inside it the other way."""

    def __init__(self, outer: str, outer_pin: str, inner: str, inner_pin: str) -> None:
        self.outer, self.outer_pin, self.inner, self.inner_pin = outer, outer_pin, inner, inner_pin
        super().__init__(
            f"{inner} is pinned {inner_pin} inside {outer}, which is pinned {outer_pin}; unpin one of them"
        )

    def __reduce__(self) -> tuple[type[PinConflict], tuple[str, str, str, str]]:
        return PinConflict, (self.outer, self.outer_pin, self.inner, self.inner_pin)
