"""What recording takes, measured on the spot."""

from __future__ import annotations

from typing import Any

import pytest

from ac_client.runtime import Region, active
from benchmarks import recording
from benchmarks.recording import recording_us


def test_the_op_alone_is_seen_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves a microsecond for each op that a region sees."""
    seen = 0
    dispatch = Region.__torch_dispatch__

    def counted(self: Region, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        return dispatch(self, *args, **kwargs)

    monkeypatch.setattr(Region, "__torch_dispatch__", counted)
    monkeypatch.setattr(recording.time, "thread_time_ns", lambda: seen * 1000)
    assert recording_us(repeats=3) == 1
    assert active.region is None
