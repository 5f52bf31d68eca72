"""The `autoac` command: `validate` without torch, for which no commit should wait; the rest as ever."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; leaves with its exit code."""
    if sys.argv[1:2] == ["validate"]:
        from autoac.offline import validate

        raise SystemExit(validate.main(sys.argv[2:]))
    from ac_client.cli import main as whole

    whole()
