from .app import create_app
from .cli.server import RefusedToListen, serve
from .settings import InvalidSettings, Settings

__all__ = ["InvalidSettings", "RefusedToListen", "Settings", "create_app", "serve"]
