"""Compare step times that are predicted from a datasheet with published training throughput.

    python -m benchmarks.published [--only PATTERN] [--out FILE]

Each row is a training run that its authors measured: tokens, images or sequences of one GPU in a second. The
model and its batch are built on the meta device and profiled in a fake step, in the same precision. The
predicted throughput follows from the times of

- forward and backward, by the roofline of the GPU's datasheet;
- what the run recomputes in backward, as a part of forward (`RECOMPUTED`);
- the optimizer, which reads and writes its state once, at the bandwidth of pointwise ops.

Communication is taken as hidden behind backward, the host as ahead of the device, and the data as there.
A row that `torch.compile` ran is predicted as if it ran eagerly, so it is not part of the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn

from autoac.planner import Profile
from autoac.profiler import DATASHEETS, Device, KernelKind, observe
from autoac.profiler.timing.roofline import kind_of
from benchmarks.models import large
from benchmarks.models.batches import ModelAndBatch
from benchmarks.models.gpt2 import gpt2
from benchmarks.models.large import bert_large_config, densenet161, images, llama, tokens, weightless
from benchmarks.results import bench_parser, chosen, markdown_table, write_result

Make = Callable[[], ModelAndBatch]

_CUDNN_8 = 8900  # of runs before 2024, without cuDNN's attention
A100 = replace(DATASHEETS["a100"], cudnn=_CUDNN_8)
A100_TF32 = replace(A100, other_flops_per_s=156e12)
H100 = DATASHEETS["h100"]
H100_IN_2023 = replace(H100, cudnn=_CUDNN_8)
H100_HBM2E = replace(H100, bytes_per_s=2.4e12)  # of torchtitan's runs, which name this number
RTX_3090 = Device(  # NVIDIA Ampere GA102 white paper, appendix A: float32 accumulation
    "NVIDIA GeForce RTX 3090",
    MappingProxyType(dict.fromkeys((torch.float16, torch.bfloat16), 71e12)),
    35.6e12,
    0.936e12,
    24 << 30,
    capability=(8, 6),
    cudnn=_CUDNN_8,
)

STATE_BYTES = {"AdamW": 28, "SGD": 20}
"""Bytes that a step of the optimizer reads and writes for each float32 parameter."""

# torchtitan's: all but attention and every second product
_PART = {KernelKind.ATTENTION: 0.0, KernelKind.CUDNN_ATTENTION: 0.0, KernelKind.PRODUCT: 0.5}
RECOMPUTED: Mapping[str, Callable[[KernelKind], float]] = {
    "": lambda kind: 0.0,
    "every second layer": lambda kind: 0.5,
    "selective ops": lambda kind: _PART.get(kind, 1.0),
}
"""By way of checkpointing, the part of each kind of op that runs again."""


def gpt(
    size: tuple[int, int, int], batch: int, length: int, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Make:
    """Return a maker of GPT-2 or MPT: layers, width and heads, without dropout, with a GELU of one kernel."""
    layers, width, heads = size
    fused: dict[str, Any] = {
        "activation_function": "gelu_pytorch_tanh",
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    }

    def make() -> ModelAndBatch:
        with weightless(dtype):
            model = gpt2(layers=layers, width=width, heads=heads, positions=length, **(fused | options))
        return model, tokens(batch, length)

    return make


def classifier(build: Callable[[], nn.Module], batch: int) -> Make:
    """Return a maker of an image classifier with float32 parameters."""

    def make() -> ModelAndBatch:
        with weightless(torch.float32):
            return build().train(), images(batch, torch.float32)

    return make


def resnet(depths: list[int], batch: int) -> Make:
    return partial(large.resnet, depths, batch, torch.float32)


def vit(layers: int, width: int, heads: int, batch: int) -> Make:
    """Return a maker of a vision transformer whose attention is products and a softmax, as before torch 2."""
    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        num_labels=1000,
        attn_implementation="eager",
    )
    return classifier(lambda: transformers.ViTForImageClassification(config), batch)


def convnext_base(batch: int) -> Make:
    config = transformers.ConvNextConfig(
        depths=[3, 3, 27, 3], hidden_sizes=[128, 256, 512, 1024], num_labels=1000
    )
    return classifier(lambda: transformers.ConvNextForImageClassification(config), batch)


def bert_large(batch: int, length: int, dtype: torch.dtype) -> Make:
    """Return a maker of BERT-large that answers questions, with dropout and a padding mask."""
    config = bert_large_config()

    def make() -> ModelAndBatch:
        with weightless(dtype):
            model = transformers.BertForQuestionAnswering(config).train()
        ids, positions = torch.ones(batch, length, dtype=torch.long), torch.ones(batch, dtype=torch.long)
        return model, {
            "input_ids": ids,
            "attention_mask": ids,
            "token_type_ids": ids,
            "start_positions": positions,
            "end_positions": positions,
        }

    return make


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A published training run on one GPU, or the share of one GPU."""

    model: str
    device: Device
    setting: str
    make: Make
    items: int  # tokens or images of a microbatch
    per_s: float  # published: items of one GPU in a second
    source: str
    optimizer: str = "AdamW"
    autocast: torch.dtype | None = None
    shards: int = 1  # of the optimizer's state
    microbatches: int = 1  # for one step of the optimizer
    checkpoint: str = ""  # a key of `RECOMPUTED`
    compiled: bool = False


TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 1"
TITAN_A100 = "pytorch/torchtitan, docs/performance.md (2024), Llama 3 on 64 A100"
MPT = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
GOLLEM = "jjschwartz.github.io/blog/scaling-gpt2.html, sections 4.2 to 12"
NVIDIA_RESNET = "NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md"
NVIDIA_BERT = "NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT/README.md, SQuAD"
TIMM = "huggingface/pytorch-image-models, results/benchmark-train-amp-{}-pt112-cu113-rtx3090.csv"

SMALL, XL = (12, 768, 12), (48, 1600, 25)


def _llama(device: Device, batch: int, per_s: float, checkpoint: str, shards: int, source: str) -> Run:
    setting = f"{batch} x 8192, {checkpoint} recomputed"
    make, items = lambda: llama(32, batch=batch, length=8192), batch * 8192
    return Run(
        "Llama 3 8B", device, setting, make, items, per_s, source, shards=shards, checkpoint=checkpoint
    )


def _mpt(name: str, device: Device, size: tuple[int, int, int], batch: int, steps: int, per_s: float) -> Run:
    setting = f"{batch} x 2048"
    make = gpt(size, batch, 2048, vocabulary=50368)
    return Run(name, device, setting, make, batch * 2048, per_s, MPT, shards=8, microbatches=steps)


def _timm(name: str, make: Callable[[int], Make], batch: int, per_s: float, layout: str = "nhwc") -> Run:
    setting = f"{batch}, fp16, {layout}"
    source = TIMM.format(layout)
    return Run(name, RTX_3090, setting, make(batch), batch, per_s, source, "SGD", torch.float16)


def _gpt2(
    name: str,
    device: Device,
    batch: int,
    per_s: float,
    *,
    autocast: torch.dtype | None = None,
    compiled: bool = False,
    **options: Any,
) -> Run:
    setting = f"{batch} x 1024, {'bf16' if autocast else 'float32'}{', compiled' if compiled else ''}"
    make = gpt(XL if "XL" in name else SMALL, batch, 1024, torch.float32, **options)
    steps = 8 if "XL" in name else 1
    return Run(
        name,
        device,
        setting,
        make,
        batch * 1024,
        per_s,
        GOLLEM,
        autocast=autocast,
        microbatches=steps,
        compiled=compiled,
    )


def _resnet50(device: Device, setting: str, per_s: float, autocast: torch.dtype | None) -> Run:
    make = resnet([3, 4, 6, 3], 256)
    return Run("ResNet-50", device, f"256, {setting}", make, 256, per_s, NVIDIA_RESNET, "SGD", autocast)


def _bert(device: Device, setting: str, dtype: torch.dtype, per_s: float) -> Run:
    make = bert_large(32, 384, dtype)
    return Run("BERT-large", device, f"32 x 384, {setting}", make, 32, per_s, NVIDIA_BERT)


