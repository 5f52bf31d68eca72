"""Check pages as text: one file, nothing from the network, and data that never becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from drawings import HOSTILE, hostile, small, timeline_of

from autoac.planner.report.page import embedded, fill, timeline_page


class Elements(HTMLParser):
    """Collect the elements of a page as a browser's parser sees them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[int, str] = {}  # by position in tags
        self.inside = -1
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = len(self.tags)
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.inside = -1

    def handle_data(self, data: str) -> None:
        self.texts[self.inside] = self.texts.get(self.inside, "") + data

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attrs, self.texts.get(i, "")) for i, (name, attrs) in enumerate(self.tags) if name == tag]


def test_the_page_is_one_file_that_asks_the_network_for_nothing() -> None:
    page = timeline_page(timeline_of(small()).data())
    elements = Elements(page)
    for _, attributes in elements.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    assert "@@" not in page
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket", page)


def test_only_its_own_scripts_and_styles_may_run() -> None:
    elements = Elements(timeline_page(timeline_of(small()).data()))
    (policy,) = [
        attributes["content"]
        for attributes, _ in elements.of("meta")
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    run = [text for attributes, text in elements.of("script") if "type" not in attributes]
    assert len(run) == 4  # uPlot, and three of ours
    for source in run + [text for _, text in elements.of("style")]:
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_hostile_names_stay_names() -> None:
    data = timeline_of(hostile()).data()
    page = timeline_page(data)
    plain, elements = Elements(timeline_page(timeline_of(small()).data())), Elements(page)
    assert [tag for tag, _ in elements.tags] == [tag for tag, _ in plain.tags]
    (found,) = [text for attributes, text in elements.of("script") if attributes.get("id") == "data"]
    assert json.loads(found) == json.loads(json.dumps(data))
    assert json.loads(found)["model"] == HOSTILE[0]
    assert elements.of("title")[0][1].startswith(HOSTILE[0])


@pytest.mark.parametrize("text", HOSTILE)
def test_data_cannot_end_their_script_element(text: str) -> None:
    written = embedded([text, {text: 1}])
    assert json.loads(written) == [text, {text: 1}]
    assert not set("<>&") & set(written)


def test_names_inside_a_part_are_not_replaced() -> None:
    assert fill("@@A@@ @@B@@", {"A": "@@B@@", "B": "2"}) == "@@B@@ 2"
    with pytest.raises(KeyError):
        fill("@@A@@ @@C@@", {"A": "1"})
