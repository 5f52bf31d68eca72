"""Delete each private name of torch that autoac uses: calls give their result, or `UnsupportedTorch`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from stepping import COMPILES

from autoac.tape.torch_facts import private

ROOT = Path(__file__).parents[2]
REFUSED = "unsupported"

# For each case: build a model in a fork, delete the names, and use the model. What torch itself does not find
# is not our subject, so the model is built before. The core is deleted before autoac is imported.
SCRIPT = """
import json, os, sys, tempfile, traceback, warnings
warnings.simplefilter("ignore")
import torch, torch._dynamo, torch._inductor.output_code, torch.utils.checkpoint as torchs
import torch._functorch._aot_autograd.graph_compile, torch._dynamo.compiled_autograd
import torch.distributed as dist, torch.distributed._composable.replicate, torch._prims.rng_prims
import torch.distributed.fsdp._fully_shard._fsdp_param_group, torch.distributed._functional_collectives
import autoac.planner.errors, autoac.planner.formats.profile, autoac.planner.units, pulp, highspy
from pkgutil import resolve_name
from torch import nn
from torch.distributed.fsdp import fully_shard

if sys.argv[1:] == ["features"]:
    import ac_client.apply, ac_client.planning.plan_batch, autoac.profiler.observe

torch.set_num_threads(1)
log = tempfile.TemporaryFile()

def layers():
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.GELU())

def applied(model):
    import ac_client
    ac_client.apply(model, 1.0)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()

class Own(nn.Linear):
    def forward(self, x):
        return torchs.checkpoint(super().forward, x, use_reentrant=False)

def drop_in(x):
    import ac_client
    contexts = lambda: torchs.create_selective_checkpoint_contexts([torch.ops.aten.sin.default])
    for options in ({}, {"context_fn": contexts}):
        ac_client.checkpoint(lambda x: x.sin().exp(), x, **options).sum().backward()

def split(x):
    import ac_client
    with ac_client.save_recompute_policy("recompute_all"):
        out = x.sin().exp()
    with ac_client.split_backward():
        torch.autograd.grad(out.sum(), x)

def fake(layer):
    from autoac.profiler import DATASHEETS, profile
    profile(layer, torch.ones(2, 3, 8), on=DATASHEETS["h100"], autocast=torch.bfloat16)

def in_group(build):
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    return build()

def sharded():
    return fully_shard(layers(), mesh=dist.init_device_mesh("cpu", (1,)))

def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    return parallelize_module(layers(), dist.init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})

def replicated():
    from torch.distributed._composable.replicate import replicate
    replicate(model := layers())
    model(torch.ones(2, 4)).sum().backward()
    return model

class Reduced(nn.Linear):
    def forward(self, x):
        return dist._functional_collectives.all_reduce(super().forward(x), "sum", dist.group.WORLD)

def compiled():
    model = layers()
    model.compile(backend="aot_eager")
    return model

def importing(_):
    import autoac.tape.torch_facts

def apply_alone(model):
    import ac_client
    ac_client.apply(model, 1.0)

def met(_):
    from ac_client.planning.ranks import Ranks
    Ranks([dist.group.WORLD], torch.device("cpu")).any(False)

def of_many(model):
    from autoac.profiler import DATASHEETS, fake_ranks, profile
    with fake_ranks(2):
        profile(layers(), torch.ones(2, 4), on=DATASHEETS["h100"])

x = torch.ones(4, requires_grad=True)
CALLS = {
    "": (layers, applied),
    "import": (layers, importing),
    "CHECKPOINTS": (lambda: Own(4, 4), applied),
    "DROP_IN": (lambda: x, drop_in),
    "SPLIT": (lambda: x, split),
    "GPU": (lambda: nn.TransformerEncoderLayer(8, 2, 8), fake),
    "FSDP": (lambda: in_group(sharded), applied),
    "SHARDED_OPS": (lambda: in_group(tensor_parallel), applied),
    "REPLICATE": (lambda: in_group(replicated), applied),
    "GROUPS": (lambda: in_group(lambda: Reduced(4, 4)), applied),
    "MEETING": (lambda: in_group(layers), met),
    "FAKE_RANKS": (layers, of_many),
    "COMPILED": (compiled, apply_alone),
}

