"""Check the figures of the report on comparisons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plans import report
from benchmarks.plans.compare import Answer, Comparison, Point

MODEL = Comparison(
    "m.h100", "d", "c", 1000, 5, 100.0, 0, 100, 10, 10, 0.0,
    points=[
        Point("per-block checkpoint", "depth 1", 50, 8.0),
        Point("minimum cut", "nothing banned", 60, 4.0),
        Point("minimum cut", "expensive ops banned", 120, 1.0),  # above the ceiling
    ],
    answers=[
        Answer(50, 50, 4.0, 4.0, "optimal", 1.0),
        Answer(60, 55, 4.0, 3.97, "optimal", 3.0),
    ],
)  # fmt: skip


def test_each_model_counts_once_however_many_devices_and_peaks_it_has():
    half = replace(MODEL, points=MODEL.points[:1])  # at one peak: 0.5
    other = replace(MODEL, name="gpt2_xl.h100", points=[Point("minimum cut", "", 60, 16.0)])  # 0.25
    twice = [half, replace(half, name="m.h200"), other]
    assert report.of_models(twice) == pytest.approx((0.5 * 0.25) ** 0.5)
    assert report.of_models(twice, without=["gpt2_xl"]) == 0.5
    assert "Without gpt2_xl and lstm, where it is smallest: 0.50." in report.verdict(twice, twice)


def growing(layers, cpu_s):
    answers = [replace(MODEL.answers[0], budget=b, cpu_s=cpu_s) for b in (20, 30)]
    return replace(MODEL, name=f"llama_l{layers}.h100", ops=40 * layers, points=[], answers=answers)


def test_a_ratio_is_taken_at_each_peak_of_a_baseline_below_the_ceiling():
    assert report.to_best(MODEL) == [0.5, 1.0]


def test_the_page_and_its_plots_are_the_same_for_the_same_numbers(tmp_path):
    written = []
    for folder in ("a", "b"):
        report.write([MODEL, growing(16, 1.0)], tmp_path / folder / "benchmarks.md")
        files = sorted(path for path in (tmp_path / folder).rglob("*") if path.is_file())
        written.append({path.relative_to(tmp_path / folder).as_posix(): path.read_bytes() for path in files})
    assert sorted(written[0]) == ["benchmarks.md", "benchmarks/m.h100.svg"]
    assert written[0] == written[1]
    assert b"](benchmarks/m.h100.svg)" in written[0]["benchmarks.md"]
