"""The `autoac` command without torch where it needs none: `validate`, for which no commit should wait, and
the commands of the service, whose processes stay.
"""

from __future__ import annotations

import sys

SERVICE = {
    "serve": "Run the planning service. Settings are environment variables (docs/service.md).",
    "worker": "Solve the service's jobs from PostgreSQL, on as many machines as wanted.",
    "db": "The service's database: upgrade it, or prune what is old.",
    "keys": "The service's keys: create, list, revoke.",
    "doctor": "Look at the service's settings, database and solver, and say what to do.",
}
"""Its commands, which `autoac.api.commands` runs, and what `autoac --help` says of them."""


def main() -> None:
    """Run the command line; leaves with its exit code."""
    if sys.argv[1:2] == ["validate"]:
        from autoac.offline import validate

        raise SystemExit(validate.main(sys.argv[2:]))
    if sys.argv[1:2] and sys.argv[1] in SERVICE:
        from autoac.api import commands

        raise SystemExit(commands.main(sys.argv[1:]))
    from ac_client.cli import main as whole

    whole()
