"""Results of the demo written by hand, for what only reads them."""

from ac_client.demo.demo import CHECKPOINT, PLAIN, SELECTIVE, SHARES, Demo, Line, ours_at, ours_share
from ac_client.demo.rows import Measured, Row
from ac_client.demo.setting import TINY
from autoac.planner import MinimumPeak, Stopped

MIB = 1 << 20


def measured(peak_mib, *, predicted_mib=None, slowdown=1.0, equal=True, plan_s=None, gap=None, own_us=20e3):
    return Measured(
        peak_bytes=int(peak_mib * MIB),
        first_step_peak_bytes=int(peak_mib * MIB),
        predicted_peak_bytes=None if predicted_mib is None else int(predicted_mib * MIB),
        step_s=slowdown,
        plain_step_s=1.0,
        slowdown=slowdown,
        gradients_equal=equal,
        compared_steps=10,
        plan_s=plan_s,
        gap=gap,
        own_recompute_us=own_us,
        own_baselines_us={"checkpoint": 200e3, "selective": 100e3},
        timeline=[(0.0, 10 * MIB), (1.0, int(peak_mib * MIB)), (2.0, 10 * MIB)],
    )


def result(**changes):
    """A demo in which all went well, but for `changes`: the name of a row of ours -> its `measured`.

    Plain peaks at 100 MiB, the checkpoint at 40 (100 ms of recompute), the selective one at 60 (50 ms), the
    smallest feasible peak is 20.
    """
    budgets = {ours_at(PLAIN): 100, ours_at(CHECKPOINT): 40, ours_at(SELECTIVE): 60}
    budgets |= {ours_share(share): 20 + share * 80 for share in SHARES}
    recompute_us = {ours_at(PLAIN): 0.0, ours_at(CHECKPOINT): 50e3, ours_at(SELECTIVE): 30e3}
    lines = [
        Line(Row(PLAIN, "plain"), measured(100, predicted_mib=100), 0.0),
        Line(Row(CHECKPOINT, "checkpoint"), measured(40, slowdown=1.4), 100e3),
        Line(Row(SELECTIVE, "selective"), measured(60, slowdown=1.2), 50e3),
    ]
    for name, budget in budgets.items():
        found = changes.pop(name, None) or measured(
            budget, predicted_mib=budget, slowdown=1.1, plan_s=2.0, gap=0.001
        )
        lines.append(Line(Row(name, "ours", budget * MIB), found, recompute_us.get(name, 10e3)))
    assert not changes
    return Demo(TINY, tuple(lines), MinimumPeak(19 * MIB, 20 * MIB, frozenset(), Stopped.OPTIMAL), 123.0)
