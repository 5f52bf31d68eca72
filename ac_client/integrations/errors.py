"""Errors of the integrations.

    MissingLibrary (ModuleNotFoundError)   the library is not installed

An integration also raises ApplyError if a training cannot be planned for another reason.
"""

from __future__ import annotations


class MissingLibrary(ModuleNotFoundError):
    """The library of an integration is not installed."""

    def __init__(self, name: str, install: str) -> None:
        self.install = install
        super().__init__(f"{name} is not installed: pip install {install}", name=name)

    def __reduce__(self) -> tuple[type[MissingLibrary], tuple[str | None, str]]:
        return MissingLibrary, (self.name, self.install)
