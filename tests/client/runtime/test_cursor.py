"""Test that a cursor follows a forward and recovers at the next module (rule 10). Needs no torch."""

from __future__ import annotations

import pytest

from autoac.tape.runtime.cursor import Cursor, LeftThePath, OffPath, Route

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
    """Follow `events` and return the decisions: `>a` enters a module, `<a` leaves it, others are ops."""
    decisions = []
    for event in events:
        if event[0] == ">":
            cursor.enter(event[1:])
        elif event[0] == "<":
            cursor.leave(event[1:])
        else:
            decisions.append(cursor.next_decision(event))
    return decisions


def test_ops_on_the_path_get_their_decisions() -> None:
    cursor = Cursor(ROUTE)
    got = walk(
        cursor, "embed", ">a", "mm", "gelu", ">a.b", "mm", "<a.b", "mm", "<a", ">c", "mm", "<c", "loss"
    )
    assert got == ["save", "recompute", "save", "recompute", "save", "recompute", "save"]
    assert cursor.off_path is None


def test_ops_of_a_side_module_do_not_leave_the_path() -> None:
    """Model DistributedDataParallel, which rebuilds buckets and sends buffers before it calls its module."""
    route = Route({"module/mm#0": "recompute", "module/gelu#0": "save"})
    wrapper = Cursor(route, strict=True, side_modules={"."})
    got = walk(wrapper, "empty", "mm", "copy_", ">module", "mm", "gelu", "<module", "copy_")
    assert got == [None, None, None, "recompute", "save", None]
    wrapper.finish()
    with pytest.raises(LeftThePath):
        walk(Cursor(route, strict=True, side_modules={"."}), "empty", ">module", "empty")
    with pytest.raises(LeftThePath):
        walk(Cursor(route, strict=True), "empty")


def test_unknown_op_gets_the_default_until_the_next_module() -> None:
    reports: list[OffPath] = []
    cursor = Cursor(ROUTE, report=reports.append)
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
    assert [str(off) for off in reports] == ["expected a/gelu#0, found relu"]


def test_skipped_module_is_reported() -> None:
    cursor = Cursor(ROUTE)
    got = walk(cursor, "embed", ">c", "mm", "<c", "loss")
    assert got == ["save", "recompute", "save"]
    assert cursor.off_path == OffPath("a/mm#0", "c/mm#0")


def test_additional_call_of_a_module_repeats_its_last_decisions_and_is_reported() -> None:
    cursor = Cursor(ROUTE)
    walk(cursor, "embed", ">a", "mm", "gelu", ">a.b", "mm", "<a.b", "mm", "<a")
    got = walk(cursor, ">c", "mm", "<c", ">c", "mm", "<c", "loss")
    assert got == ["recompute", "recompute", "save"]
    assert cursor.off_path == OffPath("./loss#0", "c/mm#0")


def test_missing_ops_at_the_end_are_reported_unless_they_may_be_the_loss() -> None:
    whole, short = Cursor(ROUTE), Cursor(ROUTE)
    for cursor, rest in ((whole, [">c", "mm", "<c"]), (short, [])):
        walk(cursor, "embed", ">a", "mm", "gelu", ">a.b", "mm", "<a.b", "mm", "<a", *rest)
        cursor.finish()
    assert whole.off_path is None
    assert short.off_path == OffPath("c/mm#0", "the end of forward")
    strict = Cursor(ROUTE, strict=True)
    walk(strict, "embed", ">a", "mm", "gelu", ">a.b", "mm", "<a.b", "mm", "<a")
    with pytest.raises(LeftThePath, match="expected c/mm#0, found the end of forward"):
        strict.finish()


SHARED = Route(
    {
        "shared/embedding#0": "save",
        "encoder/mm#0": "recompute",
        "shared/embedding#1": "save",
        "decoder/mm#0": "recompute",
        "head/mm#0": "save",
    }
)


def test_module_may_begin_with_a_call_of_a_module_from_another_part() -> None:
    cursor = Cursor(SHARED, strict=True)
    walk(cursor, ">encoder", ">shared", "embedding", "<shared", "mm", "<encoder")
    got = walk(
        cursor, ">decoder", ">shared", "embedding", "<shared", "mm", "<decoder", ">head", "mm", "<head"
    )
    cursor.finish()
    assert got == ["save", "recompute", "save"]


CALLED_TWICE = Route({"cell/mm#0": "save", "cell/mm#1": "save", "./exp#0": "recompute"})


def test_consecutive_calls_of_one_module_are_distinguished() -> None:
    cursor = Cursor(CALLED_TWICE, strict=True)
    calls = []
    for _ in range(2):
        walk(cursor, ">cell", "mm")
        calls.append(cursor.leave("cell"))
    assert calls == [(0, 1), (1, 2)]
    again = Cursor(CALLED_TWICE, strict=True)
    for begin, end in ((0, 1), (1, 2)):
        assert again.enter("cell") == begin
        again.jump_to(end)
        assert again.leave("cell") == (begin, end)
    assert walk(again, "exp") == ["recompute"]


def test_call_that_leaves_the_path_has_no_certain_span() -> None:
    cursor = Cursor(ROUTE)
    walk(cursor, "embed", ">a", "mm", "conv", ">a.b", "mm")
    assert cursor.leave("a.b") == (3, 4)
    assert cursor.leave("a") is None


