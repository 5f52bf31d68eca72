"""Time training steps of several sizes side by side, each under its plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ac_client.applied_model import applied
from ac_client.apply import apply
from ac_client.model_loader import TrainingSetup
from autoac.planner import Policy
from autoac.profiler.plain_step import run_batches, steps_put_back
from autoac.profiler.steps.training_loop import TrainingStep

log = logging.getLogger("ac_client.fit")

MOST_TURNS, LEAST_TURNS = 21, 3
ENOUGH_S = 20.0  # for all turns


@dataclass(frozen=True, slots=True)
class PlannedSize:
    """A training step as one or several equal batches, whose gradients add up."""

    size: int  # of each batch
    policy: Policy
    batches: int = 1


def times_in_turns(
    setup: Callable[[int], TrainingSetup], ways: Sequence[PlannedSize], autocast: torch.dtype | None
) -> list[list[float]]:
    """Return the microseconds of a few steps of each way, without the optimizer's step.

    The ways take turns, so that what else the machine does adds to all alike. Each step runs as it would in
    training: under no other plan than its own, and after a step that is not counted. There are 21 turns,
    or as many as twenty seconds allow, but at least three. Gradients, buffers and generators are put back.

    Args:
        setup: returns the model and the batch of a size. The first one's model runs all steps.
        ways: of different sizes.

    Raises:
        torch.OutOfMemoryError: a step has no room on the device.
    """
    log.info("timing steps of sizes %s in turns", ", ".join(_name(way) for way in ways))
    first = setup(ways[0].size)
    model, device = first.model, first.device
    steps = [_step(first, model), *(_step(setup(way.size), model) for way in ways[1:])]
    taken: list[list[float]] = [[] for _ in ways]
    with steps_put_back(model, steps, device) as note_leaves:
        turns, turn, begins = MOST_TURNS, 0, time.perf_counter()
        while turn < turns:
            for place in range(len(ways)):
                number = (turn + place) % len(ways)
                run = partial(run_batches, steps[number], ways[number].batches, device, autocast)
                apply(model, policy=ways[number].policy)
                try:
                    applied(model).plan_in_eval()
                    run(note_leaves)
                    began = time.perf_counter()
                    run()
                    taken[number].append((time.perf_counter() - began) * 1e6)
                finally:
                    applied(model).remove()
            turn += 1
            turn_s = (time.perf_counter() - begins) / turn
            turns = max(turn, LEAST_TURNS, min(MOST_TURNS, int(ENOUGH_S / turn_s)))
            log.info("turn %d of %d, about %.0f s more", turn, turns, turn_s * (turns - turn))
    return taken


def _name(way: PlannedSize) -> str:
    return str(way.size) if way.batches == 1 else f"{way.batches} x {way.size}"


def _step(setup: TrainingSetup, model: nn.Module) -> TrainingStep:
    return TrainingStep(model, setup.args, setup.kwargs, setup.loss)
