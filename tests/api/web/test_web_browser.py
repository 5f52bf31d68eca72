"""Test the pages in Chromium against a running service, by mouse and by keyboard."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import anyio
import httpx2
import pytest
from anyio import to_thread
from drawings import HOST, HOSTILE, hostile, linked, moves_budget, small
from service_fakes import InProcess, chain_profile
from serving import in_chromium, serving

from autoac.api import Settings, create_app
from autoac.api.requests import Answer, Kind
from autoac.api.solving.child_process import OnJobProgress
from autoac.planner import plan
from autoac.planner.formats.profile import Profile
from autoac.planner.offload import plan_with_host
from autoac.planner.plan import DEFAULT_GAP
from autoac.planner.units import GIB, bytes_from_gb, format_bytes, format_us

TOKEN = "a token of more than sixteen"
AXE = Path(__file__).parents[2] / "vendor" / "axe.min.js"
READY = '#main[data-ready="true"]'

pytestmark = in_chromium


@dataclass(frozen=True)
class Gated(InProcess):
    """Report progress until the gate is open, then plan."""

    plan: Any = plan_with_host
    gate: Event = field(default_factory=Event)

    async def answer(
        self, kind: Kind, body: bytes, told: OnJobProgress, *, solves: int = 1, draws: bool = False
    ) -> Answer:
        seconds = 0.0
        while not self.gate.is_set():
            numbers = {"incumbent": 2500.0, "bound": 1200.0, "gap": 0.5, "seconds": seconds}
            told(numbers | ({"point": 3, "points": 15} if kind is Kind.FRONTIER else {}))
            await anyio.sleep(0.05)
            seconds += 0.05
        return await to_thread.run_sync(self.solve, kind, body, told, draws)


@dataclass
class Live:
    """A running service."""

    url: str
    gate: Event
    http: httpx2.Client

    def policy(self, profile: Profile, budget_bytes: int, **options: Any) -> str:
        """Store a profile, plan it, and return the policy's id."""
        asked = {"profile": profile.model_dump(mode="json"), "budget_bytes": budget_bytes, **options}
        body = json.dumps(asked)
        headers = {"Content-Type": "application/json", "Prefer": "wait=120"}
        made = self.http.post("/v1/policies", content=body, headers=headers)
        assert made.status_code == 201, made.text
        return str(made.headers["location"].rpartition("/")[2])


