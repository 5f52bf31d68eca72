"""Training runs on one GPU whose memory litgpt, transformers, optimum-benchmark and mmsegmentation published.

Each run is built here as its authors describe it. What they do not say is in `unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from autoac.planner import bounds, build, plan
from autoac.profiler import DATASHEETS, observe
from benchmarks.models.fcn import Fcn
from benchmarks.models.large import bert_large_config
from benchmarks.models.lora_gpt import (
    LLAMA_2_7B,
    LLAMA_2_13B,
    PHI_1_5,
    STABLELM_3B,
    Config,
    LoraGpt,
)

GIB = 2**30
LITGPT = "https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md"
MMSEG = "https://github.com/open-mmlab/mmsegmentation/blob/main/configs/fcn/README.md"
HF = "https://huggingface.co/docs/transformers/v4.20.0/en/perf_train_gpu_one"
OPTIMUM = "https://huggingface.co/datasets/optimum-benchmark/rocm/commit/{}"
CONTEXT_MIB = 1343  # of the GPU that transformers' page counts with its figures


@dataclass(frozen=True, slots=True)
class Step:
    """One training step."""

    model: nn.Module
    kwargs: Mapping[str, Any]
    optimizer: torch.optim.Optimizer
    accumulates: bool = False
    autocast: torch.dtype | None = None
    more_nbytes: int = 0  # that the trainer holds in addition to the step


@dataclass(frozen=True, slots=True)
class SingleRun:
    """A published run, and its peak in GiB."""

    project: str
    model: str
    setup: str
    source: str
    peak: float
    figure: str  # "in use" or "reserved"
    step: Callable[[], Step] = field(repr=False)
    unknown: str


def predicted(run: SingleRun) -> float:
    """Return the predicted figure of a run, in GiB."""
    step = run.step()
    profile = observe(
        step.model,
        (),
        step.kwargs,
        optimizer=step.optimizer,
        on=DATASHEETS["a100"],
        autocast=step.autocast,
        accumulates=step.accumulates,
        take_over_checkpoints=False,
    )
    found = plan(profile, budget_bytes=bounds(build(profile)).ceiling)
    fragments = found.fragment_bytes() if run.figure == "reserved" else 0
    assert fragments is not None
    return (found.peak + fragments + step.more_nbytes) / GIB


def _lora(config: Config, length: int, batch: int) -> Step:
    with torch.device("meta"):
        model, ids = LoraGpt(config, length), torch.empty(batch, length, dtype=torch.long)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Step(model.train(), {"ids": ids, "targets": ids}, torch.optim.AdamW(trained), accumulates=True)


def _litgpt(model: str, config: Config, length: int, peaks: Mapping[int, float]) -> list[SingleRun]:
    unknown = "whether the longest sample is the batch's length"
    return [
        SingleRun(
            *("litgpt", model, f"LoRA, {batch} x {length}", LITGPT, peak * 1e9 / GIB, "in use"),
            partial(_lora, config, length, batch),
            unknown,
        )
        for batch, peak in peaks.items()
    ]


def _fcn(depth: int, height: int, width: int) -> Step:
    with torch.device("meta"):
        model, image = Fcn(depth), torch.empty(2, 3, height, width)
        target = torch.empty(2, height, width, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    buckets = sum(parameter.nbytes for parameter in model.parameters())
    return Step(model, {"image": image, "target": target}, optimizer, more_nbytes=buckets)


def _mmseg(depth: int, height: int, width: int, peak: float) -> SingleRun:
    return SingleRun(
        *("mmsegmentation", f"FCN, ResNet-{depth}", f"2 x {height} x {width}", MMSEG, peak, "in use"),
        partial(_fcn, depth, height, width),
        "cuDNN's workspaces; synchronized norms; one digit, of GiB or of 1,000 MiB",
    )


def _bert(batch: int, optimizer: type[torch.optim.Optimizer], *, checkpoint: bool, half: bool) -> Step:
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(bert_large_config()).train()
        ids, labels = torch.empty(batch, 512, dtype=torch.long), torch.empty(batch, dtype=torch.long)
    if checkpoint:
        model.gradient_checkpointing_enable()
    return Step(
        model,
        {"input_ids": ids, "labels": labels},
        optimizer(model.parameters(), foreach=False),  # type: ignore[call-arg]
        accumulates=True,  # the zero_grad of that time kept gradients
        autocast=torch.float16 if half else None,
    )


def _hf(setup: str, batch: int, mib: int, *, checkpoint: bool = False, half: bool = False) -> SingleRun:
    optimizer = torch.optim.Adafactor if "Adafactor" in setup else torch.optim.AdamW
    return SingleRun(
        *("transformers", "BERT-large", setup, HF, (mib - CONTEXT_MIB) / 1024, "reserved"),
        partial(_bert, batch, optimizer, checkpoint=checkpoint, half=half),
        "the context, taken for 1,343 MiB of the GPU, grows with the kernels that were loaded",
    )


def _masked() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig())


def _gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config())


def _trainer(build: Callable[[], nn.Module]) -> Step:
    with torch.device("meta"):
        model, ids = build().train(), torch.empty(2, 16, dtype=torch.long)
    return Step(model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters()))


def _optimum(model: str, build: Callable[[], nn.Module], megabytes: float, commit: str) -> SingleRun:
    return SingleRun(
        *("optimum-benchmark", model, "2 samples, Trainer", OPTIMUM.format(commit), megabytes * 1e6 / GIB),
        "in use",
        partial(_trainer, build),
        "the length, taken for 16; an MI250, predicted as an A100",
    )


RUNS = (
    *_litgpt("phi-1.5", PHI_1_5, 1044, {1: 4.82, 2: 6.76, 4: 10.68}),
    *_litgpt("StableLM 3B", STABLELM_3B, 1034, {1: 9.69, 2: 12.10, 4: 16.92}),
    *_litgpt("Llama 2 7B", LLAMA_2_7B, 1304, {1: 21.30, 2: 29.07}),
    *_litgpt("Llama 2 13B", LLAMA_2_13B, 1304, {1: 38.12}),
    _mmseg(18, 512, 1024, 1.7),
    _mmseg(50, 512, 1024, 5.7),
    _mmseg(101, 512, 1024, 9.2),
    _mmseg(50, 769, 769, 6.5),
    _mmseg(101, 769, 769, 10.4),
    _hf("4 x 512", 4, 14949),
    _hf("1 x 512, accumulated", 1, 8681),
    _hf("1 x 512, accumulated, AC full", 1, 6775, checkpoint=True),
    _hf("4 x 512, autocast to fp16", 4, 13939, half=True),
    _hf("1 x 512, accumulated, AC full, autocast to fp16", 1, 7275, checkpoint=True, half=True),
    _hf("4 x 512, Adafactor", 4, 12295),
    _optimum("BERT base", _masked, 2195.345408, "1017b5a8afd28e0a512c3cc3544bc3ae576dca07"),
    _optimum("GPT-2", _gpt2, 2506.73664, "b9b708f6fdfa87c7a5fda9cc1f048ecbe06c3979"),
)
