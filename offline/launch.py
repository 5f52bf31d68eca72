"""The `autoac` command without torch where it needs none: `validate`, for which no commit should wait, and
the commands of the service, whose processes stay.
"""

from __future__ import annotations

import os
import sys

SERVICE = {
    "serve": "Run the planning service. Settings are environment variables (docs/service.md).",
    "worker": "Solve the service's jobs from PostgreSQL, on as many machines as wanted.",
    "db": "The service's database: upgrade it, or prune what is old.",
    "keys": "The service's keys: create, list, revoke.",
    "doctor": "Look at the service's settings, database and solver, and say what to do.",
}
"""Its commands, which `autoac.api.cli.commands` runs, and what `autoac --help` says of them."""


def main() -> None:
    """Run the command line; leaves with its exit code, and quietly where nobody reads on (`| head`)."""
    try:
        try:
            _run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # What is left unwritten is not to be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _run() -> None:
    if sys.argv[1:2] == ["validate"]:
        from autoac.offline import validate

        raise SystemExit(validate.main(sys.argv[2:]))
    if sys.argv[1:2] and sys.argv[1] in SERVICE:
        from autoac.api.cli import commands

        raise SystemExit(commands.main(sys.argv[1:]))
    from ac_client.cli.main import main as whole

    whole()
