"""Resolve autoac together with each library of training that people use. Nothing is installed.

Usage: python tools/check_resolve.py UV [PYTHON VERSION ...]

UV is the program of that name; `make check-resolve` installs it. The client and the service must each resolve
with a torch of the supported range, next to the newest release of the library that allows it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIBRARIES = (
    "transformers==4.57.*",
    "transformers>=5",
    "trl",
    "peft",
    "accelerate",
    "lightning",
    "torchtitan",
    "liger-kernel",
    "vllm",
    "deepspeed",
    "litgpt",
    "axolotl",
    "unsloth",
    "diffusers",
)


def resolve(uv: str, python: str, *requirements: str) -> dict[str, str]:
    """Return the version of each package that would be installed; {} if nothing fits."""
    command = (
        uv,
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--python-version",
        python,
        "-",
    )
    done = subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE))


def main(uv: str, *pythons: str) -> int:
    """Print what each library is resolved to. Return the number of those that nothing fits."""
    failed = 0
    for python in pythons or ("3.11", "3.12", "3.13"):
        for library in LIBRARIES:
            for extra in ("", "[service]"):
                found = resolve(uv, python, f"autoac{extra} @ {ROOT.as_uri()}", library)
                name = re.split("[=>]", library)[0]
                versions = f"torch {found['torch']}, {name} {found[name]}" if found else "nothing fits"
                print(f"Python {python}, autoac{extra} and {library}: {versions}", flush=True)
                failed += not found
    return failed


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
