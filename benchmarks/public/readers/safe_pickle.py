"""Open a stranger's pickle without running any code of it.

Lists, dicts, sets, numbers, text and numpy arrays are read as they are. An object of the authors' classes
becomes a `Record`, which holds the object's attributes and has no behavior. Any other class or function in a
pickle is refused.
"""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy._core import multiarray


class UnsafePickle(pickle.UnpicklingError):
    """A pickle asks for a function that is not needed to hold plain data."""


class Record:
    """The attributes of an object whose class is unknown here."""

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise UnsafePickle(f"the state of an object must be a dict, got {type(state).__name__}")
        self.fields = state

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def _nested_class(_owner: type, _name: str) -> type[Record]:
    """Stand in for `getattr`, with which a pickle names a class inside a class."""
    return Record


_ALLOWED: dict[tuple[str, str], Any] = {
    ("builtins", "set"): set,
    ("builtins", "list"): list,
    ("builtins", "getattr"): _nested_class,
    ("collections", "defaultdict"): collections.defaultdict,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}
for _module in ("numpy.core.multiarray", "numpy._core.multiarray"):
    _ALLOWED[_module, "scalar"] = multiarray.scalar
    _ALLOWED[_module, "_reconstruct"] = multiarray._reconstruct

OWN_CLASSES = ("monet.", "checkmate.")  # modules of the schedules' authors
OWN_NAMES = {"CheckmateSolution"}  # saved from a script


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module.startswith(OWN_CLASSES) or (module == "__main__" and name in OWN_NAMES):
            return Record
        raise UnsafePickle(f"a pickle must hold plain data and numpy arrays, got {module}.{name}")


def read(path: Path) -> Any:
    """Return the data in the pickle at `path`.

    Raises:
        UnsafePickle: it names a function or a class other than those above.
    """
    with path.open("rb") as file:
        return _Unpickler(file).load()
