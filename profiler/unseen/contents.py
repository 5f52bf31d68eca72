"""Compare the contents of storages over one forward, to find writes by kernels that no mode sees.

A version of a storage may be recomputed only if every write to it was recorded. So its fingerprint is taken
when the op that writes it ends, and again whenever a recorded op reads it or autograd packs it:

    t = x @ w      fingerprint 17      aten.mm is recorded
    kernel(t)                          a Triton kernel, which no dispatch mode sees
    u = t.sin()    fingerprint 23      so aten.mm must be saved, and so must the ops that read `t` before

Fingerprints stay on the device until `unseen_writes` reads all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoac.planner.formats.profile import OVERWRITTEN, UNSEEN
from autoac.profiler.torch_facts.storage_table import StorageTable
from autoac.profiler.unseen.fingerprints import Fingerprint, KeptWeights, can_compare, storage_fingerprint
from autoac.profiler.unseen.last_look import LastLook

_AT_THE_END = 1 << 62  # in place of an op that reads


class Contents:
    """The fingerprints of one forward, in order, by version and by storage from outside."""

    def __init__(self) -> None:
        self._weights = KeptWeights()
        self._last_look = LastLook[int]()
        self._fingerprints: list[Fingerprint] = []
        # Of each fingerprint: version, and the op that read it; -1 for the op that wrote it.
        self._events: list[tuple[int, int]] = []
        self._made_up: StorageTable[bool] = StorageTable()  # storages with numbers of the profiler's own
        self._outside: StorageTable[int] = StorageTable()  # negative numbers of storages from outside
        # Storages from outside, to be compared at the end: number, a tensor on it, its bytes.
        self._kept: list[tuple[int, Tensor, int]] = []

    def note_written(self, version: int, tensor: Tensor) -> None:
        """Take the fingerprint of `version`, which an op has written to the storage of `tensor`."""
        self._look_last()
        self._add(version, -1, tensor)
        self._last_look.hold(tensor, version)

    def _look_last(self, *, everything: bool = False) -> None:
        for tensor, version in self._last_look.released(everything=everything):
            self._add(version, _AT_THE_END, tensor)

    def note_read(self, version: int, tensor: Tensor, op: int) -> None:
        """Take the fingerprint of `version`, which `op` reads or autograd packs before `op`."""
        self._add(version, op, tensor)

    def note_read_outside(self, tensor: Tensor, op: int) -> None:
        """Take the fingerprint of a storage that forward did not make, which `op` reads."""
        number = self._outside.get(tensor)
        if number is None:
            number = -1 - len(self._kept)
            self._outside.set(tensor, number)
            self._kept.append((number, tensor.detach(), tensor.untyped_storage().nbytes()))
            self._add(number, -1, tensor)
        self._add(number, op, tensor)

    def forget(self, tensor: Tensor) -> None:
        """Forget the storage of `tensor`, which forward did not make, since a recorded op writes it."""
        self._outside.drop(tensor)

    def note_made_up(self, tensor: Tensor) -> None:
        """Leave out the storage of `tensor`, which stands in for a saved tensor in forward."""
        self._made_up.set(tensor, True)

    def _add(self, version: int, op: int, tensor: Tensor) -> None:
        if not can_compare(tensor) or self._made_up.get(tensor):
            return
        self._events.append((version, op))
        self._fingerprints.append(storage_fingerprint(tensor))

    def unseen_writes(self, writers: Sequence[int]) -> dict[int, str]:
        """Return the ops that must be saved, each with the reason. Waits for the device.

        Args:
            writers: the op that wrote each version.
        """
        self._look_last(everything=True)
        for number, tensor, nbytes in self._kept:
            # FSDP frees gathered parameters, and gathers them again for backward.
            if self._outside.get(tensor) == number and tensor.untyped_storage().nbytes() == nbytes:
                self._add(number, _AT_THE_END, tensor)
        found: dict[int, str] = {}
        written: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        for (version, op), value in zip(self._events, _values(self._fingerprints), strict=True):
            if op < 0:
                written[version] = value
                readers[version] = []
            elif value == written[version]:
                readers[version].append(op)
            else:
                if version >= 0:
                    found[writers[version]] = UNSEEN
                for reader in readers[version]:
                    if reader != _AT_THE_END:
                        found.setdefault(reader, OVERWRITTEN)
                written[version], readers[version] = value, [op]
        return found


def _values(fingerprints: Sequence[Fingerprint]) -> list[int]:
    values = [value if isinstance(value, int) else 0 for value in fingerprints]
    on_devices = [(i, value) for i, value in enumerate(fingerprints) if isinstance(value, Tensor)]
    for device in {value.device for _, value in on_devices}:
        here = [(i, value) for i, value in on_devices if value.device == device]
        for (i, _), value in zip(here, torch.stack([value for _, value in here]).tolist(), strict=True):
            values[i] = value
    return values
