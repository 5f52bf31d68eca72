"""Decide during forward what a step without a plan holds.

Under "recompute_all" alone, the first unpack of backward recomputes all of forward, and everything stays
cached for later: nothing is saved. A *cut* holds the recorded versions that are live before an op runs, so
that a recompute starts there. A cut is made where little is live next to what was made since the last one:

    made since the last cut >= FACTOR * live, and made since the last cut >= bytes held so far

The second rule is the square root of Chen et al. (2016, arXiv:1604.06174), found online. No blocks need to be
known.

A worked example, layers that make 100 bytes inside and 10 between them:

    before layer    made    live    held    cut
    2               110     10      0       holds the 10 bytes between layers 1 and 2
    3               110     10      10      holds 10 more; so do layers 4 to 12
    13              110     10      110     holds 10 more
    14              110     10      120     not yet: 110 < 120
    15              220     10      120     holds 10 more; from here on before every second layer

- What a cut holds is held when an op reads it next. No recompute starts from what no op reads.
- If an op writes it in place first, its new version is held instead. If an op writes it later, what is held
  is copied before, and the new version is recorded like any other.
- Live is what recorded ops made since the last cut, unless no op has read it while the newer half of these
  bytes was made: a caller's variables keep much alive that nothing reads again, such as embeddings.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

FACTOR = 6.0  # bytes made for each live byte: chosen on the models of benchmarks.observed_step
RECENT = 0.5  # share of the bytes made since the last cut: what no op read while they were made is idle
PATIENCE = 0.01  # a decision is repeated once this share of the bytes has been made in addition


@dataclass(slots=True)
class _Live:
    """A storage that a recorded op made since the last cut, while it is alive."""

    ref: weakref.ref[torch.UntypedStorage]
    nbytes: int
    serial: int  # of its newest version
    read_at: int  # bytes made since the last cut when an op made, wrote or read it


class Cuts:
    """Count what the recorded ops of one region make, and say when to cut.

    Attributes:
        due: serials of the versions that are to be held when an op reads them next.
    """

    def __init__(self, factor: float = FACTOR) -> None:
        self.due: set[int] = set()
        self._factor = factor
        self._made = 0  # bytes made since the last cut
        self._held = 0  # bytes that were live at the cuts so far
        self._decide_at = 0  # bytes made since the last cut before which nothing is decided
        self._live: dict[int, _Live] = {}  # by serial of the newest version

    def note_made(self, storage: torch.UntypedStorage, serial: int) -> None:
        """Count `storage`, which a recorded op has just made, with the serial of its version."""
        live = self._live

        def free(_: weakref.ref[torch.UntypedStorage]) -> None:
            live.pop(made.serial, None)

        nbytes = storage.nbytes()
        self._made += nbytes
        made = live[serial] = _Live(weakref.ref(storage, free), nbytes, serial, self._made)

    def note_read(self, serial: int) -> bool:
        """Note that an op reads a version; return True if the version is to be held now."""
        if serial in self._live:
            self._live[serial].read_at = self._made
        if serial not in self.due:
            return False
        self.due.remove(serial)
        return True

    def note_rewritten(self, old: int, new: int) -> None:
        """Let the version with the serial `new` take the place of `old`, which an op has written over."""
        made = self._live.pop(old, None)
        if made is not None:
            made.serial, made.read_at = new, self._made
            self._live[new] = made
        if old in self.due:
            self.due.remove(old)
            self.due.add(new)

    def cut(self) -> None:
        """Make a cut before an op, if it is time for one."""
        if self._made < self._decide_at or not self._live:
            return
        recent = (1 - RECENT) * self._made
        live = sum(made.nbytes for made in self._live.values() if made.read_at >= recent)
        if self._made < self._factor * live:
            self._decide_at = int(self._made * (1 + PATIENCE))
            return
        self.due.update(self._live)
        self._held += live
        self._made, self._decide_at, self._live = 0, self._held, {}
