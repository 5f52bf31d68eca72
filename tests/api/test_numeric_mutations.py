"""Put extreme numbers into every numeric field of a request: each gets an answer that is not a 5xx."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from service_app import JSON, Serve
from service_fakes import InProcess, chain_profile, request
from starlette.testclient import TestClient

from autoac.planner.formats.constraints import Constraints
from autoac.planner.offload import plan_with_host

pytestmark = pytest.mark.slow

TRIED = 250  # of some 28,000, by a fixed seed
MARK = '"number to replace"'
NUMBERS = (
    *("0", "-0.0", "-1", "1", "7", "0.5", "1.0000001", "1e0", "1e5", "true", "null", '"7"', "[]"),
    *(str(2**n + d) for n in (31, 32, 53, 62, 63, 64, 100) for d in (-1, 0, 1)),
    *(str(-(2**n)) for n in (31, 53, 63, 64)),
    *("1e308", "-1e308", "1e309", "-1e309", "1e-320", "5e-324", "1e999999", "1e-999999"),
    *("NaN", "-NaN", "Infinity", "-Infinity", '"NaN"', '"Infinity"'),
    *("9" * 30, "9" * 400, "-" + "9" * 400, "9" * 4300, "9" * 4301, "9" * 400 + ".5", "0." + "0" * 400 + "1"),
)
QUERIES = {
    "/v1/policies": ("budget_gb", "budget_bytes", "gap", "time_limit_s", "limit", "cursor"),
    "/v1/profiles": ("limit", "cursor"),
    "/v1/jobs": ("limit", "cursor"),
}


def numeric_paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every number in JSON data."""
    if isinstance(data, (int, float)) and not isinstance(data, bool):
        yield path
    for key, value in (
        data.items() if isinstance(data, dict) else enumerate(data if isinstance(data, list) else ())
    ):
        yield from numeric_paths(value, (*path, key))


def mutated(body: dict[str, Any], path: tuple[Any, ...], number: str) -> bytes:
    """Return `body` as JSON, with `number` written as it is at `path`."""
    copied = at = json.loads(json.dumps(body))
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = json.loads(MARK)
    return json.dumps(copied).replace(MARK, number).encode()


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each route with a body that has all of its numeric fields."""
    profile = chain_profile().model_dump(mode="json")
    rules = Constraints(extra_static_bytes=1).model_dump(mode="json") | {"host_budget_bytes": 0}
    common = {"profile": profile, "gap": 0.01, "time_limit_s": 5.0, "constraints": rules}
    two = rules | {"forward_budget_bytes": 1 << 29}
    yield "/v1/profiles", profile
    yield "/v1/policies", common | {"budget_bytes": 1 << 30, "constraints": two}
    yield "/v1/policies", common | {"budget_gb": 1.0}
    yield "/v1/frontiers", common | {"points": 2}
    yield "/v1/floors", common


def mutations() -> list[tuple[str, str, bytes, dict[str, str]]]:
    """Return all mutations: method, address, body and headers."""
    found = [
        ("POST", route, mutated(body, path, number), JSON)
        for route, body in bodies()
        for path in numeric_paths(body)
        for number in NUMBERS
    ]
    found += [
        ("GET", f"{route}?{name}={number.strip(chr(34))}", b"", {})
        for route, names in QUERIES.items()
        for name in names
        for number in NUMBERS
        if number != "[]"
    ]
    valid = request(chain_profile())
    found += [("POST", "/v1/policies", valid, JSON | {"Prefer": f"wait={number}"}) for number in NUMBERS]
    return found


def answers(http: TestClient, tried: int) -> Iterator[tuple[int, str, bytes]]:
    """Yield status, address and the end of the body for `tried` of all mutations."""
    everything = mutations()
    for method, address, body, headers in random.Random(46).sample(everything, min(tried, len(everything))):
        answer = http.request(method, address, content=body, headers=headers)
        yield answer.status_code, address[:80], answer.content[:300]


def test_no_number_in_a_request_is_a_server_error(serve: Serve) -> None:
    http = serve(InProcess(plan_with_host), solve_time_limit_s=5, queue_most=100_000, key_queued=100_000)
    seen = list(answers(http, TRIED))
    assert [found for found in seen if found[0] >= 500] == []
    assert {status for status, _, _ in seen} >= {200, 201, 400, 422}
