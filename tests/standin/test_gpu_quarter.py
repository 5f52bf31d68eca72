"""Test the quarter of an hour on a GPU, on the stand-in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

from benchmarks.gpu_quarter import PRELOAD, page, results, rows, run

STAND_IN = ("standin.loaded", *PRELOAD)


def test_rows_run_in_processes_of_their_own_and_fill_the_page(gpu: ModuleType, tmp_path: Path) -> None:
    names = ["machine", "U-Net: plain", "U-Net: checkpoint", "U-Net: ours +0 %, moves", "U-Net: ours +50 %"]
    all_rows = {row.name: row for row in rows("tiny")}
    run([all_rows[name] for name in names], "tiny", tmp_path, 200.0, STAND_IN)
    found = results(tmp_path)
    assert set(found) == set(names)  # rows of a batch are in the order in which they end
    for name in names[-2:]:
        ours = found[name]
        assert ours["peak"] == ours["predicted"] <= ours["budget"]
        assert ours["norms"] == found["U-Net: plain"]["norms"]
    assert found[names[1]]["peak"] > found[names[4]]["peak"] > found[names[3]]["peak"]
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("Stand-in GPU")
    assert "failed" not in text
    assert text.count("+0.00%") == 2


def test_row_that_fails_or_has_no_time_leaves_the_others(gpu: ModuleType, tmp_path: Path) -> None:
    all_rows = {row.name: row for row in rows("tiny")}
    late = replace(all_rows["wide layer"], limit_s=0.1, batch="")
    todo = [all_rows["U-Net: ours +50 %"], late, all_rows["machine"]]
    run(todo, "tiny", tmp_path, 100.0, STAND_IN)
    found = results(tmp_path)
    assert "needs the row 'U-Net: checkpoint'" in found["U-Net: ours +50 %"]["error"]
    assert "limit" in found["wide layer"]["error"]
    assert found["machine"]["device"] == "Stand-in GPU"
    run([replace(all_rows["machine"], name="later")], "tiny", tmp_path, 0.0, STAND_IN)
    assert results(tmp_path)["later"] == {"error": "no time was left"}
    assert "| later | failed | no time was left |" in page(results(tmp_path))


def test_captured_step_has_the_norms_of_the_eager_one(gpu: ModuleType, tmp_path: Path) -> None:
    all_rows = {row.name: row for row in rows("tiny")}
    run([all_rows["eager: captured step"]], "tiny", tmp_path, 100.0, STAND_IN)
    text = results(tmp_path)["eager: captured step"]["text"]
    assert int(text.split()[0]) > 0
    assert text.endswith("norms of gradients differ by at most 0.0e+00")
