"""Profile the large models for a described device: `python -m benchmarks.plans.profiles [NAMES]`.

Each profile is built once, in a process of its own, and kept under build/bench/plans/. Its file name holds
a digest of everything that the profile depends on, so a change of the profiler or of a model makes a new
file.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import transformers
import zstandard

from autoac.planner import Profile, build, simulate
from autoac.planner.formats.profile import VERSION, Temporaries
from autoac.planner.units import GIB
from autoac.profiler import DATASHEETS, observe
from benchmarks.models.large import MODELS, OVER_MANY_DEVICES
from benchmarks.results import ROOT, source_digest

FOLDER = ROOT / "build" / "bench" / "plans"

DEVICES = ("h100", "h200")
SHARDED = "_sharded"  # suffix of models whose parameters lie on other devices
CASES = MODELS | {f"{name}{SHARDED}": model for name, model in OVER_MANY_DEVICES.items()}


def load(name: str, device: str = "h100") -> Profile:
    """Return the profile of a model of `CASES` on a device of `DATASHEETS`; build it if need be."""
    path = path_of(name, device)
    if path.exists():
        return Profile.from_json(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
    made = make(name, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(zstandard.ZstdCompressor().compress(made.to_json().encode()))
    part.replace(path)
    return made


def make(name: str, device: str) -> Profile:
    """Profile one training step of a model with AdamW."""
    model, batch = CASES[name]()
    # One parameter at a time: on a GPU the default step holds a copy of all of them.
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    profile = observe(model, (), batch, optimizer=optimizer, on=DATASHEETS[device])
    return sharded(profile) if name.endswith(SHARDED) else profile


def sharded(profile: Profile) -> Profile:
    """Return the profile without the bytes that sharding over many devices moves off this one.

    These are parameters, optimizer state, and gradients that live until the end of backward. Gathered
    parameters are not counted, so this is an approximation.
    """
    backward = profile.backward
    lasting, least = [], math.inf
    for other, peak in zip(reversed(backward.other_nbytes), reversed(backward.peak_nbytes), strict=True):
        least = min(least, other, peak)
        lasting.append(int(least))
    lasting.reverse()
    static = profile.static.model_copy(update={"parameters": 0, "gradients": 0, "optimizer_state": 0})
    less = {
        column: tuple(nbytes - gone for nbytes, gone in zip(getattr(backward, column), lasting, strict=True))
        for column in ("other_nbytes", "peak_nbytes")
    }
    return profile.model_copy(
        update={
            "static": static,
            "gradient_nbytes": 0,
            "optimizer_workspace_nbytes": 0,
            "temporaries": Temporaries(),  # they have the gradients
            "backward": backward.model_copy(update=less),
        }
    )


def path_of(name: str, device: str) -> Path:
    """Return the file of the profile."""
    return FOLDER / f"{name}.{device}.{_versions()}.json.zst"


def _versions() -> str:
    versions = (torch.__version__, transformers.__version__, str(VERSION))
    return source_digest(*versions, folders=["profiler", "tape", "benchmarks/models"], files=[Path(__file__)])


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table of profiles."""

    name: str
    device: str
    ops: int
    storages: int
    saved: int
    static: int  # bytes
    peak: int  # bytes, static ones included, with everything saved
    step_us: float
    seconds: float  # to load or build the profile

    HEAD: ClassVar[str] = (
        f"{'model':14} {'device':6} {'ops':>6} {'storages':>8} {'saved':>6} "
        f"{'static GiB':>10} {'peak GiB':>9} {'step ms':>9} {'seconds':>7}"
    )

    def __str__(self) -> str:
        return (
            f"{self.name:14} {self.device:6} {self.ops:6} {self.storages:8} {self.saved:6} "
            f"{self.static / GIB:10.2f} {self.peak / GIB:9.2f} {self.step_us / 1e3:9.1f} {self.seconds:7.1f}"
        )


def row(name: str, device: str, json: Path | None = None) -> Row:
    """Load or build a profile and return its line; with `json`, write the profile there as well."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    profile = load(name, device)
    seconds = time.perf_counter() - began
    if json is not None:
        json.mkdir(parents=True, exist_ok=True)
        (json / f"{name}.{device}.json").write_text(profile.to_json())
    graph = build(profile)
    return Row(
        name,
        device,
        len(profile.ops),
        len(profile.storages),
        len(profile.saved),
        graph.static_bytes,
        simulate(graph, graph.everything).peak.live_bytes,
        sum(profile.ops.runtime_us) + sum(profile.backward.runtime_us),
        seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAMES", help=", ".join(CASES))
    parser.add_argument("--device", action="append", choices=DATASHEETS, help="default: h100 and h200")
    parser.add_argument(
        "--json", type=Path, metavar="FOLDER", help="write the profiles there as well, as JSON"
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(CASES):
        parser.error(f"NAMES must be of {', '.join(CASES)}; got {', '.join(sorted(unknown))}")
    print(Row.HEAD)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for name in options.names or CASES:
            for device in options.device or DEVICES:
                print(processes.submit(row, name, device, options.json).result(), flush=True)


if __name__ == "__main__":
    main()
