"""Test what fingerprints cover, and how often a step takes them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from stepping import SeenOps
from torch import Tensor

from autoac.tape.runtime.policy_context import save_recompute_policy
from autoac.tape.unseen import fingerprints
from autoac.tape.unseen.fingerprints import _sum, fingerprint, fingerprint_of, shows_whole_storage

LENGTH, OPS = 1000, 50


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.view(8, 8),
        lambda x: x[8:24],
        lambda x: x.view(8, 8).t(),
        lambda x: x[16:32].view(4, 4).t(),
        lambda x: x.view(8, 8)[:, 2:5],
        lambda x: x.view(torch.int16)[1:4],
        lambda x: x[:0],
    ],
)
def test_fingerprint_is_that_of_a_copy_in_the_same_layout(view: Callable[[Tensor], Tensor]) -> None:
    tensor = view(torch.rand(64))
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    assert fingerprint(tensor) == fingerprint(copy)
    tensor.add_(1)
    assert (fingerprint(tensor) == fingerprint(copy)) == (tensor.numel() == 0)


def test_fingerprint_of_a_whole_storage_is_that_of_the_storage() -> None:
    x = torch.rand(64)
    for view in (x, x.view(8, 8), x.view(torch.uint8)):
        assert shows_whole_storage(view)
        assert fingerprint(view) == fingerprint_of(x.untyped_storage())
    assert not any(map(shows_whole_storage, (x[1:], x.view(8, 8).t(), x.expand(2, 64), x[:1].expand(64))))


def bytes_read(op: Callable[[Tensor], Tensor]) -> float:
    """Return how often the first step of a chain of ops reads what it makes, to compare it."""
    read: list[int] = []
    taken = fingerprints._of_bytes

    def noted(address: int, nbytes: int) -> int:
        read.append(nbytes)
        return taken(address, nbytes)

    y = x = torch.rand(LENGTH, requires_grad=True)
    with mock.patch.object(fingerprints, "_of_bytes", noted):
        with save_recompute_policy("recompute_all", site=op):
            for _ in range(OPS):
                y = op(y)
        y.sum().backward()
    assert x.grad is not None
    return sum(read) / (OPS * x.nbytes)


def test_saved_tensor_is_read_when_it_is_made_packed_read_freed_and_unpacked() -> None:
    assert bytes_read(lambda y: y.tanh()) <= 5


def test_tensor_that_backward_does_not_unpack_is_read_when_it_is_made_and_read() -> None:
    assert bytes_read(lambda y: y + 1) <= 2


LARGE = torch.randint(-(2**31), 2**31, (3 * 2**18 + 1025,), dtype=torch.int32)


def halves_swapped(x: Tensor) -> Tensor:
    return x.roll(len(x) // 2)


def permuted(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x))]


def signs_changed(x: Tensor) -> Tensor:
    return x ^ -(2**31)


def two_swapped(x: Tensor) -> Tensor:
    x = x.clone()
    x[[5, 2**19]] = x[[2**19, 5]]
    return x


def last_changed(x: Tensor) -> Tensor:
    x = x.clone()
    x[-1] += 1
    return x


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize(
    "change", [halves_swapped, permuted, signs_changed, two_swapped, last_changed], ids=lambda f: f.__name__
)
def test_sum_of_many_elements_changes_with_them(
    change: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    assert _sum(LARGE.view(dtype)) != _sum(change(LARGE).view(dtype))


@pytest.mark.parametrize("offset", [1, 2, 8])
def test_sum_of_many_elements_is_that_of_a_copy_at_another_offset(offset: int) -> None:
    assert _sum(LARGE[offset:]) == _sum(LARGE[offset:].clone())


def test_sum_of_many_elements_runs_few_kernels() -> None:
    with SeenOps() as few:
        _sum(LARGE)
    with SeenOps() as also_few:
        _sum(LARGE.repeat(16))
    assert len(also_few.ops) <= len(few.ops) + 20 < 120
