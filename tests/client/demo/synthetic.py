"""Results of the demo written by hand, for tests of the code that reads them."""

from ac_client.demo.comparison import CHECKPOINT, HALF, OURS, PLAIN, DemoComparison, Line
from ac_client.demo.rows import Memory, Row, Step
from ac_client.demo.setting import TINY
from autoac.planner.formats.policy import Policy, Predicted

MIB = 1 << 20
TURNS = 5


def policy_with(peak_bytes):
    """Return a policy that predicts this peak."""
    return Policy.model_construct(predicted=Predicted.model_construct(peak_bytes=peak_bytes))


def steps(cpu_s, digest=b"plain"):
    """Return timed steps, each of them a thousandth longer than the step before."""
    return tuple(Step(cpu_s + i / 1000, digest) for i in range(TURNS))


def line(name, method, peak_mib, cpu_s, *, budget_mib=None, predicted_mib=None, equal=True):
    """Return a row whose last step rises to the peak and falls again."""
    memory = Memory(
        int(peak_mib * MIB),
        first_steps=steps(2.0)[:2] if method == "ours" else (),
        steps=steps(cpu_s)[:2],
        timeline=[(0.0, 10 * MIB), (1.0, int(peak_mib * MIB)), (2.0, 10 * MIB)],
        policy=None if predicted_mib is None else policy_with(int(predicted_mib * MIB)),
    )
    row = Row(name, method, None if budget_mib is None else budget_mib * MIB)
    return Line(row, memory, steps(cpu_s, b"plain" if equal else b"other"))


def ours(peak_mib=40.0, cpu_s=1.1, *, predicted_mib=40.0, equal=True):
    """Return our row at the checkpoint's peak."""
    return line(OURS, "ours", peak_mib, cpu_s, budget_mib=40, predicted_mib=predicted_mib, equal=equal)


def comparison(at_that_peak=None):
    """Return a demo that keeps all promises: plain peaks at 100 MiB, the checkpoint and ours at 40."""
    lines = (
        line(PLAIN, "plain", 100, 1.0),
        line(CHECKPOINT, "checkpoint", 40, 1.4),
        at_that_peak or ours(),
        line(HALF, "ours", 70, 1.02, budget_mib=70, predicted_mib=70),
    )
    return DemoComparison(TINY, lines, 50.0)
