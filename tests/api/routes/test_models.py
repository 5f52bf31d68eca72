"""Test the names, small frontiers and shapes of models."""

from __future__ import annotations

import gzip
import json

import pytest
from service_app import BOTH, Serve
from service_fakes import InProcess, chain_profile, request
from starlette.testclient import TestClient

from autoac.api import policy_plot as drawing
from autoac.api.policy_plot import outline
from autoac.planner import find_frontier, plan, simulate
from autoac.planner.formats.profile import Profile

JSON = {"Content-Type": "application/json"}


def computed(http: TestClient, profile: Profile, points: int = 4) -> str:
    """Compute the frontier of `profile` and return the id of its job."""
    body = json.dumps({"profile": profile.model_dump(mode="json"), "points": points})
    made = http.post("/v1/frontiers", content=body, headers=JSON)
    assert made.status_code == 200, made.text
    return str(made.headers["location"].split("/")[3])


@BOTH
def test_model_is_named_and_renamed(serve: Serve, profile: Profile) -> None:
    http = serve()
    url = f"/v1/models/{profile.fingerprint}"
    assert http.get(url).status_code == http.put(f"{url}/name", json={"name": "mine"}).status_code == 404
    http.post("/v1/profiles", content=profile.to_json(), headers=JSON)
    for name in ("mine", "llama-70b, 8k tokens"):
        assert http.put(f"{url}/name", json={"name": f" {name} "}).json()["name"] == name
    (listed,) = http.get("/v1/models").json()["items"]
    assert (listed["name"], listed["model"], listed["named_by"]) == (
        "llama-70b, 8k tokens",
        "Chain",
        "loopback",
    )
    assert http.delete(f"{url}/name").json()["name"] is None
    assert http.get(url).json()["named_at"] is None
    actions = [line["action"] for line in http.get("/v1/audit").json()["items"]]
    assert actions.count("name model") == 3


def test_name_is_printable_text(serve: Serve, profile: Profile) -> None:
    http = serve()
    http.post("/v1/profiles", content=profile.to_json(), headers=JSON)
    for body in (
        {"name": ""},
        {"name": " "},
        {"name": "a\0b"},
        {"name": "\ud800"},
        {"name": 1},
        {},
        [],
        {"name": "x" * 101},
    ):
        answer = http.put(f"/v1/models/{profile.fingerprint}/name", content=json.dumps(body), headers=JSON)
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:autoac:problem:malformed-request")
    form = http.put(
        f"/v1/models/{profile.fingerprint}/name", content="{}", headers={"Content-Type": "text/plain"}
    )
    assert form.status_code == 415


@BOTH
def test_models_list_their_newest_frontier(serve: Serve) -> None:
    http = serve(InProcess(plan))
    first, second = chain_profile(*[1 << 20] * 4), chain_profile(*[2 << 20] * 4)
    for profile in (first, second):
        http.post("/v1/profiles", content=profile.to_json(), headers=JSON)
    computed(http, first, 2)
    job = computed(http, first, 3)
    plans = http.get(f"/v1/jobs/{job}/result").json()["plans"]
    listed = {item["fingerprint"]: item for item in http.get("/v1/models").json()["items"]}
    assert [next(iter(listed)), listed[second.fingerprint]["frontier"]] == [second.fingerprint, None]
    small = listed[first.fingerprint]["frontier"]
    assert [point["peak_bytes"] for point in small] == [plan["peak_bytes"] for plan in plans]
    assert [listed[one.fingerprint]["frontier_job"] for one in (first, second)] == [job, None]
    page = http.get("/v1/models", params={"limit": 1}).json()
    assert [item["fingerprint"] for item in page["items"]] == [second.fingerprint]
    rest = http.get("/v1/models", params={"limit": 1, "cursor": page["next"]}).json()
    assert ([item["fingerprint"] for item in rest["items"]], rest["next"]) == ([first.fingerprint], None)


@BOTH
def test_frontier_is_plotted_when_it_is_computed(serve: Serve) -> None:
    http, profile = serve(InProcess(plan)), chain_profile(*[1 << 20] * 8)
    job = computed(http, profile)
    answer = http.get(f"/v1/jobs/{job}/drawing")
    assert answer.status_code == 200
    assert (
        http.get(f"/v1/jobs/{job}/drawing", headers={"Accept-Encoding": "identity"}).json() == answer.json()
    )
    plans = http.get(f"/v1/jobs/{job}/result").json()["plans"]
    points = answer.json()["points"]
    for point, made in zip(points, plans, strict=True):
        assert max(point["live_bytes"]) == point["peak_bytes"] == made["peak_bytes"]
        again = [
            us
            for fate, us in zip(point["fates"], answer.json()["ops"]["runtime_us"], strict=True)
            if fate == "2"
        ]
        assert sum(again) == made["recompute_us"]
    assert "2" in points[0]["fates"]
    solved = http.post("/v1/policies", content=request(profile), headers=JSON)
    assert solved.status_code == 201
    others = [item["id"] for item in http.get("/v1/jobs", params={"kind": "policy"}).json()["items"]]
    assert [http.get(f"/v1/jobs/{id}/drawing").status_code for id in (*others, "0" * 32)] == [404, 404]


def test_frontier_is_not_plotted_if_draw_ahead_is_off(serve: Serve) -> None:
    http = serve(InProcess(plan), draw_ahead=False)
    assert http.get(f"/v1/jobs/{computed(http, chain_profile())}/drawing").status_code == 404


def test_outline_of_a_long_step_keeps_its_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "OUTLINE", 20)
    found = find_frontier(chain_profile(*[1 << 20] * 30), points=2)
    points = json.loads(gzip.decompress(outline(found)))["points"]
    for point, made in zip(points, found.plans, strict=True):
        events = len(simulate(made.graph, made.save_set).instants)
        assert len(point["begin_us"]) == len(point["live_bytes"]) < 30 < events
        assert max(point["live_bytes"]) == made.peak


def test_progress_names_the_point_of_the_frontier() -> None:
    seen = []
    find_frontier(
        chain_profile(*[1 << 20] * 12), points=5, progress=lambda now: seen.append((now.point, now.points))
    )
    assert set(seen) <= {(0, 0), (1, 4), (2, 4), (3, 4), (4, 4)}
    assert seen == sorted(seen)
    assert (4, 4) in seen


@BOTH
def test_profiles_list_their_shapes(serve: Serve, profile: Profile) -> None:
    http = serve()
    http.post("/v1/profiles", content=profile.to_json(), headers=JSON)
    for listed in ("profiles", "models"):
        (found,) = http.get(f"/v1/{listed}").json()["items"]
        assert found["inputs"] == list(profile.inputs) != []
        assert found["parameter_bytes"] == profile.static.parameters > 0
