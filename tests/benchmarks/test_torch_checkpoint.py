"""Wrapped blocks compute what plain ones compute."""

import pytest
import torch

from ac_client.demo.setting import TINY, blocks, build_model, make_batch
from benchmarks.torch_checkpoint import wrap_blocks


@pytest.mark.parametrize("baseline", ["checkpoint", "selective"])
def test_wrapped_blocks_have_the_gradients_of_plain(baseline):
    torch.manual_seed(3)
    model, ids = build_model(TINY), make_batch(TINY)
    torch.manual_seed(4)
    plain = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    wrap_blocks(blocks(model, TINY), baseline)
    torch.manual_seed(4)
    wrapped = torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, wrapped, strict=True))
