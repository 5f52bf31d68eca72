"""The loops: small models from configurations, five steps each, as each library's users write them."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ac_client

STEPS = 5
MEASURED = 3  # the step, from 0, whose peak is measured in a loop of our own

Loop = Callable[[float | None, Any], "Done"]


class Done(NamedTuple):
    """Hold what a training left: all weights, and the report of a planned one."""

    weights: list[Tensor]
    report: Any


def own_loop(
    model: nn.Module,
    optimizer: Any,
    batch: Callable[[], Any],
    step: Callable[[Any], None],
    budget_gb: float | None,
    messages: Any,
) -> Done:
    """Take the steps in a loop of our own, each on a batch that was made before it."""
    if budget_gb is not None:
        ac_client.apply(model, budget_gb, optimizer=optimizer)
    report = None
    for messages.step in range(STEPS):
        torch.manual_seed(messages.step)
        made = batch()
        if budget_gb is not None and messages.step == MEASURED:
            with ac_client.applied(model).measure():
                step(made)
        else:
            step(made)
    if budget_gb is not None:
        report = ac_client.applied(model).report()
        ac_client.applied(model).remove()
    return Done([p.detach().clone() for p in model.parameters()], report)


def language_model() -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=1,
        )
    )


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[EOS]", "[UNK]", *(f"w{i}" for i in range(100))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    )


def sentence(seed: int, length: int) -> str:
    return " ".join(f"w{(seed * 7 + i * 3) % 100}" for i in range(length))


def with_trl(name: str, rows: list[dict[str, Any]], options: dict[str, Any], **arguments: Any) -> Loop:
    """Return the loop of a trainer of TRL."""

    def run(budget_gb: float | None, messages: Any) -> Done:
        import trl
        from datasets import Dataset
        from transformers import TrainerCallback

        from ac_client.integrations.transformers import AutoACCallback

        class Counts(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                messages.step += 1

        messages.step = 0
        ours = [] if budget_gb is None else [AutoACCallback(budget_gb, measure=True)]
        with tempfile.TemporaryDirectory() as folder:
            config = getattr(trl, f"{name}Config")(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=4,
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                gradient_checkpointing=False,
                learning_rate=1e-3,
                seed=1,
                **options,
            )
            trainer = getattr(trl, f"{name}Trainer")(
                model=language_model(),
                args=config,
                train_dataset=Dataset.from_list(rows),
                processing_class=tokenizer(),
                callbacks=[*ours, Counts()],
                **{key: make() for key, make in arguments.items()},
            )
            trainer.train()
        weights = [p.detach().clone() for p in trainer.model.parameters()]
        return Done(weights, ours[0].report if ours else None)

    return run


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def reward() -> Any:
    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text.split()))) for text in completions]

    return length


def unet(budget_gb: float | None, messages: Any) -> Done:
    from diffusers import DDPMScheduler, UNet2DModel

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    optimizer, noises = torch.optim.AdamW(model.parameters(), 1e-4), DDPMScheduler(100)

    def batch() -> Any:
        clean, noise, times = torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16), torch.randint(100, (4,))
        return noises.add_noise(clean, noise, times), noise, times

    def step(made: Any) -> None:
        noisy, noise, times = made
        nn.functional.mse_loss(model(noisy, times, return_dict=False)[0], noise).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return own_loop(model, optimizer, batch, step, budget_gb, messages)


def load_torchvision() -> None:
    """Import torchvision if it is installed, also where its kernels are built for CUDA and torch is not.

    Other libraries import it wherever they find it. No loop uses its kernels.
    """
    try:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("torchvision")
    except RuntimeError:
        for op in ("nms", "qnms"):
            torch.library.define(f"torchvision::{op}", "(Tensor boxes, Tensor scores, float least) -> Tensor")


def image_model(budget_gb: float | None, messages: Any) -> Done:
    import timm
    from timm.data.mixup import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=96, depth=4, num_classes=10, drop_path_rate=0.1
    )
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3)
    average, loss, mixed = ModelEmaV3(model), SoftTargetCrossEntropy(), Mixup(0.8, num_classes=10)

    def batch() -> Any:
        import numpy as np

        np.random.seed(messages.step)
        return mixed(torch.randn(32, 3, 96, 96), torch.randint(10, (32,)))

    def step(made: Any) -> None:
        loss(model(made[0]), made[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)

    done = own_loop(model, optimizer, batch, step, budget_gb, messages)
    return done._replace(weights=[*done.weights, *(p.detach() for p in average.module.parameters())])


def with_lightning(*, automatic: bool) -> Loop:
    """Return the loop of Lightning's Trainer."""

    def run(budget_gb: float | None, messages: Any) -> Done:
        import lightning.pytorch as lp

        from ac_client.integrations.lightning import AutoACCallback

        class Lit(lp.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
                self.model, self.automatic_optimization = nn.Sequential(*layers), automatic

            def training_step(self, batch: Tensor, _: int) -> Tensor:
                loss: Tensor = (self.model(batch) - batch).square().mean()
                if not automatic:
                    optimizer = self.optimizers()
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    optimizer.step()
                return loss

            def on_train_batch_end(self, *_: Any) -> None:
                messages.step += 1

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), 1e-3)

        messages.step = 0
        path = None if automatic else "model"
        ours = [] if budget_gb is None else [AutoACCallback(budget_gb, module=path, measure=True)]
        trainer = lp.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=ours,
        )
        batches = list(torch.randn(STEPS * 64, 64, generator=torch.Generator().manual_seed(1)).split(64))
        data: Any = batches  # a list is a dataset
        trainer.fit(module := Lit(), torch.utils.data.DataLoader(data, batch_size=None))
        return Done([p.detach().clone() for p in module.parameters()], ours[0].report if ours else None)

    return run


