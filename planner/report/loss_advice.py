"""Say how much time a chunked or fused cross-entropy would save, if the loss is at the peak.

A language model's loss makes logits in two types, their log-probabilities, and gradients of both, each with
an element for every token and every word of the vocabulary. A cross-entropy that multiplies by the head's
weights a few tokens at a time (`torch.nn.functional.linear_cross_entropy`, Liger's kernel) holds none of
them whole. `without_loss` returns the graph of a step with such a loss; a plan of that graph has the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoac.planner.formats.op_key import OpKey
from autoac.planner.memory.simulate import simulate
from autoac.planner.offload import plan_with_host
from autoac.planner.plan import Plan
from autoac.planner.problem.graph import Graph, OpId, StepId
from autoac.planner.units import format_bytes, format_us

LOG_PROBABILITIES = ("aten._log_softmax.default",)
PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")
AT_PEAK = 0.98  # of the planned peak: from here on the loss counts as at the peak


@dataclass(frozen=True, slots=True)
class Loss:
    """The part of a step that a chunked cross-entropy replaces."""

    head: OpId  # the product that makes the logits
    temporaries: frozenset[OpId]  # the head, and the ops from it to the log-probabilities
    first_step: StepId  # of backward, that unpacks log-probabilities
    last_step: StepId  # the head's own


def find_loss(graph: Graph) -> Loss | None:
    """Return the loss of `graph`: log-probabilities of a matrix product; None if there are none."""
    names = [OpKey.parse(op.name).op for op in graph.ops]
    found = [op for op in graph.ops if names[op.id] in LOG_PROBABILITIES]
    if not found:
        return None
    op = found[-1]
    temporaries = {op.id}
    while names[op.id] not in PRODUCTS:
        if not op.reads:
            return None
        op = graph.ops[graph.versions[max(op.reads, key=graph.nbytes)].op]
        temporaries.add(op.id)
    unpacking = {
        j for w in found[-1].writes for h in graph.versions[w].saved_tensors
        for j in graph.saved_tensors[h].unpacked
    }  # fmt: skip
    of_head = {
        j for r in op.reads for h in graph.versions[r].saved_tensors for j in graph.saved_tensors[h].unpacked
    }
    if not unpacking or not of_head or min(of_head) < max(unpacking):
        return None
    return Loss(op.id, frozenset(temporaries), min(unpacking), min(of_head))


def without_loss(graph: Graph, loss: Loss) -> Graph:
    """Return `graph` without the temporaries of `loss`.

    From the head's forward to its backward, the only gradients live are those that the head's backward makes:
    of its weights and of its input.
    """
    own = {graph.versions[w].storage for op in loss.temporaries for w in graph.ops[op].writes}
    left = min(
        graph.steps[loss.last_step].extra_bytes_peak,
        *(step.extra_bytes_while_unpacking for step in graph.steps[loss.last_step + 1 :][:1]),
    )
    return replace(
        graph,
        storages=tuple(replace(s, nbytes=0) if s.id in own else s for s in graph.storages),
        ops=tuple(
            replace(op, workspace_bytes=0, extra_bytes=left) if op.id in loss.temporaries else op
            for op in graph.ops
        ),
        steps=tuple(
            replace(
                step,
                extra_bytes_while_unpacking=min(step.extra_bytes_while_unpacking, left),
                extra_bytes_peak=min(step.extra_bytes_peak, left),
            )
            if loss.first_step <= step.id <= loss.last_step
            else step
            for step in graph.steps
        ),
    )


def loss_in_words(plan: Plan) -> list[str]:
    """Return a sentence on what a chunked cross-entropy would gain; none if nothing.

    Only if the loss is at the peak is the step planned without its temporaries, within the same budget.
    """
    graph = plan.graph if plan.unmoved is None else plan.unmoved  # without the loss, other outputs move
    loss = find_loss(graph) if plan.recompute_set else None
    if loss is None:
        return []
    n = len(graph.ops)
    moments = {*loss.temporaries, *range(n + loss.first_step, n + loss.last_step + 1)}
    fullest = max((i for i in plan.timeline.instants if i.moment in moments), key=lambda i: i.live_bytes)
    if fullest.live_bytes < AT_PEAK * plan.peak:
        return []
    chunked = without_loss(graph, loss)
    then = plan_with_host(
        chunked,
        budget_bytes=plan.budget,
        rates=plan.profile.link if plan.profile is not None else None,
        constraints=plan.constraints.beyond_the_graph,
    )
    if then.extra_us >= plan.extra_us:
        return []
    instants = simulate(chunked, plan.save_set).instants
    temporary = fullest.live_bytes - max(i.live_bytes for i in instants if i.moment == fullest.moment)
    return [
        f"The loss is at the peak. A chunked or fused one (torch.nn.functional.linear_cross_entropy) holds"
        f" {format_bytes(temporary)} less: within this budget, backward would recompute"
        f" {format_us(then.extra_us)} instead of {format_us(plan.extra_us)}."
    ]
