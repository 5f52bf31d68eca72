"""Results of the demo written by hand, for tests of the code that reads them."""

from ac_client.demo.comparison import Demo, Line, ModelComparison
from ac_client.demo.largest_batch import LargestBatch, LargestBatches
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


def line(method, peak_mib, cpu_s, *, budget_mib=None, predicted_mib=None, equal=True):
    """Return a row whose last step rises to the peak and falls again."""
    memory = Memory(
        int(peak_mib * MIB),
        first_steps=steps(2.0)[:2] if method == "ours" else (),
        steps=steps(cpu_s)[:2],
        timeline=[(0.0, 10 * MIB), (1.0, int(peak_mib * MIB)), (2.0, 10 * MIB)],
        policy=None if predicted_mib is None else policy_with(int(predicted_mib * MIB)),
    )
    row = Row(method, None if budget_mib is None else budget_mib * MIB)
    return Line(row, memory, steps(cpu_s, b"plain" if equal else b"other"))


def ours(peak_mib=40.0, cpu_s=1.1, *, predicted_mib=40.0, equal=True):
    """Return our row at the checkpoint's peak."""
    return line("ours", peak_mib, cpu_s, budget_mib=40, predicted_mib=predicted_mib, equal=equal)


def model(at_that_peak=None):
    """Return the rows of a model: plain peaks at 100 MiB, the checkpoint and ours at 40."""
    return ModelComparison(
        TINY, (line("plain", 100, 1.0), line("checkpoint", 40, 1.4), at_that_peak or ours())
    )


def demo(at_that_peak=None, batch_mib=99):
    """Return a demo of two models that keeps all promises."""
    rows = [("plain", 4, 100), ("checkpoint", 6, 90), ("ours", 11, batch_mib)]
    batches = (LargestBatch(Row(method), samples, mib * MIB) for method, samples, mib in rows)
    return Demo((model(), model(at_that_peak)), LargestBatches(TINY, 100 * MIB, tuple(batches)), 50.0)
