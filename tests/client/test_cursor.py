"""The cursor knows where it is, and finds its way back at the next module (rule 10). No torch."""

from __future__ import annotations

import pytest

from ac_client.cursor import Cursor, LeftThePath, OffPath, Route

ROUTE = Route(
    {
        "./embed#0": "save",
        "a/mm#0": "recompute",
        "a/gelu#0": "save",
        "a.b/mm#0": "recompute",
        "a/mm#1": "save",
        "c/mm#0": "recompute",
        "./loss#0": "save",
    }
)


def walk(cursor: Cursor, *events: str) -> list[str | None]:
    """`>a` enters a module, `<a` leaves it, anything else is an op."""
    decisions = []
    for event in events:
        if event[0] == ">":
            cursor.enter(event[1:])
        elif event[0] == "<":
            cursor.leave(event[1:])
        else:
            decisions.append(cursor.op(event))
    return decisions


def test_on_the_path() -> None:
    cursor = Cursor(ROUTE)
    got = walk(
        cursor, "embed", ">a", "mm", "gelu", ">a.b", "mm", "<a.b", "mm", "<a", ">c", "mm", "<c", "loss"
    )
    assert got == ["save", "recompute", "save", "recompute", "save", "recompute", "save"]
    assert cursor.off is None


def test_an_unknown_op_is_left_to_the_default_until_the_next_module() -> None:
    told: list[OffPath] = []
    cursor = Cursor(ROUTE, report=told.append)
    got = walk(
        cursor,
        "embed",
        ">a",
        "mm",
        "relu",
        "gelu",
        ">a.b",
        "mm",
        "<a.b",
        "mm",
        "<a",
        ">c",
        "mm",
        "<c",
        "loss",
    )
    assert got == ["save", "recompute", None, None, "recompute", "save", "recompute", "save"]
    assert [str(off) for off in told] == ["expected a/gelu#0, found relu"]


def test_a_module_that_is_left_out_is_skipped() -> None:
    got = walk(Cursor(ROUTE), "embed", ">c", "mm", "<c", "loss")
    assert got == ["save", "recompute", "save"]


def test_a_module_that_is_called_once_more_is_left_to_its_last_call() -> None:
    cursor = Cursor(ROUTE)
    got = walk(cursor, "embed", ">c", "mm", "<c", ">c", "mm", "<c", "loss")
    assert got == ["save", "recompute", "recompute", "save"]


def test_an_unknown_module_is_left_to_the_default() -> None:
    got = walk(
        Cursor(ROUTE), "embed", ">new", "conv", "<new", ">a", "mm", "gelu", "<a", ">c", "mm", "<c", "loss"
    )
    assert got == ["save", None, "recompute", "save", "recompute", "save"]


def test_it_tells_once() -> None:
    told: list[OffPath] = []
    cursor = Cursor(ROUTE, report=told.append)
    walk(cursor, "x", ">a", "y", "<a", ">c", "z", "<c")
    assert len(told) == 1
    assert told[0] == OffPath("./embed#0", "x")


def test_strict_raises_with_both_names() -> None:
    with pytest.raises(LeftThePath, match=r"expected \./embed#0, found relu"):
        walk(Cursor(ROUTE, strict=True), "relu")
