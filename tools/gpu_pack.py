"""Pack what a GPU machine without a network lacks: `python tools/gpu_pack.py FOLDER [PATCH ...]`.

The folder gets the packages of this checkout (`src`), wheels for Python 3.12 of what is not installed there
with torch (`wheels`), and `run.sh`, which runs `benchmarks.gpu_quarter` and writes to $OUT. Patches are
applied to the packed copy alone; their paths are those of `src`, such as `autoac/tape/errors.py`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {
    "ac_client": "src",
    "benchmarks": "src",
    **dict.fromkeys(("api", "planner", "profiler", "tape"), "src/autoac"),
}
MISSING = {
    *("annotated-types", "cachetools", "highspy", "httpcore2", "httpx2", "lazy-loader", "pulp", "pydantic"),
    *(
        "pydantic_core",
        "pydantic-settings",
        "structlog",
        "tenacity",
        "truststore",
        "typing-inspection",
        "xxhash",
    ),
    *("typing_extensions", "zstandard"),
}
GLIBCS = ("2_28", "2_27", "2_24", "2_17")
MOST_BYTES = 60 << 20
RUN = """#!/bin/sh
# Run from the folder above: .gpu/run.sh [arguments of benchmarks.gpu_quarter]
here=$(cd "$(dirname "$0")" && pwd)
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \\
    --target /tmp/site "$here"/wheels/*.whl || exit
export PYTHONPATH="$here/src:/tmp/site" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
cd "$here/src" && exec python3 -m benchmarks.gpu_quarter --out "$OUT" --seconds 540 "$@"
"""


def main() -> None:
    """Make the folder; what it had is removed."""
    folder, patches = Path(sys.argv[1]), sys.argv[2:]
    shutil.rmtree(folder, ignore_errors=True)
    for name, place in PLACES.items():
        (folder / place).mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", "HEAD", name], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "x", "-C", str(folder / place)], input=archive.stdout, check=True)
    for patch in patches:
        subprocess.run(
            ["patch", "-p1", "-d", str(folder / "src"), "-i", str(Path(patch).resolve())], check=True
        )
    pins = [line.strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [pin for pin in pins if pin.partition("==")[0].lower() in MISSING]
    assert len(pins) == len(MISSING), f"constraints.txt must pin {MISSING}, got {pins}"
    platforms = [f"--platform=manylinux_{glibc}_x86_64" for glibc in GLIBCS]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version=3.12", "--implementation=cp", *platforms, "--platform=manylinux2014_x86_64"]
    subprocess.run([*command, "-d", str(folder / "wheels"), *pins], check=True)
    (folder / "run.sh").write_text(RUN)
    (folder / "run.sh").chmod(0o755)
    nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {nbytes / 2**20:.1f} MiB, {len(pins)} wheels")
    assert nbytes <= MOST_BYTES, f"the folder must be at most {MOST_BYTES} bytes, got {nbytes}"


if __name__ == "__main__":
    main()
