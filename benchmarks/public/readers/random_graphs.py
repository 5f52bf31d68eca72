"""Draw layered graphs with long and short skip connections, for which nobody has tuned a planner."""

from __future__ import annotations

import random

from benchmarks.public.step_graph import StepGraph, StepOp, StepValue

MIB = 2**20


def layered(seed: int, layers: int) -> StepGraph:
    """Return a step of `layers` layers of one or two ops, forward and backward.

    Each op reads one or two values of the layer before, and one op in eight also reads a value of any earlier
    layer. Backward has one op for each op of forward: it reads the gradient of that op's output, and the op's
    inputs (a product), its output (an activation), or neither (a sum), and adds to its inputs' gradients.
    """
    draw = random.Random(seed)
    ops: list[StepOp] = []
    sizes: list[int] = []
    rows: list[list[int]] = []
    kinds: list[str] = []
    for _ in range(layers):
        row = []
        for _ in range(draw.randint(1, 2)):
            reads = draw.sample(rows[-1], min(len(rows[-1]), draw.randint(1, 2))) if rows else []
            if len(rows) > 1 and draw.random() < 0.125:
                reads.append(draw.choice(draw.choice(rows[:-1])))
            kinds.append(draw.choice(("mm", "relu", "add")))
            fast, slow = (200, 2000) if kinds[-1] == "mm" else (10, 200)
            row.append(len(ops))
            sizes.append(MIB * draw.choice((1, 2, 4, 8, 16)))
            name = f"/aten.{kinds[-1]}.default#{len(ops)}"
            ops.append(StepOp(name, draw.randint(fast, slow), tuple(sorted(set(reads)))))
        rows.append(row)
    n = len(ops)
    gradient: dict[int, int] = {}  # the newest gradient of each forward value
    values = [StepValue(op, nbytes) for op, nbytes in enumerate(sizes)]
    for op in reversed(range(n)):
        kept = {"mm": ops[op].reads, "relu": (op,), "add": ()}[kinds[op]]
        sums = {v: gradient[v] for v in ops[op].reads if v in gradient}
        own = (gradient[op],) if op in gradient else ()
        us = ops[op].us * (2 if kinds[op] == "mm" else 1)
        number = len(ops)
        needs = tuple(sorted({*kept, *own, *sums.values()}))
        ops.append(StepOp(f"backward/{kinds[op]}.{op}", us, needs))
        for v in ops[op].reads:
            gradient[v] = len(values)
            values.append(StepValue(number, sizes[v], sums.get(v)))
    return StepGraph(f"layered {seed} ({layers} layers)", "random", tuple(ops), tuple(values), n).checked()
