"""Decide during forward what an observed step holds, when there is no plan yet.

Under "recompute_all" alone, the first unpack of backward recomputes all of forward, and everything stays cached
for later: nothing is saved. A *cut* holds all recorded versions that are live before an op runs, so that a
recompute starts there. A cut is made where little is live compared with what was made since the last one:

    made since the last cut >= FACTOR * live, and made since the last cut >= bytes held so far

The second rule is the square root of Chen et al. (2016, arXiv:1604.06174), found online: n equal layers get about
sqrt(n) cuts, each as far from the last as all cuts are large. No blocks need to be known.

A worked example, layers of 100 bytes inside and 10 bytes between them, FACTOR 8:

    before layer    made    live    held    cut
    2               110     10      0       holds the 10 bytes between layers 1 and 2
    3               110     10      10      holds 10 more
    ...
    13              110     10      110     not yet: 110 < 120 from here on
    14              220     10      110     holds 10 more; every second layer from here on

What a cut holds is decided when the cut is made, and held when an op reads it next: what no op reads any more is
no input of a recompute. If the next op writes it in place instead, its new version is held.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

FACTOR = 8  # between 4 (best for ResNet) and 16 (best for GPT-2)
SMALLEST = 1 << 12


class Cuts:
    """Count what the recorded ops of one region make, and say when to cut.

    Attributes:
        due: serials of the versions that are to be held when an op reads them next.
    """

    def __init__(self) -> None:
        self.due: set[int] = set()
        self._made = 0  # bytes made since the last cut
        self._live = 0  # bytes of these that are alive
        self._held = 0  # bytes that were live at the cuts so far
        # The storages made since the last cut that are alive, by id of their reference.
        self._since_cut: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def note_made(self, storage: torch.UntypedStorage) -> None:
        """Count `storage`, which a recorded op has just made."""
        nbytes = storage.nbytes()
        since_cut = self._since_cut

        def freed(ref: weakref.ref[torch.UntypedStorage]) -> None:
            if since_cut.pop(id(ref), None) is not None and since_cut is self._since_cut:
                self._live -= nbytes

        ref = weakref.ref(storage, freed)
        since_cut[id(ref)] = ref
        self._made += nbytes
        self._live += nbytes

    def note_rewritten(self, old: int, new: int) -> None:
        """Hold the version with the serial `new` in place of `old`, which an op has written over."""
        if old in self.due:
            self.due.remove(old)
            self.due.add(new)

    def cut(self) -> Iterable[torch.UntypedStorage]:
        """Return the storages that a cut at this moment holds: none if it is too early for one."""
        if self._made < max(FACTOR * self._live, self._held, SMALLEST) or not self._live:
            return ()
        live = [storage for ref in self._since_cut.values() if (storage := ref()) is not None]
        self._held += self._live
        self._made, self._live, self._since_cut = 0, 0, {}
        return live
