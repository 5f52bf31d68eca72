"""Bound what packing can buy: the share of packable bytes, and plans with masks at an eighth of their size.

The share is that of a step of models/medium.py on this CPU. The plans are for an H100 by its datasheet, where
a mask takes a byte per element. There packing and unpacking cost nothing here, so a real packing buys less.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import Tensor

from autoac.planner import Profile, bounds, build, find_minimum_peak, plan
from autoac.planner.units import format_bytes
from autoac.profiler import DATASHEETS, observe
from benchmarks.models import large, medium
from benchmarks.models.batches import ModelAndBatch
from benchmarks.models.large import weightless
from benchmarks.results import markdown_table
from benchmarks.step_timing import loss_of

BUDGETS = (0.02, 0.1, 0.25, 0.5)  # positions between the minimum peak and the save-all peak
GAP = 0.005
BITS_PER_BYTE = 8


def bert_large(batch: int = 32, length: int = 512) -> ModelAndBatch:
    """Build google-bert/bert-large-uncased, config.json; its dropouts are 0.1."""
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    with weightless():
        return transformers.BertForMaskedLM(config).train(), large.tokens(batch, length)


ON_H100: dict[str, Callable[[], ModelAndBatch]] = {
    "GPT-2 XL, 8 x 1024": large.gpt2_xl,
    "BERT-large, 32 x 512": bert_large,
}


def kind_of(tensor: Tensor) -> str:
    """Return the kind of a saved tensor: of floating-point numbers, some are a mask with two values."""
    if tensor.dtype is torch.bool:
        return "bool"
    if tensor.dtype in (torch.int32, torch.int64):
        return "integers"
    if not tensor.is_floating_point():
        return "other"  # such as the workspace of an LSTM
    two = tensor.eq(0).logical_or_(tensor.eq(tensor.max())) if tensor.numel() > 1 else None
    return "masks" if two is not None and bool(two.all()) else "other"


def saved_bytes(name: str) -> dict[str, int]:
    """Return by kind the bytes that autograd saves in a step, without parameters, buffers and the batch."""
    torch.set_num_threads(1)
    model, batch = medium.build(name)
    batch = {key: value[:2] if isinstance(value, Tensor) else value for key, value in batch.items()}
    outside = [*model.parameters(), *model.buffers(), *(v for v in batch.values() if isinstance(v, Tensor))]
    seen = {tensor.untyped_storage().data_ptr() for tensor in outside}
    held: list[Tensor] = []  # so that no address is used twice
    sums = dict.fromkeys(KINDS, 0)

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held.append(tensor.detach())
            sums[kind_of(held[-1])] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_of(model(**batch))
    return sums


KINDS = ("masks", "bool", "integers", "other")


def render_kinds(rows: dict[str, dict[str, int]]) -> str:
    """Return the shares of saved bytes as a Markdown table."""
    head = ["model", "dropout masks", "bool", "int32 and int64"]
    lines = [
        [name, *(f"{sums[kind] / sum(sums.values()):.1%}" for kind in KINDS[:3])]
        for name, sums in rows.items()
    ]
    return markdown_table(head, lines)


def masks_of(profile: Profile) -> list[int]:
    """Return the storages of the masks that `native_dropout` makes: the smaller of its two outputs."""
    written: dict[int, list[int]] = {}
    for op, storage in zip(profile.values.op, profile.values.storage, strict=True):
        if profile.overloads[profile.ops.overload[op]] == "aten.native_dropout.default":
            written.setdefault(op, []).append(storage)
    return [min(pair, key=lambda s: profile.storages.nbytes[s]) for pair in written.values()]


def with_bits(profile: Profile) -> Profile:
    """Return the profile with an eighth of the bytes of each mask."""
    nbytes, masks = list(profile.storages.nbytes), masks_of(profile)
    rounding = profile.environment.allocator_rounding
    for mask in masks:
        nbytes[mask] = -(-nbytes[mask] // (BITS_PER_BYTE * rounding)) * rounding
    storages = profile.storages.model_copy(update={"nbytes": tuple(nbytes)})
    return profile.model_copy(update={"storages": storages})


def bound_on_h100(name: str) -> list[list[str]]:
    """Return lines with the smallest peaks and, at equal budgets, recompute times and their proven gaps."""
    model, batch = ON_H100[name]()
    taken = observe(model, (), batch, on=DATASHEETS["h100"])
    ways = (taken, with_bits(taken))
    least = [find_minimum_peak(way, gap=GAP, time_limit_s=60) for way in ways]
    lines = [[name, "smallest", *(format_bytes(peak.found) for peak in least), ""]]
    smallest, largest = least[0].found, bounds(build(taken)).ceiling
    for part in BUDGETS:
        budget = int(smallest + (largest - smallest) * part)
        without, packed = (plan(way, budget_bytes=budget, gap=GAP) for way in ways)
        times = [f"{found.recompute_us / 1e3:.1f} ms, {found.gap:.1%}" for found in (without, packed)]
        less = (without.recompute_us - packed.recompute_us) / without.step_us
        lines.append([name, format_bytes(budget), *times, f"{less:.2%}"])
    return lines


def render_bound(lines: list[list[str]]) -> str:
    """Return the plans for an H100 as a Markdown table."""
    head = ["model, H100", "budget", "peak; or recompute, gap: without", "with", "less, of the step"]
    return markdown_table(head, lines)
