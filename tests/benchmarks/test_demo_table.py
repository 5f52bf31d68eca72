"""The promises and the Markdown of the full table."""

import pytest
from client.demo.synthetic import MIB, measured

from ac_client.demo.comparison import CHECKPOINT, PLAIN, Line
from ac_client.demo.rows import Row, measure
from ac_client.demo.setting import TINY
from autoac.planner import bounds, build
from benchmarks.demo_table import table
from benchmarks.demo_table.table import SELECTIVE, ours_at, ours_share

HALF = ours_share(0.5)


class FakePlan:
    """The two numbers of a plan that the promises read."""

    def __init__(self, recompute_us=20e3, gap=0.001):
        self.recompute_us, self.gap = recompute_us, gap


def replanned(seconds=2.0, **changes):
    return table.Replanned(FakePlan(**changes), seconds, {"checkpoint": 200e3, "selective": 100e3})


def missed(slowdown_half=1.1, **rows):
    lines = [
        Line(Row(PLAIN, "plain"), measured(100)),
        Line(Row(CHECKPOINT, "checkpoint"), measured(40, slowdown=1.4)),
        Line(Row(HALF, "ours", 60 * MIB), measured(60, predicted_mib=60, slowdown=slowdown_half)),
    ]
    names = (ours_at(CHECKPOINT), ours_at(SELECTIVE), HALF)
    plans = {name: replanned() for name in names} | rows
    return [check.promise for check in table._checks(lines, plans) if not check.kept]


@pytest.mark.parametrize(
    ("changes", "promise"),
    [
        ({"slowdown_half": 1.21}, "half of the per-block"),
        ({ours_at(CHECKPOINT): replanned(recompute_us=191e3)}, "at most 95% of its"),
        ({ours_at(SELECTIVE): replanned(recompute_us=81e3)}, "at most 80% of its"),
        ({HALF: replanned(seconds=10.1)}, "planned in at most 10 s"),
        ({HALF: replanned(gap=0.02)}, "within 1 % of the best"),
    ],
)
def test_broken_promise_is_found(changes, promise):
    assert missed() == []
    (only,) = missed(**changes)
    assert promise in only


def test_profile_of_the_plain_row_predicts_its_peak():
    profile = table._plain_profile(TINY)
    assert profile.static.gradients == profile.static.parameters
    plain = measure(Row(PLAIN, "plain", pairs=1), TINY)
    assert bounds(build(profile)).ceiling == pytest.approx(plain.peak_bytes, rel=0.02)
    assert plain.slowdown == 1
