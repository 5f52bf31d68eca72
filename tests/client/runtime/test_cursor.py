"""Test that a cursor follows a forward and recovers at the next module (rule 10). Needs no torch."""

from __future__ import annotations

from contextlib import nullcontext

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
SHARED = Route(
    {
        "shared/embedding#0": "save",
        "encoder/mm#0": "recompute",
        "shared/embedding#1": "save",
        "decoder/mm#0": "recompute",
        "head/mm#0": "save",
    }
)
LAYERS = Route(
    {
        "layers.0/mm#0": "save",
        "layers.0.act/gelu#0": "save",
        "layers.2/mm#0": "recompute",
        "layers.2.act/gelu#0": "save",
        "layers.2/mm#1": "recompute",
        "head/mm#0": "save",
    }
)
COPY = "aten.clone.default"  # which a `reshape` leaves out if a dimension has size 1
COPIES = Route({f"a/{COPY}#0": "save", "a/mm#0": "recompute", f"a/{COPY}#1": "recompute", "b/mm#0": "save"})
IDENTITY = Route({"layers.0/mm#0": "save", "layers.0.act/relu#0": "recompute", "layers.1/mm#0": "recompute"})
A = ">a mm gelu >a.b mm <a.b mm <a"
ENCODER = ">encoder >shared embedding <shared mm <encoder"

# The route, the events of a forward (`>a` enters a module, `<a` leaves it, others are ops), the decisions of
# the ops ("-" is none), and what is reported once: nothing if the forward is on its path.
WALKS: dict[str, tuple[Route, str, str, str]] = {
    "on the path": (
        ROUTE,
        f"embed {A} >c mm <c loss",
        "save recompute save recompute save recompute save",
        "",
    ),
    "a loss outside": (ROUTE, f"embed {A} >c mm <c", "save recompute save recompute save recompute", ""),
    "missing ops at the end": (
        ROUTE,
        f"embed {A}",
        "save recompute save recompute save",
        "expected c/mm#0, found the end of forward",
    ),
    "an unknown op, until the next module": (
        ROUTE,
        "embed >a mm relu gelu >a.b mm <a.b mm <a >c mm <c loss",
        "save recompute - - recompute save recompute save",
        "expected a/gelu#0, found relu",
    ),
    "unknown ops in several modules": (ROUTE, "x >a y <a >c z <c", "- - -", "expected ./embed#0, found x"),
    "an unknown op, until its module ends": (
        ROUTE,
        "embed >a mm gelu >a.b exp <a.b mm <a >c mm <c loss",
        "save recompute save - save recompute save",
        "expected a.b/mm#0, found exp",
    ),
    "an unknown module": (
        ROUTE,
        "embed >new conv <new >a mm gelu <a >c mm <c loss",
        "save - recompute save recompute save",
        "expected a/mm#0, found conv",
    ),
    "a skipped module": (
        ROUTE,
        "embed >c mm <c loss",
        "save recompute save",
        "expected a/mm#0, found c/mm#0",
    ),
    "an additional call": (
        ROUTE,
        f"embed {A} >c mm <c >c mm <c loss",
        "save recompute save recompute save recompute recompute save",
        "expected ./loss#0, found c/mm#0",
    ),
    "a module that begins with one of another part": (
        SHARED,
        f"{ENCODER} >decoder >shared embedding <shared mm <decoder >head mm <head",
        "save recompute save recompute save",
        "",
    ),
    "missing copies": (COPIES, ">a mm <a >b mm <b", "recompute save", ""),
    "another op than a copy": (COPIES, ">a exp <a", "-", f"expected a/{COPY}#0, found exp"),
    "a layer that the route lacks, like the nearest one": (
        LAYERS,
        ">layers.0 mm >layers.0.act gelu <layers.0.act <layers.0 "
        + " ".join(f">layers.{i} mm >layers.{i}.act gelu <layers.{i}.act mm <layers.{i}" for i in (2, 4))
        + " >head mm <head",
        "save save recompute save recompute recompute save recompute save",
        "expected head/mm#0, found layers.4",
    ),
    "a layer in the middle, like its lower neighbor": (
        LAYERS,
        ">layers.0 mm >layers.0.act gelu <layers.0.act <layers.0 >layers.1 mm exp <layers.1"
        " >layers.2 mm >layers.2.act gelu <layers.2.act mm <layers.2 >head mm <head",
        "save save save - recompute save recompute save",
        "expected layers.2/mm#0, found layers.1",
    ),
    "a layer without ops, such as nn.Identity": (
        IDENTITY,
        ">layers.0 mm >layers.0.act relu <layers.0.act <layers.0 >layers.1 mm >layers.1.act <layers.1.act"
        " <layers.1",
        "save recompute recompute",
        "",
    ),
}


