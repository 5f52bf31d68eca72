"""The pages as they are sent: no data in them, no key for them, and nothing but their own scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import Serve
from service_fakes import InProcess, chain_profile, request, save_all
from starlette.testclient import TestClient

from autoac.api import child
from autoac.api.drawing import AGAIN, IDLE, KEPT
from autoac.api.solver import SpawnedSolver
from autoac.api.web import OURS, assets
from autoac.planner import plan
from autoac.planner.policy import Policy
from autoac.planner.profile import Profile

JSON = {"Content-Type": "application/json"}
TOKEN = "a token of more than sixteen"
ID = "0" * 64
PAGES = ("/", f"/models/{ID}", f"/policies/{ID}", "/difference", "/jobs")


@dataclass(frozen=True)
class Counting(InProcess):
    """Counts the drawings that it makes."""

    made: list[int] = field(default_factory=list)

    async def draw(self, body: bytes) -> bytes:
        self.made.append(len(body))
        return await InProcess.draw(self, body)


def planned(http: TestClient, profile: Profile, budget_bytes: int) -> str:
    """The address of a policy's drawing."""
    made = http.post("/v1/policies", content=request(profile, budget_bytes=budget_bytes), headers=JSON)
    assert made.status_code == 201, made.text
    return f"{made.headers['location']}/drawing"


@pytest.mark.parametrize("path", PAGES)
def test_a_page_needs_no_key_and_asks_for_nothing_but_what_is_here(serve: Serve, path: str) -> None:
    http = serve(token=TOKEN)
    page = http.get(path)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"\s(on\w+|style)=", page.text)
    scripts = re.findall(r"<script ([^>]*)>(.*?)</script>", page.text, re.DOTALL)
    assert len(scripts) >= 3
    assert all(not inline for _, inline in scripts)
    loaded = re.findall(r'(?:src|rel="stylesheet" href)="([^"]*)" integrity="([^"]*)"', page.text)
    assert len(loaded) == len(scripts) + 3
    for url, integrity in loaded:
        found = http.get(url)
        assert found.status_code == 200
        assert "immutable" in found.headers["cache-control"]
        digest = hashlib.sha256(found.content).digest()
        assert integrity == f"sha256-{base64.b64encode(digest).decode()}"
    again = http.get(path, headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_every_script_and_style_is_served_and_nothing_else_is(serve: Serve) -> None:
    http = serve()
    here = Path(child.__file__).with_name("web") / "static"
    assert sorted(OURS) == sorted(file.name for file in here.iterdir())
    for asset in assets().values():
        assert http.get(asset.url).content == asset.content
    url = assets()["service.js"].url
    for wrong in (
        url.replace("service.js", "jobs.js"),
        "/assets/0000000000000000/service.js",
        "/assets/x/..",
    ):
        assert http.get(wrong).status_code == 404


def test_scripts_make_no_markup_of_text() -> None:
    for asset in assets().values():
        if asset.name != "uPlot.iife.min.js":
            text = asset.content.decode()
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)


def test_a_drawing_is_made_once_and_is_what_the_policy_says(serve: Serve, profile: Profile) -> None:
    solver = Counting(plan)
    http = serve(solver)
    url = planned(http, profile, plan(profile, budget_bytes=1 << 40).peak)
    first = http.get(url)
    assert first.status_code == 200
    drawn = first.json()
    policy = Policy.from_json(http.get(url.removesuffix("/drawing")).content)
    track = drawn["tracks"][0]
    assert track["live_bytes"][track["peak"]] == policy.predicted.peak_bytes
    assert drawn["budget_bytes"] == policy.budget_bytes
    assert drawn["fates"]["fate"] == [KEPT, KEPT, KEPT]
    assert drawn["fates"]["nbytes"] == [4 << 20, 8 << 20, 2 << 20]
    assert http.get(url, headers={"Accept-Encoding": "identity"}).json() == drawn
    tag = first.headers["etag"]
    assert tag.startswith('W/"')
    again = http.get(url, headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert len(solver.made) == 1


def test_what_a_plan_runs_again_is_told_by_op(serve: Serve) -> None:
    profile = chain_profile(*[1 << 20] * 8)
    http = serve(InProcess(plan))
    floor = http.post(
        "/v1/floors", content=json.dumps({"profile": profile.model_dump(mode="json")}), headers=JSON
    )
    drawn = http.get(planned(http, profile, floor.json()["found_bytes"])).json()
    fates = drawn["fates"]["fate"]
    assert AGAIN in fates
    assert set(fates) <= {IDLE, KEPT, AGAIN}
    again = [us for fate, us in zip(fates, drawn["fates"]["runtime_us"], strict=True) if fate == AGAIN]
    assert sum(again) == drawn["tracks"][0]["recompute_us"]


def test_a_drawing_ends_with_its_policy_and_needs_its_profile(serve: Serve, profile: Profile) -> None:
    http = serve(InProcess(save_all), draw_ahead=False)
    url = planned(http, profile, 1 << 30)
    assert http.delete(f"/v1/profiles/{profile.digest}").status_code == 204
    gone = http.get(url)
    assert gone.status_code == 404
    assert "profile" in gone.json()["detail"]
    http.post("/v1/profiles", content=profile.to_json(), headers=JSON)
    assert http.get(url).status_code == 200
    assert http.delete(url.removesuffix("/drawing")).status_code == 204
    assert http.get(url).status_code == 404


def test_a_child_draws(serve: Serve, profile: Profile) -> None:
    http = serve(SpawnedSolver(60.0, 30.0, 2 << 30))
    made = http.get(planned(http, profile, 1 << 30))
    assert made.status_code == 200
    assert made.json()["model"] == "Chain"


def test_jobs_of_one_profile(serve: Serve) -> None:
    http = serve()
    for profile in (chain_profile(), chain_profile(1 << 20)):
        planned(http, profile, 1 << 30)
    (job,) = http.get("/v1/jobs", params={"profile": chain_profile().digest}).json()["items"]
    assert job["profile_digest"] == chain_profile().digest
    assert http.get("/v1/jobs", params={"profile": ID}).json()["items"] == []


def test_a_policy_is_drawn_before_anybody_opens_its_page(serve: Serve, profile: Profile) -> None:
    ahead = Counting(plan)
    http = serve(ahead)
    url = planned(http, profile, 1 << 30)
    while not ahead.made:
        http.get("/livez")
    assert http.get(url).status_code == 200
    planned(http, profile, 1 << 30)  # the same once more
    assert len(ahead.made) == 1


def test_nothing_is_drawn_ahead_where_the_settings_say_so(serve: Serve, profile: Profile) -> None:
    asked = Counting(plan)
    http = serve(asked, draw_ahead=False)
    url = planned(http, profile, 1 << 30)
    http.get("/livez")
    assert asked.made == []
    assert http.get(url).status_code == 200
