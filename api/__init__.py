"""The planning service: a profile and a budget in, a policy out. Imports no torch.

The names are loaded when they are asked for: the child that solves a request lives in this package too,
and has no use for a web server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoac.api.app import create_app
    from autoac.api.server import RefusedToListen, serve
    from autoac.api.settings import InvalidSettings, Settings

__all__ = ["InvalidSettings", "RefusedToListen", "Settings", "create_app", "serve"]

_HOME = {
    "InvalidSettings": "settings",
    "RefusedToListen": "server",
    "Settings": "settings",
    "create_app": "app",
    "serve": "server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
