"""Planned models on several ranks: one policy for all, the budget kept on each, and no rank that hangs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import outputs_of_ranks
from torch import nn

import ac_client
from ac_client.planning import ranks as ranks_module
from ac_client.planning.ranks import planners_of, ranks_of
from autoac.tape.torch_facts import private

COMMON = """
import json
from pathlib import Path
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from benchmarks.models.modules import Transformer
from checkpoints import same
from rank_setups import local
from stepping import scalar
import ac_client
from autoac.planner import build, simulate
from autoac.planner.units import GIB
from autoac.profiler import observe
from autoac.profiler.static_memory import static_bytes

CPU = torch.device("cpu")

def batch(rows=8, length=32):
    return torch.randn(rows, length, 32, generator=torch.Generator().manual_seed(rank))

def tight(model, x, optimizer=None):
    "A budget that saving everything does not keep, the same on all ranks."
    graph = build(observe(model, (x,), {}, optimizer=optimizer))
    budget = torch.tensor([int(0.85 * simulate(graph, graph.everything).peak.live_bytes)])
    dist.all_reduce(budget, dist.ReduceOp.MAX)
    return int(budget)

def step(model, x, seed):
    torch.manual_seed(10 * seed + rank)
    scalar(model(x)).backward()

def gradients(model):
    return [local(p.grad).clone() for p in model.parameters()]

def step_both(plain, planned, x, seed, clears=True):
    "Return True if the gradients are the same after a step of each."
    for model in (plain, planned):
        if clears:
            model.zero_grad()
        step(model, x, seed)
    return same(gradients(plain), gradients(planned))
"""

Results = list[dict[str, Any]]


def results_of(store: Path, world: int = 2, **scripts: str) -> dict[str, Results]:
    """Run scripts one after another on the same ranks, since starting takes long; return what each finds."""
    script = COMMON + "found = {}\n"
    for name, part in scripts.items():
        script += f"found[{name!r}] = results = {{}}\n{part}"
    outs = outputs_of_ranks(script + "print(json.dumps(found))\n", store, world, timeout=300)
    ranks = [json.loads(out) for out in outs]
    return {name: [rank[name] for rank in ranks] for name in scripts}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    store = tmp_path_factory.mktemp("replicas") / "store"
    return results_of(store, ddp=DDP, failing=FAILING, replicate=REPLICATE, dropped=DROPPED_OUTPUTS)


DDP = """
def made():
    torch.manual_seed(0)
    return DistributedDataParallel(Transformer())

plain, planned = made(), made()
budget = tight(planned, batch(rows=4 + 4 * rank))
ac_client.apply(planned, budget / GIB)
at = ac_client.applied(planned)
results["equal"] = []
for i in range(3):
    x = batch(rows=4 + 4 * rank)  # rank 1 has the larger batch
    results["equal"].append(step_both(plain, planned, x, i))
    if i == 1:  # they meet after the first step
        results["policy"] = at.policy.to_json()
        results["shapes"] = [dict(b.shape) for b in at.policies.buckets]
        results["recomputed"], results["evidence"] = at.report().recomputed, at.plan is not None

# Rank 0 alone meets a new shape, in a step of its own and then in one with gradients that are there.
for i, longer in enumerate([40, 40, 48, 48]):
    x = batch(rows=4, length=longer if rank == 0 else 32)
    results["equal"].append(step_both(plain, planned, x, i, clears=False))
results["buckets"], results["off_path"] = len(at.policies.buckets), at.report().off_path
"""


def test_ranks_get_the_policy_of_the_largest_batch_and_gradients_stay_equal(
    replicas: dict[str, Results],
) -> None:
    first, second = replicas["ddp"]
    assert first["policy"] == second["policy"]
    assert first["shapes"] == second["shapes"] == [{"0": "float32[8, 32, 32]"}]
    assert first["recomputed"] > 0
    assert [first["evidence"], second["evidence"]] == [False, True]  # only rank 1 planned
    assert first["equal"] == second["equal"] == [True] * 7
    assert first["buckets"] > second["buckets"]
    assert first["off_path"] == second["off_path"] == "", "buckets are rebuilt in the second forward"


FAILING = """
from autoac.planner import InfeasibleBudget

