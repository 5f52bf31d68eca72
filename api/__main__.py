"""`python -m autoac.api`: the service, or another of its commands, with settings from the environment."""

from __future__ import annotations

import sys

from autoac.api.cli.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
