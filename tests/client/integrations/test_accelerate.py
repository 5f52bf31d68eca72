"""Prepared models: the same weights with and without a plan, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import TorchDynamoPlugin
from ranks import outputs_of_ranks
from stepping import ThirdStep, needs_compiled_plans
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ac_client.integrations.accelerate import planned
from benchmarks.models.modules import Transformer

BUDGET_GB = 0.0026
State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """accelerate keeps its state for the process."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared(accelerator: Accelerator, rows: int = 14) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Transformer(layers=2, width=32)
    data = list(torch.randn(rows, 64, 32))  # the last batch is short
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))  # type: ignore[arg-type]


def train(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> int:
    """One epoch; the third batch's peak above what stands."""
    torch.manual_seed(1)
    watch = ThirdStep()
    for number, batch in enumerate(loader):
        watch.begin(number)
        with accelerator.accumulate(model):
            loss = model(batch)["logits"].float().square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        watch.end()
    return watch.peak


def state(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}


def compare(
    accelerator: Accelerator,
    rows: int,
    share: float,
    calls: Callable[[], Any] = dict,
    inside: Callable[[], object] = int,
) -> tuple[nn.Module, State]:
    """Train plainly and under a plan, and compare weights and calls; return the model and its weights.

    Args:
        share: of the plain peak, which is more than the planned one.
        calls: return the calls since its last call.
        inside: called once the planned model is trained.
    """
    model, optimizer, loader = prepared(accelerator, rows)
    plain_peak = train(accelerator, model, optimizer, loader)
    plain, plain_calls = state(accelerator, model), calls()
    accelerator.free_memory()

    model, optimizer, loader = prepared(accelerator, rows)
    with planned(accelerator, model, BUDGET_GB, optimizer=optimizer) as at:
        peak = train(accelerator, model, optimizer, loader)
        assert calls() == plain_calls
        inside()
        torch.testing.assert_close(state(accelerator, model), plain, rtol=0, atol=0)
    report = at.report()
    assert report.predicted_peak_bytes < report.save_all_peak_bytes
    assert not report.off_path
    assert 0 < peak < share * plain_peak
    return model, plain


def test_weights_equal_those_of_an_unplanned_training(tmp_path: Path, calls_of: Any) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    calls_of(Transformer, "forward")
    model, plain = compare(accelerator, 14, 0.9, calls_of, lambda: accelerator.save_state(str(tmp_path)))
    assert not any(module._forward_pre_hooks for module in model.modules())
    for path in tmp_path.iterdir():
        assert b"ac_client" not in path.read_bytes()
    for parameter in model.parameters():
        parameter.data.zero_()
    accelerator.load_state(str(tmp_path))
    torch.testing.assert_close(state(accelerator, model), plain, rtol=0, atol=0)


def test_prepared_optimizer_keeps_its_parameters_and_is_counted() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = prepared(accelerator)
    before = [id(p) for group in optimizer.param_groups for p in group["params"]]
    with planned(accelerator, model, 1.0, optimizer=optimizer) as at:
        model(torch.randn(4, 64, 32))["logits"].sum().backward()
        with_state = at.report().predicted_peak_bytes
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == before
    model.zero_grad()
    with planned(accelerator, model, 1.0) as at:
        model(torch.randn(4, 64, 32))["logits"].sum().backward()
        without_state = at.report().predicted_peak_bytes
    assert with_state - without_state >= 2 * sum(p.nbytes for p in model.parameters())


@needs_compiled_plans
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("regional", [False, True])
def test_model_that_accelerate_compiles_is_planned(regional: bool) -> None:
    torch.compiler.reset()
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    compare(Accelerator(cpu=True, dynamo_plugin=plugin), 12, 1.0)
    torch.compiler.reset()


RANKS = """
import hashlib, os, sys
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
os.environ.update(
    RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
    MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
)
sys.path.append("tests/client/integrations")
from test_accelerate import Accelerator, BUDGET_GB, planned, prepared, train

def digest(model):
    tensors = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in model.state_dict().values())
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
assert accelerator.num_processes == world
if {fsdp}:  # accelerate sets this on GPUs alone
    for kind in PartialState, AcceleratorState:
        kind._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=["Block"],
    )
    assert accelerator.is_fsdp2
found = []
for ours in (False, True):
    accelerator.free_memory()
    model, optimizer, loader = prepared(accelerator, 14 * world)
    assert isinstance(model, FSDPModule if {fsdp} else DistributedDataParallel)
    if ours:
        with planned(accelerator, model, BUDGET_GB, optimizer=optimizer) as at:
            peak = train(accelerator, model, optimizer, loader)
        assert at.report().predicted_peak_bytes < at.report().save_all_peak_bytes, at.report()
        assert 0 < peak < 0.95 * plain_peak, (peak, plain_peak)
    else:
        plain_peak = train(accelerator, model, optimizer, loader)
    assert accelerator.is_fsdp2 == {fsdp}
    found.append(digest(model))
print(*found)
"""


@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
def test_two_ranks_train_to_the_weights_of_two_unplanned_ranks(fsdp: bool, tmp_path: Path) -> None:
    script = RANKS.replace("{fsdp}", str(fsdp))
    first, second = (said.split() for said in outputs_of_ranks(script, tmp_path / "store"))
    assert first[-2:] == second[-2:]
    assert first[-1] == first[-2]
