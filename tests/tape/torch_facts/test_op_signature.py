"""Test what makes two calls of an op the same work."""

from __future__ import annotations

import torch

from autoac.tape.torch_facts.op_signature import signature_of


def test_storage_is_described_by_its_size() -> None:
    """The repr of a storage reads every byte, on a GPU one by one."""
    name, storage = "aten.set_.source_Storage_storage_offset", torch.empty(1 << 28).untyped_storage()
    target = torch.empty(0)
    found = signature_of(name, (target, storage, 0, [4]), {})
    assert found == signature_of(name, (target, torch.empty(1 << 28).untyped_storage(), 0, [4]), {})
    assert found != signature_of(name, (target, torch.empty(1).untyped_storage(), 0, [4]), {})
