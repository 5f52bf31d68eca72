"""Planned models that train beside one another on one device: each is planned with what the others hold.

A budget is the device's. So what other planned models hold is static to a plan: parameters, buffers,
gradients and optimizer state all the time, and what their forwards in flight have saved. Another model counts
once it has run a planned forward after `apply` was called for this one: before that nobody knows whether it
will train.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Protocol

import torch

_turns = itertools.count(1)


class Neighbor(Protocol):
    """A planned model, as others on its device see it."""

    @property
    def device(self) -> torch.device | None:
        """Where it trains; None if it is gone."""

    @property
    def held_nbytes(self) -> int:
        """The bytes that it holds all the time, and that its forwards in flight hold now."""

    @property
    def standing_nbytes(self) -> int:
        """The bytes that it holds between steps now."""

    def meet(self) -> None:
        """Judge what others hold, now that one of them trains."""

    def make_room(self, nbytes: int) -> None:
        """Plan the next step with so many bytes less, which another one lacks."""


class Neighbors:
    """The planned models that train beside one."""

    def __init__(self, of: Neighbor) -> None:
        self._of = weakref.ref(of)
        self._since = next(_turns)
        self._latest = 0  # turn at which a planned forward of this one began
        _all.add(self)

    def took_turn(self) -> None:
        """Note that a planned forward of this one begins."""
        self._latest = next(_turns)

    def close(self) -> None:
        """Count for others no longer."""
        _all.discard(self)

    def active(self) -> Iterator[Neighbor]:
        """Yield the others on the same device that have trained since this one was planned."""
        me = self._of()
        for other in list(_all):
            one = other._of()
            if other is self or other._latest <= self._since or one is None or me is None:
                continue
            if one.device is not None and one.device == me.device:
                yield one

    def ask_for_room(self, nbytes: int) -> None:
        """Have the active ones make room."""
        for one in self.active():
            one.make_room(nbytes)

    def held_nbytes(self) -> int:
        """Return the bytes that the active ones hold."""
        return sum(one.held_nbytes for one in self.active())


_all: weakref.WeakSet[Neighbors] = weakref.WeakSet()
