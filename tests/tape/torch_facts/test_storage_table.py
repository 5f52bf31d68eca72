"""Test that any view finds the entry of its storage, and that entries are deleted with storages."""

from __future__ import annotations

import copy
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from autoac.tape.torch_facts.storage_table import PRUNED_AT, StorageTable
from autoac.tape.torch_facts.view_recipes import disjoint, recipe_of


class Known:
    """An entry whose deletion can be observed."""


def entries(table):
    """Return the entries of the storages that are alive."""
    storages = {id(ref): ref() for ref in table.refs}.values()
    found = (s.__dict__.get(table.name) for s in storages if s is not None)
    return [entry for entry in found if entry is not None]


def test_views_share_an_entry_and_copies_do_not() -> None:
    table: StorageTable[str] = StorageTable()
    tensor = torch.zeros(4, 4)
    table.set(tensor, "known")
    assert table.get(tensor.t()[1:]) == table.get(tensor.detach()) == "known"
    assert table.of(tensor.untyped_storage()) == "known"
    assert table.get(tensor.clone()) is None
    assert table.get(copy.deepcopy(tensor)) is None
    assert table.of(copy.deepcopy(tensor.untyped_storage())) is None


def test_entry_is_deleted_with_the_last_view_of_its_storage() -> None:
    table: StorageTable[Known] = StorageTable()
    tensor = torch.zeros(4)
    view = tensor[1:]
    table.set(tensor, Known())
    known = weakref.ref(entries(table)[0])
    del tensor
    assert table.get(view) is known() is not None
    del view
    assert known() is None
    assert entries(table) == []


def test_entry_lives_while_only_autograd_holds_the_storage() -> None:
    table: StorageTable[str] = StorageTable()
    x = torch.zeros(4, requires_grad=True)
    y = x.exp()
    table.set(y, "saved")
    z = y * 2
    del y
    assert entries(table) == ["saved"]
    z.sum().backward()
    assert entries(table) == []


def test_tables_are_independent_and_delete_their_entries() -> None:
    tensor = torch.zeros(4)
    before = dict(tensor.untyped_storage().__dict__)
    one: StorageTable[int] = StorageTable()
    other: StorageTable[int] = StorageTable()
    one.set(tensor, 1)
    other.set(tensor, 2)
    assert (one.get(tensor), other.get(tensor)) == (1, 2)
    one.clear()
    assert (one.get(tensor), other.get(tensor)) == (None, 2)
    del other
    assert tensor.untyped_storage().__dict__ == before


def test_entry_that_is_dropped_and_set_again_is_listed_once() -> None:
    table: StorageTable[int] = StorageTable()
    tensor = torch.zeros(4)
    for i in range(3):
        table.set(tensor, i)
        table.drop(tensor)
        table.drop(tensor)
        assert table.get(tensor) is None
    table.set(tensor, 3)
    assert entries(table) == [3]


def test_dead_storages_are_pruned_from_the_count() -> None:
    table: StorageTable[int] = StorageTable()
    kept = [torch.zeros(1) for _ in range(PRUNED_AT)]
    for i in range(10 * PRUNED_AT):
        table.set(torch.zeros(1), i)
    assert len(table.refs) <= PRUNED_AT
    for i, tensor in enumerate(kept):
        table.set(tensor, i)
    for i in range(10 * PRUNED_AT):
        table.set(torch.zeros(1), i)
    assert PRUNED_AT <= len(table.refs) <= 2 * PRUNED_AT
    assert sorted(entries(table)) == list(range(PRUNED_AT))


def test_tables_of_several_threads_have_names_of_their_own() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            made = pool.map(lambda _: [StorageTable[int]().name for _ in range(30_000)], range(4))
            names = [name for one in made for name in one]
    finally:
        sys.setswitchinterval(interval)
    assert len(set(names)) == len(names) == 120_000


def slices() -> list[Tensor]:
    """Return windows of all kinds on one storage of 24 bytes."""
    base = torch.zeros(24, dtype=torch.uint8)
    cube, wide = base.view(2, 3, 4), base.view(torch.int16).view(3, 4)
    chunks = [chunk for dim in range(3) for chunk in cube.unsafe_chunk(2, dim)]
    turned = [part.transpose(0, 1) for part in wide.unsafe_chunk(2, 1)]
    return [
        cube,
        wide,
        *chunks,
        *turned,
        base[5:17:3],
        cube[:, 1:, ::2],
        cube[1, 1],
        cube[:0],
        wide[::2, 1::2],
    ]


def shown(tensor: Tensor) -> set[int]:
    """Return the bytes of the storage that `tensor` views, one by one."""
    itemsize, strides = tensor.itemsize, tensor.stride()
    starts = {tensor.storage_offset()} if tensor.numel() else set()
    for size, stride in zip(tensor.shape, strides, strict=True):
        starts = {start + i * stride for start in starts for i in range(size)}
    return {start * itemsize + i for start in starts for i in range(itemsize)}


def test_disjoint_windows_share_no_byte() -> None:
    called = [(a, b) for a in slices() for b in slices() if disjoint(recipe_of(a), recipe_of(b))]
    assert called
    for a, b in called:
        assert not shown(a) & shown(b)
