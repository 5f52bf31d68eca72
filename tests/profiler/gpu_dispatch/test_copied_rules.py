"""The rules of profiler/gpu_dispatch are those of one release of torch; under another, a profile says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from autoac.profiler import DATASHEETS, gpu_dispatch, profile

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"


def test_rules_were_compared_with_the_pinned_torch() -> None:
    """After an update, compare the sources that the files of profiler/gpu_dispatch name, of both releases."""
    pinned = re.search(r"^torch==(\d+)\.(\d+)", CONSTRAINTS.read_text(), re.MULTILINE)
    assert tuple(map(int, pinned.groups())) == gpu_dispatch.COPIED_FROM


@pytest.mark.parametrize(("version", "known"), [("2.13.1", True), ("2.12.1", False), ("2.15.0", False)])
def test_profile_names_the_release_of_the_rules_under_another_one(
    version: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    for name in ("h100", "mi300x"):
        notes = profile(layer, x, on=DATASHEETS[name]).notes
        assert any("is known of torch 2.13" in note for note in notes) is not known
