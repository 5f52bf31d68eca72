"""Test planned training on two ranks, each with a device of its own, over collectives ordered by streams."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from ranks import outputs_of_ranks

COMMON = """
import gc
import json
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from benchmarks.models.modules import Transformer
import ac_client
from autoac.planner import build, simulate
from autoac.planner.units import GIB
from autoac.profiler import observe

DEVICE = torch.device("cuda", rank)
results = {}
gc.freeze()  # what is imported: the models below are collected often

class Loss(nn.Module):
    "With the loss in the model, and an odd width to be sharded."
    def __init__(self):
        super().__init__()
        self.inner, self.last = Transformer(), nn.Linear(32, 7)
    def forward(self, x):
        return self.last(self.inner(x)["logits"]).float().square().mean()

def ddp(**settings):
    return DistributedDataParallel(Loss().to(DEVICE), **settings)

def sharded(**settings):
    mesh, model = init_device_mesh("cuda", (world,)), Loss().to(DEVICE)
    for block in model.inner.blocks:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)

BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
WAYS = {
    "DDP": ddp,
    "DDP in small buckets": lambda: ddp(bucket_cap_mb=0.02),
    "FSDP2": sharded,
    "FSDP2, kept gathered": lambda: sharded(reshard_after_forward=False),
    "FSDP2 in bf16": lambda: sharded(**BF16),
}

def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

def made(way):
    gc.collect()
    torch.manual_seed(0)
    model = WAYS[way]().train()
    x = torch.randn(16, 32, 32, generator=torch.Generator().manual_seed(rank)).to(DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False), x

def train(way, budget=None, **options):
    "Return the peak and the numbers of each step, and the applied plan."
    model, optimizer, x = made(way)
    if budget is not None:
        ac_client.apply(model, budget / GIB, optimizer=optimizer, **options)
    peaks, numbers = [], []
    for i in range(4):
        torch.manual_seed(10 * i + rank)
        gpu.reset_peak(rank)
        loss = model(x)
        loss.backward()
        optimizer.step()
        peaks.append(gpu.peak(rank))
        numbers += [loss.detach().cpu(), *(local(p.grad).cpu() for p in model.parameters())]
        optimizer.zero_grad()
        del loss
    numbers.append(torch.cuda.get_rng_state(DEVICE))
    return peaks, numbers, ac_client.applied(model) if budget is not None else None

def budget_of(way):
    "Return a budget that saving everything does not keep, the same on all ranks."
    model, optimizer, x = made(way)
    graph = build(observe(model, (x,), {}, optimizer=optimizer))
    budget = torch.tensor([int(0.8 * simulate(graph, graph.everything).peak.live_bytes)], device=DEVICE)
    dist.all_reduce(budget, dist.ReduceOp.MAX)
    return int(budget)
"""

TRAINING = """
def compare(way):
    budget = budget_of(way)
    plain, numbers, _ = train(way)
    measured, planned_numbers, at = train(way, budget, host_budget_gb=0)
    report = at.report()
    return {
        "equal": len(numbers) == len(planned_numbers) and all(map(torch.equal, numbers, planned_numbers)),
        "plain": plain, "measured": measured, "predicted": report.predicted_peak_bytes, "budget": budget,
        "save_all": at.policy.predicted.save_all_peak_bytes, "recomputed": report.recomputed,
        "corrections": report.corrections, "off_path": report.off_path, "policy": at.policy.to_json(),
        "races": gpu.take_races(),
    }

for way in WAYS:
    results[way] = compare(way)
