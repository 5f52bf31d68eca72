"""Make StepGraphs from this project's profiles of models, on a device described by its datasheet."""

from __future__ import annotations

import importlib.util

from autoac.planner.problem.build import build
from benchmarks.plans.profiles import load
from benchmarks.public.planner_graph import step_graph_of
from benchmarks.public.step_graph import StepGraph

DEVICE = "h100"
NEEDS = {"unet_sd15": "diffusers"}  # packages that a model needs in addition to ours


def is_available(name: str) -> bool:
    """Return True if the packages of a model are installed."""
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


def read(name: str) -> StepGraph:
    """Return the step of a model of `benchmarks/models/large.py`."""
    return step_graph_of(name, f"our profile, {DEVICE}", build(load(name, DEVICE)))
