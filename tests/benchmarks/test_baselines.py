"""Check that baselines return legal save sets and follow their sources."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest
import torch
import transformers
from graphs import Tape, chain, gpt2, random_profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import OpId
from autoac.planner.problem.save_sets import with_forced_saves, without_cost_free_recomputes
from autoac.profiler import profile
from benchmarks.models import gpt2 as zoo_gpt2
from benchmarks.plans import block_rules, knapsacks, minimum_cut
from benchmarks.plans.baselines import BASELINES

pytestmark = pytest.mark.filterwarnings("ignore:.*PuLP 4.0:DeprecationWarning")  # torch's own calls
GPT2 = build(gpt2(2, batch=2, length=64, width=48, vocabulary=64))
SMALL = [GPT2, chain(1, 8, 1, 8, 0), *(build(random_profile(random.Random(seed))) for seed in range(6))]


@pytest.fixture
def no_children(monkeypatch):
    """Solve small knapsacks in this process: a fork of it takes longer than most of them."""
    monkeypatch.setattr(knapsacks, "run_in_child", lambda solver, *args, limit_s: solver(*args))


def two_blocks():
    """Build two blocks of `mm -> gelu -> mm`; autograd saves what each mm reads."""
    tape = Tape()
    (x,) = tape.op("aten.embedding.default", [], 4, us=1, module="embed")
    saved = []
    for i in range(2):
        saved.append(tape.save(x))
        (y,) = tape.op("aten.mm.default", [x], 8, us=5, module=f"layers.{i}.up")
        saved.append(tape.save(y))
        (z,) = tape.op("aten.gelu.default", [y], 8, us=1, module=f"layers.{i}")
        saved.append(tape.save(z))
        (x,) = tape.op("aten.mm.default", [z], 4, us=5, module=f"layers.{i}.down")
    tape.op("aten.sum.default", [x], 1, us=1, module="")
    tape.step("loss", [])
    for handle in reversed(saved):
        tape.step("step", [handle])
    return build(tape.profile())


def names(graph, save_set):
    return [graph.ops[op].name for op in sorted(save_set)]


@pytest.mark.usefixtures("no_children")
@pytest.mark.parametrize("graph", SMALL, ids=range(len(SMALL)))
@pytest.mark.parametrize("baseline", BASELINES)
def test_every_save_set_is_legal(graph, baseline):
    for save_set in BASELINES[baseline](graph).values():
        assert save_set == without_cost_free_recomputes(graph, save_set)
        assert graph.must_save <= save_set <= graph.everything
        assert with_forced_saves(graph, save_set) >= save_set
        assert peak_bytes(graph, save_set) >= graph.static_bytes


def test_checkpoint_around_blocks_saves_what_crosses_and_what_is_outside():
    assert names(two_blocks(), block_rules.per_block(two_blocks())["depth 1"]) == [
        "embed/aten.embedding.default#0",
        "layers.0.down/aten.mm.default#0",
        "layers.1.down/aten.mm.default#0",
        "/aten.sum.default#0",
    ]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_selective_checkpoint_peaks_where_torch_does(kind):
    model, batch, optimizer = trainee(kind)
    step(model, batch, optimizer)
    graph = build(profile(model, **batch, optimizer=optimizer))
    measured = {}
    for which, seconds in (("every matmul, depth 1", False), ("every second matmul, depth 1", True)):
        with AllocatorTimeline() as timeline:
            model, batch, optimizer = trainee(kind)
            under_selective_checkpoint(blocks_of(model), every_second=seconds)
            step(model, batch, optimizer)
            timeline.mark("second step")
            step(model, batch, optimizer)
        measured[which] = timeline.peak_since("second step")
    predicted = {
        setting: peak_bytes(*block_rules.as_run(graph, block_rules.SELECTIVE, setting, save_set))
        for setting, save_set in block_rules.selective(graph).items()
    }
    assert predicted == pytest.approx(measured, rel=0.015)


def trainee(kind):
    torch.manual_seed(0)
    if kind == "gpt2":
        model = zoo_gpt2.gpt2(layers=4, width=128, heads=2, vocabulary=200, positions=128)
    else:
        config = transformers.LlamaConfig(
            vocab_size=200, hidden_size=128, intermediate_size=352, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(0, 200, (4, 128), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters(), foreach=False)


def step(model, batch, optimizer):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def blocks_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def under_selective_checkpoint(blocks, *, every_second):
    """torch's own, with matmuls and attention on the list, as torchtitan's option sets it up."""
    aten = torch.ops.aten
    matmuls = {aten.mm.default, aten.addmm.default, aten.bmm.default}

    def contexts():
        seen = {False: 0, True: 0}

        def policy(context, op, *args, **kwargs):
            seen[context.is_recompute] += op in matmuls
            skipped = every_second and seen[context.is_recompute] % 2 == 0
            if (op in matmuls and not skipped) or "attention" in op.name():
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("seed", range(12))
def test_a_minimum_cut_is_the_least_of_all(seed):
    graph = build(random_profile(random.Random(seed), 7))
    banned = {op.id for op in graph.ops if op.id % 3 == 0}

    def runs_banned(save_set):
        asked = [False] * len(graph.ops)
        for op in reversed(graph.ops):
            unpacked = any(
                graph.saved_tensors[h].unpacked for w in op.writes for h in graph.versions[w].saved_tensors
            )
            read = any(asked[r] for w in op.writes for r in graph.versions[w].readers)
            asked[op.id] = op.id not in save_set and (unpacked or read)
        return any(asked[op] for op in banned | graph.must_save)

    def cost(save_set):
        return sum(knapsacks.nbytes_of(graph, op) for op in save_set - graph.must_save)

    every = [
        frozenset(map(OpId, chosen)) | graph.must_save
        for size in range(len(graph.ops) + 1)
        for chosen in itertools.combinations(range(len(graph.ops)), size)
    ]
    found = minimum_cut.cut(graph, banned)
    assert not runs_banned(found | graph.must_save)
    assert cost(found) == min(cost(s) for s in every if not runs_banned(s))
