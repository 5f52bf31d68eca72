"""Test that nested policies resolve from the outermost to the innermost (rule 9)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stepping import EventLog, recomputed
from torch.utils.checkpoint import CheckpointPolicy as P

from ac_client import PolicyConflict, save_recompute_policy
from autoac.tape.runtime.nested_policies import PolicyFrame, parse_policy, resolve
from autoac.tape.torch_facts.op_facts import facts_of

MM = torch.ops.aten.mm.default


def asked(word: P) -> object:
    return lambda ctx, out, op, *args, **kwargs: word


@pytest.mark.parametrize(
    ("stack", "result"),
    [
        ([], P.PREFER_SAVE),
        (["recompute_all"], P.PREFER_RECOMPUTE),
        (["recompute_all", [MM]], P.MUST_SAVE),
        ([[MM], "recompute_all"], P.MUST_SAVE),  # a MUST beats a PREFER at any position
        ([asked(P.PREFER_RECOMPUTE), asked(P.PREFER_SAVE)], P.PREFER_SAVE),
        ([asked(P.PREFER_SAVE), asked(P.PREFER_RECOMPUTE)], P.PREFER_RECOMPUTE),
        ([asked(P.MUST_RECOMPUTE), asked(P.PREFER_SAVE)], P.MUST_RECOMPUTE),
        ([lambda ctx, out, op, *a, **k: True], P.MUST_SAVE),
        ([lambda ctx, out, op, *a, **k: False], P.PREFER_RECOMPUTE),
    ],
)
def test_stack_resolves_from_the_outermost_policy_to_the_innermost(stack: list[object], result: P) -> None:
    frames = [PolicyFrame(parse_policy(policy), "train.py", 1) for policy in stack]
    assert resolve(frames, MM, facts_of(MM), (), {}, None) is result


def test_different_musts_are_an_error_that_names_both_policies() -> None:
    x = torch.randn(2, 2, requires_grad=True)
    with (
        pytest.raises(
            PolicyConflict,
            match=r"MUST_SAVE by .*must_save_all.*test_nested_policies.py:\d+.* and "
            "MUST_RECOMPUTE by the function",
        ),
        save_recompute_policy("must_save_all"),
        save_recompute_policy(asked(P.MUST_RECOMPUTE)),
    ):
        x @ x


def test_only_the_outermost_region_installs_the_mode() -> None:
    with save_recompute_policy("recompute_all"):
        depth = torch._C._len_torch_dispatch_stack()
        with save_recompute_policy([MM]):
            assert torch._C._len_torch_dispatch_stack() == depth


def test_inner_policy_applies_inside_only() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    log = EventLog()
    with save_recompute_policy("recompute_all", log=log):
        a = (x @ x).sin()
        with save_recompute_policy("must_save_all"):
            b = (a @ a).sin()
        c = (b @ b).sin()
    c.sum().backward()
    again = recomputed(log)
    assert again.count("aten.mm.default") == 2
    assert again.count("aten.sin.default") == 1


@pytest.mark.parametrize("policy", ["save_everything", 3, [torch.mm], ["mm"]])
def test_invalid_policy_is_rejected(policy: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        save_recompute_policy(policy)


def test_function_that_returns_neither_policy_nor_bool_is_an_error() -> None:
    with (
        pytest.raises(TypeError, match="got 'save'"),
        save_recompute_policy(lambda ctx, out, op, *a, **k: "save"),
    ):
        torch.ones(2) + 1


def test_function_sees_the_output_of_the_op() -> None:
    x = torch.randn(3, 3, requires_grad=True)
    seen = []

    def small_ones(ctx: Any, out: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        seen.append((op, out.shape))
        return bool(out.numel() <= 3)

    log = EventLog()
    with save_recompute_policy(small_ones, log=log):
        row = (x @ x).sin().sum(0)
        y = row.exp().sum()
    y.backward()
    assert seen[0] == (MM, (3, 3))
    # The sum over rows is small, so it is saved, and so is exp; of the large tensors, backward needs only mm.
    assert recomputed(log) == ["aten.mm.default"]


def test_function_in_the_form_of_selective_checkpoint_is_rejected_with_advice() -> None:
    with pytest.raises(TypeError, match=r"\(ctx, out, op, \*args, \*\*kwargs\)"):
        save_recompute_policy(lambda ctx, op, *args, **kwargs: True)