class Moody(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8), nn.Tanh())
    def forward(self, x):
        return self.inner(x)

def attempt(budget_gb, spoil=False, **options):
    torch.manual_seed(0)
    plain = DistributedDataParallel(Moody())
    ac_client.apply(plain, budget_gb, **options)
    step(plain, batch(), 0)
    if spoil:  # its record cannot become a profile
        observed = ac_client.applied(plain)._planning.planner.observation.step
        observed._tape.replays.samples = lambda: 1 // 0
    try:
        plain(batch())
    except Exception as error:
        said = [type(error).__name__, str(error), getattr(error, "to_dict", dict)()]
    step(plain, batch(), 0)  # nobody hangs, and the model is as it was
    try:
        ac_client.applied(plain)
    except ac_client.NotApplied:
        said.append("unplanned")
    return said

results["budget"] = attempt(1e-4)
results["one is too small"] = attempt(1e-4 if rank else 1.0)
results["constraints"] = attempt(1.0, constraints=ac_client.Constraints(pin_save=("nothing",)))
results["one fails"] = attempt(1.0, spoil=rank == 1)

# While one rank has a profiler on, all wait with planning.
model = ac_client.apply(DistributedDataParallel(Transformer()), 1.0)
at = ac_client.applied(model)
with torch.profiler.profile() if rank == 0 else torch.enable_grad():
    step(model, batch(), 0)
results["while profiling"] = at.policy is None
step(model, batch(), 1), step(model, batch(), 1)
results["after"] = at.policy is not None

# Each for itself: rank 1 never comes to the meeting.
model = ac_client.apply(DistributedDataParallel(Transformer()), 1.0, group=None)
if rank == 0:
    with model.no_sync():
        step(model, batch(), 0)
results["alone"] = ac_client.applied(model).policy is not None

# The rank that holds most in addition to the profile sets the bound.
torch.manual_seed(0)
model = nn.Sequential(Transformer())[0]
model.register_buffer("table", torch.zeros(50_000 * rank))
ac_client.apply(model, 1.0, group=dist.group.WORLD)
for i in range(2):
    model.zero_grad()
    step(model, batch(), i)
