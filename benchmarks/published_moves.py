"""Plan steps whose offload others measured: `python -m benchmarks.published_moves [--only NAME]`.

The steps are rebuilt from what was published, for a datasheet, so sizes and times are near theirs, not equal:
theirs are compiled, ours are eager. What each source measured stands next to what this planner says.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import transformers

from autoac.planner import InfeasibleBudget, Profile, build, plan_offload
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.problem.moves import Link
from autoac.planner.units import GIB
from autoac.profiler import DATASHEETS, observe
from benchmarks.models.large import llama, tokens, weightless
from benchmarks.plans.profiles import sharded

LINKS_GB_S = (50, 25)
LATENCY_US = 10.0


@dataclass(frozen=True, slots=True)
class Case:
    """A published measurement: the step, the bytes it may use, and what was reported."""

    name: str
    profile: Callable[[], Profile]
    budget_bytes: float
    theirs: str


def qwen3_14b(length: int) -> Profile:
    """Profile Qwen3-14B, 4 sequences, on one of 8 H200 with ZeRO-3 and bf16 optimizer states."""
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        use_cache=False,
    )
    with weightless():
        model = transformers.Qwen3ForCausalLM(config).train()
    profile = sharded(observe(model, (), tokens(4, length), on=DATASHEETS["h200"]))
    profile = profile.with_dropped_outputs(profile.droppable_outputs)
    n = sum(parameter.numel() for parameter in model.parameters())
    # parameter, gradient and two states of Adam, each bf16; and two layers that are gathered
    return _holding(profile, n * 8 // 8 + 2 * 2 * n // config.num_hidden_layers)


def boundary_inputs() -> Profile:
    """Profile 24 layers of width 1,024 on 32,768 tokens: their inputs are the 1.61 GB of the source."""
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        use_cache=False,
    )
    with weightless():
        model = transformers.LlamaModel(config).train()
    ids = torch.ones(8, 4096, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return observe(model, (), {"input_ids": ids}, optimizer=optimizer, on=DATASHEETS["h100"])


def llama_8b_over_8() -> Profile:
    """Profile Llama-3-8B, one sequence of 8,192 tokens, on one of 8 H100 that share its parameters."""
    model, batch = llama(32)
    profile = sharded(observe(model, (), batch, on=DATASHEETS["h100"]))
    n = sum(parameter.numel() for parameter in model.parameters())
    return _holding(profile, n * 12 // 8)  # parameter and gradient in bf16, two states of Adam in fp32


def _holding(profile: Profile, nbytes: int) -> Profile:
    """Return a sharded profile with what one device holds of parameters, gradients and optimizer states."""
    return profile.model_copy(update={"static": profile.static.model_copy(update={"parameters": nbytes})})


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for length, theirs in (
        (2048, "fits, moves nothing"),
        (3072, "fits, moves nothing"),
        (3328, "out of memory without; moves 11.7 GB, and recomputes what inductor recomputes"),
    ):
        step = partial(qwen3_14b, length)
        yield Case(f"DeepSpeed#8255, {length} tokens", step, 0.95 * 139 * GIB, theirs)
    yield Case(
        "accelerate#4175, short",
        boundary_inputs,
        24.73e9,
        "checkpoint peaks at 24.73 GB in 1.28 of the plain step; moving 1.6 GB as well: same peak, 1.72",
    )
    yield Case(
        "torchtitan#4636", llama_8b_over_8, 40 * GIB, "moves 8 to 9 GiB; budget and step not published"
    )


def main() -> None:
    """Run the command in the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_moves", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="a part of the names of the cases to run")
    options = parser.parse_args()
    for case in cases():
        if options.only not in case.name:
            continue
        profile = case.profile()
        graph = build(profile)
        plain = peak_bytes(graph, graph.everything) / GIB
        print(f"{case.name}: budget {case.budget_bytes / GIB:.1f} GiB, plain needs {plain:.1f}", flush=True)
        print(f"  theirs: {case.theirs}")
        for gb_s in LINKS_GB_S:
            link = Link(gb_s * 1e3, gb_s * 1e3, LATENCY_US, 1 << 40)
            try:
                found = plan_offload(profile, budget_bytes=int(case.budget_bytes), link=link)
            except InfeasibleBudget as error:
                print(f"  ours at {gb_s} GB/s: {error}", flush=True)
                continue
            made, alone = found.plan, found.without_moves
            without = "nothing fits" if alone is None else f"{1 + alone.extra_us / alone.step_us:.3f}"
            print(
                f"  ours at {gb_s} GB/s: {made.moved_bytes / GIB:.1f} GiB move, step "
                f"{1 + made.extra_us / made.step_us:.3f} of plain's; without moves {without}",
                flush=True,
            )


if __name__ == "__main__":
    main()
