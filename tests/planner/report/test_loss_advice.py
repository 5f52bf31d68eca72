"""Check what a chunked cross-entropy would buy."""

from __future__ import annotations

from dataclasses import replace

from graphs import chain

from autoac.planner import Plan, Profile, explain, plan
from autoac.planner.problem.graph import Graph
from autoac.planner.report.loss_advice import (
    Loss,
    find_loss,
    loss_in_words,
    without_loss,
)
from autoac.planner.units import format_us

NAMES = [
    *(f"layers.{i}/aten.mm.default#0" for i in range(6)),
    "head/aten.mm.default#0",
    "./aten._to_copy.default#0",
    "./aten._log_softmax.default#0",
    "./aten.nll_loss_forward.default#0",
]


def language_model(names: list[str] = NAMES) -> Graph:
    """Return six layers of 4 bytes, then logits of 8, 16 and 16 bytes with as many for their gradients."""
    graph = chain(4, 4, 4, 4, 4, 4, 8, 16, 16, 1)
    extra = [0, 16, 32, 24, 8, 2, 2, 2, 2, 2]
    return replace(
        graph,
        ops=tuple(replace(op, name=name) for op, name in zip(graph.ops, names, strict=True)),
        steps=tuple(
            replace(step, extra_bytes_peak=nbytes, extra_bytes_while_unpacking=min(nbytes, 2))
            for step, nbytes in zip(graph.steps, extra, strict=True)
        ),
    )


def planning(subject: Profile | Graph, budget: int) -> Plan:
    return plan(subject, budget_bytes=budget, gap=0.0)


def test_loss_is_from_the_head_to_the_log_probabilities() -> None:
    assert find_loss(language_model()) == Loss(6, frozenset({6, 7, 8}), 1, 4)
    assert find_loss(chain(1, 2, 3)) is None


def test_step_without_the_loss_has_no_logits_but_the_gradients_of_the_head() -> None:
    graph = language_model()
    loss = find_loss(graph)
    chunked = without_loss(graph, loss)
    assert [storage.nbytes for storage in chunked.storages] == [4] * 6 + [0, 0, 0, 1]
    assert [step.extra_bytes_peak for step in chunked.steps] == [0, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    assert [op.extra_bytes for op in chunked.ops] == [0] * 6 + [2, 2, 2, 0]


def test_summary_has_the_figure_of_a_plan_without_the_temporaries() -> None:
    graph = language_model()
    made, loss = planning(graph, 76), find_loss(graph)
    best = planning(without_loss(graph, loss), 76)
    assert best.recompute_us == 0 < made.recompute_us
    (line,) = (line for line in explain(made).splitlines() if "linear_cross_entropy" in line)
    assert f"would recompute {format_us(0)} instead of {format_us(made.recompute_us)}." in line
    assert "holds 46 B less" in line


def test_no_advice_where_the_loss_is_not_at_the_peak_or_nothing_is_recomputed() -> None:
    graph = language_model()
    assert not loss_in_words(planning(graph, 1000))
    other = language_model([*NAMES[:8], "./aten.tanh.default#0", NAMES[9]])
    assert not loss_in_words(planning(other, 76))
    last = replace(graph, ops=(*graph.ops[:9], replace(graph.ops[9], workspace_bytes=60)))
    made = planning(last, 115)
    assert made.recompute_us > 0
    assert not loss_in_words(made)