predicted = ac_client.applied(model).policy.predicted
results["predicted"] = [predicted.peak_bytes, predicted.static_bytes]
results["static"] = static_bytes(model, (batch(),), {}, 0, CPU, accumulates=False).total
results["static"] -= sum(p.grad.nbytes for p in model.parameters())
"""


def test_error_of_one_rank_is_raised_on_all_in_the_same_words(replicas: dict[str, Results]) -> None:
    first, second = replicas["failing"]
    for case in ("budget", "one is too small", "constraints"):
        assert first[case] == second[case]
        assert first[case][3:] == ["unplanned"]
    assert first["budget"][0] == first["one is too small"][0] == "InfeasibleBudget"
    assert first["constraints"][0] == "UnmatchedPattern"
    assert second["one fails"][::3] == ["ZeroDivisionError", "unplanned"]
    assert first["one fails"][::3] == ["RankFailed", "unplanned"]
    assert "rank 1" in first["one fails"][1]
    assert "ZeroDivisionError: integer division" in first["one fails"][1]
    assert first["while profiling"] is second["while profiling"] is True
    assert first["after"] is second["after"] is True
    assert [first["alone"], second["alone"]] == [True, False]
    assert first["predicted"] == second["predicted"]
    assert first["predicted"][1] == second["static"] == first["static"] + 200_000


FSDP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (world,))
class Loss(nn.Module):
    "With the loss in the model, an odd width to be sharded, and blocks in a unit of their own."
    def __init__(self):
        super().__init__()
        self.inner = Transformer(layers=2)
        self.last = nn.Linear(32, 7)
    def forward(self, x):
        return self.last(self.inner(x)["logits"]).float().square().mean()

def made():
    torch.manual_seed(0)
    model = Loss()
    for block in model.inner.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)

plain, planned, x = made(), made(), batch(rows=32)
shards = [local(p).clone() for p in planned.parameters()]
budget = tight(planned, x)
results["untouched"] = same(shards, [local(p) for p in planned.parameters()]) and all(
    p.grad is None for p in planned.parameters()
)
ac_client.apply(planned, budget / GIB)
with torch.no_grad():  # leaves the root gathered
    results["equal"] = [torch.equal(plain.eval()(x), planned.eval()(x))]
plain.train(), planned.train()
for i in range(6):  # with gradients that are there from the fourth on; then rank 0 alone meets a new shape
    if i == 4:
        x = batch(rows=4, length=40 if rank == 0 else 32)
    results["equal"].append(step_both(plain, planned, x, i, clears=i < 3))
results["buckets"] = len(ac_client.applied(planned).policies.buckets)

# No gradient is touched that is not reduced yet.
model = made()
model.set_requires_gradient_sync(False)
step(model, batch(), 0)
ac_client.apply(model, 1.0)
step(model, batch(), 1)
results["waits"] = ac_client.applied(model).policy is None
model.set_requires_gradient_sync(True)
step(model, batch(), 2)
reference = made()
reference.set_requires_gradient_sync(False)
step(reference, batch(), 0), step(reference, batch(), 1)
reference.set_requires_gradient_sync(True)
step(reference, batch(), 2)
results["accumulated"] = same(gradients(reference), gradients(model))
step(model, batch(), 3), step(model, batch(), 4)
results["planned later"] = ac_client.applied(model).policy is not None

# The second microbatch finds whole gradients, for which its plan has to have room.
model, x = made(), batch(rows=32)
ac_client.apply(model, 1.0)
for synchronizes in (True, True, False):
    model.zero_grad()
    model.set_requires_gradient_sync(synchronizes)
    step(model, x, 0)
others = ac_client.applied(model)._planning.watch.on_device.others_nbytes()
results["unreduced"] = [others, sum(p.numel() * p.itemsize for p in model.parameters())]

# A region that recomputes everything stays inside of the units.
model, reference = made(), made()
torch.manual_seed(rank)
with ac_client.save_recompute_policy("recompute_all"):
    loss = model(batch())
loss.backward()
torch.manual_seed(rank)
reference(batch()).backward()
results["region"] = same(gradients(reference), gradients(model))
"""


def test_sharded_model_is_planned_within_its_units(tmp_path: Path) -> None:
    first, second = results_of(tmp_path / "store", fsdp=FSDP)["fsdp"]
    assert [first["buckets"], second["buckets"]] == [2, 1]
    for at in (first, second):
        assert at["equal"] == [True] * 7
        assert at["untouched"]
        assert at["waits"]
        assert at["accumulated"]
        assert at["planned later"]
        assert at["unreduced"][0] == at["unreduced"][1]
        assert at["region"]


MISSING = """
from datetime import timedelta
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import ac_client

store = dist.distributed_c10d._get_default_store()
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
if rank == 0:
    ac_client.apply(model, 1.0)
    store.set_timeout(timedelta(seconds=2))
    try:
        model(torch.ones(2, 8))
    except ac_client.RankMissing as error:
        print(error)
    store.set("over", "")
else:
    store.wait(["over"], timedelta(seconds=60))
model(torch.ones(2, 8)).sum().backward()
print(model.module[0].weight.grad is not None)
"""


def test_a_rank_without_a_plan_is_named_and_all_train_on(tmp_path: Path) -> None:
    first, second = outputs_of_ranks(MISSING, tmp_path / "store")
    assert "rank 1 did not come to plan with this one within 2 s" in first
    assert first.splitlines()[-1] == second.strip() == "True"


