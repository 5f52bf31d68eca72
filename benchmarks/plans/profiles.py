"""Profile the large models for a described device.

Each profile is kept under build/bench/plans/. Its file name holds a digest of everything that the profile
depends on, so a change of the profiler or of a model makes a new file.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import transformers
import zstandard

from autoac.planner import Profile
from autoac.planner.formats.base import VERSION
from autoac.planner.formats.profile import Ragged, Temporaries
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
            # Without temporaries, which have the gradients.
            "temporaries": Temporaries(nbytes=(), changes=Ragged.of([()] * len(profile.temporaries.changes))),
            "backward": backward.model_copy(update=less),
        }
    )


def path_of(name: str, device: str) -> Path:
    """Return the file of the profile."""
    return FOLDER / f"{name}.{device}.{_versions()}.json.zst"


def _versions() -> str:
    versions = (torch.__version__, transformers.__version__, str(VERSION))
    return source_digest(*versions, folders=["profiler", "tape", "benchmarks/models"], files=[Path(__file__)])
