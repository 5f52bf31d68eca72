"""Train a debug model of torchtitan under a memory budget, on two ranks, with torchtitan's own Trainer.

    torchrun --nproc-per-node 2 examples/with_torchtitan.py llama3 0.07
    torchrun --nproc-per-node 2 examples/with_torchtitan.py deepseek_v3 0.4

Needs torchtitan 0.3, and torch 2.14 as torchtitan does. The line that plans is `planned(config, ...)`; in a
config_registry.py it is all that there is. The rest makes random batches and runs on a CPU as well.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import ac_client
from ac_client.integrations.torchtitan import planned


class CPU(types.ModuleType):
    """The functions of torch.cuda that torchtitan calls and torch.cpu lacks."""

    def __getattr__(self, name: str) -> Any:
        known: dict[str, Callable[..., Any]] = {
            "get_device_name": lambda *_: "cpu",
            "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=1 << 34),
            "current_device": lambda: 0,
            "memory_stats": lambda *_: {},
        }
        return known.get(name) or getattr(torch.cpu, name, lambda *_: None)


def use_the_cpu() -> None:
    import torchtitan.trainer  # and with it all modules that copy these names

    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan") and hasattr(module, "device_module"):
            vars(module).update(device_module=CPU("cpu"), device_type="cpu")
    torchtitan.trainer.utils.get_local_device = lambda: torch.device("cpu")


def config_of(kind: str) -> Any:
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config import Configurable
    from torchtitan.models.common.attention import ScaledDotProductAttention

    class RandomWords(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.seed, self.shape = dp_rank, (local_batch_size, seq_len)

        def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
            random = torch.Generator().manual_seed(self.seed)
            while True:
                words = torch.randint(0, 2048, self.shape, generator=random)
                yield {"input": words}, words.roll(-1, 1)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

    class NoTokenizer(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            pass

    registry = importlib.import_module(f"torchtitan.models.{kind}.config_registry")
    config = getattr(registry, f"{kind}_debugmodel")()
    config.dataloader, config.tokenizer = RandomWords.Config(), NoTokenizer.Config()
    config.validator.enable = config.checkpoint.enable = config.compile.enable = False
    config.training.steps, config.training.seq_len, config.training.local_batch_size = 4, 128, 4
    if not torch.cuda.is_available():
        for layer in config.model_spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def main(kind: str, budget_gb: float) -> None:
    if not torch.cuda.is_available():
        torch._utils._get_available_device_type = lambda: "cpu"
        use_the_cpu()
    trainer = planned(config_of(kind), budget_gb=budget_gb).build()
    for module in trainer.model_parts[0].modules():
        if not torch.cuda.is_available() and hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no average
    trainer.train()
    if torch.distributed.get_rank() == 0:
        print(ac_client.applied(trainer.model_parts[0]).report())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
