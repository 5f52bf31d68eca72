"""What the demo makes of its measurements: promises, table, page, exit code."""

import io
import json
import re

import pytest
from client.demo.synthetic import measured, result
from rich.console import Console

from ac_client.demo.demo import CHECKPOINT, SELECTIVE, checks, ours_at, ours_share
from ac_client.demo.page import render_page
from ac_client.demo.table import COLUMNS, cells, markdown, render

HALF = ours_share(0.5)


def missed(demo):
    return [check.promise for check in checks(demo) if not check.kept]


def test_when_all_goes_well_every_promise_is_kept():
    assert missed(result()) == []
    assert not result().failed


@pytest.mark.parametrize(
    ("row", "found", "promise", "fails"),
    [
        (HALF, measured(60.001, predicted_mib=60, slowdown=1.1), "within its budget", True),
        (HALF, measured(60, predicted_mib=60, slowdown=1.1, equal=False), "bit for bit", True),
        (HALF, measured(60, predicted_mib=59.3, slowdown=1.1), "predicted within 1 %", False),
        (HALF, measured(60, predicted_mib=60.7, slowdown=1.1), "predicted within 1 %", False),
        (HALF, measured(60, predicted_mib=60, slowdown=1.21), "half of the per-block", False),
        (ours_at(CHECKPOINT), measured(40, predicted_mib=40, own_us=191e3), "at most 95% of its", False),
        (ours_at(SELECTIVE), measured(60, predicted_mib=60, own_us=81e3), "at most 80% of its", False),
        (HALF, measured(60, predicted_mib=60, plan_s=10.1), "planned in at most 10 s", False),
        (HALF, measured(60, predicted_mib=60, gap=0.02), "within 1 % of the best", False),
    ],
)
def test_a_broken_promise_is_found_and_budget_and_gradients_fail_the_demo(row, found, promise, fails):
    demo = result(**{row: found})
    (only,) = missed(demo)
    assert promise in only
    assert demo.failed is fails


def test_recompute_is_compared_at_the_peak_of_each_baseline():
    found = [check.found for check in checks(result()) if "recompute time" in check.promise]
    assert found == [
        "10% by the profile that was planned from, 50% by the table's",
        "20% by the profile that was planned from, 60% by the table's",
    ]


def test_the_table_has_a_row_for_each_way_to_train():
    demo = result()
    assert [cells(line)[0] for line in demo.lines] == [line.row.name for line in demo.lines]
    assert cells(demo.line(ours_at(CHECKPOINT))) == [
        "ours, peak of checkpoint every block", "40.0", "40.0", "40.0", "50 ms", "1.10", "yes", "2.0 s"
    ]  # fmt: skip
    assert len(markdown(demo).splitlines()) == 2 + len(demo.lines)


def test_unequal_gradients_stand_out_in_the_table():
    demo = result(**{HALF: measured(60, equal=False)})
    assert cells(demo.line(HALF))[COLUMNS.index("gradients equal")] == "NO"


def test_the_table_prints_on_a_narrow_terminal():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render(result()))
    assert "ours, 50% of the way" in console.export_text()


def test_data_for_machines_is_json_without_timelines():
    data = json.loads(json.dumps(result().data()))
    assert len(data["rows"]) == 9
    assert "timeline" not in data["rows"][0]
    assert {"promise", "found", "kept", "binding"} == set(data["checks"][0])


def test_the_page_asks_the_network_for_nothing():
    page = render_page(result())
    without_licences = re.sub(r"<!--.*?-->|/\*!.*?\*/", "", page, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:)""", without_licences)
    assert not re.findall(r"https?://(?!github\.com/leeoniya|www\.w3\.org)", without_licences)
    assert "default-src 'none'" in page
    assert "@@" not in page


def test_the_page_carries_every_timeline():
    page = render_page(result())
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    series = json.loads(found.group(1))
    assert [row["name"] for row in series] == [line.row.name for line in result().lines]
    assert series[1]["bytes"] == [10 << 20, 40 << 20, 10 << 20]
    assert series[1]["budget"] is None
