"""Keep the user's pins: modules whose ops must be saved or must be recomputed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import nn

from autoac.tape.errors import PinConflict
from autoac.tape.torch_facts.module_paths import ROOT

MUST_SAVE, MUST_RECOMPUTE = "must_save", "must_recompute"

pins: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
"""The word that pins all ops inside of a module's forward."""


def pins_of(model: nn.Module) -> Mapping[str, str]:
    """Return the pin that applies at each module path of `model`, without paths that have none.

    Raises:
        PinConflict: a module is pinned one way and one inside it the other way.
    """
    found: dict[str, tuple[str, str]] = {}  # path -> pin, and the path at which it was set
    for name, module in model.named_modules():
        path = name or ROOT
        parent = name.rpartition(".")[0] or ROOT
        outer = found.get(parent) if name else None
        own = pins.get(module)
        if own is None and outer is None:
            continue
        if own is not None and outer is not None and own != outer[0]:
            raise PinConflict(outer[1], outer[0], path, own)
        found[path] = (own, path) if own is not None else outer  # type: ignore[assignment]
    return {path: word for path, (word, _) in found.items()}
