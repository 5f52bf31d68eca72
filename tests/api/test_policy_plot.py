"""Test the plots of policies: made once, stored with the policy, and served by every replica."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field

import pytest
from drawings import moving, small
from service_app import BOTH, Serve
from service_fakes import MIB, InProcess, chain_profile, child_command, request, save_all
from sqlalchemy import func, select, update
from starlette.testclient import TestClient

from autoac.api.policy_plot import AGAIN, IDLE, KEPT, became, draw, plot_body
from autoac.api.requests import Answer, Kind
from autoac.api.solving import child_main as child
from autoac.api.solving.child_process import OnJobProgress, SpawnedSolver
from autoac.api.storage.database import Database
from autoac.api.storage.plot_cache import read_plot, store_plot
from autoac.api.storage.policy_registry import PolicyOptions, add_policy
from autoac.api.storage.tables import drawings
from autoac.planner import plan
from autoac.planner.formats.policy import Policy
from autoac.planner.formats.profile import Profile
from autoac.planner.plan import plan_of
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import OpId
from autoac.planner.problem.use_groups import with_use_groups
from autoac.planner.report.by_module import Decision, op_decisions, runs_added_up
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.variables import Options

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Counting(InProcess):
    """Count the policies that come with plots, and the plots that are made on demand."""

    ahead: list[bytes | None] = field(default_factory=list)
    asked: list[bytes] = field(default_factory=list)

    def solve(self, kind: Kind, body: bytes, told: OnJobProgress, draws: bool) -> Answer:
        made = InProcess.solve(self, kind, body, told, draws)
        self.ahead.append(made.drawing)
        return made

    async def draw(self, body: bytes) -> bytes:
        self.asked.append(body)
        return await InProcess.draw(self, body)


def planned(http: TestClient, profile: Profile, budget_bytes: int = 1 << 30) -> str:
    """Return the address of a policy's plot."""
    made = http.post("/v1/policies", content=request(profile, budget_bytes=budget_bytes), headers=JSON)
    assert made.status_code == 201, made.text
    return f"{made.headers['location']}/drawing"


def kept(database: Database) -> int:
    with database.read() as connection:
        return connection.scalar(select(func.count()).select_from(drawings)) or 0


def test_plot_matches_the_policy(serve: Serve, profile: Profile) -> None:
    http = serve(InProcess(plan))
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


def test_decisions_are_read_from_the_plot_of_a_plan_with_moves() -> None:
    made = moving()
    profile, policy = made.profile, made.policy()
    assert profile is not None
    found = became(draw(profile, policy), policy)
    assert found == op_decisions(made.graph, made.save_set, made.moved)
    assert any(op.decision is Decision.MOVED and op.kept_bytes for op in found)


def test_decisions_are_read_from_the_plot_of_a_plan_with_use_groups() -> None:
    profile = chain_profile(*[MIB] * 5)
    graph = with_use_groups(build(profile), {OpId(1): (OpId(2), OpId(1))})
    saved = frozenset(OpId(i) for i in (0, 3))
    made = plan_of(SearchProblem(graph, Options(use_groups=False)), profile, 1 << 30, saved)
    policy = made.policy()
    assert "recompute@2" in policy.decisions.values()
    found = became(draw(profile, policy), policy)
    assert found == runs_added_up(op_decisions(made.graph, made.save_set))
    assert [op.key for op in found] == list(policy.decisions)


def test_difference_uses_plots_only_if_both_are_there(serve: Serve) -> None:
    profile = small(2)
    slower = [us * 1.001 for us in profile.ops.runtime_us]
    other = profile.model_copy(update={"ops": profile.ops.model_copy(update={"runtime_us": tuple(slower)})})
    http = serve(InProcess(plan), draw_ahead=False)
    peak = plan(profile, budget_bytes=1 << 50).peak
    urls = [planned(http, one, peak) for one in (profile, other)]
    ids = [url.split("/")[-2] for url in urls]
    assert http.delete(f"/v1/profiles/{other.digest}").status_code == 204
    assert [http.get(url).status_code for url in urls] == [200, 404]
    for before, after in (ids, ids[::-1]):
        found = http.get("/v1/differences", params={"before": before, "after": after}).json()
        assert (found["same"], found["changes"]) == (True, [])
        assert found["before"]["idle"] is found["after"]["idle"] is None
        assert found["before"]["kept"] == found["after"]["kept"]
        assert "count as kept" in found["words"]
        assert "Two profiles" in found["words"]
    http.post("/v1/profiles", content=other.to_json(), headers=JSON)
    found = http.get("/v1/differences", params={"before": ids[0], "after": ids[1]}).json()
    assert found["before"]["idle"] == found["after"]["idle"] > 0
    assert "count as kept" not in found["words"]


def test_plot_marks_recomputed_ops(serve: Serve) -> None:
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


