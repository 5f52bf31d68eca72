"""Fuzz the whole OpenAPI document over the network: no 5xx, and no undocumented answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from service_fakes import InProcess, chain_profile, request, save_all
from serving import serving

from autoac.api import Settings, create_app

pytestmark = pytest.mark.slow

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
DOCUMENT = create_app(Settings()).openapi()
OPERATIONS = {
    f"{method} {path}": (path, method)
    for path, methods in DOCUMENT["paths"].items()
    for method in methods
    if path != "/v1/jobs/{id}/events"  # a stream, which has a test of its own
}


@dataclass(frozen=True)
class Live:
    """Start a service and return its document, with existing ids as examples."""

    url: str
    schema: Any


@pytest.fixture(scope="module")
def live(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Store a profile, a policy and a job, whose ids the fuzzer uses."""
    path = tmp_path_factory.mktemp("fuzz") / "service.sqlite3"
    path.write_bytes(sqlite_template.read_bytes())
    app = create_app(Settings(database_url=f"sqlite:///{path}", wait_s=5), InProcess(save_all))
    with serving(app) as url:
        yield Live(url, schemathesis.openapi.from_dict(with_examples(url)))


def with_examples(url: str) -> dict[str, Any]:
    """Return the document with the ids that this function stores."""
    with httpx2.Client(base_url=url, timeout=60) as http:
        headers = {"Content-Type": "application/json"}
        made = http.post("/v1/policies", content=request(chain_profile()), headers=headers)
        policy = made.headers["location"].rpartition("/")[2]
        job = http.get("/v1/jobs").json()["items"][0]["id"]
        document: dict[str, Any] = http.get("/openapi.json").json()
    stored = {"jobs": job, "profiles": chain_profile().digest, "policies": policy}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "path":
                    parameter["example"] = stored[path.split("/")[2]]
    return document


@pytest.mark.parametrize("name", sorted(OPERATIONS, key=lambda name: (name.startswith("delete"), name)))
def test_every_answer_is_documented(live: Live, name: str) -> None:
    path, method = OPERATIONS[name]
    seen: list[int] = []

    @settings(
        max_examples=12,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=live.schema[path][method.upper()].as_strategy())
    def check(case: Any) -> None:
        answer = case.call(base_url=live.url)
        seen.append(answer.status_code)
        case.validate_response(answer, checks=CHECKS)

    check()
    assert seen
