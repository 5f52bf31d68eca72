"""Decide during forward what a step without a plan holds.

Under "recompute_all" alone, the first unpack of backward recomputes all of forward, and everything stays
cached for later: nothing is saved. A *cut* holds the recorded versions that are live before an op runs, so
that a recompute starts there. A cut is made where little is live next to what was made since the last one:

    made since the last cut >= FACTOR * live, and made since the last cut >= bytes held so far

After a module that has called others has returned, half the factor is enough: the variables of its
forward are gone, so almost all that is live is read again. The second rule is the square root of Chen et al.
(2016, arXiv:1604.06174), found online. No blocks need to be known.

A worked example, layers of several modules that make 100 bytes inside and 10 between them:

    before layer    made    live    held    cut
    2               110     10      0       holds the 10 bytes between layers 1 and 2
    3               110     10      10      holds 10 more; so do layers 4 to 12
    13              110     10      110     holds 10 more
    14              110     10      120     not yet: 110 < 120
    15              220     10      120     holds 10 more; from here on before every second layer

- Live is what recorded ops made since the last cut, in storages that something still refers to.
- What a cut holds is held when an op reads it next. No recompute starts from what no op reads.
- What the model or the loop goes on holding, as hooks do that keep inputs, is not recomputed while it has
  the contents that the op has made (`HeldElsewhere` in replay.py).
- If an op writes it in place first, its new version is held instead. If an op writes it later, what is held
  is copied before, and the new version is recorded like any other.
"""

from __future__ import annotations

import weakref

import torch

FACTOR = 8.0  # bytes made for each live byte: chosen on the models of benchmarks.observed_step
AFTER_EXIT = 0.5  # share of the factor after a module that has called others has returned


class _Live(weakref.ref[torch.UntypedStorage]):
    """A storage that a recorded op made since the last cut, while it is alive."""

    __slots__ = ("nbytes", "serial")

    nbytes: int
    serial: int  # of its newest version


class Cuts:
    """Count what the recorded ops of one region make, and say when to cut.

    Attributes:
        due: bytes of the versions that are to be held when an op reads them next, by serial.
    """

    def __init__(self, factor: float = FACTOR) -> None:
        self.due: dict[int, int] = {}
        self._factor = factor
        self._last_exit = ""  # path of the module that returned last
        self._after_exit = False  # a module that has called others has returned since the last op
        self._made = 0  # bytes made since the last cut
        self._held = 0  # bytes that cuts hold
        self._live: dict[int, _Live] = {}  # by serial of the newest version
        self._live_bytes = 0  # of these

    def note_made(self, storage: torch.UntypedStorage, serial: int) -> None:
        """Count `storage`, which a recorded op has just made, with the serial of its version."""
        self._made += storage.nbytes()
        self._note_live(storage, serial)

    def _note_live(self, storage: torch.UntypedStorage, serial: int) -> None:
        made = self._live[serial] = _Live(storage, self._free)
        made.serial, made.nbytes = serial, storage.nbytes()
        self._live_bytes += made.nbytes

    def _free(self, made: _Live) -> None:
        if self._live.pop(made.serial, None) is not None:
            self._live_bytes -= made.nbytes

    def note_read(self, serial: int) -> bool:
        """Note that an op reads a version; return True if the version is to be held now."""
        nbytes = self.due.pop(serial, None)
        if nbytes is None:
            return False
        self._held += nbytes
        return True

    def note_rewritten(self, storage: torch.UntypedStorage, old: int, new: int) -> None:
        """Let the version with the serial `new` take the place of `old`, which an op has written over."""
        made = self._live.pop(old, None)
        if made is not None:
            made.serial = new
            self._live[new] = made
        elif old in self.due:
            self.due[new] = self.due.pop(old)
        else:  # a cut holds the old version
            self._note_live(storage, new)

    def note_exit(self, path: str) -> None:
        """Note that the module at `path` returns."""
        self._after_exit |= self._last_exit.startswith(f"{path}.")
        self._last_exit = path

    def cut(self) -> None:
        """Make a cut before an op, if it is time for one."""
        factor, self._after_exit = self._factor * (AFTER_EXIT if self._after_exit else 1), False
        if self._live and self._made >= max(factor * self._live_bytes, self._held):
            live, self._live = self._live, {}
            self._made = self._live_bytes = 0
            self.due |= {serial: made.nbytes for serial, made in live.items()}
