"""Define the report on a planned model: its predicted and measured peak and step time."""

from __future__ import annotations

from dataclasses import dataclass

from autoac.planner.errors import Holding, holdings_in_lines
from autoac.planner.units import format_bytes, format_us, gb_from_bytes

RECORDED_OP_US = 70.0
"""The host's time to record an op in forward: the last line of `python -m benchmarks.overhead`."""


@dataclass(frozen=True, slots=True)
class Report:
    """Compare the predicted step of a planned model with the measured one. Prints as text.

    Sizes are bytes and times are microseconds; None means not known yet.
    """

    model: str
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    save_all_peak_bytes: int | None  # predicted, with nothing recomputed
    predicted_step_us: float | None  # forward and backward, recompute and recording included
    measured_step_us: float | None  # median time between forwards, so optimizer and data loader are included
    recompute_us: float | None  # predicted, in backward
    recording_us: float | None  # predicted; what it adds to a forward
    gap: float | None
    ops: int  # in the policy
    recomputed: int  # ops that the policy recomputes
    moved_bytes: int  # that the policy moves to the host
    stall_us: float  # predicted: compute waits for copies
    recorded: int  # ops that the last forward recorded
    steps: int  # planned steps so far
    off_path: str  # the first op at which the last forward left the policy; "" if it did not
    stale: str = ""  # what steps did that the prediction does not count; "" if nothing is known
    peak_at: str = ""  # the moment of the predicted peak
    live_at_peak: tuple[
        Holding, ...
    ] = ()  # at that moment, largest first; empty if the plan was loaded from a file
    beyond_dispatch: tuple[str, ...] = ()  # what must be saved for kernels that PyTorch does not dispatch
    buckets: int = 1  # policies for different batch shapes; the numbers above are of the last that ran
    corrections: int = 0  # how often the model was planned again because a measured peak differed
    corrected_by_bytes: int = 0  # by how much the policy's budget was lowered for that
    allocated_peak_bytes: int | None = None  # of the allocator's counter since its last reset (CUDA)
    reserved_peak_bytes: int | None = None  # memory that the allocator then held on the device (CUDA)
    predicted_reserved_bytes: int | None = None  # of the device, fragments included (CUDA)

    def metrics(self) -> dict[str, float]:
        """Return values for a training loop's logger, by name, such as `autoac/predicted_peak_gb`.

        Sizes are in GiB and times in milliseconds. `autoac/recompute_overhead` is a fraction of the step
        without recompute and recording. Unknown values are left out.
        """
        step_us = None
        if self.predicted_step_us is not None and self.recompute_us is not None:
            step_us = self.predicted_step_us - self.recompute_us - (self.recording_us or 0)
        sizes = {
            "budget_gb": self.budget_bytes,
            "predicted_peak_gb": self.predicted_peak_bytes,
            "measured_peak_gb": self.measured_peak_bytes,
            "save_all_peak_gb": self.save_all_peak_bytes,
        }
        metrics = {f"autoac/{name}": gb_from_bytes(size) for name, size in sizes.items() if size is not None}
        if self.recording_us is not None:
            metrics["autoac/recording_ms"] = self.recording_us / 1000
        if self.recompute_us is not None:
            metrics["autoac/recompute_ms"] = self.recompute_us / 1000
            if step_us:
                metrics["autoac/recompute_overhead"] = self.recompute_us / step_us
        return metrics

    def __str__(self) -> str:
        def size(nbytes: int | None) -> str:
            return format_bytes(nbytes) if nbytes is not None else "unknown"

        def time(us: float | None) -> str:
            return format_us(us) if us is not None else "unknown"

        budget = "a policy and no budget"
        if self.budget_bytes is not None:
            budget = f"budget {format_bytes(self.budget_bytes)}"
        if self.predicted_peak_bytes is None:
            return f"{self.model}: {budget}; the first training step will plan it"
        recompute = f"{time(self.recompute_us)} of recompute for {self.recomputed} of {self.ops} ops"
        moves = f", {size(self.moved_bytes)} moved to the host" if self.moved_bytes else ""
        gap = f"; no plan takes over {self.gap:.1%} less" if self.gap is not None and self.gap < 1 else ""
        recording = f", {time(self.recording_us)} of recording in forward" if self.recording_us else ""
        measured_step = "not measured yet"
        if self.measured_step_us is not None:
            measured_step = f"measured {format_us(self.measured_step_us)}"
        lines = [
            f"{self.model}: {budget}, {self.steps} planned steps",
            f"  peak: predicted {size(self.predicted_peak_bytes)}, {self._measured_peak()}; "
            f"{size(self.save_all_peak_bytes)} with nothing recomputed",
            f"  step: predicted {time(self.predicted_step_us)}, {measured_step}",
            f"  plan: {recompute}{moves}{recording}{gap}",
        ]
        if self.buckets > 1:
            lines.append(f"  shapes: {self.buckets} buckets; the numbers above are of the last one")
        if self.corrections:
            lines.append(
                f"  corrections: planned again {self.corrections} times, budget lowered by "
                f"{format_bytes(self.corrected_by_bytes)}"
            )
        if self.reserved_peak_bytes is not None and self.allocated_peak_bytes is not None:
            lines.append(
                f"  device: reserved {size(self.reserved_peak_bytes)} for "
                f"{size(self.allocated_peak_bytes)} allocated, predicted "
                f"{size(self.predicted_reserved_bytes)}"
            )
        if self.stale:
            lines.append(f"  the prediction is stale: {self.stale}")
        if self.off_path:
            lines.append(f"  off the path: {self.off_path}")
        lines += [f"  {line}" for line in self.beyond_dispatch]
        if self.live_at_peak:
            lines.append(f"  live at the peak, {self.peak_at}:")
            lines += [f"  {line}" for line in holdings_in_lines(self.live_at_peak)]
        return "\n".join(lines)

    def _measured_peak(self) -> str:
        measured = self.measured_peak_bytes
        if measured is None:
            if not self.steps:
                return "not measured yet"
            return "not measured yet (on a CPU, run a step in `with ac_client.applied(model).measure():`)"
        off_by = ""
        if measured and self.predicted_peak_bytes:
            off_by = f" ({measured / self.predicted_peak_bytes - 1:+.2%})"
        return f"measured {format_bytes(measured)}{off_by}"
