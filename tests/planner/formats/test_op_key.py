"""Check that every reader parses an op key alike, even if a module name contains "/" or "#"."""

from __future__ import annotations

import graphs
import pytest

from autoac.planner import Constraints, Profile, build, constrained
from autoac.planner.formats.op_key import OpKey
from autoac.planner.report.by_module import by_module, op_decisions

MODULE = "layers.3.experts.a/b#2"


@pytest.mark.parametrize(
    ("key", "module", "op", "occurrence"),
    [
        ("layers.3.mlp/aten.mm.default#1", "layers.3.mlp", "aten.mm.default", 1),
        ("./aten.mm.default#0", ".", "aten.mm.default", 0),
        ("/aten.mm.default#0", "", "aten.mm.default", 0),
        ("a/b.c/mylib.scan.default#12", "a/b.c", "mylib.scan.default", 12),
        ("a#1/aten.mm.default#0", "a#1", "aten.mm.default", 0),
    ],
)
def test_key_is_split_at_its_last_slash(key: str, module: str, op: str, occurrence: int) -> None:
    parsed = OpKey.parse(key)
    assert (parsed.module, parsed.op, parsed.occurrence) == (module, op, occurrence)
    assert str(parsed) == key


def test_text_without_a_slash_is_an_op_name() -> None:
    assert OpKey.parse("op3") == OpKey("", "op3", None)


@pytest.mark.parametrize(("depth", "block"), [(1, "layer1.2"), (2, "layer1.2.conv2.experts.5"), (3, "")])
def test_block_is_the_path_up_to_a_numeric_part(depth: int, block: str) -> None:
    key = OpKey.parse("layer1.2.conv2.experts.5.w1/aten.mm.default#1")
    assert key.block(depth) == block


@pytest.fixture
def profile() -> Profile:
    """Return a step of two modules, one of which has "/" and "#" in its name."""
    tape = graphs.Tape()
    (x,) = tape.op("aten.mm.default", [], 8, module=MODULE)
    (y,) = tape.op("aten.mm.default", [x], 8, module=MODULE)
    (z,) = tape.op("aten.relu.default", [y], 8, module="head")
    saved = [tape.save(v) for v in (x, y, z)]
    for h in reversed(saved):
        tape.step("Backward0", [h])
    return tape.profile()


def test_module_with_a_slash_has_one_row_in_a_report(profile: Profile) -> None:
    graph = build(profile)
    rows = by_module(op_decisions(graph, graph.everything))
    assert [(row.name, row.keeps) for row in rows] == [
        (MODULE, ("mm.default#0", "mm.default#1")),
        ("head", ("relu.default",)),
    ]


@pytest.mark.parametrize(
    "pattern", [MODULE, f"{MODULE}/aten.mm", "layers.*.experts.*", "layers.*.experts.a/b*", "*/aten.mm"]
)
def test_pattern_matches_a_module_with_a_slash(profile: Profile, pattern: str) -> None:
    graph = constrained(profile, Constraints(pin_save=(pattern,)))
    assert [bool(op.must_save) for op in graph.ops] == [True, True, False]
