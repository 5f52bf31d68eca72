"""Check the page in Chromium: the drawing, the readout under the cursor, the keyboard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drawings import moving, small, timeline_of
from serving import Tab, in_chromium

from autoac.planner import Picture, Stopped, picture
from autoac.planner.report.page import timeline_page
from autoac.planner.units import format_bytes

pytestmark = in_chromium


class Opened(Tab):
    """Open a page, and wait until it has drawn itself."""

    def __init__(self, browser: Any, picture: Picture, folder: Path) -> None:
        file = folder / "page.html"
        file.write_text(timeline_page(picture.data()), "utf-8")
        super().__init__(browser)
        self.page.goto(file.as_uri())
        self.page.wait_for_selector('[data-ready="true"]')

    def text(self, part: str) -> str:
        return str(self.page.inner_text(f'[data-part="{part}"]'))

    def press(self, *keys: str) -> str:
        """Press these keys on the plot; return the readout."""
        for key in keys:
            self.page.press('[data-part="plot"]', key)
        return self.text("readout")


@pytest.fixture(scope="module")
def small_picture() -> Picture:
    return timeline_of(small())


@pytest.fixture
def opened(browser: Any, small_picture: Picture, tmp_path: Path) -> Iterator[Opened]:
    made = Opened(browser, small_picture, tmp_path)
    yield made
    made.close("file:")


def test_page_opens_at_the_peak_with_what_is_live_there(opened: Opened, small_picture: Picture) -> None:
    track, measured = small_picture.tracks[0], small_picture.measured_peak_bytes
    assert measured is not None
    peak = format_bytes(track.live_bytes[track.peak])
    assert f"predicted {peak}" in opened.text("readout")
    assert opened.text("live-title") == "Live at the peak"
    table = opened.text("live")
    assert table.splitlines()[-1].split("\t")[-1] == peak
    assert "parameters" in table
    assert "transformer.h.1" in table
    assert format_bytes(measured) in opened.text("facts")
    assert "+1.00 % compared with predicted" in opened.text("facts")


def test_large_gap_asks_for_more_time_only_if_the_search_had_too_little(
    browser: Any, small_picture: Picture, tmp_path: Path
) -> None:
    for stopped, words in (
        (Stopped.OPTIMAL, "too little of the step"),
        (Stopped.WORK_LIMIT, "a longer time limit may find"),
    ):
        made = Opened(browser, replace(small_picture, gap=0.2, stopped=stopped.value), tmp_path)
        assert words in made.text("facts")
        made.close("file:")


def test_the_cursor_shows_the_module_under_it_and_a_click_stays(opened: Opened) -> None:
    before = opened.text("readout")
    area = opened.page.locator(".u-over").bounding_box()
    x, y = area["x"] + area["width"] * 0.1, area["y"] + area["height"] / 2
    opened.page.mouse.move(x, y)
    opened.page.wait_for_function(
        "old => document.querySelector('[data-part=readout]').innerText !== old", arg=before
    )
    here = opened.text("readout")
    assert "forward, " in here
    assert " in transformer." in here
    opened.page.mouse.move(2, 2)  # elsewhere: back to the moment that was chosen
    opened.page.wait_for_function(
        "old => document.querySelector('[data-part=readout]').innerText === old", arg=before
    )
    opened.page.mouse.move(x, y)
    opened.page.mouse.down()
    opened.page.mouse.up()
    opened.page.mouse.move(2, 2)
    assert opened.text("readout") == here


def test_click_takes_effect_before_the_next_frame_and_leaving_hides_the_cursor(opened: Opened) -> None:
    """Dispatch the events in one task, so that no frame comes between them."""
    in_one_task = """async kinds => {
        const over = document.querySelector('.u-over'), area = over.getBoundingClientRect();
        const at = {clientX: area.x + area.width * 0.1, clientY: area.y + area.height / 2, bubbles: true};
        for (const kind of kinds) over.dispatchEvent(new MouseEvent(kind, at));
        for (let frame = 0; frame < 3; frame++) await new Promise(requestAnimationFrame);
        return document.querySelector('[data-part=readout]').innerText;
    }"""
    before = opened.text("readout")
    assert opened.page.evaluate(in_one_task, ["mouseenter", "mousemove", "mouseleave"]) == before
    clicked = ["mouseenter", "mousemove", "mousedown", "mouseup", "click", "mouseleave"]
    assert "forward, " in opened.page.evaluate(in_one_task, clicked)


def test_keys_move_over_the_step_and_values_are_announced(opened: Opened) -> None:
    opened.page.focus('[data-part="plot"]')
    first = opened.press("Home")
    assert first.startswith("0.000 ms")
    assert "embedding.default#0 in transformer.wte" in first
    second = opened.press("ArrowRight")
    assert "embedding.default#0 in transformer.wpe" in second
    assert opened.press("ArrowLeft") == first
    assert "transformer.h.0" in opened.press("PageDown")
    assert "transformer.h.1" in opened.press("PageDown")
    assert "optimizer step" in opened.press("End")
    opened.press("p")
    opened.page.wait_for_function(
        "() => document.querySelector('[data-part=spoken]').textContent.includes('predicted')"
    )
    assert opened.text("live-title") == "Live at the peak"
    spoken = opened.page.text_content('[data-part="spoken"]')
    assert "GiB" in spoken or "MiB" in spoken


def test_the_numbers_are_there_as_a_table(opened: Opened, small_picture: Picture) -> None:
    opened.page.click("summary")
    opened.page.wait_for_selector('[data-part="runs"] tbody tr')  # drawn a task after the click
    table = opened.text("runs")
    assert "forward, transformer.h.0" in table
    assert "backward, transformer.h.2" in table
    assert format_bytes(max(small_picture.tracks[0].live_bytes)) in table


# Pixels below the axis that have about this colour, [red, green, blue].
BELOW = """colour => {
    const canvas = document.querySelector('canvas'), copy = document.createElement('canvas');
    [copy.width, copy.height] = [canvas.width, 78 * devicePixelRatio];
    const read = copy.getContext('2d', {willReadFrequently: true});
    read.drawImage(canvas, 0, copy.height - canvas.height);
    const pixels = read.getImageData(0, 0, copy.width, copy.height).data;
    let count = 0;
    for (let i = 0; i < pixels.length; i += 4)
        count += pixels[i + 3] === 255 && colour.every((value, k) => Math.abs(pixels[i + k] - value) < 9);
    return count;
}"""
MOVED, STALLS = [0x0F, 0x8A, 0x7E], [0xB3, 0x26, 0x1E]


def test_moves_are_drawn_below_the_axis_and_named_under_the_cursor(
    browser: Any, opened: Opened, tmp_path: Path
) -> None:
    drawn = picture(moving(0.5))
    copy = next(copy for copy in drawn.copies if copy.stall_us)
    made = Opened(browser, drawn, tmp_path)
    try:
        area = made.page.locator(".u-over").bounding_box()
        below = made.page.locator('[data-part="plot"]').bounding_box()
        end = max(track.end_us for track in drawn.tracks) + 0.03 * drawn.tracks[0].end_us
        x = round(area["x"] + area["width"] * sum(copy.out_us) / 2 / end)
        made.page.mouse.move(x, below["y"] + below["height"] - 5)
        made.page.wait_for_function(
            "() => document.querySelector('[data-part=readout]').textContent.includes('To the host: ')"
        )
        readout = made.text("readout")
        op = f"{drawn.modules[drawn.ops.module[copy.op]]}/{drawn.labels[drawn.ops.label[copy.op]]}"
        assert f"To the host: {op}, {format_bytes(copy.nbytes)}, freed at " in readout
        assert "compute waits " in readout
        made.page.select_option('[data-part="live-by"]', "op")
        assert "until it is on the host" in made.text("live")
        assert made.page.evaluate(BELOW, MOVED) > 5000  # the bytes on the host
        assert made.page.evaluate(BELOW, STALLS) > 50
        assert "Moved to the host" in made.text("facts")
        made.page.click('[data-part="layers"] button >> nth=1')
        assert "moves " in made.text("layers")
        assert made.complaints == []
    finally:
        made.page.close()
    assert opened.page.evaluate(BELOW, MOVED) == 0
    unmoved = opened.page.locator('[data-part="plot"]').bounding_box()
    assert unmoved["height"] < below["height"]
    assert "host" not in opened.page.inner_text("main")
