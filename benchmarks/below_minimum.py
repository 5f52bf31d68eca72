"""Plan below the smallest peak of recompute alone, with moves to the host, and carry the plans out.

    python -m benchmarks.below_minimum           between two arenas of a CPU
    make bench-below-minimum                     there, and on the stand-in device of tests/standin

Two training steps of each model, plain and planned: weights must be equal bit for bit, and the peak of the
second step must be the predicted one, up to the slack of a GPU's allocator. The link is taken to be fast, so
that the budget alone decides.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy
import torch
from torch import Tensor

import ac_client
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner import (
    InfeasibleBudget,
    Plan,
    Policy,
    Profile,
    SolverOutOfTime,
    find_minimum_peak,
    plan_offload,
)
from autoac.planner.problem.moves import Link
from autoac.planner.units import GIB
from autoac.profiler import observe
from autoac.tape.runtime.moves.host_memory import host_memory
from autoac.tape.torch_facts.libraries import free_workspaces
from benchmarks.models import medium
from benchmarks.models.batches import Batch

MODELS = ("GPT-2", "Llama", "BERT", "T5", "ViT", "Whisper")
SHARES = (0.9, 0.95, 0.98, 0.99)  # tried one after another: of what the smallest peak has beyond static bytes
LINK = Link(20e3, 20e3, 5.0, 1 << 40)
WORK_LIMIT = 10.0
MIB = GIB >> 10
STEPS = 2


def train(name: str, device: torch.device, policy: Policy | None) -> tuple[list[Tensor], list[int], int, int]:
    """Return weights after the steps, the peak of each, the host's peak, and the slack of blocks.

    A peak is what a step takes beyond what there was before; slack, what blocks hold beyond what was asked.
    """
    cuda = device.type == "cuda"
    free_workspaces(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    peaks = []
    host_memory.peak = 0
    with AllocatorTimeline(device=device) as timeline:
        torch.manual_seed(0)
        model, batch = medium.MODELS[name]()
        model, batch = model.to(device), _on(batch, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if policy is not None:
            ac_client.apply(model, policy=policy, optimizer=optimizer)
        for step in range(STEPS):
            torch.manual_seed(step)
            numpy.random.seed(step)  # transformers masks with it
            timeline.mark(str(step))
            loss = model(**batch).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
    peaks = [timeline.peak_since(str(step)) - before for step in range(STEPS)]
    stats = torch.cuda.memory_stats(device) if cuda else {}
    slack = stats["allocated_bytes.all.peak"] - stats["requested_bytes.all.peak"] if cuda else 0
    return [parameter.detach().clone() for parameter in model.parameters()], peaks, host_memory.peak, slack


def _on(batch: Batch, device: torch.device) -> Batch:
    return {key: value.to(device) for key, value in batch.items()}


def row_of(name: str, device: torch.device) -> tuple[str, bool]:
    """Return the row of a model, and True if it trained as planned."""
    torch.manual_seed(0)
    model, batch = medium.MODELS[name]()
    model, batch = model.to(device), _on(batch, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profile = observe(model, (), batch, optimizer=optimizer)
    profile = profile.with_dropped_outputs(profile.droppable_outputs)
    static, low = profile.static.total, find_minimum_peak(profile, work_limit=WORK_LIMIT).found
    del model, batch, optimizer
    plans = (_planned(profile, static + round(s * (low - static))) for s in SHARES)
    planned = next(filter(None, plans), None)
    if planned is None:
        return f"| {name} | {low / MIB:.1f} | NOT FOUND |", False
    plain, *_ = train(name, device, None)
    weights, peaks, host, slack = train(name, device, planned.policy())
    equal = all(map(torch.equal, plain, weights))
    # Blocks of CUDA's allocator are larger than what was asked for, in each step by others. Of those of
    # parameters, a given policy knows nothing.
    slack = max(slack, sum(profile.storages.slack_nbytes))
    exact = max(abs(peaks[-1] - planned.peak), abs(host - planned.moved_bytes)) <= slack
    moved, extra = planned.moved_bytes / MIB, planned.recompute_us / planned.step_us
    row = (
        f"| {name} | {low / MIB:.1f} | {planned.peak / MIB:.1f} | {peaks[-1] / MIB:.1f} | "
        f"{moved:.1f} | {host / MIB:.1f} | {extra:.1%} | "
        f"{'equal' if equal else 'DIFFER'} |{'' if exact else ' NOT AS PREDICTED'}"
    )
    return row, equal and exact


def _planned(profile: Profile, budget: int) -> Plan | None:
    try:
        return plan_offload(profile, budget_bytes=budget, link=LINK, work_limit=WORK_LIMIT)
    except (InfeasibleBudget, SolverOutOfTime):
        return None


def main(races: Callable[[], list[str]] = list) -> None:
    """Run the command in the module docstring.

    Args:
        races: returns the races since its last call, on a device that notes them.
    """
    torch.set_num_threads(1)  # several add some gradients in another order each time
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("| model | smallest, MiB | planned | measured | moved | on the host | recompute | weights |")
    print("| --- |" + " ---: |" * 6 + " --- |")
    right = True
    for name in MODELS:
        row, as_planned = row_of(name, device)
        raced = races()
        print(row, *raced[:1], flush=True)
        right &= as_planned and not raced
    raise SystemExit(not right)


if __name__ == "__main__":
    main()
