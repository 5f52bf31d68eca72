"""Check what ops write and which of them communicate, where their schemas do not say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stepping import SeenOps

from autoac.tape.torch_facts import op_facts
from autoac.tape.torch_facts.op_facts import OpFacts, facts_of, written_tensors
from autoac.tape.torch_facts.op_signature import tensors_in

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")

WRITE_NOTHING = {"send", "barrier", "monitored_barrier_", "check_for_nan"}


def overload(name: str) -> torch._ops.OpOverload:
    namespace, name = name.split("::")
    return getattr(getattr(torch.ops, namespace), name).default  # type: ignore[no-any-return]


def test_every_c10d_op_writes_its_first_argument_or_nothing() -> None:
    schemas = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("c10d::")]
    assert len(schemas) > 15
    for name in schemas:
        facts = facts_of(overload(name))
        expected = () if name.removeprefix("c10d::") in WRITE_NOTHING else (0,)
        assert (facts.writes, facts.writes_any) == (expected, False), name
        assert facts.collective, name
        assert facts.never_recomputed, name


def test_functional_receive_writes_the_tensor_that_it_returns() -> None:
    if hasattr(torch.ops._c10d_functional, "irecv"):  # since torch 2.12
        assert facts_of(overload("_c10d_functional::irecv")).writes == (0,)
        assert facts_of(overload("_c10d_functional::batch_p2p_ops")).writes == (3,)
    assert not facts_of(overload("_c10d_functional::all_reduce")).mutates


def test_lists_of_lists_are_written() -> None:
    lists = [[torch.zeros(2), torch.zeros(2)], [torch.zeros(2)]]
    facts = facts_of(torch.ops.c10d.allgather_.default)
    written = list(map(id, written_tensors(facts, (lists, [torch.ones(2)], None), {})))
    assert written == [id(tensor) for tensor in (*lists[0], *lists[1])]
    assert len(list(tensors_in((lists,), {}))) == 3


@pytest.fixture(scope="module")
def libraries() -> Iterator[None]:
    """Define ops as libraries of kernels do."""
    of_experts = torch.library.Library("deep_ep", "FRAGMENT")
    of_experts.define("test_dispatch(Tensor x, Tensor out) -> ()")
    others = torch.library.Library("autoac_test_comm", "FRAGMENT")
    others.define("by_name(Tensor x, Tensor out, str group_name) -> ()")
    others.define("by_role(Tensor x, str? tp_group=None) -> Tensor")
    others.define("by_class(Tensor x, __torch__.torch.classes.c10d.ProcessGroup pg) -> Tensor")
    others.define("marked(Tensor x, Tensor(a!) out, str group_name) -> ()")
    others.define("convolution(Tensor x, int group, int group_size) -> Tensor")
    yield
    others._destroy()
    of_experts._destroy()


def found(name: str) -> OpFacts:
    return facts_of(overload(name))


@pytest.mark.usefixtures("libraries")
def test_op_of_a_library_for_communication_writes_any_argument_unless_its_schema_marks_some() -> None:
    for name in ("deep_ep::test_dispatch", "autoac_test_comm::by_name", "autoac_test_comm::by_role"):
        assert found(name).collective, name
        assert found(name).writes_any, name
    assert found("autoac_test_comm::by_class").collective
    assert (found("autoac_test_comm::marked").writes, found("autoac_test_comm::marked").writes_any) == (
        (1,),
        False,
    )
    assert not found("autoac_test_comm::convolution").collective


def test_ops_of_aten_are_no_collectives() -> None:
    assert not facts_of(torch.ops.aten.convolution.default).collective


X, B, IMAGES, V = torch.rand(2, 2), torch.rand(3, 2, 2), torch.rand(1, 2, 3, 3), torch.rand(2)
CALLS: dict[str, list[Any]] = {
    "add.Tensor": [(X, X), (X, 2), (2, X)], "addmm": [(V, X, X)], "bmm": [(B, B)], "cat": [([X, X], -1)],
    "convolution": [(IMAGES, torch.rand(2, 2, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)],
    "div.Tensor": [(X, X), (X, 2.0)], "embedding": [(X, torch.tensor([1])), (X, torch.tensor([1]), 0)],
    "mean.dim": [(X, [-1], True), (X, [0]), (X, None)], "mm": [(X, X)], "permute": [(X, [1, 0])],
    "mul.Tensor": [(X, X), (X, 0.5), (X, True)], "view": [(X, [4])], "expand": [(X, [3, 2, 2])],
    "native_batch_norm": [(IMAGES, V, V, None, None, True, 0.1, 1e-5)], "transpose.int": [(X, 0, 1)],
    "native_dropout": [(X, 0.5, True)], "native_layer_norm": [(X, [2], V, None, 1e-5)],
    "sub.Tensor": [(X, X), (X, 1), (1, X)], "unsqueeze": [(X, 0)], "_softmax": [(X, -1, False)],
    "_log_softmax": [(X, -1, False)],
}  # fmt: skip


@pytest.mark.parametrize("name", ["aten::expand", "aten::view", *sorted(op_facts._FUNCTIONS)])
def test_function_that_stands_for_an_op_runs_this_overload(name: str) -> None:
    packet, _, overload_name = name.removeprefix("aten::").partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload_name or "default")
    assert facts_of(op).call is not op._op
    for args in CALLS[name.removeprefix("aten::")]:
        with SeenOps() as seen:
            facts_of(op).call(*args)
        assert seen.ops == [str(op)]