@contextmanager
def listening(
    database: Path, token: str | None = None, below: str = "", draw_ahead: bool = True
) -> Iterator[Live]:
    """Run a service with this database; `below` is a path that a proxy strips."""
    gate = Event()
    gate.set()
    settings = Settings(database_url=f"sqlite:///{database}", token=token, draw_ahead=draw_ahead)
    app = create_app(settings, Gated(gate=gate))

    async def proxied(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            path = (
                scope["path"].removeprefix(below) if scope["path"].startswith(f"{below}/") else "/elsewhere"
            )
            scope = scope | {"path": path, "raw_path": path.encode()}
        await app(scope, receive, send)

    try:
        with serving(proxied if below else app) as host:
            url = host + below
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            with httpx2.Client(base_url=url, headers=headers, timeout=120) as http:
                yield Live(url, gate, http)
    finally:
        gate.set()


@dataclass
class Stored:
    """The contents of the service in most tests."""

    live: Live
    profile: Profile
    ids: list[str]  # of two policies of it, the larger budget first
    budgets: list[int]
    hostile: str  # a policy of a model that wants to be code
    lengthy: str  # a policy of a model and a device with long names


def lengthy() -> Profile:
    """Return a small step of a model and a device with long names."""
    profile = small(2)
    device = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition Max-Q"
    return profile.model_copy(
        update={
            "model": "MixtureOfExpertsForConditionalGenerationWithRotaryPositions",
            "environment": profile.environment.model_copy(update={"device_name": device}),
        }
    )


@pytest.fixture(scope="module")
def stored(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    path = tmp_path_factory.mktemp("web") / "service.sqlite3"
    shutil.copy(sqlite_template, path)
    profile = small(2)
    roomy = plan(profile, budget_bytes=1 << 50)
    budgets = [roomy.peak, roomy.floor + (roomy.peak - roomy.floor) * 7 // 10]
    with listening(path) as live:
        ids = [live.policy(profile, budget) for budget in budgets]
        wild = live.policy(hostile(), 1 << 45)
        long_ = live.policy(lengthy(), 1 << 45)
        too_small = {"profile_digest": profile.digest, "budget_bytes": 1 << 20}
        failed = live.http.post("/v1/policies", json=too_small, headers={"Prefer": "wait=120"})
        assert failed.status_code == 422, failed.text
        named = live.http.put(
            "/v1/aliases/gpt2@test/production", json={"policy_id": ids[1]}, headers={"If-None-Match": "*"}
        )
        assert named.status_code == 201
        yield Stored(live, profile, ids, budgets, wild, long_)


class Visit:
    """A tab, its errors, and its requests."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        self.page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.requests: list[Any] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request))

    def go(self, path: str) -> Any:
        self.page.goto(self.url + path)
        self.page.wait_for_selector(READY)
        return self.page

    def until(self, condition: str, arg: Any = None) -> None:
        self.page.wait_for_function(condition, arg=arg)


@pytest.fixture
def visit(browser: Any, stored: Stored) -> Iterator[Visit]:
    made = Visit(browser, stored.live.url)
    yield made
    made.page.close()
    assert made.complaints == []
    strange = [
        one.url for one in made.requests if not one.url.startswith((stored.live.url, "data:", "blob:"))
    ]
    assert strange == []


def names(row: Any) -> list[str]:
    return [text.strip() for text in row.locator("th, td").all_inner_texts()]


def test_registry_is_filtered_and_left_by_keyboard(visit: Visit, stored: Stored) -> None:
    page = visit.go("/")
    assert page.title() == "Registry · autoac"
    assert page.locator("#policies tbody tr").count() == 4
    assert "gpt2@test/production" in page.inner_text("#aliases")
    (mine,) = [row for row in page.locator("#models tbody tr").all() if names(row)[0] == stored.profile.model]
    assert "of parameters" in names(mine)[1]
    assert stored.profile.inputs[0] in names(mine)[1]
    assert names(mine)[4].startswith("2")
    assert all(format_bytes(budget) in names(mine)[4] for budget in stored.budgets)

    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "To the content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.id") == "filter"
    outline = "() => getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    page.keyboard.type("no such model")
    assert "No model, alias or policy has “no such model” in it." in page.inner_text("#none")
    assert not page.is_visible("#models")
    page.fill("#filter", "")
    page.keyboard.type("production")
    assert page.locator("#policies tbody tr:visible").count() == 1
    assert page.locator("#models tbody tr:visible").count() == 0
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.pathname || ''").startswith("/policies/"):
            break
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/policies/{stored.ids[1]}")
    page.wait_for_selector(READY)
    page.go_back()
    page.wait_for_selector(READY)
    assert page.input_value("#filter") == "production"  # the filter is in the address


def test_policy_page_draws_the_step_and_lists_saved_ops(visit: Visit, stored: Stored) -> None:
    page = visit.go(f"/policies/{stored.ids[1]}")
    policy = stored.live.http.get(f"/v1/policies/{stored.ids[1]}")
    predicted = policy.json()["predicted"]
    assert format_bytes(predicted["peak_bytes"]) in page.inner_text('[data-part="facts"]')
    legend = page.inner_text('[data-part="legend"]')
    assert all(line in legend for line in ("this plan", "nothing recomputed", "every block recomputed"))
    assert page.inner_text('[data-part="live-title"]') == "Live at the peak"
    assert "transformer.h.1" in page.inner_text('[data-part="live"]')
    page.press('[data-part="plot"]', "Home")
    assert "embedding" in page.inner_text('[data-part="readout"]')
    fates = stored.live.http.get(f"/v1/policies/{stored.ids[1]}/drawing").json()["fates"]["fate"]
    assert page.locator("#map td.saved").count() == fates.count(1)
    assert page.locator("#map td.again").count() == fates.count(2) > 0
    columns = page.locator("#map table >> nth=0").locator("thead th").all_text_contents()
    assert columns == ["op", "transformer.h.00", "transformer.h.11"]  # the whole name, and what is seen of it
    assert "mlp.act/" in page.locator("#map tbody").first.inner_text()
    page.hover("#map td.again >> nth=0")
    assert "run again" in page.inner_text("#map-says")

    with page.expect_download() as download:
        page.click("#download")
    assert Path(download.value.path()).read_bytes() == policy.content
    assert download.value.suggested_filename.endswith(".json")
    page.click("#to-model")
    page.wait_for_url("**/models/*")


def test_frontier_is_computed_watched_cancelled_and_chosen_from(visit: Visit, stored: Stored) -> None:
    profile = chain_profile(*[1 << 20] * 10)
    live = stored.live
    live.policy(profile, plan(profile, budget_bytes=1 << 40).peak)
    page = visit.go(f"/models/{profile.fingerprint}")
    assert "not computed yet" in page.inner_text("#progress")
    live.gate.clear()
    page.click("#compute")
    visit.until("() => document.querySelector('#progress').textContent.includes('point 3 of 15, ')")
    visit.until(
        "() => document.querySelector('#progress').textContent.includes('best 2.5 ms, proven 1.2 ms')"
    )
    page.click("#cancel")
    visit.until("() => document.querySelector('#progress').textContent === 'Cancelled.'")
    assert live.http.get("/v1/jobs?kind=frontier").json()["items"][0]["state"] == "cancelled"

    live.gate.set()
    page.click("#compute")
    visit.until("() => document.querySelectorAll('#points tbody tr').length > 2")
    page.focus("#budget")
    page.keyboard.press("Home")
    cheap = page.inner_text("#one-liner"), page.inner_text("#facts")
    page.keyboard.press("End")
    dear = page.inner_text("#one-liner"), page.inner_text("#facts")
    assert all(a != b for a, b in zip(cheap, dear, strict=True))
    assert "0.0 %" in dear[1]
    said = page.get_attribute("#budget", "aria-valuetext")
    assert re.search(r"peak .* MiB, 0\.0 % slower", said)
    area = page.locator("#plot .u-over").bounding_box()
    page.mouse.click(area["x"] + area["width"] * 0.5, area["y"] + 40)
    clicked = page.inner_text("#one-liner")
    assert clicked not in (cheap[0], dear[0])
    budget = bytes_of(clicked)
    page.click("#plan")
    visit.until("() => document.querySelectorAll('#policies tbody tr').length === 2")
    assert not page.is_visible("#plan")
    newest = live.http.get("/v1/policies").json()["items"][0]
    assert newest["budget_bytes"] == budget
    page.reload()
    page.wait_for_selector(READY)
    assert page.locator("#points tbody tr").count() > 2  # of the stored frontier


def bytes_of(line: str) -> int:
    """Return the budget in a line of Python, as `ac_client.apply` reads it."""
    found = re.search(r"budget_gb=([\d.e-]+)", line)
    assert found is not None, line
    return bytes_from_gb(float(found[1]))


def newest_for(live: Live, profile: Profile, budget_bytes: int) -> list[str]:
    """Return the policy that the client gets for a budget (`ac_client.planning.service_client`)."""
    asked = {
        "fingerprint": profile.fingerprint,
        "device": profile.environment.device_name,
        "budget_bytes": budget_bytes,
        "headroom_bytes": 0,
        "gap": DEFAULT_GAP,
        "constraints_digest": "",
        "limit": 1,
    }
    return [item["id"] for item in live.http.get("/v1/policies", params=asked).json()["items"]]


def test_code_line_on_a_policy_page_fetches_that_policy(visit: Visit, stored: Stored) -> None:
    for id, budget in zip(stored.ids, stored.budgets, strict=True):
        page = visit.go(f"/policies/{id}")
        line = page.inner_text("#one-liner")
        assert bytes_of(line) == budget
        assert newest_for(stored.live, stored.profile, bytes_of(line)) == [id]
        assert f'service="{stored.live.url}"' in line


def test_policy_not_found_by_its_budget_is_named_or_downloaded(visit: Visit, stored: Stored) -> None:
    live, profile = stored.live, chain_profile(1 << 20, 2 << 20, 3 << 20)
    asked = {"profile": profile.model_dump(mode="json"), "budget_bytes": 1 << 30, "headroom_bytes": 1 << 20}
    made = live.http.post("/v1/policies", json=asked, headers={"Prefer": "wait=120"})
    assert made.status_code == 201, made.text
    id = made.headers["location"].rpartition("/")[2]
    assert newest_for(live, profile, 1 << 30) == []
    page = visit.go(f"/policies/{id}")
    line = page.inner_text("#one-liner")
    with page.expect_download() as download:
        page.click("#download")
    assert line == f'model = ac_client.apply(model, policy="{download.value.suggested_filename}")'
    named = live.http.put("/v1/aliases/chain", json={"policy_id": id}, headers={"If-None-Match": "*"})
    assert named.status_code == 201
    page = visit.go(f"/policies/{id}")
    assert 'alias="chain"' in page.inner_text("#one-liner")
    assert live.http.delete("/v1/aliases/chain").status_code == 204


def test_model_page_finds_a_stored_policy_only_if_it_answers_the_line(visit: Visit, stored: Stored) -> None:
    profile, live = chain_profile(*[3 << 20] * 4), stored.live
    asked = {"profile": profile.model_dump(mode="json"), "budget_bytes": 1 << 30}
    for more, words in (({"headroom_bytes": 1 << 20}, "No policy that is stored"), ({}, "A policy for this")):
        made = live.http.post("/v1/policies", json=asked | more, headers={"Prefer": "wait=120"})
        assert made.status_code == 201, made.text
        page = visit.go(f"/models/{profile.fingerprint}?budget_gb=1")
        visit.until("words => document.querySelector('#there').textContent.startsWith(words)", words)
        assert page.is_visible("#plan") == bool(more)


def test_stored_point_is_chosen_by_its_budget(visit: Visit, stored: Stored) -> None:
    page = visit.go(f"/models/{stored.profile.fingerprint}")
    page.focus("#budget")
    for key, budget, id in (
        ("Home", stored.budgets[1], stored.ids[1]),
        ("End", *stored.budgets[:1], stored.ids[0]),
    ):
        page.keyboard.press(key)
        assert bytes_of(page.inner_text("#one-liner")) == budget
        assert page.get_attribute("#there a", "href").endswith(f"/policies/{id}")
        assert not page.is_visible("#plan")
        assert float(page.input_value("#budget-number")) == pytest.approx(budget / GIB, abs=0.005)
    shared = page.url
    page.keyboard.press("Home")
    assert page.url != shared
    page.goto(shared)  # the budget is in the address
    page.wait_for_selector(READY)
    assert bytes_of(page.inner_text("#one-liner")) == stored.budgets[0]


def test_pages_report_missing_resources(browser: Any, stored: Stored) -> None:
    made = Visit(browser, stored.live.url)
    try:
        for path in (f"/models/{'0' * 64}", f"/policies/{'0' * 64}", "/models/unknown", "/policies/unknown"):
            made.page.goto(stored.live.url + path)
            made.page.wait_for_selector('#main[data-ready="missing"]')
            said = made.page.inner_text("main")
            assert re.search(r"There is no (model|policy) ", said)
            assert "Back to the registry" in said
            assert not made.page.locator("main button:visible, main input:visible, main code:visible").count()
    finally:
        made.page.close()
    assert [text for text in made.complaints if "404" not in text and "422" not in text] == []


# Text of tables that stands in lines of fewer than five characters.
NARROW = """() => {
    const found = [], texts = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
    for (let text = texts.nextNode(); text; text = texts.nextNode()) {
        const cell = text.parentElement.closest('td, th'), words = text.textContent.trim();
        if (!cell || !cell.offsetParent || cell.closest('.map') || words.length < 5) continue;
        const range = document.createRange();
        range.selectNodeContents(text);
        const lines = new Set([...range.getClientRects()].map(line => Math.round(line.top))).size;
        if (lines && words.length / lines < 5) found.push(words);
    }
    return found;
}"""


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_tables_can_be_read(visit: Visit, stored: Stored, width: int) -> None:
    """Check the pages with long names and a long error too."""
    visit.page.set_viewport_size({"width": width, "height": 900})
    difference = f"/difference?before={stored.ids[0]}&after={stored.ids[1]}"
    for path in ("/", "/jobs", f"/models/{lengthy().fingerprint}", f"/policies/{stored.lengthy}", difference):
        page = visit.go(path)
        assert page.locator("main tbody tr").count()
        assert page.evaluate(NARROW) == [], path
        assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0, path
        if width == 1280:  # no column is cut
            wide = (
                "() => [...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)"
            )
            assert page.evaluate(wide), path
        if path == "/jobs":
            row = page.locator('tr[data-state="failed"]').first
            assert row.bounding_box()["height"] < (400 if width < 900 else 100)
            row.locator("summary").click()
            assert "the step needs at least" in row.inner_text()


def test_registry_shows_its_last_column_next_to_long_names_and_many_budgets(
    visit: Visit, stored: Stored
) -> None:
    environment = lengthy().environment
    profile = chain_profile(*[13 << 20] * 5, model=lengthy().model)
    profile = profile.model_copy(update={"environment": environment})
    high = frontier_of(stored.live, profile, 3)["plans"][-1]["budget_bytes"]
    budgets = [high + (i << 20) for i in range(7)]
    for budget in budgets:
        stored.live.policy(profile, budget)
    page = visit.go("/")
    row = page.locator("#models tbody tr", has=page.locator(f'a[href*="{profile.fingerprint}"]'))
    shown = ", ".join(format_bytes(budget) for budget in budgets[:3])
    assert names(row)[4].split() == ["7", *shown.split(), "and", "4", "more"]
    made = row.locator("td").last.bounding_box()
    scroll = page.locator(".scroll").first.bounding_box()
    assert made["x"] + made["width"] <= scroll["x"] + scroll["width"]


def test_axe_finds_nothing(visit: Visit, stored: Stored) -> None:
    model, policy = f"/models/{stored.profile.fingerprint}", f"/policies/{stored.ids[1]}"
    for width, paths in ((1280, ("/", "/jobs", model, policy)), (390, ("/", policy, "/difference"))):
        visit.page.set_viewport_size({"width": width, "height": 900})
        for path in paths:
            page = visit.go(path)
            page.evaluate(f"() => {{ {AXE.read_text('utf-8')} }}")
            found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
            assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == [], (path, width)


def test_budget_below_the_minimum_is_refused_in_its_field(visit: Visit, stored: Stored) -> None:
    profile = chain_profile(*[3 << 20] * 4)
    least = frontier_of(stored.live, profile, 3)["floor"]["found_bytes"]
    page = visit.go(f"/models/{profile.fingerprint}")
    assert page.inner_text("#unit") == "MiB"
    page.fill("#budget-number", "1")
    page.keyboard.press("Enter")
    assert f"The least is {format_bytes(least)}" in page.inner_text("#least")
    assert bytes_of(page.inner_text("#one-liner")) >= least
    page.fill("#budget-number", str(-(-least // (1 << 20)) + 1))
    page.keyboard.press("Enter")
    assert not page.is_visible("#least")
    assert bytes_of(page.inner_text("#one-liner")) == (-(-least // (1 << 20)) + 1) << 20
    assert "slower than with nothing recomputed" in page.inner_text("#slower")


def frontier_of(live: Live, profile: Profile, points: int) -> dict[str, Any]:
    asked = {"profile": profile.model_dump(mode="json"), "points": points}
    made = live.http.post("/v1/frontiers", json=asked, headers={"Prefer": "wait=120"})
    assert made.status_code == 200, made.text
    found: dict[str, Any] = made.json()
    return found


def with_times(profile: Profile, factor: float) -> Profile:
    """Return the profile as another measurement of the same step, which has another digest."""
    times = tuple(us * factor for us in profile.ops.runtime_us)
    return profile.model_copy(update={"ops": profile.ops.model_copy(update={"runtime_us": times})})


def points_of(page: Any) -> list[list[str]]:
    """Return the table of points, opened."""
    page.evaluate("() => { document.querySelector('#points').closest('details').open = true; }")
    return [names(row) for row in page.locator("#points tbody tr").all()]


def test_curve_is_of_the_profile_with_the_newest_frontier(visit: Visit, stored: Stored) -> None:
    live, profile = stored.live, chain_profile(*[1 << 20] * 12)
    frontier = frontier_of(live, profile, 6)
    plans = frontier["plans"]
    middle = plans[len(plans) // 2]
    slow = with_times(profile, 5.0)
    id = live.policy(slow, middle["budget_bytes"])
    assert slow.fingerprint == profile.fingerprint
    page = visit.go(f"/models/{profile.fingerprint}?budget_gb={middle['budget_bytes'] / GIB!r}")
    assert [row[0] for row in points_of(page)] == [format_bytes(plan_["peak_bytes"]) for plan_ in plans]
    assert page.get_attribute("#there a", "href").endswith(f"/policies/{id}")
    share = live.http.get(f"/v1/policies/{id}/about").json()
    assert f"of another profile, by which it recomputes {format_us(share['recompute_us'])}" in (
        page.inner_text("#there").replace("\u00b5", "u")
    )
    assert f"{100 * middle['recompute_us'] / middle['step_us']:.1f} %" in page.inner_text("#facts")
    assert "not of the newest profile" in page.inner_text("#newer")
    assert page.is_visible("#plan")  # for the profile of the curve
    assert names(page.locator("#policies tbody tr").first)[1] == "another"
    page.click("#compute")  # for the newest
    visit.until("() => document.querySelector('#newer').hidden")
    (job,) = live.http.get(f"/v1/jobs?kind=frontier&profile={slow.digest}").json()["items"]
    newest = live.http.get(f"/v1/jobs/{job['id']}/result").json()["plans"]
    visit.until("n => document.querySelectorAll('#points tbody tr').length === n", len(newest))
    assert names(page.locator("#policies tbody tr").first)[1] == "the one above"


def test_each_point_can_be_chosen_even_if_its_peak_is_far_below_its_budget(
    visit: Visit, stored: Stored
) -> None:
    live, profile = stored.live, chain_profile(*[7 << 20] * 8)
    plans = frontier_of(live, profile, 2)["plans"]
    asked = {"profile_digest": profile.digest, "budget_bytes": plans[-1]["budget_bytes"] + 5}
    pinned = asked | {"constraints": {"pin_recompute": ["chain/aten.mm.default#3"]}}
    headers = {"Prefer": "wait=120"}
    slow = live.http.post("/v1/policies", json=pinned, headers=headers).json()["predicted"]
    page = visit.go(f"/models/{profile.fingerprint}")
    page.focus("#budget")
    shown = set()
    for i in range(int(page.get_attribute("#budget", "max")) + 1):  # each point selects itself
        page.keyboard.press("Home")
        for _ in range(i):
            page.keyboard.press("ArrowRight")
        assert int(page.input_value("#budget")) == i
        shown.add(page.inner_text("#facts dd >> nth=1").split("\n")[0])
    assert shown == {row[0] for row in points_of(page)}
    assert format_bytes(slow["peak_bytes"]) in shown
    assert page.locator("#points a").count() == 1


# Whether the first fifth of the plot has a pixel in the color of the card that is opaque.
WHITE = """() => {
    const canvas = document.querySelector('#plot canvas'), pixels = canvas.getContext('2d')
        .getImageData(0, 0, canvas.width / 5, canvas.height).data;
    return [...pixels.keys()].some(i => i % 4 === 0 && [0, 1, 2, 3].every(c => pixels[i + c] === 255));
}"""


def test_points_that_a_limit_stopped_are_hollow_and_show_their_gap(visit: Visit, stored: Stored) -> None:
    profile = chain_profile(*[11 << 20] * 9)
    asked = {"profile": profile.model_dump(mode="json"), "points": 4, "time_limit_s": 1e-6}
    made = stored.live.http.post("/v1/frontiers", json=asked, headers={"Prefer": "wait=120"}).json()
    stopped = [plan_ for plan_ in made["plans"] if plan_["stopped"] == "time limit"]
    assert stopped
    page = visit.go(f"/models/{profile.fingerprint}")
    gaps = [row[4] for row in points_of(page)]
    assert [gap.endswith(", time limit") for gap in gaps] == [plan_ in stopped for plan_ in made["plans"]]
    assert gaps[0] == f"{100 * stopped[0]['gap']:.1f} %, time limit"
    assert "hollow" in page.inner_text("#hollow")
    page.focus("#budget")
    page.keyboard.press("End")
    assert "Not proven" not in page.inner_text("#facts")
    page.keyboard.press("Home")
    assert "gap at the time limit" in page.inner_text("#facts")
    page.keyboard.press("End")
    assert page.evaluate(WHITE)  # nothing else in the plot is opaque and white


def test_model_without_a_choice_says_why(visit: Visit, stored: Stored) -> None:
    profile = chain_profile(1 << 20, 1 << 20).model_copy(update={"gradient_nbytes": 9 << 30})
    (only,) = frontier_of(stored.live, profile, 3)["plans"]
    page = visit.go(f"/models/{profile.fingerprint}")
    least = format_bytes(only["peak_bytes"])
    assert f"No plan needs less than {least}" in page.inner_text("#single")
    assert "parameters, gradients and the optimizer alone take 9.00 GiB" in page.inner_text("#single")
    assert page.is_disabled("#budget")
    assert "0 B" not in page.inner_text("#facts")


# The boxes of the numbers above the columns of the first map, and what is behind each.
NUMBERS = """() => [...document.querySelector('#map table').querySelectorAll('thead th + th')]
    .filter(th => th.lastChild.textContent).map(th => {
        const {left, right} = th.lastChild.getBoundingClientRect();
        return {left, right, ground: getComputedStyle(th).backgroundColor};
    })"""


def test_numbers_above_a_map_of_many_layers_are_whole(visit: Visit, stored: Stored) -> None:
    id = stored.live.policy(small(80), 1 << 45)
    for width in (1280, 390):
        visit.page.set_viewport_size({"width": width, "height": 900})
        page = visit.go(f"/policies/{id}")
        boxes = page.evaluate(NUMBERS)
        assert len(boxes) > 10
        assert {box["ground"] for box in boxes} == {"rgba(0, 0, 0, 0)"}  # so none covers the one before
        for before, after in pairwise(boxes):
            assert before["right"] < after["left"], width


def test_difference_without_one_profile_shows_no_change(
    browser: Any, sqlite_template: Path, tmp_path: Path
) -> None:
    path = tmp_path / "service.sqlite3"
    shutil.copy(sqlite_template, path)
    profiles = (small(1), with_times(small(1), 1.001))
    with listening(path, draw_ahead=False) as live:
        ids = [live.policy(profile, 1 << 45) for profile in profiles]
        made = Visit(browser, live.url)
        try:
            for deleted in (False, True):
                if deleted:
                    with sqlite3.connect(path) as database:
                        database.execute("DELETE FROM drawings")
                    assert live.http.delete(f"/v1/profiles/{profiles[1].digest}").status_code == 204
                page = made.go(f"/difference?before={ids[0]}&after={ids[1]}")
                assert page.inner_text("#verdict").startswith("Both keep the same.")
                assert "two profiles" in page.inner_text("#verdict")
                assert ("count as kept" in page.inner_text("#verdict")) == deleted
                assert "No module decides otherwise." in page.inner_text("#changes")
            assert made.complaints == []
        finally:
            made.page.close()


def test_timeline_and_map_follow_a_dragged_budget(visit: Visit, stored: Stored) -> None:
    profile = chain_profile(*[3 << 30] * 6)
    plans = frontier_of(stored.live, profile, 4)["plans"]
    assert len(plans) > 2
    page = visit.go(f"/models/{profile.fingerprint}")
    area = page.locator("#plot .u-over").bounding_box()
    shows = "peak => document.querySelector('#preview').dataset.shows === String(peak)"
    again = []
    page.mouse.move(area["x"] + 2, area["y"] + 60)
    page.mouse.down()
    for plan_, x in ((plans[0], 3), (plans[-1], area["width"] - 2)):
        page.mouse.move(area["x"] + x, area["y"] + 60)
        visit.until(shows, plan_["peak_bytes"])
        again.append(page.locator("#map td.again").count())
        assert bytes_of(page.inner_text("#one-liner")) == plan_["budget_bytes"]
    page.mouse.up()
    assert again[0] > again[1] == 0
    assert f"{again[1]} are run again" in page.inner_text("#map-says")
    assert page.locator("#map tbody tr").count() == len(profile.ops)  # rows stay while it is dragged
    assert page.locator("#plot .device").all_text_contents() == ["fits T4"]
    assert "L4 or A10" in page.inner_text("#facts")  # 18 GiB and more
    before = visit.page.url
    assert bytes_of(before) == plans[-1]["budget_bytes"]
    asked = len(visit.requests)
    page.focus("#budget")
    page.keyboard.press("Home")
    visit.until(shows, plans[0]["peak_bytes"])
    assert page.url != before
    assert len(visit.requests) == asked  # all of it was there


def test_stored_policy_is_drawn_on_its_model_page(visit: Visit, stored: Stored) -> None:
    page = visit.go(f"/models/{stored.profile.fingerprint}")
    page.focus("#budget")
    for key, id in (("Home", stored.ids[1]), ("End", stored.ids[0])):
        page.keyboard.press(key)
        drawing = stored.live.http.get(f"/v1/policies/{id}/drawing").json()
        track = drawing["tracks"][0]
        peak = track["live_bytes"][track["peak"]]
        visit.until("peak => document.querySelector('#preview').dataset.shows === String(peak)", peak)
        assert page.locator("#map td.again").count() == drawing["fates"]["fate"].count(2)


# Blue pixels in a column of the step's plot, which is in `share` of its width.
BLUE = """share => {
    const canvas = document.querySelector('#step canvas'), copy = document.createElement('canvas');
    [copy.width, copy.height] = [canvas.width, canvas.height];
    const read = copy.getContext('2d', {willReadFrequently: true});
    read.drawImage(canvas, 0, 0);
    const pixels = read.getImageData(Math.floor(canvas.width * share), 0, 2, canvas.height).data;
    let blue = 0;
    for (let i = 0; i < pixels.length; i += 4) blue += pixels[i + 2] > pixels[i] + 60 && pixels[i + 3] > 200;
    return blue;
}"""


def test_longer_step_is_drawn_to_its_end(visit: Visit, stored: Stored) -> None:
    profile = chain_profile(*[1 << 20] * 16)
    plans = frontier_of(stored.live, profile, 2)["plans"]
    stored.live.policy(profile, plans[-1]["peak_bytes"])
    page = visit.go(f"/models/{profile.fingerprint}")
    page.focus("#budget")
    for key, plan_ in (("End", plans[-1]), ("Home", plans[0])):
        page.keyboard.press(key)
        shows = "peak => document.querySelector('#preview').dataset.shows === String(peak)"
        visit.until(shows, plan_["peak_bytes"])
        visit.until(f"share => ({BLUE})(share) > 0", 0.6)
    visit.until(f"share => ({BLUE})(share) > 0", 0.9)


def test_model_gets_a_name_and_a_small_frontier_in_the_registry(visit: Visit, stored: Stored) -> None:
    profile = chain_profile(*[5 << 20] * 5)
    plans = frontier_of(stored.live, profile, 3)["plans"]
    page = visit.go(f"/models/{profile.fingerprint}")
    page.click("#rename")
    page.keyboard.type(HOSTILE[0])
    page.keyboard.press("Enter")
    visit.until("name => document.querySelector('#name').textContent === name", HOSTILE[0])
    assert page.inner_text("#class") == profile.model
    assert page.evaluate("() => document.activeElement.id") == "rename"
    page = visit.go("/")
    row = page.locator("#models tbody tr", has=page.locator(f'a[href*="{profile.fingerprint}"]'))
    assert HOSTILE[0] in row.inner_text()
    words = row.locator("svg").get_attribute("aria-label")
    assert format_bytes(plans[0]["peak_bytes"]) in words
    assert page.evaluate("() => window.broken") is None
    page = visit.go(f"/models/{profile.fingerprint}")
    page.click("#rename")
    page.fill("#new-name", "")
    page.keyboard.press("Enter")
    visit.until("name => document.querySelector('#name').textContent === name", profile.model)


def test_empty_registry_explains_how_to_begin(browser: Any, sqlite_template: Path, tmp_path: Path) -> None:
    path = tmp_path / "service.sqlite3"
    shutil.copy(sqlite_template, path)
    with listening(path, below="/autoac") as live:  # and below a path of a proxy
        made = Visit(browser, live.url)
        try:
            page = made.go("/")
            assert f'service="{live.url}"' in page.inner_text("#python")
            assert f"{live.url}/v1/profiles" in page.inner_text("#shell")
            assert page.locator("#empty button").count() == 2
            assert not page.is_visible("#models")
            page = made.go("/difference")
            assert "No policy is stored yet" in page.inner_text("#none")
            assert not page.is_visible("#before")
            page = made.go("/jobs")
            assert "No job was asked for" in page.inner_text("#jobs")
            live.policy(chain_profile(), 1 << 30)
            page.click("nav a >> nth=0")
            page.wait_for_selector(READY)
            page.click("#policies a >> nth=1")
            page.wait_for_url("**/autoac/policies/*")
            page.wait_for_selector(READY)
            page.click("#to-model")
            page.wait_for_url("**/autoac/models/*")
            page.wait_for_selector(READY)
            assert all(one.url.startswith((live.url, "data:")) for one in made.requests)
            assert made.complaints == []
        finally:
            made.page.close()


def test_jobs_show_progress_and_can_be_cancelled(visit: Visit, stored: Stored) -> None:
    stored.live.gate.clear()
    try:
        asked = {"profile_digest": stored.profile.digest, "points": 5}
        job = stored.live.http.post("/v1/frontiers", json=asked, headers={"Prefer": "wait=0"}).json()["id"]
        page = visit.go("/jobs")
        visit.until(
            "id => document.querySelector(`[data-how='${id}']`)?.textContent.includes('best 2.5 ms')",
            job,
        )
        button = page.get_by_role("button", name=f"Cancel the frontier job {job[:8]}")
        button.focus()
        page.keyboard.press("Enter")
        visit.until("() => !document.querySelector('tr[data-state=running]')")
        ended = names(page.locator("#jobs tbody tr").first)
        assert ended[3] == "cancelled"
        assert all(re.fullmatch(r"\d+\.\d s", seconds) for seconds in ended[4:6]), ended  # waited, took
    finally:
        stored.live.gate.set()


def test_two_policies_are_compared(visit: Visit, stored: Stored) -> None:
    page = visit.go(f"/difference?before={stored.ids[0]}&after=gpt2@test/production")
    assert "They decide otherwise." in page.inner_text("#verdict")
    assert "lower" in page.inner_text("#verdict")
    assert "transformer.h" in page.inner_text("#changes")
    page.click("#swap")
    visit.until("() => document.querySelector('#verdict').textContent.includes('higher')")
    held: list[Any] = []  # the first of two comparisons is answered last
    page.route("**/v1/differences?*", lambda route: route.continue_() if held else held.append(route))
    page.select_option("#before", stored.ids[1])
    page.select_option("#after", stored.ids[1])
    same = "() => document.querySelector('#verdict').textContent.includes('Both keep the same.')"
    visit.until(same)
    with page.expect_response("**/v1/differences?*") as late:
        held[0].continue_()
    late.value.finished()
    page.evaluate("() => new Promise(done => setTimeout(() => requestAnimationFrame(done)))")
    assert page.evaluate(same)


def test_moved_ops_are_shown_in_the_map_and_in_a_comparison(visit: Visit, stored: Stored) -> None:
    host = HOST.model_dump(mode="json")
    id = stored.live.policy(linked(), moves_budget(), constraints=host)
    drawing = stored.live.http.get(f"/v1/policies/{id}/drawing").json()
    moved = [op for op, fate in enumerate(drawing["fates"]["fate"]) if fate == 3]
    page = visit.go(f"/policies/{id}")
    assert page.locator("#map td.moved").count() == len(moved) > 0
    assert f"{len(moved)} are moved to the host" in page.inner_text("#map-says")
    page.hover("#map td.moved >> nth=0")
    nbytes = drawing["fates"]["nbytes"][int(page.get_attribute("#map td.moved >> nth=0", "data-op"))]
    assert f": moved to the host, {format_bytes(nbytes)}" in page.inner_text("#map-says")
    page = visit.go(f"/difference?before={stored.ids[0]}&after={id}")
    at = names(page.locator("#sides thead tr")).index("moved")
    rows = [names(row) for row in page.locator("#sides tbody tr").all()]
    assert [row[at] for row in rows] == ["0 ops", f"{len(moved)} ops"]
    page = visit.go(f"/difference?before={stored.ids[0]}&after={stored.ids[1]}")
    assert "moved" not in page.inner_text("#sides")
    page = visit.go(f"/policies/{stored.ids[1]}")
    assert "moved" not in page.inner_text("#map-says")


def test_names_are_shown_as_text_and_pages_have_landmarks(visit: Visit, stored: Stored) -> None:
    fingerprint = hostile().fingerprint
    paths = ("/", f"/models/{fingerprint}", f"/policies/{stored.hostile}", "/jobs")
    for path in (*paths, f"/difference?before={stored.hostile}&after={stored.ids[0]}"):
        page = visit.go(path)
        assert HOSTILE[0] in page.inner_text("main"), path
        assert page.evaluate("() => window.broken") is None
        assert page.locator("img").count() == 0
        for landmark in ("header", "nav", "main", "h1"):
            assert page.locator(f"body {landmark}").first.is_visible(), (path, landmark)
        unnamed = page.evaluate(
            "() => [...document.querySelectorAll('button, select, input')]"
            ".filter(e => !e.ariaLabel && !e.textContent.trim() && !e.labels.length).map(e => e.outerHTML)"
        )
        assert unnamed == []


def test_dark_and_light_follow_the_system_and_the_button_is_remembered(browser: Any, stored: Stored) -> None:
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light, dark = (Visit(browser, stored.live.url, color_scheme=scheme) for scheme in ("light", "dark"))
    try:
        colours = []
        for made in (light, dark):
            page = made.go(f"/policies/{stored.ids[1]}")
            colours.append(page.evaluate(ground))
        assert colours[0] != colours[1]
        light.page.click("#theme")
        assert light.page.evaluate(ground) == colours[1]
        assert light.go("/").evaluate(ground) == colours[1]
        assert light.complaints == dark.complaints == []
    finally:
        light.page.close()
        dark.page.close()


def test_key_is_requested_and_sent_only_in_the_header(
    browser: Any, sqlite_template: Path, tmp_path: Path
) -> None:
    path = tmp_path / "service.sqlite3"
    shutil.copy(sqlite_template, path)
    with listening(path, TOKEN) as live:
        live.policy(chain_profile(), 1 << 30)
        made = Visit(browser, live.url)
        try:
            made.page.goto(f"{live.url}/")
            made.page.wait_for_selector("#key-dialog[open]")
            assert "Chain" not in made.page.content()
            made.page.keyboard.type("not the key at all")
            made.page.keyboard.press("Enter")
            made.until("() => document.querySelector('#key-why').textContent.includes('does not know')")
            made.page.keyboard.type(TOKEN)
            made.page.keyboard.press("Enter")
            made.page.wait_for_selector(READY)
            assert "Chain" in made.page.inner_text("#models")
            made.page.click("#models a")
            made.page.wait_for_url("**/models/*")
            made.page.wait_for_selector(READY)  # without being asked again
            kept = made.page.evaluate(
                "() => [Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
            )
            assert kept == [[TOKEN], [], ""]
            asked = [one for one in made.requests if "/v1/" in one.url]
            assert asked[-1].headers["authorization"] == f"Bearer {TOKEN}"
            assert not any(word in one.url for one in made.requests for word in ("token", "key="))
            made.page.click("#key-button")
            made.page.click("#key-forget")
            assert made.page.evaluate("() => sessionStorage.length") == 0
            refused = [text for text in made.complaints if "401" not in text]  # Chromium says those by itself
            assert refused == []
        finally:
            made.page.close()