COPIES = Route(
    {
        "a/aten.clone.default#0": "save",
        "a/mm#0": "recompute",
        "a/aten.clone.default#1": "recompute",
        "a.b/mm#0": "save",
        "a/aten.clone.default#2": "save",
    }
)


def test_copies_may_be_missing() -> None:
    """Leave out the copy of a `reshape` that can return a view because a dimension has size 1."""
    cursor = Cursor(COPIES, strict=True)
    assert walk(cursor, ">a", "mm", ">a.b", "mm", "<a.b", "<a") == ["recompute", "save"]
    cursor.finish()
    with pytest.raises(LeftThePath):
        walk(Cursor(COPIES, strict=True), ">a", "exp")


def test_ops_after_an_interrupted_forward_do_not_belong_to_it() -> None:
    reports: list[OffPath] = []
    for strict in (False, True):
        cursor = Cursor(ROUTE, strict=strict, report=reports.append, in_forward=lambda: False)
        assert walk(cursor, "embed", ">a", "randn", "mm", "<a", "add") == ["save", None, None, None]
        assert cursor.interrupted
        cursor.finish()
    assert not reports


def test_uncertain_position_is_not_run_unseen() -> None:
    """Refuse to run a fully saved module without the mode while another may have been skipped."""
    cursor = Cursor(SHARED)
    walk(cursor, ">encoder", ">shared", "embedding", "<shared", "mm", "<encoder")
    assert cursor.enter("head") is None  # a call of decoder may still follow, from there
    assert cursor.next_decision("mm") == "save"
    assert cursor.off_path == OffPath("shared/embedding#1", "head/mm#0")


def test_unknown_module_gets_the_default() -> None:
    got = walk(
        Cursor(ROUTE), "embed", ">new", "conv", "<new", ">a", "mm", "gelu", "<a", ">c", "mm", "<c", "loss"
    )
    assert got == ["save", None, "recompute", "save", "recompute", "save"]


def test_layer_that_the_route_lacks_is_decided_like_the_nearest_one() -> None:
    decisions = {
        "layers.0/mm#0": "save",
        "layers.0.act/gelu#0": "save",
        "layers.2/mm#0": "recompute",
        "layers.2.act/gelu#0": "save",
        "layers.2/mm#1": "recompute",
        "head/mm#0": "save",
    }
    cursor = Cursor(Route(decisions))
    got = walk(cursor, ">layers.0", "mm", ">layers.0.act", "gelu", "<layers.0.act", "<layers.0")
    assert got == ["save", "save"]
    got = walk(cursor, ">layers.2", "mm", ">layers.2.act", "gelu", "<layers.2.act", "mm", "<layers.2")
    assert got == ["recompute", "save", "recompute"]
    assert cursor.off_path is None
    got = walk(cursor, ">layers.4", "mm", ">layers.4.act", "gelu", "<layers.4.act", "mm", "<layers.4")
    assert got == ["recompute", "save", "recompute"]
    assert cursor.off_path == OffPath("head/mm#0", "layers.4")
    assert walk(cursor, ">head", "mm", "<head") == ["save"]
    cursor.finish()


def test_layer_in_the_middle_is_decided_like_its_lower_neighbor() -> None:
    route = Route({"layers.0/mm#0": "save", "layers.2/mm#0": "recompute", "layers.2/mm#1": "save"})
    cursor = Cursor(route)
    assert walk(cursor, ">layers.0", "mm", "<layers.0", ">layers.1", "mm", "exp", "<layers.1") == [
        "save",
        "save",
        None,
    ]
    assert walk(cursor, ">layers.2", "mm", "mm", "<layers.2") == ["recompute", "save"]


def test_layer_without_ops_that_the_route_lacks_is_on_the_path() -> None:
    """As is the nn.Identity that ResNet has in place of a last activation."""
    route = Route({"layers.0/mm#0": "save", "layers.0.act/relu#0": "recompute", "layers.1/mm#0": "recompute"})
    cursor = Cursor(route, strict=True)
    got = walk(cursor, ">layers.0", "mm", ">layers.0.act", "relu", "<layers.0.act", "<layers.0")
    got += walk(cursor, ">layers.1", "mm", ">layers.1.act", "<layers.1.act", "<layers.1")
    assert got == ["save", "recompute", "recompute"]
    assert cursor.off_path is None
    cursor.finish()


def test_leaving_the_path_is_reported_once() -> None:
    reports: list[OffPath] = []
    cursor = Cursor(ROUTE, report=reports.append)
    walk(cursor, "x", ">a", "y", "<a", ">c", "z", "<c")
    assert len(reports) == 1
    assert reports[0] == OffPath("./embed#0", "x")


@pytest.mark.parametrize("planned_native", [True, False])
@pytest.mark.parametrize("runs_native", [True, False])
def test_kernels_of_batch_norm_share_a_key(planned_native: bool, runs_native: bool) -> None:
    """torch's own kernel comes after an empty tensor, cuDNN's does not."""
    empty = ["aten.empty.memory_format"]
    keys = [f"bn/{op}#0" for op in (*empty * planned_native, "aten.batch_norm.default")]
    cursor = Cursor(Route(dict.fromkeys([*keys, "./aten.mm.default#0"], "recompute")), strict=True)
    cursor.enter("bn")
    decisions = [cursor.next_decision(op) for op in (*empty * runs_native, "aten.batch_norm.default")]
    cursor.leave("bn")
    assert decisions[-1] == "recompute"
    assert cursor.next_decision("aten.mm.default") == "recompute"
    cursor.finish()
