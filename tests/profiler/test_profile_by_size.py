"""Profiles at sizes that were not profiled equal the profiles of those sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from autoac.planner import PlannerError, Profile, ProfileBySize, build, plan
from autoac.planner.memory.simulate import peak_bytes
from autoac.profiler import DATASHEETS, profile
from benchmarks.models import batches
from benchmarks.models.batches import Batch
from benchmarks.models.gpt2 import gpt2

ROUNDS = DATASHEETS["h100"]
EXACT = replace(ROUNDS, allocator_rounding=1)
NO_SIZES = {"notes": True, "ops": {"runtime_us", "spread_us"}, "backward": {"runtime_us"}}


def llama() -> nn.Module:
    """Return a Llama whose rows are not multiples of 512 bytes."""
    config = transformers.LlamaConfig(
        hidden_size=144,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1001,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def small_gpt2() -> nn.Module:
    """Return a GPT-2 whose heads are too narrow for fused attention: scores grow with the square."""
    return gpt2(layers=2, width=36, heads=4, vocabulary=101)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1], layer_type="basic"
    )
    return transformers.ResNetForImageClassification(config)


CASES = {
    "llama, length": (llama, lambda n: batches.tokens(1, n, 1001), (50, 100, 300), (51, 77, 128, 555)),
    "gpt2, length": (small_gpt2, lambda n: batches.tokens(3, n, 101), (50, 90, 170, 300), (51, 128, 555)),
    "resnet, batch": (resnet, lambda n: batches.images(n, 32), (2, 5, 9), (3, 7, 20)),
}


def by_size(
    make: Callable[[], nn.Module], batch: Callable[[int], Batch], knots: tuple[int, ...]
) -> ProfileBySize:
    first = knots[0]
    return ProfileBySize.of(
        {size: profile(make(), on=EXACT, **batch(size)) for size in knots},
        (first, profile(make(), on=ROUNDS, **batch(first))),
    )


@functools.cache
def profiles_of(case: str) -> ProfileBySize:
    make, batch, knots, _ = CASES[case]
    return by_size(make, batch, knots)


def without_times(step: Profile) -> dict[str, object]:
    return step.model_dump(exclude=NO_SIZES | {"ops": {"runtime_us", "spread_us", "flops"}})


@pytest.mark.parametrize("case", CASES)
def test_a_profile_between_and_beyond_the_knots_equals_one_that_was_profiled(case: str) -> None:
    make, batch, _, sizes = CASES[case]
    profiles = profiles_of(case)
    assert not profiles.measured_only
    for size in sizes:
        real = profile(make(), on=ROUNDS, **batch(size))
        assert without_times(profiles.at(size)) == without_times(real), size


def test_peaks_of_save_sets_at_a_size_between_knots_are_exact() -> None:
    make, batch, _, _ = CASES["llama, length"]
    there, real = profiles_of("llama, length").at(77), profile(make(), on=ROUNDS, **batch(77))
    graph, real_graph = build(there), build(real)
    most, least = (peak_bytes(graph, chosen) for chosen in (graph.everything, frozenset()))
    planned = plan(there, budget_bytes=(most + least) // 2)
    assert len(planned.graph.ops) == len(graph.ops)  # no use groups: the save set is one of `graph`
    for save_set in (graph.everything, frozenset(), planned.save_set):
        assert peak_bytes(graph, save_set) == peak_bytes(real_graph, save_set)


def test_times_are_between_those_of_the_knots_and_never_extrapolated() -> None:
    profiles = profiles_of("llama, length")
    low, between, high = (profiles.at(size) for size in (50, 75, 100))
    for a, b, c in zip(low.ops.runtime_us, between.ops.runtime_us, high.ops.runtime_us, strict=True):
        assert b == pytest.approx((a + c) / 2, abs=0.01)
    assert profiles.at(600).ops.runtime_us == profiles.at(300).ops.runtime_us
    assert "run times are those of size 300" in profiles.at(600).notes[-1]


def test_columns_that_a_further_knot_contradicts_are_measured_only() -> None:
    make, batch, _, _ = CASES["gpt2, length"]
    profiles = by_size(make, batch, (50, 100, 300))
    assert "storages.nbytes" in profiles.measured_only


def test_profiles_of_different_ops_are_not_joined() -> None:
    with pytest.raises(PlannerError, match="equal ops"):
        by_size(llama, lambda n: batches.tokens(n, 77, 1001), (1, 2))
