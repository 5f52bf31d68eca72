"""Real architectures, small: the plain gradients, and the predicted peak, under random save sets."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from ac_client.cursor import Cursor, Route
from ac_client.measure import AllocatorTimeline
from ac_client.runtime import save_recompute_policy
from autoac.planner.graph import OpId, build, closed
from autoac.planner.policy import Decision, decisions
from autoac.planner.simulate import peak_bytes
from autoac.profiler import profile
from autoac.profiler.modules import watch_modules

IDS = torch.arange(48).remainder(37).reshape(2, 24)
TEXT = {"input_ids": IDS, "labels": IDS}
PIXELS = {
    "pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32),
    "labels": torch.tensor([0, 1]),
}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}

ZOO: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "llama": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SMALL, vocab_size=64, num_key_value_heads=2, use_cache=False)
        ),
        TEXT,
    ),
    "mixtral": (
        lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                **SMALL, vocab_size=64, num_key_value_heads=2, num_local_experts=4, use_cache=False
            )
        ),
        TEXT,
    ),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=64,
                d_model=32,
                d_ff=64,
                d_kv=8,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
            )
        ),
        TEXT,
    ),
    "resnet": (
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(
                embedding_size=16, hidden_sizes=[16, 32, 32, 32], depths=[1, 1, 1, 1], layer_type="basic"
            )
        ),
        PIXELS,
    ),
}


def step(name: str, static: int, choice: dict[str, Decision] | None) -> tuple[int, list[Tensor]]:
    """The measured peak, and everything that the step computed."""
    make, batch = ZOO[name]
    torch.manual_seed(0)
    model = make().train()
    torch.manual_seed(1)
    with AllocatorTimeline(base=static) as timeline:
        if choice is None:
            out = model(**batch)
        else:
            cursor = Cursor(Route(choice), strict=True)
            watch_modules(model, cursor.enter, cursor.leave)
            with save_recompute_policy(cursor):
                out = model(**batch)
        out.loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return timeline.peak_bytes, [out.loss, *gradients, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("name", ZOO)
def test_gradients_are_plain_and_peaks_as_predicted(name: str) -> None:
    make, batch = ZOO[name]
    torch.manual_seed(0)
    found = profile(make().train(), **batch)
    graph = build(found)
    peak, plain = step(name, found.static.total, None)
    assert peak == peak_bytes(graph, graph.everything)
    chance = random.Random(1)
    for probability in (0.0, 0.2, 0.5, 0.8):
        drawn = frozenset(OpId(op.id) for op in graph.ops if chance.random() < probability)
        save_set = closed(graph, drawn)
        peak, planned = step(name, found.static.total, decisions(found, save_set))
        assert all(map(torch.equal, plain, planned))
        assert peak == pytest.approx(peak_bytes(graph, save_set), abs=64)  # a scalar that became a tensor