RUNS = (
    _llama(H100_HBM2E, 2, 5762, "selective ops", 8, TITAN),
    _llama(A100, 1, 2973, "selective ops", 64, TITAN_A100),
    _llama(A100, 1, 2904, "every second layer", 64, TITAN_A100),
    _mpt("MPT 760M", H100_IN_2023, (24, 1536, 12), 24, 2, 63147),
    _mpt("MPT 1B", H100_IN_2023, (24, 2048, 16), 14, 1, 45455),
    _mpt("MPT 7B", H100_IN_2023, (32, 4096, 32), 6, 1, 10643),
    _mpt("MPT 125M", A100, SMALL, 32, 2, 141737),
    _mpt("MPT 350M", A100, (24, 1024, 16), 32, 2, 58782),
    _mpt("MPT 760M", A100, (24, 1536, 12), 24, 2, 32434),
    _mpt("MPT 1B", A100, (24, 2048, 16), 14, 4, 20513),
    _mpt("MPT 3B", A100, (32, 2560, 20), 10, 2, 10811),
    _mpt("MPT 7B", A100, (32, 4096, 32), 6, 2, 4641),
    _gpt2("GPT-2", RTX_3090, 1, 11381, attn_implementation="eager"),
    _gpt2("GPT-2", H100, 1, 27026, attn_implementation="eager"),
    _gpt2("GPT-2", H100, 1, 48154, autocast=torch.bfloat16),
    _gpt2("GPT-2 XL", H100, 16, 40000, autocast=torch.bfloat16, compiled=True),
    _resnet50(A100, "fp16, nhwc", 2470, torch.float16),
    _resnet50(A100_TF32, "TF32, nchw", 938, None),
    _bert(A100, "fp16", torch.float16, 110.5),
    _bert(A100_TF32, "TF32", torch.float32, 61.5),
    _timm("ResNet-50", lambda batch: resnet([3, 4, 6, 3], batch), 512, 1218.01),
    _timm("ResNet-50", lambda batch: resnet([3, 4, 6, 3], batch), 512, 826.06, "nchw"),
    _timm("ResNet-152", lambda batch: resnet([3, 8, 36, 3], batch), 192, 501.44),
    _timm("DenseNet-161", lambda batch: partial(densenet161, batch, torch.float32), 128, 399.17),
    _timm("ConvNeXt-B", convnext_base, 128, 338.68),
    _timm("ViT-S/16", lambda batch: vit(12, 384, 6, batch), 384, 1057.92),
    _timm("ViT-B/16", lambda batch: vit(12, 768, 12, batch), 192, 392.99),
    _timm("ViT-L/16", lambda batch: vit(24, 1024, 16, batch), 64, 117.2),
)


def kind_of_op(profile: Profile, op: int) -> KernelKind:
    """Return the kind of kernel that the datasheet took an op of the profile for."""
    name = profile.overloads[profile.ops.overload[op]]
    packet, _, overload = name.removeprefix("aten.").partition(".")
    func = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    return kind_of(func, f"aten.{packet}", profile.ops.flops[op])


def predicted_per_s(run: Run) -> float:
    """Return the items in a second that the datasheet predicts."""
    model, batch = run.make()
    profile = observe(model, (), batch, on=run.device, autocast=run.autocast)
    part = RECOMPUTED[run.checkpoint]
    us = sum(
        op_us * (1 + part(kind_of_op(profile, op))) for op, op_us in enumerate(profile.ops.runtime_us)
    ) + sum(profile.backward.runtime_us)
    state = STATE_BYTES[run.optimizer] * sum(p.numel() for p in model.parameters()) / run.shards
    rate = run.device.bytes_per_s * run.device.efficiency[KernelKind.POINTWISE]
    return run.items / (us / 1e6 + state / rate / run.microbatches)


def short_name(device: Device) -> str:
    return device.name.removeprefix("NVIDIA ").removeprefix("GeForce ").split(" SXM")[0]


def table(runs: list[Run]) -> str:
    """Return the comparison as Markdown, with the errors below it."""
    errors = {run: predicted_per_s(run) / run.per_s - 1 for run in runs}
    head = ["model, GPU", "batch", "published", "predicted (error)"]
    rows = [
        [
            f"{run.model}, {short_name(run.device)}",
            run.setting,
            f"{run.per_s:,.0f}",
            f"{run.per_s * (1 + error):,.0f} ({error:+.0%})",
        ]
        for run, error in errors.items()
    ]
    eager = sorted(abs(error) for run, error in errors.items() if not run.compiled)
    summary = f"Errors of the {len(eager)} eager runs: median {statistics.median(eager):.0%}"
    summary += f", worst {eager[-1]:.0%}."
    sources = {f"- {run.model}, {short_name(run.device)}: {run.source}": None for run in runs}
    return f"{markdown_table(head, rows)}\n\n{summary}\n\n" + "\n".join(sources)


def main() -> None:
    """Predict, and print the table."""
    options = bench_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    names = chosen(dict.fromkeys(run.model for run in RUNS), options.only)
    write_result(table([run for run in RUNS if run.model in names]), options.out)


if __name__ == "__main__":
    main()
