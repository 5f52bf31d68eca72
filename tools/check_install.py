"""Install the wheel in an empty environment, without our constraints, and use the command as a newcomer does.

Usage: python tools/check_install.py torch==VERSION [FOLDER]

torch comes first and by itself: as a dependency, pip would take a build of several gigabytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
SETUP = """
import torch

def make():
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
    return torch.nn.Sequential(*layers).train(), (torch.randn(4096, 512),), {}
"""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(*command: str | Path, folder: Path = ROOT, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command that must end with this exit code."""
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode != code:
        raise SystemExit(
            f"{' '.join(map(str, command))}: the exit code must be {code}, got {done.returncode}\n"
            f"{done.stdout}{done.stderr}"
        )
    return done


def check(promise: str, kept: bool, found: object = "") -> None:
    """Print a promise that is kept, or end with what was found in its place."""
    if not kept:
        raise SystemExit(f"not kept: {promise}\n{found}")
    print(f"ok  {promise}")


def is_json(text: str) -> bool:
    """Return True if `text` is JSON and nothing else."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def check_page(wheel: Path) -> None:
    """Check the metadata that become the package's page."""
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = message_from_bytes(
            archive.read(next(name for name in names if name.endswith("/METADATA")))
        )
    page = str(metadata.get_payload())
    relative = re.findall(r"\]\((?!https?:|#)[^)]*\)", page)
    check("the package's page has no relative link", "](http" in page and not relative, relative)
    check("the package names its authors", bool(metadata["Author"] or metadata["Author-Email"]))
    check("the package has links", len(metadata.get_all("Project-URL") or []) >= 3)
    licenses = [name for name in names if ".dist-info/licenses/" in name]
    check("the wheel has the licenses of autoac and uPlot", len(licenses) == 2, licenses)
    check(
        "the license expression names both",
        metadata["License-Expression"] == "Apache-2.0 AND MIT",
        metadata["License-Expression"],
    )


def main(torch: str, folder: Path) -> None:
    """Build, install and use the wheel in `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    wheel = next(folder.glob("autoac-*.whl"))
    check_page(wheel)
    venv.create(folder / "venv", with_pip=True)
    pip = (folder / "venv" / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "install", torch)
    run(*pip, "install", wheel)
    run(*pip, "check")
    print(f"ok  installed {wheel.name}: " + run(*pip, "freeze").stdout.replace("\n", " "))

    autoac = folder / "venv" / "bin" / "autoac"
    (folder / "train_setup.py").write_text(SETUP)
    plan = ("plan", "profile.json", "--budget-gb", "0.09")
    for command in (
        ("profile", "train_setup:make", "--json"),
        (*plan, "--json"),
        (*plan, "-o", "-"),
        ("frontier", "profile.json", "--points", "3", "--json"),
    ):
        printed = run(autoac, *command, folder=folder).stdout
        check(f"`autoac {' '.join(command)}` prints JSON and nothing else", is_json(printed), printed)
    message = run(autoac, "demo", folder=folder, code=1).stderr
    check("`autoac demo` names its extra", "its extra `demo`" in message, message)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else ROOT / "build" / "install"))
