"""Read the steps that DTR's authors recorded: `simrd/logs.zip` of `uwsampl/dtr-prototype`, unpacked.

A line is one JSON object. CONSTANT is a tensor from outside, with its MEMORY. CALL is an op; MEMORY and ALIAS
follow for each of its results, and a result with an ALIAS other than -1 shares the memory of that argument.
MUTATE is an in-place op. COPY and COPY_FROM bind a name to a tensor, RELEASE unbinds it. Times are in
nanoseconds. Constants count as static bytes, but for those that an in-place op writes: they are values of ops
that run once and take no time. An op that only returns aliases is left out.

Forward ends at ANNOTATE BACKWARD. Names of ops do not tell: some logs call a pooling of forward
`max_pool2d_backward`. The log of the unrolled GAN, which takes gradients of gradients, has no such line;
there, forward ends at the op with the most live bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.public.step_graph import StepGraph, StepOp, StepValue


class _Reader:
    """The state of one pass over a log."""

    def __init__(self, written: Iterable[str] = ()) -> None:
        self.ops: list[StepOp] = []
        self.values: list[StepValue] = []
        self.bound: dict[str, int | str] = {}  # the value or the constant behind each name
        self.written = set(written)  # constants that in-place ops write; known only after a pass
        self.static_bytes = 0
        self.forward_ops: int | None = None

    def constant(self, name: str, nbytes: int) -> None:
        if name in self.written:
            self.bound[name] = len(self.values)
            written = [StepValue(len(self.ops), nbytes)]
            self._add({"NAME": "constant", "TIME": 0}, (), written, repeatable=False)
        else:
            self.bound[name] = name
            self.static_bytes += nbytes

    def call(self, line: dict[str, Any], details: Sequence[dict[str, Any]]) -> None:
        reads = self._reads(line)
        written: list[StepValue] = []
        for result, memory, alias in zip(line["RESULT"], details[::2], details[1::2], strict=True):
            if int(alias["ALIAS"]) >= 0:
                self.bound[result] = self.bound[line["ARGS"][int(alias["ALIAS"])]]
            else:
                self.bound[result] = len(self.values) + len(written)
                written.append(StepValue(len(self.ops), int(memory["MEMORY"])))
        if written:
            self._add(line, reads, written)

    def mutate(self, line: dict[str, Any]) -> None:
        targets = {self.bound[line["ARGS"][int(i)]] for i in line["MUTATE"]}
        self.written |= {target for target in targets if isinstance(target, str)}
        overwritten = sorted(target for target in targets if isinstance(target, int))
        if not overwritten:
            return  # constants only, which become values in the next pass
        newest = {p: len(self.values) + i for i, p in enumerate(overwritten)}
        written = [StepValue(len(self.ops), self.values[p].nbytes, p) for p in overwritten]
        self._add(line, self._reads(line), written)
        for name, value in self.bound.items():
            if value in newest:
                self.bound[name] = newest[value]

    def _reads(self, line: dict[str, Any]) -> tuple[int, ...]:
        return tuple(sorted({v for name in line["ARGS"] if isinstance(v := self.bound[name], int)}))

    def _add(
        self, line: dict[str, Any], reads: tuple[int, ...], written: list[StepValue], repeatable: bool = True
    ) -> None:
        name = f"/aten.{line['NAME']}.default#{len(self.ops)}"
        self.ops.append(StepOp(name, float(line["TIME"]) / 1e3, reads, repeatable))
        self.values += written


def read(path: Path) -> StepGraph:
    """Return the step in a log, from ANNOTATE START on."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    starts = [i for i, line in enumerate(lines) if line.get("ANNOTATION") == "START"]
    first = starts[0] + 1 if starts else 0
    reader = _passed(_Reader(), lines, first)
    if reader.written:
        reader = _passed(_Reader(reader.written), lines, first)
    keep = sorted({v for v in reader.bound.values() if isinstance(v, int)})
    forward = reader.forward_ops
    return StepGraph(
        name=f"DTR {path.name.split('-')[0]}",
        source="uwsampl/dtr-prototype",
        ops=tuple(reader.ops),
        values=tuple(reader.values),
        forward_ops=_fullest(reader.ops, reader.values, keep) if forward is None else forward,
        static_bytes=reader.static_bytes,
        keep=tuple(keep),
    ).checked()


def _passed(reader: _Reader, lines: Sequence[dict[str, Any]], i: int) -> _Reader:
    """Pass the lines from `i` on to `reader`, and return it."""
    while i < len(lines):
        line = lines[i]
        i += 1
        match line["INSTRUCTION"]:
            case "CONSTANT":
                reader.constant(line["NAME"], int(lines[i]["MEMORY"]))
                i += 1
            case "CALL":
                count = 2 * len(line["RESULT"])
                reader.call(line, lines[i : i + count])
                i += count
            case "MUTATE":
                reader.mutate(line)
            case "COPY" | "COPY_FROM":
                reader.bound[line["DST"]] = reader.bound[line["SRC"]]
            case "RELEASE":
                reader.bound.pop(line["NAME"], None)
            case "ANNOTATE":
                if line["ANNOTATION"] == "BACKWARD":
                    reader.forward_ops = len(reader.ops)
            case other:
                raise ValueError(f"an instruction must be one of DTR's, got {other!r} in line {i}")
    return reader


def _fullest(ops: Sequence[StepOp], values: Sequence[StepValue], keep: Sequence[int]) -> int:
    """Return how many ops have run when the most bytes are live, if nothing runs again."""
    ends = [value.op for value in values]
    for number, op in enumerate(ops):
        for v in op.reads:
            ends[v] = number
    for v in keep:
        ends[v] = len(ops)
    change = [0] * (len(ops) + 2)
    for value, end in zip(values, ends, strict=True):
        change[value.op] += value.nbytes
        change[end + 1] -= value.nbytes
    live, most, fullest = 0, 0, 0
    for number in range(len(ops)):
        live += change[number]
        if live > most:
            most, fullest = live, number
    return fullest + 1
