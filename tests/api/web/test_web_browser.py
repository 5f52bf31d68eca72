"""Test the pages in Chromium against a running service, by mouse and by keyboard."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import anyio
import httpx2
import pytest
from anyio import to_thread
from drawings import HOSTILE, hostile, small
from service_app import TOKEN
from service_fakes import InProcess, chain_profile
from serving import Tab, in_chromium, serving

from autoac.api import Settings, create_app
from autoac.api.requests import Kind
from autoac.api.solving.child_process import OnJobProgress
from autoac.planner import plan
from autoac.planner.formats.profile import Profile
from autoac.planner.offload import plan_with_host
from autoac.planner.plan import DEFAULT_GAP
from autoac.planner.units import bytes_from_gb, format_bytes

AXE = Path(__file__).parents[2] / "vendor" / "axe.min.js"
READY = '#main[data-ready="true"]'

pytestmark = in_chromium


@dataclass(frozen=True)
class Gated(InProcess):
    """Report progress until the gate is open, then plan."""

    plan: Any = plan_with_host
    gate: Event = field(default_factory=Event)

    async def answer(self, kind: Kind, body: bytes, progress: OnJobProgress, *, solves: int = 1) -> str:
        seconds = 0.0
        while not self.gate.is_set():
            numbers = {"incumbent": 2500.0, "bound": 1200.0, "gap": 0.5, "seconds": seconds}
            progress(numbers | ({"point": 3, "points": 15} if kind is Kind.FRONTIER else {}))
            await anyio.sleep(0.05)
            seconds += 0.05
        return await to_thread.run_sync(self.solve, kind, body, progress)


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
def listening(database: Path, token: str | None = None, below: str = "") -> Iterator[Live]:
    """Run a service with this database; `below` is a path that a proxy strips."""
    gate = Event()
    gate.set()
    settings = Settings(database_url=f"sqlite:///{database}", token=token)
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
        yield Stored(live, profile, ids, budgets, wild, long_)


class Visit(Tab):
    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.url = url
        super().__init__(browser, **options)

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
    made.close(stored.live.url, "blob:")


Opened = Callable[..., tuple[Live, Visit]]


@pytest.fixture
def opened(browser: Any, sqlite_template: Path, tmp_path: Path) -> Iterator[Opened]:
    """Return a function that starts a service with an empty database, and opens a tab on it."""
    path = tmp_path / "service.sqlite3"
    shutil.copy(sqlite_template, path)
    with ExitStack() as stack:

        def start(**options: Any) -> tuple[Live, Visit]:
            live = stack.enter_context(listening(path, **options))
            made = Visit(browser, live.url)
            stack.callback(made.page.close)
            return live, made

        yield start


def names(row: Any) -> list[str]:
    return [text.strip() for text in row.locator("th, td").all_inner_texts()]


def test_lists_are_left_by_keyboard(visit: Visit, stored: Stored) -> None:
    page = visit.go("/")
    assert page.title() == "Profiles and policies · autoac"
    mine = next(
        row for row in page.locator("#profiles tbody tr").all() if names(row)[0] == stored.profile.model
    )
    assert "of parameters" in names(mine)[1]
    assert stored.profile.inputs[0] in names(mine)[1]
    assert names(mine)[3].endswith("by loopback")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "To the content"
    page.keyboard.press("Enter")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement.pathname || ''").startswith("/policies/"):
            break
    outline = "() => getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url("**/policies/*")
    page.wait_for_selector(READY)


def test_lists_have_ten_rows_to_a_page(opened: Opened) -> None:
    live, made = opened()
    for i in range(23):
        live.policy(chain_profile(model=f"Chain {i % 2}"), (i + 1) << 30)
    for where in ("/", f"/profiles/{chain_profile(model='Chain 0').digest}", "/jobs"):
        page = made.go(where)
        table = "#jobs" if where == "/jobs" else "#policies"
        rows = f"{table} tbody tr"
        shown = page.locator(rows).all_inner_texts()
        newer, older = (
            page.locator("section", has=page.locator(table)).get_by_text(word) for word in ("Newer", "Older")
        )
        assert len(shown) == 10
        assert newer.is_disabled()
        seen = [shown]
        while older.is_enabled():
            first = seen[-1][0].split("\t")[0]
            older.click()
            made.until(
                "([rows, old]) => !document.querySelector(rows).innerText.startsWith(old)", [rows, first]
            )
            seen.append(page.locator(rows).all_inner_texts())
        assert len({row for rows_ in seen for row in rows_}) == (12 if "profiles" in where else 23)
        first = seen[-1][0].split("\t")[0]
        newer.click()
        made.until("([rows, old]) => !document.querySelector(rows).innerText.startsWith(old)", [rows, first])
        assert page.locator(rows).count() == 10
        for width, most in ((390, 3500), (1280, 1500)):  # a phone's page too ends in sight
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("() => document.documentElement.scrollHeight") < most, (where, width)
    assert made.complaints == []


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
    with page.expect_download() as download:
        page.click("#download")
    assert Path(download.value.path()).read_bytes() == policy.content
    assert download.value.suggested_filename.endswith(".json")
    page.click("#to-profile")
    page.wait_for_url(f"**/profiles/{stored.profile.digest}")


def test_frontier_is_computed_watched_cancelled_and_chosen_from(visit: Visit, stored: Stored) -> None:
    profile = chain_profile(*[1 << 20] * 10)
    live = stored.live
    live.policy(profile, plan(profile, budget_bytes=1 << 40).peak)
    page = visit.go(f"/profiles/{profile.digest}")
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
    assert "nothing is recomputed" in dear[1]
    said = page.get_attribute("#budget", "aria-valuetext")
    assert re.search(r"peak .* MiB, 0\.0 % slower", said)
    area = page.locator("#plot .u-over").bounding_box()
    page.mouse.click(area["x"] + area["width"] * 0.5, area["y"] + 40)
    clicked = page.inner_text("#one-liner")
    assert clicked not in (cheap[0], dear[0])
    budget = bytes_of(clicked)
    page.click("#plan")
    visit.until("() => document.querySelectorAll('#policies tbody tr').length === 2")
    visit.until("() => document.querySelector('#progress').textContent.startsWith('Planned for ')")
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
        assert line.endswith(f', service="{stored.live.url}", optimizer=optimizer)')


def test_pages_report_missing_resources(opened: Opened) -> None:
    live, made = opened()
    for kind, id in itertools.product(("profiles", "policies"), ("0" * 64, "unknown")):
        made.page.goto(f"{live.url}/{kind}/{id}")
        made.page.wait_for_selector('#main[data-ready="missing"]')
        said = made.page.inner_text("main")
        assert re.search(r"There is no (profile|policy) ", said)
        assert "Back to all profiles and policies" in said
        assert not made.page.locator("main button:visible, main input:visible, main code:visible").count()
    assert [text for text in made.complaints if "404" not in text and "422" not in text] == []


@pytest.mark.parametrize("width", [390, 1280])
def test_tables_can_be_read(visit: Visit, stored: Stored, width: int) -> None:
    """Check the pages with long names and a long error too."""
    visit.page.set_viewport_size({"width": width, "height": 900})
    difference = f"/difference?before={stored.ids[0]}&after={stored.ids[1]}"
    for path in ("/", "/jobs", f"/profiles/{lengthy().digest}", f"/policies/{stored.lengthy}", difference):
        page = visit.go(path)
        assert page.locator("main tbody tr").count()
        assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0, path
        for button in page.locator('[data-part="layers"] button, [data-part="numbers"] summary').all():
            button.click()
        wide = "() => [...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)"
        assert page.evaluate(wide), path  # no column is cut
        if "policies" in path:
            assert page.locator("tr.inner small").first.is_visible()  # what a module keeps
        if path == "/jobs":
            row = page.locator('tr[data-state="failed"]').first
            assert row.bounding_box()["height"] < (400 if width < 900 else 100)
            row.locator("summary").click()
            assert "the step needs at least" in row.inner_text()
            assert row.locator("details p").count() > 2  # one for each line


def test_axe_finds_nothing(visit: Visit, stored: Stored) -> None:
    profile, policy = f"/profiles/{stored.profile.digest}", f"/policies/{stored.ids[1]}"
    for width, paths in ((1280, ("/", "/jobs", profile, policy)), (390, ("/", policy, "/difference"))):
        visit.page.set_viewport_size({"width": width, "height": 900})
        for path in paths:
            page = visit.go(path)
            page.evaluate(f"() => {{ {AXE.read_text('utf-8')} }}")
            found = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
            assert [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]] == [], (path, width)


def test_budget_below_the_least_is_refused_in_its_field(visit: Visit, stored: Stored) -> None:
    profile = chain_profile(*[3 << 20] * 4)
    least = frontier_of(stored.live, profile, 3)["floor"]["found_bytes"]
    page = visit.go(f"/profiles/{profile.digest}")
    assert page.inner_text("#unit") == "MiB"
    page.fill("#budget-number", "1")
    page.keyboard.press("Enter")
    assert f"The least is {format_bytes(least)}" in page.inner_text("#least")
    assert page.is_disabled("#plan")
    page.fill("#budget-number", str(-(-least // (1 << 20)) + 1))
    page.keyboard.press("Enter")
    assert not page.is_visible("#least")
    assert bytes_of(page.inner_text("#one-liner")) == (-(-least // (1 << 20)) + 1) << 20
    assert page.is_enabled("#plan")


def frontier_of(live: Live, profile: Profile, points: int) -> dict[str, Any]:
    asked = {"profile": profile.model_dump(mode="json"), "points": points}
    made = live.http.post("/v1/frontiers", json=asked, headers={"Prefer": "wait=120"})
    assert made.status_code == 200, made.text
    return made.json()


def test_empty_service_explains_how_to_begin(opened: Opened) -> None:
    live, made = opened(below="/autoac")
    page = made.go("/")
    assert f'service="{live.url}"' in page.inner_text("#python")
    assert f"{live.url}/v1/profiles" in page.inner_text("#shell")
    assert page.locator("#empty button").count() == 2
    assert not page.is_visible("#profiles")
    page = made.go("/difference")
    assert "Two policies are needed" in page.inner_text("#none")
    assert not page.is_visible("#pick")
    page = made.go("/jobs")
    assert "No job was asked for" in page.inner_text("#jobs")
    live.policy(chain_profile(), 1 << 30)
    page.click("nav a >> nth=0")
    page.wait_for_selector(READY)
    page.click("#policies a >> nth=0")
    page.wait_for_url("**/autoac/policies/*")
    page.wait_for_selector(READY)
    page.click("#to-profile")
    page.wait_for_url("**/autoac/profiles/*")
    page.wait_for_selector(READY)
    assert all(one.url.startswith((live.url, "data:")) for one in made.requests)
    assert made.complaints == []


def test_jobs_show_progress_and_can_be_cancelled(visit: Visit, stored: Stored) -> None:
    stored.live.gate.clear()
    try:
        asked = {"profile_digest": stored.profile.digest, "points": 5}
        job = stored.live.http.post("/v1/frontiers", json=asked, headers={"Prefer": "wait=0"}).json()["id"]
        page = visit.go("/jobs")
        visit.until(
            "() => document.querySelector('tr[data-state=running]')?.textContent.includes('best 2.5 ms')"
        )
        button = page.get_by_role("button", name=f"Cancel the frontier job {job[:8]}")
        page.locator("#jobs summary").first.click()
        cut = "() => (all => all.scrollWidth - all.clientWidth)(document.querySelector('.scroll'))"
        assert page.evaluate(cut) <= 0  # neither the button nor an error
        button.focus()
        page.keyboard.press("Enter")
        visit.until("() => !document.querySelector('tr[data-state=running]')")
        ended = names(page.locator("#jobs tbody tr").first)
        assert ended[3] == "cancelled"
        assert all(re.fullmatch(r"\d+\.\d s", seconds) for seconds in ended[4:6]), ended  # waited, took
    finally:
        stored.live.gate.set()


def test_two_policies_are_compared(visit: Visit, stored: Stored) -> None:
    page = visit.go(f"/difference?before={stored.ids[0]}&after={stored.ids[1]}")
    assert "lower" in page.inner_text("#verdict")
    rows = [names(row) for row in page.locator("#changes tbody tr").all()]
    assert any(row[0].startswith("transformer.h") and row[2:4] == ["saved", "recomputed"] for row in rows)
    assert all(row[4].startswith("\u2212") and row[4].endswith("B") for row in rows)  # fewer bytes held
    assert all(row[5].startswith("+") for row in rows)
    page.click("#swap")
    visit.until("() => document.querySelector('#verdict').textContent.includes('higher')")
    late: list[Any] = []  # the first of two comparisons is answered last
    page.route("**/v1/differences?*", lambda route: route.continue_() if late else late.append(route))
    page.select_option("#before", stored.ids[1])
    assert page.is_visible("#comparing")
    page.select_option("#after", stored.ids[1])
    same = "() => document.querySelector('#verdict').textContent.includes('Both decide the same.')"
    visit.until(same)
    with page.expect_response("**/v1/differences?*") as answer:
        late[0].continue_()
    answer.value.finished()
    page.evaluate("() => new Promise(done => setTimeout(() => requestAnimationFrame(done)))")
    assert page.evaluate(same)
    assert page.is_hidden("#comparing")


def test_difference_without_a_profile_has_no_bytes(opened: Opened) -> None:
    live, made = opened()
    profiles = [chain_profile(1 << 20), chain_profile(*[1 << 20] * 50)]
    ids = [live.policy(profile, 1 << 45) for profile in profiles]
    for deleted in (False, True):
        if deleted:
            assert live.http.delete(f"/v1/profiles/{profiles[1].digest}").status_code == 204
        page = made.go(f"/difference?before={ids[0]}&after={ids[1]}")
        assert ("was deleted" in page.inner_text("#verdict")) == deleted
        assert page.locator("#changes thead th").count() == (4 if deleted else 6)
        assert "absent" in page.inner_text("#changes")
        assert page.locator("#changes tbody tr").count() == 41
        page.click("#changes button")
        assert page.locator("#changes tbody tr").count() == 49
    assert made.complaints == []


def test_names_are_shown_as_text_and_pages_have_landmarks(visit: Visit, stored: Stored) -> None:
    stored.live.policy(hostile(), 1 << 44)  # the newest, on the first page of each list
    paths = ("/", f"/profiles/{hostile().digest}", f"/policies/{stored.hostile}", "/jobs")
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


def test_dark_and_light_follow_the_system_and_the_button_is_remembered(visit: Visit, stored: Stored) -> None:
    ground, page, colours = "() => getComputedStyle(document.body).backgroundColor", visit.page, {}
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        visit.go(f"/policies/{stored.ids[1]}")
        colours[scheme] = page.evaluate(ground)
    assert colours["light"] != colours["dark"]
    page.click("#theme")
    assert page.evaluate(ground) == colours["dark"]
    assert visit.go("/").evaluate(ground) == colours["dark"]


def test_key_is_requested_and_sent_only_in_the_header(opened: Opened) -> None:
    live, made = opened(token=TOKEN)
    live.policy(chain_profile(), 1 << 30)
    made.page.goto(f"{live.url}/")
    made.page.wait_for_selector("#key-dialog[open]")
    assert "Chain" not in made.page.content()
    made.page.keyboard.type("not the key at all")
    made.page.keyboard.press("Enter")
    made.until("() => document.querySelector('#key-why').textContent.includes('does not know')")
    made.page.keyboard.type(TOKEN)
    made.page.keyboard.press("Enter")
    made.page.wait_for_selector(READY)
    assert "Chain" in made.page.inner_text("#profiles")
    made.page.click("#profiles a")
    made.page.wait_for_url("**/profiles/*")
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