@BOTH
def test_plot_made_with_the_policy_is_shared_by_replicas(serve: Serve, profile: Profile) -> None:
    maker, other = Counting(save_all), Counting(save_all)
    url = planned(serve(maker), profile)
    assert [drawing is not None for drawing in maker.ahead] == [True]
    late = serve(other, runner="workers")  # another process, or the same one after a restart
    assert gzip.decompress(maker.ahead[0] or b"") == late.get(url).content
    assert maker.asked == other.asked == []


@BOTH
def test_missing_plot_is_made_at_the_first_visit(serve: Serve, profile: Profile) -> None:
    maker, other = Counting(save_all), Counting(save_all)
    http = serve(maker, draw_ahead=False)
    url = planned(http, profile)
    assert maker.ahead == [None]
    first = http.get(url)
    assert first.status_code == 200
    assert serve(other).get(url).content == http.get(url).content == first.content
    assert (len(maker.asked), len(other.asked)) == (1, 0)


@BOTH
def test_plot_of_another_release_is_made_again(serve: Serve, profile: Profile, database: Database) -> None:
    solver = Counting(save_all)
    http = serve(solver)
    url = planned(http, profile)
    tag = http.get(url).headers["etag"]
    with database.write() as connection:
        connection.execute(update(drawings).values(drawn_by="0" * 64, content=b"of old"))
    assert http.get(url).headers["etag"] == tag
    assert http.get(url).json()["model"] == "Chain"
    assert (len(solver.asked), kept(database)) == (1, 1)


@BOTH
def test_plot_is_deleted_with_its_policy_and_needs_its_profile(
    serve: Serve, profile: Profile, database: Database
) -> None:
    http = serve(InProcess(save_all), draw_ahead=False)
    url = planned(http, profile)
    assert http.delete(f"/v1/profiles/{profile.digest}").status_code == 204
    gone = http.get(url)
    assert gone.status_code == 404
    assert "profile" in gone.json()["detail"]
    http.post("/v1/profiles", content=profile.to_json(), headers=JSON)
    assert http.get(url).status_code == 200
    assert kept(database) == 1
    assert http.delete(f"/v1/profiles/{profile.digest}").status_code == 204
    assert http.get(url).status_code == 200  # once it is there, it needs nothing
    assert http.delete(url.removesuffix("/drawing")).status_code == 204
    assert http.get(url).status_code == 404
    assert kept(database) == 0


@BOTH
def test_newest_plots_are_kept(database: Database, profile: Profile) -> None:
    policies = [save_all(profile, budget_gb=gb).policy() for gb in (1, 2, 3)]
    options = PolicyOptions(0, 0.01, 60.0, "")
    with database.write() as connection:
        ids = [add_policy(connection, policy.to_json(), "me", options) for policy in policies]
    for id, text in zip(ids, (b"12345", b"123", b"1234"), strict=True):
        with database.write() as connection:
            store_plot(connection, id, text, most_bytes=7)
    with database.read() as connection:
        assert [read_plot(connection, id) for id in ids] == [None, b"123", b"1234"]
    with database.write() as connection:
        store_plot(connection, ids[1], b"123456", most_bytes=7)  # in place of what there was of it
        store_plot(connection, "0" * 64, b"1", most_bytes=7)  # of a policy that was deleted
        assert [read_plot(connection, id) for id in ids] == [None, b"123456", None]


def test_plots_are_not_made_ahead_if_none_are_kept(
    serve: Serve, profile: Profile, database: Database
) -> None:
    solver = Counting(save_all)
    http = serve(solver, keep_drawings_bytes=0)
    url = planned(http, profile)
    assert [http.get(url).status_code for _ in range(2)] == [200, 200]
    assert (solver.ahead, len(solver.asked), kept(database)) == ([None], 2, 0)


@pytest.mark.anyio
async def test_child_plots_new_and_stored_policies(profile: Profile) -> None:
    solver = SpawnedSolver(60.0, 30.0, 2048 * MIB, child_command(save_all))
    made = await solver.answer(Kind.POLICY, request(profile), lambda told: None, draws=True)
    policy = save_all(profile, budget_gb=1, time_limit_s=60.0).policy()
    assert made == Answer(policy.to_json(), draw(profile, policy))
    assert await solver.draw(plot_body(profile.to_json().encode(), made.text.encode())) == made.drawing


def test_failed_or_slow_plot_does_not_lose_the_answer(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def endless(profile: Profile, policy: Policy) -> bytes:
        while True:
            pass

    policy = save_all(profile, budget_gb=1).policy()
    other = chain_profile(1, 2)
    assert child.plot_if_quick(other, policy) is None
    assert "OtherProfile" in caplog.text
    monkeypatch.setattr(child, "DRAW_S", 0.05)
    monkeypatch.setattr(child, "plot", endless)
    assert child.plot_if_quick(profile, policy) is None
    assert "TimeoutError" in caplog.text
