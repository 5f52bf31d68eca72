"""`python -m autoac.api`: the service, with its settings from the environment."""

from __future__ import annotations

import sys

from autoac.api.server import RefusedToListen, serve
from autoac.api.settings import InvalidSettings

if __name__ == "__main__":
    try:
        serve()
    except (InvalidSettings, RefusedToListen) as error:
        print(f"autoac: {error}", file=sys.stderr)
        sys.exit(2)
