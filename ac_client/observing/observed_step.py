"""Run one training step for real, under a policy that needs no profile, and record its profile.

Everything that may be recomputed is, but for what *cuts* hold (ac_client/runtime/cuts.py), so the step takes
about as much memory as torch's checkpoint around every block. Its numbers are those of plain training. The
record is made by the region that runs the step (profiler/capture/step_tape.py), and nothing runs twice but
what backward recomputes. Those replays are what times the ops.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ac_client.runtime.cuts import Cuts
from ac_client.runtime.policy_context import save_recompute_policy
from autoac.planner.formats.profile import Profile
from autoac.profiler.capture.allocations import AllocationRecord
from autoac.profiler.capture.step_tape import StepTape
from autoac.profiler.environment import describe_leaf, environment_of_device
from autoac.profiler.observe import profile_of
from autoac.profiler.static_memory import static_bytes
from autoac.profiler.steps.hollow import HollowStep
from autoac.profiler.steps.training_loop import Loss, TrainingStep, loss_of
from autoac.profiler.timing.op_timer import host_clock, median_and_spread
from autoac.profiler.torch_facts.gradients import gradient_of, roots_of
from autoac.profiler.torch_facts.module_paths import ROOT, Watch, watch_modules
from autoac.profiler.torch_facts.module_pins import pins_of
from autoac.profiler.torch_facts.private import tree_leaves


class ObservedStep:
    """One step of a model, from the beginning of its forward to the end of its backward.

    Call `begin`, the model, `end_forward`, `begin_backward`, backward, `end_backward`, `end` and `profile`.
    """

    def __init__(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
    ) -> None:
        accumulates = any(gradient_of(parameter) is not None for parameter in model.parameters())
        self._subject = TrainingStep(model, args, kwargs, None, accumulates)
        self._device = device
        self._environment = environment_of_device(model, device)
        self._inputs = [describe_leaf(leaf) for leaf in tree_leaves((tuple(args), dict(kwargs)))]
        self._allocations = AllocationRecord(device, nodes=True)
        self._tape = StepTape(self._allocations.mark, host_clock(device))
        self._region: save_recompute_policy | None = None
        self._watches: list[Watch] = []
        self._path = [ROOT]
        self._backward = -1, -1, -1
        self._static = static_bytes(model, args, kwargs, 0, device, accumulates=accumulates)

    def begin(self) -> None:
        """Record from here on."""
        recorder = self._tape.recorder
        recorder.pins = pins_of(self._subject.compiled)
        self._watches = watch_modules(self._subject.compiled, self._enter, self._leave)
        self._allocations.__enter__()
        self._region = save_recompute_policy("recompute_all", cuts=Cuts(), tape=self._tape)
        self._region.__enter__()

    def _enter(self, name: str) -> None:
        self._path.append(name)
        self._tape.recorder.module = name

    def _leave(self, _name: str) -> None:
        self._path.pop()
        self._tape.recorder.module = self._path[-1]

    def end_forward(self, output: Any) -> None:
        """Note the end of the forward, which returns `output`."""
        self._tape.recorder.end_forward(output)

    def close_region(self) -> None:
        """Record no more ops."""
        region, self._region = self._region, None
        if region is not None:
            region.__exit__(None, None, None)
        self._tape.saved.forward_over = True
        for watch in self._watches:
            watch.remove()

    def begin_backward(self) -> None:
        """Note that backward begins."""
        self._tape.held.look()
        self._backward = self._allocations.mark(), -1, -1

    def end_backward(self) -> None:
        """Note the end of backward, which frees the graph."""
        self._tape.held.look()
        self._tape.saved.save_differentiated()
        self._backward = self._backward[0], self._allocations.mark(), -1

    def end(self) -> None:
        """Note the end of the record."""
        tape = self._tape
        tape.held.look()
        self._backward = *self._backward[:2], self._allocations.mark()
        tape.saved.closed = True
        self._allocations.mark()
        self._allocations.__exit__(None, None, None)

    def profile(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> Profile:
        """Return the profile of the step."""
        tape, at = self._tape, self._allocations.times_ns
        record = tape.recorder.record
        begin, graph_end, end = self._backward
        in_step_us = [(at[op.end_mark] - at[op.begin_mark]) / 1e3 for op in record.ops]
        signatures: list[Hashable] = [op.signature for op in record.ops]
        times = median_and_spread(in_step_us, signatures, tape.samples)
        step = HollowStep(
            record,
            tape.saved,
            self._allocations,
            at,
            begin,
            graph_end,
            end,
            op_times=times,
            temporary=tape.temporary,
            hidden=tape.hidden,
        )
        notes = [f"measured: run times of {len(times)} kinds of op"]
        return profile_of(
            self._subject,
            step,
            notes,
            self._inputs,
            self._environment,
            self._device,
            None,
            optimizer,
            self._static,
        )


def observe_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> Profile:
    """Run `loss(model(*args, **kwargs)).backward()` once, for real, and return its profile."""
    step = ObservedStep(model, args, kwargs, device)
    step.begin()
    try:
        output = model(*args, **kwargs)
        step.end_forward(output)
        roots = roots_of(output) if loss is None else [loss_of(loss, output)]
        del output
    finally:
        step.close_region()
    roots = [root for root in roots if root.requires_grad]
    step.begin_backward()
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    step.end_backward()
    del roots
    step.end()
    return step.profile(optimizer)