def graph_network(budget_gb: float | None, messages: Any) -> Done:
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(GCNConv(32, 32) for _ in range(4))
            self.head = nn.Linear(32, 4)

        def forward(self, data: Any) -> Any:
            x = data.x
            for layer in self.layers:
                x = x + layer(x, data.edge_index).relu()
            return self.head(global_mean_pool(x, data.batch))

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def batch() -> Any:
        graphs = [Data(x=torch.randn(64, 32), edge_index=torch.randint(64, (2, 256))) for _ in range(8)]
        return Batch.from_data_list(graphs), torch.randint(4, (8,))

    def step(made: Any) -> None:
        nn.functional.cross_entropy(model(made[0]), made[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return own_loop(model, optimizer, batch, step, budget_gb, messages)


def private_gradients(budget_gb: float | None, messages: Any) -> Done:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)]
    model = GradSampleModule(nn.Sequential(*layers))
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), 1e-2),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=32,
    )

    def batch() -> Any:
        return torch.randn(32, 64)

    def step(made: Any) -> None:
        model(made).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return own_loop(model, optimizer, batch, step, budget_gb, messages)


TEXTS = [{"text": sentence(i, 24)} for i in range(64)]
PAIRS = [
    {"prompt": sentence(i, 8), "chosen": sentence(i + 1, 16), "rejected": sentence(i + 2, 16)}
    for i in range(64)
]
PROMPTS = [{"prompt": sentence(i, 8)} for i in range(64)]

LOOPS: dict[str, Loop] = {
    "TRL: SFT with LoRA": with_trl("SFT", TEXTS, {"max_length": 32}, peft_config=lora),
    "TRL: DPO": with_trl("DPO", PAIRS, {"max_length": 32}, ref_model=language_model),
    "TRL: GRPO": with_trl(
        "GRPO", PROMPTS, {"num_generations": 2, "max_completion_length": 8}, reward_funcs=reward
    ),
    "diffusers: UNet": unet,
    "timm: mixup, EMA": image_model,
    "Lightning: automatic": with_lightning(automatic=True),
    "Lightning: manual": with_lightning(automatic=False),
    "PyG": graph_network,
    "Opacus: hooks": private_gradients,
}
