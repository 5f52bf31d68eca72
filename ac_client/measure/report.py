"""What was predicted of a planned model's step, and what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoac.planner.errors import Holding, holdings_in_lines
from autoac.planner.units import format_bytes, format_us, gb_from_bytes


@dataclass(frozen=True, slots=True)
class Report:
    """Predicted and measured. Prints as text. Bytes and microseconds; None: not known yet."""

    model: str
    budget_bytes: int | None
    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    save_all_peak_bytes: int | None  # predicted, with nothing recomputed
    predicted_step_us: float | None  # forward and backward, recompute and recording included
    measured_step_us: float | None  # median from one forward to the next: the optimizer and the loader too
    recompute_us: float | None  # predicted, in backward
    recording_us: float | None  # predicted, in forward; on the CPU, where the host's time counts
    gap: float | None
    ops: int  # in the policy
    recomputed: int  # of them
    recorded: int  # of them, by the last forward
    steps: int  # planned steps so far
    off_path: str  # the first op that the policy did not have; "" if there was none
    peak_at: str = ""  # where the predicted peak is
    live_at_peak: tuple[Holding, ...] = ()  # there, largest first; nothing where the plan was made elsewhere
    buckets: int = 1  # policies, by the shape of the batch; the numbers above are of the last one that ran
    corrections: int = 0  # how often a plan was made again, since the allocator said otherwise
    corrected_by_bytes: int = 0  # what the policy was planned with less than the budget
    retries: int = 0  # steps that ran out of memory and were run again
    allocated_peak_bytes: int | None = None  # by the allocator's counter, since it was last reset (CUDA)
    reserved_peak_bytes: int | None = None  # what the allocator took from the device for that
    proposed_headroom_bytes: int | None = None  # headroom that keeps also what is reserved within the budget

    def metrics(self) -> dict[str, float]:
        """What a training loop's logger plots, by name: `autoac/predicted_peak_gb`, ... in GiB, milliseconds
        and, for `autoac/recompute_overhead`, as a part of the step without recompute and recording. What is
        not known is left out.
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
        found = {f"autoac/{name}": gb_from_bytes(size) for name, size in sizes.items() if size is not None}
        if self.recording_us is not None:
            found["autoac/recording_ms"] = self.recording_us / 1000
        if self.recompute_us is not None:
            found["autoac/recompute_ms"] = self.recompute_us / 1000
            if step_us:
                found["autoac/recompute_overhead"] = self.recompute_us / step_us
        return found

    def __str__(self) -> str:
        def size(nbytes: int | None) -> str:
            return format_bytes(nbytes) if nbytes is not None else "not measured"

        def time(us: float | None) -> str:
            return format_us(us) if us is not None else "not measured"

        budget = "a policy and no budget"
        if self.budget_bytes is not None:
            budget = f"budget {format_bytes(self.budget_bytes)}"
        if self.predicted_peak_bytes is None:
            return f"{self.model}: {budget}; planned at the first training step"
        recompute = f"{time(self.recompute_us)} of recompute for {self.recomputed} of {self.ops} ops"
        gap = f", within {self.gap:.1%} of the best plan" if self.gap is not None else ""
        recording = f", {time(self.recording_us)} of recording in forward" if self.recording_us else ""
        lines = [
            f"{self.model}: {budget}, {self.steps} planned steps",
            f"  peak   predicted {size(self.predicted_peak_bytes)}, "
            f"measured {size(self.measured_peak_bytes)}{self._off_by()}, "
            f"save-all {size(self.save_all_peak_bytes)}",
            f"  step   predicted {time(self.predicted_step_us)}, measured {time(self.measured_step_us)}",
            f"  plan   {recompute}{recording}{gap}",
        ]
        if self.buckets > 1:
            lines.append(f"  shapes {self.buckets} buckets; the above is of the last one")
        if self.corrections or self.retries:
            lines.append(
                f"  loop   planned again {self.corrections} times, corrected by "
                f"{format_bytes(self.corrected_by_bytes)}; {self.retries} steps run again"
            )
        if self.reserved_peak_bytes is not None and self.allocated_peak_bytes is not None:
            headroom = ""
            if self.proposed_headroom_bytes:
                gb = math.ceil(gb_from_bytes(self.proposed_headroom_bytes) * 1000) / 1000
                headroom = f"; headroom_gb={gb:.3f} would keep it within the budget"
            lines.append(
                f"  device reserved {size(self.reserved_peak_bytes)} for "
                f"{size(self.allocated_peak_bytes)} allocated{headroom}"
            )
        if self.off_path:
            lines.append(f"  off the path: {self.off_path}")
        if self.live_at_peak:
            lines.append(f"  the peak is at {self.peak_at}, while these are live:")
            lines += [f"  {line}" for line in holdings_in_lines(self.live_at_peak)]
        return "\n".join(lines)

    def _off_by(self) -> str:
        if not self.measured_peak_bytes or not self.predicted_peak_bytes:
            return ""
        return f" ({self.measured_peak_bytes / self.predicted_peak_bytes - 1:+.2%})"