def delete(name):
    module, _, path = name.partition(":")
    owner, _, last = path.rpartition(".")
    owner = resolve_name(f"{module}:{owner}" if owner else module)
    if hasattr(owner, last):
        try:
            delattr(owner, last)
        except (AttributeError, TypeError):  # a member of an enumeration: its class goes
            delattr(resolve_name(module), path.split(".")[0])

def outcome(names, call):
    build, use = CALLS[call]
    try:
        model = build()
        for name in names:
            delete(name)
        use(model)
    except Exception as error:
        if type(error).__name__ == "UnsupportedTorch":
            return f"unsupported {error.feature}: {error.why}"
        return traceback.format_exc()
    return "result"

def case(names, call):
    before, after = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(log.fileno(), 1), os.dup2(log.fileno(), 2)
        os.write(after, outcome(names, call).encode()[:60000])
        os._exit(0)
    os.close(after)
    with open(before) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text

print(json.dumps([case(*each) for each in json.load(sys.stdin)]))
"""
FEATURES = {value: name for name, value in vars(private).items() if name.isupper() and isinstance(value, str)}


def core_names() -> list[str]:
    """Return the names that private.py looks up when it is imported, as `module:name`."""
    tree = ast.parse(Path(private.__file__).read_text())
    modules = {"torch": "torch", "nn": "torch.nn"}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    looked_up = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    found = set()
    for node in (part for statement in looked_up if statement.value for part in ast.walk(statement.value)):
        if isinstance(node, ast.Attribute):
            root, _, path = ast.unparse(node).partition(".")
            if root in modules and not path.startswith("ops."):
                found.add(f"{modules[root]}:{path}")
    return sorted(found - {"torch:_C._dynamo", "torch._C:_autograd", "torch:autograd"})


def outcomes(kind: str, cases: list[tuple[list[str], str]]) -> list[str]:
    """Return what each case came to: names that are deleted, and the call that is made."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_missing_core_name_is_unsupported_torch_at_import() -> None:
    names = core_names()
    assert len(names) > 80
    assert "torch._C:_len_torch_dispatch_stack" in names
    cases = [([name], "import" if number else "") for number, name in enumerate(names)]
    for name, found in zip(names, outcomes("core", cases), strict=True):
        assert found.startswith("unsupported : it lacks"), (name, found)


@pytest.mark.slow
def test_missing_name_is_unsupported_torch_where_the_feature_is_used() -> None:
    cases = [(row.split(), FEATURES[feature]) for feature, rows in private.FEATURES.items() for row in rows]
    for case, found in zip(cases, outcomes("features", cases), strict=True):
        assert found.startswith("unsupported ") or (case[1] == "GROUPS" and found == "result"), (case, found)


@pytest.mark.slow
def test_plain_model_is_planned_without_the_names_of_features() -> None:
    deleted = [private.GPU, private.FSDP, private.GROUPS]
    names = [name for feature in deleted for row in private.FEATURES[feature] for name in row.split()]
    names = sorted(set(names), reverse=True)  # attributes of a class before the class
    features = [feature for feature in private.FEATURES if feature != private.COMPILED or COMPILES]
    calls = ["", *map(FEATURES.__getitem__, features)]
    assert outcomes("features", [(names, ""), *(([], call) for call in calls)]) == ["result"] * (
        1 + len(calls)
    )


@pytest.mark.slow
def test_missing_names_of_a_feature_leave_other_calls_their_result_or_refuse_them() -> None:
    cases = []
    calls = sorted(["", *(FEATURES[feature] for feature in private.FEATURES.keys() - {private.COMPILED})])
    for number, (feature, rows) in enumerate(private.FEATURES.items()):
        names = sorted({name for row in rows for name in row.split()}, reverse=True)
        if feature in (private.COMPILED, private.FAKE_RANKS):  # torch itself does not get far without them
            cases += [([name], "") for name in names]
        else:  # a third of the calls, another one for each feature, and the plain one
            some = {"", *calls[number % 3 :: 3]} - {FEATURES[feature]}
            cases += [(names, call) for call in sorted(some)]
    found = outcomes("features", cases)
    wrong = [
        (*case, one) for case, one in zip(cases, found, strict=True) if one[:11] not in ("result", REFUSED)
    ]
    assert not wrong
    assert found.count("result") > len(found) // 2
