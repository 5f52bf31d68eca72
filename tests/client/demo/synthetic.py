"""Results of the demo written by hand, for tests of the code that reads them."""

from ac_client.demo.comparison import CHECKPOINT, OURS, PLAIN, DemoComparison, Line, checks
from ac_client.demo.rows import Measured, Row
from ac_client.demo.setting import TINY
from autoac.planner.formats.policy import Policy, Predicted

MIB = 1 << 20


def policy_with(peak_bytes):
    """Return a policy that predicts this peak."""
    return Policy.model_construct(predicted=Predicted.model_construct(peak_bytes=peak_bytes))


def measured(peak_mib, *, predicted_mib=None, slowdown=1.0, equal=True, first_steps_s=None):
    """Return a result whose last step rises to the peak and falls again."""
    return Measured(
        peak_bytes=int(peak_mib * MIB),
        first_steps_s=first_steps_s,
        step_s=slowdown,
        slowdown=slowdown,
        gradients_equal=equal,
        compared_steps=10,
        timeline=[(0.0, 10 * MIB), (1.0, int(peak_mib * MIB)), (2.0, 10 * MIB)],
        policy=None if predicted_mib is None else policy_with(int(predicted_mib * MIB)),
    )


def comparison(ours=None):
    """Return a demo that keeps all promises: plain peaks at 100 MiB, the checkpoint and ours at 40."""
    ours = ours or measured(40, predicted_mib=40, slowdown=1.1, first_steps_s=(0.5, 2.0))
    lines = [
        Line(Row(PLAIN, "plain"), measured(100)),
        Line(Row(CHECKPOINT, "checkpoint"), measured(40, slowdown=1.4)),
        Line(Row(OURS, "ours", 40 * MIB), ours),
    ]
    return DemoComparison(TINY, tuple(lines), tuple(checks(lines)), 50.0)