def test_ranks_plan_only_for_batches_that_no_other_covers() -> None:
    wide, long, small = {"0": "f[8, 4]"}, {"0": "f[4, 9]"}, {"0": "f[4, 4]"}
    assert planners_of([small, wide, small, wide]) == [1]
    assert planners_of([small, wide, long]) == [2, 1]


@pytest.mark.parametrize(("talks_over", "expected"), [("cuda", "cuda:3"), ("cpu", "cpu")])
def test_ranks_communicate_over_the_device_of_their_model(
    talks_over: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the current one, which is every rank's first GPU if nobody set it, NCCL refuses to."""
    monkeypatch.setattr(private, "device_of_group", lambda group: torch.device(talks_over))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(ranks_module, "device_of", lambda model: torch.device("cuda", 3))
    found = ranks_of(nn.Linear(1, 1), object())
    asked: list[Any] = []
    monkeypatch.setattr(torch, "tensor", lambda *_args, **kwargs: asked.append(kwargs["device"]))
    found._numbers(1)
    assert asked == [torch.device(expected)]


def test_model_without_a_wrapper_is_planned_by_each_rank_alone() -> None:
    assert ranks_of(nn.Linear(1, 1), "auto") is None
    with pytest.raises(ValueError, match='group must be "auto", a ProcessGroup or None'):
        ac_client.apply(nn.Linear(1, 1), 1.0, group="all")


REPLICATE = """
from torch.distributed._composable import replicate

def made():
    torch.manual_seed(0)
    return replicate(Transformer())

def reduced(model):
    mine = torch.cat([gradient.flatten() for gradient in gradients(model)])
    all_of_them = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(mine, other) for other in all_of_them)

plain, planned = made(), made()
unplanned = Transformer()
budget = tight(unplanned, batch(rows=4))
ac_client.apply(planned, budget / GIB, strict=True)
results["equal"] = []
for i in range(3):
    same_on_rank = step_both(plain, planned, batch(rows=4 + 4 * rank), i)
    results["equal"].append(same_on_rank and reduced(planned))
report = ac_client.applied(planned).report()
results["met"] = dict(ac_client.applied(planned).policies.buckets[0].shape)
results["off_path"] = report.off_path

# Any other that a forward builds is trained, and planned.
class Builds(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.wrapper = nn.Linear(32, 4), None
    def forward(self, x):
        if self.wrapper is None:
            self.wrapper = [DistributedDataParallel(self.inner)]
        return self.wrapper[0](x).sum()

torch.manual_seed(0)
plain, planned = Builds(), Builds()
planned.load_state_dict(plain.state_dict())
ac_client.apply(planned, 1.0)
results["builds"] = []
for i in range(3):
    results["builds"].append(step_both(plain, planned, batch(), i))
"""


def test_reducer_that_the_first_forward_builds_reduces_the_real_gradients(
    replicas: dict[str, Results],
) -> None:
    first, second = replicas["replicate"]
    assert first["equal"] == second["equal"] == [True] * 3
    assert first["met"] == second["met"] == {"0": "float32[8, 32, 32]"}
    assert first["off_path"] == second["off_path"] == ""
    assert first["builds"] == second["builds"] == [True] * 3


PARALLEL = """
import logging
from autoac.planner import Constraints
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import torch.distributed._functional_collectives as functional

class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x, group=group)
        return x
    @staticmethod
    def backward(ctx, grad):
        return grad, None

class Parallel(nn.Module):
    def __init__(self, *groups):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in groups)
        self.groups = groups
    def forward(self, x):
        for layer, group in zip(self.layers, self.groups):
            x = Reduce.apply(layer(x).tanh() + x, group)
        return x.square().mean()

class Functional(Parallel):
    def forward(self, x):
        y = self.layers[0](x).tanh()
        return functional.all_gather_tensor_autograd(y, 0, self.groups[0]).square().mean()

def sharded():
    layers = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    return parallelize_module(layers, mesh["inner"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner"))
inner, outer = mesh["inner"].get_group(), mesh["outer"].get_group()

def attempt(model, budget_gb=1 + rank, **options):
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage()) if record.levelno > logging.INFO else None
    logging.getLogger("ac_client").addHandler(handler)
    ac_client.apply(model, budget_gb, **options)
    try:
        for i in range(2):
            step(model, batch(), i)
            model.zero_grad()
    except Exception as error:
        said.append(type(error).__name__)
        said.extend(note for note in error.__notes__)
    else:
        said.append(ac_client.applied(model).policy.budget_bytes // GIB)  # the smallest of the ranks that met
    logging.getLogger("ac_client").removeHandler(handler)
    return said

results["one group"] = attempt(Functional(inner))
results["in a larger one"] = attempt(Parallel(inner, dist.group.WORLD))
results["mesh"] = attempt(Parallel(inner, outer))
results["dtensor"] = attempt(sharded())
results["none"] = attempt(nn.Linear(32, 4))
repeats = Constraints(save_collectives=False)
results["repeats"] = attempt(Functional(inner), constraints=repeats)
results["repeats beyond its group"] = attempt(Functional(inner), group=outer, constraints=repeats)
results["one is too small"] = attempt(Parallel(inner), 1e-5 if rank == 1 else 1.0)
"""


def test_ranks_of_a_parallel_model_are_found_by_the_collectives_of_its_profile(tmp_path: Path) -> None:
    found = results_of(tmp_path / "store", world=4, parallel=PARALLEL)["parallel"]

    def by_rank(case: str) -> list[Any]:
        return [one[case][-1] for one in found]

    assert by_rank("one group") == by_rank("dtensor") == [1, 1, 3, 3]
    assert by_rank("in a larger one") == [1, 1, 1, 1]
    assert by_rank("mesh") == by_rank("none") == [1, 2, 3, 4]
    assert all("groups that overlap" in one["mesh"][0] for one in found)
    assert [len(one["none"]) for one in found] == [1] * 4, "nothing to say where no rank waits for another"
    assert by_rank("repeats") == [1, 1, 3, 3]
    assert by_rank("repeats beyond its group") == [1, 2, 1, 2]
    beyond = [one["repeats beyond its group"] for one in found]
    assert all(
        any("saves collectives" in str(said) for one in beyond[i::2] for said in one) for i in range(2)
    )
    assert all(len(one["repeats"]) == 1 for one in found), "nothing to say where all ranks plan together"
    assert all(one["one is too small"][-2] == "InfeasibleBudget" for one in found[:2])
    assert all("of 2 raised this error" in one["one is too small"][-1] for one in found[:2])
    assert by_rank("one is too small")[2:] == [1, 1]


DROPPED_OUTPUTS = """
from autoac.planner import find_minimum_peak
from autoac.profiler.steps.training_loop import Loop

class Head(nn.Module):
    "A loss, and logits that are larger than all else."
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(32, 32), nn.GELU()), nn.Linear(32, 1024)
    def forward(self, x):
        logits = self.head(self.body(x)).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long))
        return {"loss": loss, "logits": logits}

def made():
    torch.manual_seed(0)
    return DistributedDataParallel(Head())

def step(model, x):
    model.zero_grad()
    model(x)["loss"].backward()

plain, planned = made(), made()
x = batch()
smallest = find_minimum_peak(observe(planned, (x,), {})).proven
dropped = observe(planned, (x,), {}, loop=Loop(drops=frozenset({1})))
ac_client.apply(planned, (smallest + find_minimum_peak(dropped).found) / 2 / GIB)
results["equal"] = []
for _ in range(3):
    step(plain, x), step(planned, x)
    results["equal"].append(same(gradients(plain), gradients(planned)))
report = ac_client.applied(planned).report()
results["within"] = report.predicted_peak_bytes <= report.budget_bytes < smallest
"""


def test_ranks_agree_on_a_budget_that_only_a_loop_that_drops_outputs_keeps(
    replicas: dict[str, Results],
) -> None:
    for result in replicas["dropped"]:
        assert result == {"equal": [True] * 3, "within": True}