"""

COLLECTIVES = """
x = torch.full((2,), rank + 1.0, device=DEVICE)
work = dist.all_reduce(x, async_op=True)
results["not waited for"] = (x + 1).isnan().all().item()
results["races"] = gpu.take_races()
work.wait()
results["sum"] = (x + 0).tolist()
gathered = torch.empty(4, device=DEVICE)
dist.all_gather_into_tensor(gathered, x + rank)
results["gathered"] = gathered.tolist()
dist.reduce_scatter_tensor(x, gathered * (rank + 1), dist.ReduceOp.AVG)
results["scattered"] = x.tolist()
parts = [torch.empty_like(x) for _ in range(world)]
dist.all_gather(parts, x)
results["parts"] = torch.cat(parts).tolist()
dist.broadcast(x, 1)
results["sent"] = x.tolist()
dist.barrier(device_ids=[rank])
results["late races"] = gpu.take_races()
del x, work, gathered, parts  # their bytes are in no profile
"""


CAPTURED = """
def replays(budget=None):
    "Train for 4 steps on a side stream and then 6: eager ones of the plain model, or replays."
    model, _, x = made("FSDP2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, capturable=True)
    torch.manual_seed(rank)
    if budget is not None:
        ac_client.apply(model, budget / GIB, optimizer=optimizer, host_budget_gb=0)

    def step():
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side, losses, peak, graph = torch.cuda.Stream(), [], 0, None
    for i in range(10):
        x.copy_(torch.randn(16, 32, 32, generator=torch.Generator().manual_seed(2 * i + rank)))
        if budget is None:
            loss = step()
        elif i < 4:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                loss = step()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if graph is None:
                gpu.reset_peak(rank)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    loss = step()
                peak = gpu.peak(rank)
            graph.replay()
        losses.append(loss.cpu())
        if graph is None:
            del loss
    numbers = [*losses, *(local(p.detach()).cpu() for p in model.parameters())]
    numbers.append(torch.cuda.get_rng_state(DEVICE))
    return numbers, peak, ac_client.applied(model) if budget is not None else None

def captured():
    budget = budget_of("FSDP2")
    plain, _, _ = replays()
    planned, peak, at = replays(budget)
    report = at.report()
    return {
        "equal": len(plain) == len(planned) and all(map(torch.equal, plain, planned)),
        "peak": peak, "predicted": report.predicted_peak_bytes, "recomputed": report.recomputed,
        "off_path": report.off_path, "races": gpu.take_races(),
    }

results["captured"] = captured()
"""


MOVES = """
import logging
import re
from ac_client.planning.facts import host_budget
from ac_client.planning.plan_batch import BatchPlanner
from autoac.planner.formats.profile import LinkRates
from autoac.tape.runtime.moves.copies import stalls
from autoac.tape.runtime.moves.host_memory import host_memory

class Lines(logging.Handler):
    def emit(self, record):
        if (said := re.search("nothing moves to the host, since (.*)", record.getMessage())):
            lines.append(said[1])

lines = []
logging.getLogger("ac_client").addHandler(Lines())
logging.getLogger("ac_client").setLevel(logging.INFO)
stalls.watch = lambda: None  # on a busy machine copies take long
host_budget._free_nbytes = lambda: (64 - 16 * rank) << 20
register = torch.cuda.cudart().cudaHostRegister
linked, observed = [], BatchPlanner.observed
BatchPlanner.observed = lambda *args: linked.append(observed(*args)) or linked[-1]
budget = budget_of("FSDP2") * 5 // 8
_, expected, _ = train("FSDP2")

def moved(gb_s, status=None):
    lines.clear()
    host_memory.release()
    host_budget.link_of = lambda _: LinkRates(
        out_bytes_per_us=1e3 * gb_s + rank, in_bytes_per_us=1e3 * gb_s - rank, latency_us=0.0
    )
    torch.cuda.cudart().cudaHostRegister = register if status is None else lambda *_: status
    _, numbers, at = train("FSDP2", budget)
    found = {
        "equal": all(map(torch.equal, expected, numbers)), "moved": at.report().moved_bytes,
        "host": at.policy.constraints.host_budget_bytes if at.policy.constraints else 0,
        "link": [] if (link := linked[-1].link) is None else [link.out_bytes_per_us, link.in_bytes_per_us],
        "policy": at.policy.to_json(), "lines": list(lines), "races": gpu.take_races(),
    }
    at.remove()
    return {**found, "pinned": host_memory.reserved}

results["moves"] = {
    "all": moved(1e3),
    "slow on one": moved(7.9 if rank else 1e3),
    "refused on one": moved(1e3, 2 if rank else None),
}
print(json.dumps(results))
"""


@functools.cache
def ranks() -> list[dict[str, Any]]:
    """Return the results of both ranks; starting them takes long."""
    script = f"{COMMON}{COLLECTIVES}{TRAINING}{CAPTURED}{MOVES}"
    with tempfile.TemporaryDirectory() as folder:
        outputs = outputs_of_ranks(script, Path(folder) / "store", timeout=280, backend="standin")
    return [json.loads(out) for out in outputs]


def test_collectives_run_in_the_order_of_a_stream_of_their_own() -> None:
    for rank, found in enumerate(ranks()):
        assert found["not waited for"]
        assert f"reads what aten::copy_ on stream 1 of cuda:{rank} writes" in found["races"][0]
        assert found["sum"] == [3.0, 3.0]
        assert found["gathered"] == [3.0, 3.0, 4.0, 4.0]
        assert found["scattered"] == [[4.5, 4.5], [6.0, 6.0]][rank]
        assert found["parts"] == [4.5, 4.5, 6.0, 6.0]
        assert found["sent"] == [6.0, 6.0]
        assert found["late races"] == []


SMALL = "DDP in small buckets"
COMPARING = 2 << 20  # bytes at most, in the first planned step, which compares what it recomputes
BUCKETS = 8  # at most; each is rounded to 512 bytes, and DDP sizes them after the first backward


@pytest.mark.parametrize("way", ["DDP", SMALL, "FSDP2", "FSDP2, kept gathered", "FSDP2 in bf16"])
def test_planned_ranks_have_the_plain_numbers_and_the_predicted_peak(way: str) -> None:
    unpredicted = 511 * BUCKETS if way == SMALL else 0
    for found in (rank[way] for rank in ranks()):
        assert found["races"] == []
        assert found["equal"]
        assert found["recomputed"] > 0
        assert (found["corrections"], found["off_path"]) == (0, "")
        assert found["predicted"] <= found["measured"][-1] <= found["predicted"] + unpredicted
        assert found["measured"][1] <= found["budget"] + COMPARING  # the first step is observed
        assert max(found["measured"][2:]) == found["measured"][-1] <= found["budget"]
        assert found["save_all"] <= found["plain"][-1] <= found["save_all"] + unpredicted
    first, second = (rank[way] for rank in ranks())
    assert first["policy"] == second["policy"]


def test_replays_of_sharded_steps_communicate_and_equal_eager_steps() -> None:
    for found in (rank["captured"] for rank in ranks()):
        assert found["equal"]
        assert found["recomputed"] > 0
        assert (found["off_path"], found["races"]) == ("", [])
        assert found["peak"] == found["predicted"]


def test_ranks_of_a_machine_share_its_memory_and_stop_moving_together() -> None:
    both = [rank["moves"] for rank in ranks()]
    assert all(found[case]["equal"] and not found[case]["races"] for found in both for case in found)
    moving = [found["all"] for found in both]
    assert [found["host"] for found in moving] == [4 << 20] * 2  # a quarter of 48 MiB, halved, a power of two
    assert [found["link"] for found in moving] == [[1e6, 1e6 - 1]] * 2
    assert all(found["moved"] > 0 and found["pinned"] == 0 and not found["lines"] for found in moving)
    assert len({found["policy"] for found in moving}) == 1
    slow, refused = ([found[f"{case} on one"] for found in both] for case in ("slow", "refused"))
    assert [found["moved"] for found in slow + refused] == [0] * 4
    others = ["another rank moves nothing"]
    assert [found["lines"] for found in slow] == [
        others,
        ["the link to the host carries 7.9 GB/s, less than 8"],
    ]
    assert refused[0]["lines"] == others
    assert "cannot be pinned" in refused[1]["lines"][0]
