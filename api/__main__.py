"""Run a command of the service, `serve` by default: `python -m autoac.api COMMAND`."""

from __future__ import annotations

import sys

from autoac.api.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