def walk(cursor: Cursor, events: str) -> str:
    """Follow `events` and return the decisions."""
    decisions = []
    for event in events.split():
        if event[0] == ">":
            cursor.enter(event[1:])
        elif event[0] == "<":
            cursor.leave(event[1:])
        else:
            decisions.append(cursor.next_decision(event) or "-")
    return " ".join(decisions)


def follow(cursor: Cursor, events: str) -> str:
    decisions = walk(cursor, events)
    cursor.finish()
    return decisions


@pytest.mark.parametrize(("route", "events", "decisions", "off_path"), WALKS.values(), ids=WALKS)
def test_forward_gets_decisions_and_what_leaves_the_path_is_reported_once(
    route: Route, events: str, decisions: str, off_path: str
) -> None:
    reports: list[OffPath] = []
    cursor = Cursor(route, report=reports.append)
    assert follow(cursor, events) == decisions
    assert [str(off) for off in reports] == [off_path] * bool(off_path)
    with pytest.raises(LeftThePath, match=off_path) if off_path else nullcontext():
        follow(Cursor(route, strict=True), events)


def test_ops_of_a_side_module_do_not_leave_the_path() -> None:
    """Model DistributedDataParallel, which rebuilds buckets and sends buffers before it calls its module."""
    route = Route({"module/mm#0": "recompute", "module/gelu#0": "save"})
    wrapper = Cursor(route, strict=True, side_modules={"."})
    assert walk(wrapper, "empty mm copy_ >module mm gelu <module copy_") == "- - - recompute save -"
    wrapper.finish()
    with pytest.raises(LeftThePath):
        walk(Cursor(route, strict=True, side_modules={"."}), "empty >module empty")
    with pytest.raises(LeftThePath):
        walk(Cursor(route, strict=True), "empty")


def test_consecutive_calls_of_one_module_are_distinguished() -> None:
    route = Route({"cell/mm#0": "save", "cell/mm#1": "save", "./exp#0": "recompute"})
    cursor, again = Cursor(route, strict=True), Cursor(route, strict=True)
    for begin, end in ((0, 1), (1, 2)):
        walk(cursor, ">cell mm")
        assert cursor.leave("cell") == (begin, end)
        assert again.enter("cell") == begin
        again.jump_to(end)
        assert again.leave("cell") == (begin, end)
    assert walk(again, "exp") == "recompute"


def test_call_that_leaves_the_path_has_no_certain_span() -> None:
    cursor = Cursor(ROUTE)
    walk(cursor, "embed >a mm conv >a.b mm")
    assert cursor.leave("a.b") == (3, 4)
    assert cursor.leave("a") is None


def test_ops_after_an_interrupted_forward_do_not_belong_to_it() -> None:
    reports: list[OffPath] = []
    for strict in (False, True):
        cursor = Cursor(ROUTE, strict=strict, report=reports.append, in_forward=lambda: False)
        assert walk(cursor, "embed >a randn mm <a add") == "save - - -"
        assert cursor.interrupted
        cursor.finish()
    assert not reports


def test_uncertain_position_is_not_run_unseen() -> None:
    """Refuse to run a fully saved module without the mode while another may have been skipped."""
    cursor = Cursor(SHARED)
    walk(cursor, ENCODER)
    assert cursor.enter("head") is None  # a call of decoder may still follow, from there
    assert cursor.next_decision("mm") == "save"
    assert cursor.off_path == OffPath("shared/embedding#1", "head/mm#0")


@pytest.mark.parametrize("planned_native", [True, False])
@pytest.mark.parametrize("runs_native", [True, False])
def test_kernels_of_batch_norm_share_a_key(planned_native: bool, runs_native: bool) -> None:
    """torch's own kernel comes after an empty tensor, cuDNN's does not."""
    empty, norm = "aten.empty.memory_format", "aten.batch_norm.default"
    keys = [f"bn/{op}#0" for op in (*[empty] * planned_native, norm)]
    cursor = Cursor(Route(dict.fromkeys([*keys, "./aten.mm.default#0"], "recompute")), strict=True)
    decisions = follow(cursor, f">bn {empty * runs_native} {norm} <bn aten.mm.default")
    assert decisions.split()[-2:] == ["recompute"] * 2
