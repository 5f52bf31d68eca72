"""Read the steps that DTR's authors recorded: `simrd/logs.zip` of `uwsampl/dtr-prototype`, unpacked.

A line is one JSON object. CONSTANT is a tensor from outside, with its MEMORY. CALL is an op; MEMORY and ALIAS
follow for each of its results, and a result with an ALIAS other than -1 shares the memory of that argument.
MUTATE is an in-place op. COPY and COPY_FROM bind a name to a tensor, RELEASE unbinds it. Times are in
nanoseconds. Constants count as static bytes; an op that only returns aliases is left out. An op of forward is
one before the first whose name has "backward" in it, or before ANNOTATE BACKWARD.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.public.step_graph import StepGraph, StepOp, StepValue


class _Reader:
    """The state of one pass over a log."""

    def __init__(self) -> None:
        self.ops: list[StepOp] = []
        self.values: list[StepValue] = []
        self.bound: dict[str, int | None] = {}  # the value behind each name; None: a constant
        self.static_bytes = 0
        self.forward_ops: int | None = None

    def begin_backward(self, name: str = "backward") -> None:
        if "backward" in name.lower() and self.forward_ops is None:
            self.forward_ops = len(self.ops)

    def call(self, line: dict[str, Any], details: list[dict[str, Any]]) -> None:
        self.begin_backward(line["NAME"])
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
        self.begin_backward(line["NAME"])
        targets = {self.bound[line["ARGS"][int(i)]] for i in line["MUTATE"]}
        overwritten = sorted(p for p in targets if p is not None)
        if not overwritten:
            return  # writes to constants only: nothing to plan
        newest = {p: len(self.values) + i for i, p in enumerate(overwritten)}
        written = [StepValue(len(self.ops), self.values[p].nbytes, p) for p in overwritten]
        self._add(line, self._reads(line), written)
        for name, value in self.bound.items():
            if value in newest:
                self.bound[name] = newest[value]

    def _reads(self, line: dict[str, Any]) -> tuple[int, ...]:
        return tuple(sorted({v for name in line["ARGS"] if (v := self.bound[name]) is not None}))

    def _add(self, line: dict[str, Any], reads: tuple[int, ...], written: list[StepValue]) -> None:
        name = f"/aten.{line['NAME']}.default#{len(self.ops)}"
        self.ops.append(StepOp(name, float(line["TIME"]) / 1e3, reads))
        self.values += written


def read(path: Path) -> StepGraph:
    """Return the step in a log, from ANNOTATE START on."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    reader = _Reader()
    starts = [i for i, line in enumerate(lines) if line.get("ANNOTATION") == "START"]
    i = starts[0] + 1 if starts else 0
    while i < len(lines):
        line = lines[i]
        i += 1
        match line["INSTRUCTION"]:
            case "CONSTANT":
                reader.bound[line["NAME"]] = None
                reader.static_bytes += int(lines[i]["MEMORY"])
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
                    reader.begin_backward()
            case other:
                raise ValueError(f"an instruction must be one of DTR's, got {other!r} in line {i}")
    keep = sorted({v for v in reader.bound.values() if v is not None})
    forward = len(reader.ops) if reader.forward_ops is None else reader.forward_ops
    return StepGraph(
        name=f"DTR {path.name.split('-')[0]}",
        source="uwsampl/dtr-prototype",
        ops=tuple(reader.ops),
        values=tuple(reader.values),
        forward_ops=forward,
        static_bytes=reader.static_bytes,
        keep=tuple(keep),
    ).checked()
