"""Check that baselines return legal save sets and follow their sources."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from functools import partial

import pytest
import torch
import transformers
from graphs import Tape, gpt2, random_profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ac_client.measure.forked_call import run_in_child
from ac_client.measure.memory_timeline import AllocatorTimeline
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import OpId, chain
from autoac.planner.problem.save_sets import with_forced_saves, without_cost_free_recomputes
from autoac.profiler import profile
from benchmarks.models import gpt2 as zoo_gpt2
from benchmarks.plans import block_rules, knapsacks, minimum_cut, sac_milp
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


@pytest.mark.usefixtures("no_children")
def test_every_baseline_returns_a_save_set_for_a_transformer():
    assert all(baseline(GPT2) for baseline in BASELINES.values())


def test_checkpoint_around_blocks_saves_what_crosses_and_what_is_outside():
    assert names(two_blocks(), block_rules.per_block(two_blocks())["depth 1"]) == [
        "embed/aten.embedding.default#0",
        "layers.0.down/aten.mm.default#0",
        "layers.1.down/aten.mm.default#0",
        "/aten.sum.default#0",
    ]


def test_the_selective_list_counts_matmuls_in_each_block():
    every, second = (block_rules.listed(two_blocks(), f"{which}, depth 1") for which in block_rules.EVERY)
    assert {name for name in names(two_blocks(), every) if "mm" in name} == {
        f"layers.{i}.{m}/aten.mm.default#0" for i in (0, 1) for m in ("up", "down")
    }
    dropped = [f"layers.{i}.down/aten.mm.default#0" for i in (0, 1)]
    assert names(two_blocks(), every - second) == dropped


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


def test_attention_is_the_product_after_each_softmax_where_no_kernel_is_fused():
    found = [GPT2.ops[op].name for op in sorted(block_rules.attention_outputs(GPT2))]
    assert found == [f"transformer.h.{i}.attn/aten.bmm.default#1" for i in (0, 1)]


@pytest.mark.parametrize("baseline", ["dp_knapsack", "greedy_knapsack", "ilp_knapsack"])
@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.8])
def test_a_knapsack_keeps_to_its_bytes(baseline, fraction):
    from torch._functorch._activation_checkpointing import knapsack

    chosen = []

    def recorded(memory, runtimes, capacity):
        result = getattr(knapsack, baseline)(memory, runtimes, capacity)
        chosen.append(sum(memory[i] for i in result[1]))
        assert sum(memory) == pytest.approx(1)
        return result

    knapsacks.knapsack(GPT2, recorded, [fraction])
    rounding = 1e-4 * len(GPT2.ops) if baseline == "dp_knapsack" else 1e-6  # torch counts in 1/10,000
    assert chosen
    assert all(share <= fraction + rounding for share in chosen)


def test_the_dynamic_program_and_the_integer_program_agree_on_a_knapsack_seen_by_eye():
    graph = chain(6, 5, 5, runtime_us=[7, 4, 4])  # within 10 of 16 bytes: the two small ones are worth 8
    for baseline in (knapsacks.dp_knapsack, knapsacks.ilp_knapsack):
        assert baseline(graph)["packed, fraction 0.65"] == {1, 2}
    assert knapsacks.greedy_knapsack(graph)["packed, fraction 0.65"] == {0}


def test_a_solver_that_takes_too_long_leaves_its_fraction_out():
    def solver(memory, runtimes, fraction):
        time.sleep(60 if fraction == 0.5 else 0)
        return 0.0, [], list(range(len(memory)))

    family = knapsacks.knapsack(GPT2, partial(run_in_child, solver, limit_s=2.0), [0.2, 0.5, 0.8])
    assert list(family) == [
        f"{items}, fraction {fraction}" for items in ("packed", "all") for fraction in ("0.20", "0.80")
    ]
    assert not multiprocessing.active_children()


def test_every_block_gets_the_same_decisions():
    for fraction, save_set in knapsacks.uniform_blocks(GPT2).items():
        of_block = [
            {GPT2.ops[op].name.split(f"h.{i}")[-1] for op in save_set if f"h.{i}." in GPT2.ops[op].name}
            for i in (0, 1)
        ]
        missing = of_block[0] ^ of_block[1]
        # What nothing asks for is saved for free, and that differs in the last block only.
        assert all("default#" in name or "Tensor#" in name for name in missing), fraction


@pytest.mark.parametrize(("fraction", "saved"), [(0.0, 0), (0.5, 1), (1.0, 3)])
def test_a_block_keeps_to_its_fraction(fraction, saved):
    graph = chain(4, 4, 4, runtime_us=[1, 3, 2])
    policy = knapsacks.block_policy(graph, [OpId(0), OpId(1), OpId(2)], fraction)
    assert sum(policy) == saved
    assert fraction != 0.5 or policy == [False, True, False]


def test_the_module_tree_has_no_lists_and_no_leaves():
    tree = sac_milp.module_tree(GPT2)
    assert [module.name for module in tree] == [
        "",
        "transformer",
        *(
            name
            for i in (0, 1)
            for name in (f"transformer.h.{i}", f"transformer.h.{i}.attn", f"transformer.h.{i}.mlp")
        ),
    ]
    assert tree[3].within == (0, 1, 2)
    assert set(tree[4].ops) <= set(tree[2].ops) <= set(tree[1].ops)


def test_the_tradeoff_is_the_hull_of_the_greedy_order():
    slopes, intercepts = sac_milp.tradeoff([(6, 1), (4, 3)], 10, 4)
    assert slopes == pytest.approx([0.25 / 0.6, 0.75 / 0.4])
    assert intercepts == pytest.approx([0, 1 - 0.75 / 0.4])


def test_a_minimum_cut_seen_by_eye():
    """`mm (8) -> gelu (2) -> add (8)`, of which backward reads the last two: 2 bytes serve both."""
    tape = Tape()
    (a,) = tape.op("aten.mm.default", [], 8)
    (b,) = tape.op("aten.gelu.default", [a], 2)
    (c,) = tape.op("aten.add.Tensor", [b], 8)
    handles = [tape.save(b), tape.save(c)]
    for handle in reversed(handles):
        tape.step("step", [handle])
    graph = build(tape.profile())
    assert minimum_cut.cut(graph, banned={0}) == {1}
    assert minimum_cut.cut(graph, banned=set()) == frozenset()
    assert minimum_cut.cut(graph, banned={0, 2}) == {1, 2}


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
