"""Check the measured time of recording an op."""

from __future__ import annotations

from typing import Any

import pytest

from autoac.tape.runtime.region import Region
from benchmarks import overhead


def test_only_the_op_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a clock that advances a microsecond for each op that a region sees."""
    seen = 0
    dispatch = Region.__torch_dispatch__

    def counted(self: Region, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        return dispatch(self, *args, **kwargs)

    monkeypatch.setattr(Region, "__torch_dispatch__", counted)
    monkeypatch.setattr(overhead.time, "thread_time_ns", lambda: seen * 1000)
    assert overhead.recording_us(repeats=3) == 1
