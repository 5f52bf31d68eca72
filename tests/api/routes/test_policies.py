"""Test `POST /v1/policies` in process, with a function in place of the planner."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import httpx2
import pytest
from service_app import JSON, URN, Serve
from service_fakes import InProcess, Raising, infeasible, out_of_time, request, save_all

from autoac.api import Settings, create_app
from autoac.api.errors import SolverDied, SolveTimedOut
from autoac.api.routes.solves import preferred_wait
from autoac.planner.errors import InfeasibleBudget
from autoac.planner.formats.profile import Profile

Post = Callable[..., httpx2.Response]


@pytest.fixture
def post(serve: Serve) -> Post:
    """Return a function that posts a body to a service with the given solver and settings."""

    def posted(body: bytes, headers: dict[str, str] | None = None, **how: Any) -> httpx2.Response:
        return serve(**how).post("/v1/policies", content=body, headers=headers or JSON)

    return posted


def test_time_limit_is_capped(post: Post, profile: Profile) -> None:
    solver = InProcess(save_all, most_seconds=20)
    assert (
        post(request(profile, time_limit_s=1e6), solver=solver).json()["stopped"].endswith("time limit 20 s")
    )


def test_infeasible_budget_reports_feasible_sizes(post: Post, profile: Profile) -> None:
    response = post(request(profile), solver=InProcess(infeasible))
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json() == {
        "type": URN + "infeasible-budget",
        "title": "No plan fits in the budget",
        "status": 422,
        "detail": str(_infeasible()),
        "budget_bytes": 1 << 30,
        "proven_floor_bytes": 3 << 30,
        "smallest_found_bytes": 4 << 30,
        "peak_at": "chain/aten.mm.default#1, forward",
        "live": [{"nbytes": 3 << 30, "name": "weights", "why": "not planned"}],
        "constraints": [],
    }


def _infeasible() -> InfeasibleBudget:
    with pytest.raises(InfeasibleBudget) as caught:
        infeasible(None)  # type: ignore[arg-type]
    return caught.value


BROKEN = {
    "not JSON": (b"{", 400, "not-json"),
    "empty": (b"", 400, "not-json"),
    "not UTF-8": (b'"\xff"', 400, "not-json"),
    "NaN": (b'{"budget_gb": NaN}', 400, "not-json"),
    "a name twice": (b'{"budget_gb": 1, "budget_gb": 2}', 400, "not-json"),
    "no object": (b"[]", 422, "malformed-request"),
    "no profile": (b'{"budget_gb": 1}', 422, "malformed-request"),
}


@pytest.mark.parametrize(("body", "status", "kind"), BROKEN.values(), ids=BROKEN)
def test_invalid_request_is_refused(post: Post, body: bytes, status: int, kind: str) -> None:
    assert_problem(post(body), status, kind)


@pytest.mark.parametrize(
    ("options", "status", "kind"),
    [
        ({"budget_gb": 0}, 422, "invalid-budget"),
        ({"budget_bytes": 2**60}, 422, "invalid-budget"),
        ({"budget_gb": 1, "budget_bytes": 1}, 422, "invalid-budget"),
        ({"budget_gb": None}, 422, "invalid-budget"),
        ({"budget_gb": "much"}, 422, "malformed-request"),
        ({"gap": 2}, 422, "malformed-request"),
        ({"time_limit_s": 0}, 422, "malformed-request"),
        ({"colour": "red"}, 422, "malformed-request"),
        ({"budget_bytes": True}, 422, "malformed-request"),  # neither text nor a bool is a number
        ({"budget_gb": "1"}, 422, "malformed-request"),
    ],
)
def test_invalid_options_are_refused(
    post: Post, profile: Profile, options: dict[str, Any], status: int, kind: str
) -> None:
    assert_problem(post(request(profile, **options)), status, kind)


def test_malformed_profile_is_refused_with_its_place(post: Post, profile: Profile) -> None:
    data = profile.model_dump(mode="json")
    data["storages"]["nbytes"][1] = -5
    problem = assert_problem(post(request(data)), 422, "malformed-profile")
    assert problem["problems"] == ["storages.nbytes.1: Input should be greater than or equal to 0"]


def test_unknown_version_is_refused_with_the_known_one(post: Post, profile: Profile) -> None:
    data = profile.model_dump(mode="json") | {"version": 99}
    problem = assert_problem(post(request(data)), 422, "unknown-version")
    assert (problem["format"], problem["known"]) == ("autoac.profile", 7)


@pytest.mark.parametrize("where", ["model", "version", "format", "storages", "notes"])
@pytest.mark.parametrize("what", ["the client's secret", ["the client's secret"]])
def test_errors_repeat_neither_values_nor_paths(post: Post, profile: Profile, where: str, what: Any) -> None:
    data = profile.model_dump(mode="json") | {where: what}
    if where in ("model", "notes"):
        data |= {"inputs": 7}
    text = post(request(data)).text
    assert "secret" not in text
    assert "/" not in text.replace("application/", "")


def test_long_key_is_truncated_in_errors(post: Post, profile: Profile) -> None:
    response = post(request(profile, **{"k" * 100_000: 1}))
    assert response.status_code == 422
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {**JSON, "Content-Encoding": "gzip"},
        {**JSON, "Content-Encoding": "zstd, zstd"},
    ],
    ids=str,
)
def test_unsupported_types_and_codings_are_refused(
    post: Post, profile: Profile, headers: dict[str, str]
) -> None:
    response = post(request(profile), headers)
    assert_problem(response, 415, "unsupported-body")
    assert response.headers["accept-encoding"] == "zstd"


def test_solver_out_of_time_is_504(post: Post, profile: Profile) -> None:
    problem = assert_problem(
        post(request(profile, time_limit_s=3), solver=InProcess(out_of_time)), 504, "solver-out-of-time"
    )
    assert problem["time_limit_s"] == 3


@pytest.mark.parametrize("prefer", ["wait=60", "respond-async, wait=60", 'WAIT = "60"', "wait=60; foo=1"])
def test_client_chooses_how_long_it_waits(prefer: str) -> None:
    assert preferred_wait([prefer]) == 60
    assert preferred_wait(["wait=soon", "wait=-1", "handling=lenient", "wait=" + "9" * 50]) is None


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(SolveTimedOut(4), 504, "solver-out-of-time"), (SolverDied("by signal 9"), 500, "solver-died")],
)
def test_death_of_the_child_is_reported(
    post: Post, profile: Profile, error: Exception, status: int, kind: str
) -> None:
    problem = assert_problem(post(request(profile), solver=Raising(error=error)), status, kind)
    assert problem["detail"] == str(error)


def test_bug_reveals_nothing_of_the_server(post: Post, profile: Profile) -> None:
    response = post(request(profile), solver=Raising(error=RuntimeError("/srv/secret")))
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/problem+json"
    assert "secret" not in response.text


@pytest.mark.parametrize(
    ("method", "path", "status"), [("PUT", "/v1/policies", 405), ("GET", "/nothing", 404)]
)
def test_unknown_routes_and_methods_are_problems(serve: Serve, method: str, path: str, status: int) -> None:
    response = serve().request(method, path)
    assert response.status_code == response.json()["status"] == status
    assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/policies", "GET, HEAD, POST"),
        ("/v1/profiles", "GET, HEAD, POST"),
        (f"/v1/profiles/{'0' * 64}", "DELETE, GET, HEAD"),
        ("/jobs", "GET, HEAD"),
    ],
)
def test_allow_names_every_method_of_the_path(serve: Serve, path: str, methods: str) -> None:
    response = serve().patch(path)
    assert (response.status_code, response.headers["allow"]) == (405, methods)


@pytest.mark.parametrize(
    "path", ["/", "/jobs", "/v1/policies", "/livez", "/openapi.json", "/v1/jobs/none", "/nothing"]
)
def test_head_is_the_head_of_get(serve: Serve, path: str) -> None:
    http = serve()
    got, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    for name in ("content-type", "content-length"):
        assert head.headers[name] == got.headers[name]


@cache
def documented() -> dict[str, Any]:
    """Return the answers in the OpenAPI document, which takes a sixth of a second to build."""
    return create_app(Settings()).openapi()["paths"]["/v1/policies"]["post"]["responses"]


def assert_problem(response: httpx2.Response, status: int, kind: str) -> dict[str, Any]:
    """Assert that an answer is this problem and that the OpenAPI document has it."""
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert (response.status_code, problem["status"], problem["type"]) == (status, status, URN + kind), problem
    assert problem["title"]
    assert problem["detail"]
    assert "application/problem+json" in documented()[str(status)]["content"]
    return problem


def test_refused_kind_of_jobs_is_named_as_it_is_written(serve: Serve) -> None:
    detail = serve().get("/v1/jobs?kind=profile").json()["detail"]
    assert detail == "query.kind: Input should be 'policy', 'frontier' or 'floor'"
