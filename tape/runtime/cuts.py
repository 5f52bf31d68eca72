"""Decide during forward what a step without a plan holds.

Under "recompute_all" alone, the first unpack of backward recomputes all of forward, and everything stays
cached for later: nothing is saved. A *cut* holds the recorded versions that are live before an op runs, so
that a recompute starts there. A cut is made where little is live next to what was made since the last one:

    made since the last cut >= FACTOR * live, and made since the last cut >= bytes held so far

After a module that has called others has returned, half the factor is enough: the variables of its
forward are gone, so almost all that is live is read again. The second rule is the square root of Chen et al.
(2016, arXiv:1604.06174), found online. No blocks need to be known.

A recompute needs what the cuts before it hold, and makes what was made up to the next cut. While the last one
needs the most, older cuts are too many, and cost next to nothing to drop: what was made before a cut runs
again in any case, but for the last ops, which only make what the cut holds. So a cut is dropped, the oldest
first, once

    held before it + made from the cut before to the next + gradients <= bytes held + made since the last

The left side is what the longer recompute needs, late in backward, when most gradients exist. A cut stays if
the model or the loop still has what it holds, or if ops after the next cut have read it: recomputes from
later cuts would then go back to the cut before. All cuts stay once an op writes what recorded ops have read
from outside: to recompute what they hold would take a copy of it.

No gradient flows through layers that do not train. What is live there at a cut is saved, as if its op were:
the ops that made it need not run again, and it is freed when no op that backward runs again reads it.

A worked example, layers of several modules that make 100 bytes inside and 10 between them:

    before layer    made    live    held    cut
    2               110     10      0       holds the 10 bytes between layers 1 and 2
    3               110     10      10      holds 10 more; so do layers 4 to 12
    13              110     10      110     holds 10 more; the oldest is dropped: 0 + 220 <= 110 + 110
    15              110     10      110     holds 10 more; one is dropped: 10 + 220 <= 120 + 110
    16              110     10      120     not yet: 110 < 120
    17              220     10      70      holds 10 more; of those up to layer 13, every second is dropped

- Live is what recorded ops made since the last cut, in storages that something still refers to.
- What a cut holds is held when an op reads it next. No recompute starts from what no op reads.
- What the model or the loop goes on holding, as hooks do that keep inputs, is not recomputed while it has
  the contents that the op has made (`HeldElsewhere` in replay.py).
- If an op writes it in place first, its new version is held instead. If an op writes it later, what is held
  is copied before, and the new version is recorded like any other.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from autoac.tape.runtime.nodes import Node, NodeVersion, make_by, next_order, pin_version

FACTOR = 8.0  # bytes made for each live byte: chosen on the models of benchmarks.observed_step
AFTER_EXIT = 0.5  # share of the factor after a module that has called others has returned


class _Live(weakref.ref[torch.UntypedStorage]):
    """A storage that a recorded op made since the last cut, while it is alive."""

    __slots__ = ("nbytes", "serial")

    nbytes: int
    serial: int  # of its newest version


@dataclass(slots=True, eq=False)
class _Cut:
    """Versions that are held so that a recompute starts before one op.

    Attributes:
        number: of the cut, in order.
        made: bytes made since the cut before.
        nbytes: held, of versions that may be recomputed again.
        held: these versions, each with the node that would recompute it.
    """

    number: int
    made: int
    nbytes: int = 0
    held: weakref.WeakKeyDictionary[NodeVersion, Node] = field(default_factory=weakref.WeakKeyDictionary)


class Cuts:
    """Count what the recorded ops of one region make, and say when to cut, and which cuts to drop.

    Args:
        factor: bytes made for each live byte at a cut.
        gradients: bytes of the gradients that backward is to allocate.

    Attributes:
        due: versions that are to be held when an op reads them next, by serial, each with its cut's number.
    """

    def __init__(self, factor: float = FACTOR, gradients: int = 0) -> None:
        self.due: dict[int, int] = {}
        self._factor, self._gradients = factor, gradients
        self._last_exit = ""  # path of the module that returned last
        self._after_exit = False  # a module that has called others has returned since the last op
        self._made = 0  # bytes made since the last cut
        self._held = 0  # bytes that cuts hold
        self._live: dict[int, _Live] = {}  # by serial of the newest version
        self._live_bytes = 0  # of these
        self._number = 0  # of cuts, dropped ones included
        self._cuts: dict[int, _Cut] = {}  # those that may be dropped, by number
        self._last_reads: dict[int, int] = {}  # number of cuts at the last read of a version, by serial
        self._next_drop = math.inf  # bytes that the step must need before another cut can be dropped

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

    def note_read(self, version: NodeVersion, tensor: Tensor) -> bool:
        """Note that an op reads `tensor`, which shows `version`; return True if it is to be held now.

        If a gradient flows through it, it is held on return. Else the caller saves it.
        """
        self._last_reads[version.serial] = self._number
        number = self.due.pop(version.serial, 0)
        if number and tensor.requires_grad:
            node, nbytes = version.node, pin_version(version, tensor, next_order()).nbytes
            self._held += nbytes
            if (cut := self._cuts.get(number)) is not None:
                cut.held[version], cut.nbytes = node, cut.nbytes + nbytes
        return number > 0

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
            self._number += 1
            self._cuts[self._number] = _Cut(self._number, self._made)
            self.due |= dict.fromkeys(self._live, self._number)
            self._live, self._live_bytes, self._made, self._next_drop = {}, 0, 0, 0
        self.drop()

    def drop(self) -> None:
        """Drop cuts, the oldest first, without which the step needs no more than it needs now."""
        needed = self._held + self._made
        if needed < self._next_drop:
            return
        self._next_drop = math.inf
        before = self._held - sum(cut.nbytes for cut in self._cuts.values())
        for last, cut in pairwise(list(self._cuts.values())):
            needs = before + last.made + cut.made + self._gradients
            is_empty = not last.held and last.number not in self.due.values()  # as where nothing trains
            if is_empty or (needs <= needed and all(self._is_over(version, last) for version in last.held)):
                for version, node in last.held.items():
                    make_by(version, node)
                cut.made += self._cuts.pop(last.number).made
                self._held -= last.nbytes
                needed = self._held + self._made
            else:
                self._next_drop = min(self._next_drop, needs) if needs > needed else self._next_drop
                before += last.nbytes

    def _is_over(self, version: NodeVersion, cut: _Cut) -> bool:
        """Return True if nothing but `cut` holds `version`, and nothing after the next cut has read it."""
        return version.tensor_ref() is None and self._last_reads[version.serial] <= cut.number

    def settle(self) -> None:
        """Drop none of the cuts so far from here on, and let go of what would recompute them."""
        self._cuts.clear()
