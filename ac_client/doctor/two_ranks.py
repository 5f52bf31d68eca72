"""Train under DistributedDataParallel on two GPUs, planned and plain, in two processes of their own.

    python -m ac_client.doctor.two_ranks BACKEND DEVICE_TYPE RANK FILE

Each rank prints one JSON object. `FILE` is where the ranks find each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

import ac_client
from ac_client.doctor.gpu_report import GpuFinding, Result, redacted
from ac_client.doctor.sample_models import SAMPLES, TINY
from autoac.planner import bounds, build
from autoac.planner.units import GIB
from autoac.profiler import observe

RANKS = 2
STEPS = 3
WAIT_S = 180.0
BUDGET = 0.5  # of the way from the smallest peak to the one with nothing recomputed


def check_two_ranks(device: torch.device) -> Iterator[GpuFinding]:
    """Compare planned with plain training over NCCL, if there are two GPUs."""
    if not distributed.is_available() or not distributed.is_nccl_available():
        yield GpuFinding("two GPUs", Result.SKIPPED, "this build of torch has no NCCL")
    elif torch.cuda.device_count() < RANKS:
        yield GpuFinding("two GPUs", Result.SKIPPED, "one GPU")
    else:
        yield train_on_two_ranks("nccl", device.type)


def train_on_two_ranks(backend: str, device_type: str) -> GpuFinding:
    """Start the ranks, and judge their results."""
    command = [sys.executable, "-m", "ac_client.doctor.two_ranks", backend, device_type]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(Path(folder) / "store")],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            said = [rank.communicate(timeout=WAIT_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            return GpuFinding(
                "two GPUs", Result.WRONG, f"no result in {WAIT_S:g} s: the ranks wait for each other"
            )
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    failed = [err for rank, (_, err) in zip(ranks, said, strict=True) if rank.returncode]
    if failed:
        return GpuFinding("two GPUs", Result.WRONG, redacted(" ".join(failed[0].splitlines()[-3:])))
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    recomputed = [result["recomputed"] for result in found]
    text = f"{backend}, {RANKS} ranks: {recomputed[0]} ops recomputed; gradients "
    equal = all(result["equal"] for result in found)
    text += "equal plain's bit for bit" if equal else "differ from plain's"
    if len({result["policy"] for result in found}) > 1:
        return GpuFinding("two GPUs", Result.WRONG, f"{text}; the ranks run different policies")
    wrong = not equal or not recomputed[0]
    return GpuFinding("two GPUs", Result.WRONG if wrong else Result.OK, text, {"recomputed": recomputed[0]})


def _train(device: torch.device, budget_bytes: int | None) -> tuple[list[Tensor], ac_client.Applied | None]:
    """Return the gradients of the last of a few steps, each rank on a batch of its own."""
    torch.manual_seed(0)
    model = SAMPLES[0].make(TINY).train().to(device)
    ids = (SAMPLES[0].batch(TINY)["ids"].to(device) + distributed.get_rank()) % TINY.vocabulary
    wrapped = DistributedDataParallel(model, device_ids=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if budget_bytes is not None:
        ac_client.apply(wrapped, budget_bytes / GIB, optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(step)
        wrapped(ids).backward()
        optimizer.step()
    gradients = [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]
    return gradients, ac_client.applied(wrapped) if budget_bytes is not None else None


def _budget(device: torch.device) -> int:
    """Return a budget that a plan must recompute for.

    Gradients exist before the step, since DistributedDataParallel holds them in its buckets all the time.
    """
    model, batch = SAMPLES[0].make(TINY).train().to(device), SAMPLES[0].batch(TINY)
    profile = observe(model, (), {name: value.to(device) for name, value in batch.items()}, accumulates=True)
    known = bounds(build(profile))
    return int(known.floor + BUDGET * (known.ceiling - known.floor))


def main() -> None:
    """Run one rank."""
    backend, device_type, rank, file = sys.argv[1:]
    device = torch.device(device_type if device_type == "cpu" else f"{device_type}:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, init_method=f"file://{file}", rank=int(rank), world_size=RANKS)
    budget = _budget(device)
    plain, _ = _train(device, None)
    planned, applied = _train(device, budget)
    assert applied is not None
    assert applied.policy is not None
    result = {
        "equal": all(map(torch.equal, plain, planned)),
        "recomputed": applied.report().recomputed,
        "policy": applied.policy.to_json(),
    }
    print(json.dumps(result), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
