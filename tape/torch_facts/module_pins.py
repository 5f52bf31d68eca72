"""Keep the user's pins: modules whose ops must be saved or must be recomputed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import nn

from autoac.tape.errors import PinConflict
from autoac.tape.torch_facts.module_paths import ROOT

MUST_SAVE, MUST_RECOMPUTE = "must_save", "must_recompute"

_pins: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def set_pin(module: nn.Module, word: str) -> None:
    """Pin all ops that run inside `module`'s forward."""
    _pins[module] = word


def drop_pin(module: nn.Module) -> None:
    """Remove the pin of `module`, if there is one."""
    _pins.pop(module, None)


def pins_of(model: nn.Module) -> Mapping[str, str]:
    """Return the pin that applies at each module path of `model`, without paths that have none.

    Raises:
        PinConflict: a module is pinned one way and one inside it the other way.
    """
    pins: dict[str, tuple[str, str]] = {}  # path -> pin, and the path at which it was set
    for name, module in model.named_modules():
        path = name or ROOT
        parent = name.rpartition(".")[0] or ROOT
        outer = pins.get(parent) if name else None
        own = _pins.get(module)
        if own is None and outer is None:
            continue
        if own is not None and outer is not None and own != outer[0]:
            raise PinConflict(outer[1], outer[0], path, own)
        pins[path] = (own, path) if own is not None else outer  # type: ignore[assignment]
    return {path: word for path, (word, _) in pins.items()}
