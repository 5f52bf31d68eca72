"""The examples run, in this process: each library takes seconds to load."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

EXAMPLES = Path(__file__).parents[3] / "examples" / "loops"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """accelerate keeps its state for the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_runs_and_reports(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    assert "of recompute for" in said
    assert not re.search(r"\b0 us of recompute", said)
    assert "off the path" not in said
    assert not list(tmp_path.iterdir())
