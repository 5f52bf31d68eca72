"""Take stored policies of a service that fit, and have others made."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import httpx2
import pytest
from service_app import InApp, Serve, Transport
from service_fakes import InProcess, Planned, chain_profile, save_all

import ac_client.service_client.connection
from ac_client.service_client.errors import ServiceRefused, ServiceUnavailable
from ac_client.service_client.policy_requests import on_profile, request_policy
from autoac.api.storage.database import Database
from autoac.api.storage.keys import Scope, create_key
from autoac.planner.formats.constraints import Constraints
from autoac.planner.formats.policy import Policy
from autoac.planner.formats.profile import LinkRates, Profile
from autoac.planner.offload import plan_with_host
from autoac.planner.plan import plan, plan_of
from autoac.planner.problem.build import build
from autoac.planner.problem.graph import OpId
from autoac.planner.problem.use_groups import later_runs, with_use_groups
from autoac.planner.solver.start.search_problem import SearchProblem
from autoac.planner.solver.variables import Options

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pauses")]

URL = "http://localhost"
MIB = 1 << 20
GIB = 1 << 30
SIZES = tuple(size * MIB for size in (4, 8, 2, 8, 4))


@pytest.fixture
def step() -> Profile:
    """Return a step for which some budgets require a recompute."""
    found = chain_profile(*SIZES)
    on_gpu = found.environment.model_copy(update={"device_type": "cuda"})  # no op costs the host's time
    return found.model_copy(update={"environment": on_gpu})


def ask(transport: httpx2.BaseTransport, profile: Profile, budget: int = GIB, **options: Any) -> Policy:
    return request_policy(URL, profile, budget, transport=transport, **options)


def tightest(profile: Profile) -> int:
    """Return the largest budget that requires a recompute."""
    return plan(profile, budget_bytes=GIB).ceiling - 1


def slower(profile: Profile) -> Profile:
    """Return the same step with other run times, as from a second measurement."""
    return timed(profile, *(11.0,) * len(profile.ops))


def timed(profile: Profile, *runtime_us: float) -> Profile:
    """Return the same step with these run times of its ops."""
    return profile.model_copy(update={"ops": profile.ops.model_copy(update={"runtime_us": runtime_us})})


def fits(policy: Policy, profile: Profile, budget: int, headroom: int) -> bool:
    rules = policy.constraints.model_copy(update={"headroom_bytes": headroom})
    asked = policy.model_copy(update={"budget_bytes": budget, "constraints": rules})
    return on_profile(asked, profile) is not None


def hungrier(profile: Profile, nbytes: int) -> Profile:
    """Return the same step with larger peaks in backward, which the fingerprint leaves out."""
    peaks = (64 + nbytes,) * len(profile.backward.peak_nbytes)
    return profile.model_copy(update={"backward": profile.backward.model_copy(update={"peak_nbytes": peaks})})


def test_stored_policy_is_taken_without_the_profile_and_predicts_for_it(
    in_app: Transport, step: Profile
) -> None:
    transport = in_app(InProcess(plan))
    made = ask(transport, step, tightest(step))
    taken = ask(transport, slower(step), tightest(step))
    assert transport.posts == 1
    assert taken.decisions == made.decisions
    assert "recompute" in made.decisions.values()
    assert taken.profile_digest == slower(step).digest
    assert taken.predicted.recompute_us == pytest.approx(1.1 * made.predicted.recompute_us)
    assert taken.predicted.step_us == plan(slower(step), budget_bytes=GIB).step_us
    assert taken.predicted.recompute_bound_us == 0  # nothing is proven for these run times
    assert ask(transport, step, tightest(step)) == made


@pytest.mark.parametrize("dear", [(1, 1, 200, 1, 1), (200, 200, 1, 200, 200)])
def test_policy_planned_for_other_run_times_is_not_taken(
    in_app: Transport, step: Profile, dear: tuple[float, ...]
) -> None:
    """Nor one that states too much time: its planner had no reason to avoid what is cheap here."""
    transport = in_app(InProcess(plan))
    budget = tightest(step)
    mine = timed(step, *(201.0 - us for us in dear))
    assert ask(transport, timed(step, *dear), budget).decisions != plan(mine, budget_bytes=budget).policy()
    taken = ask(transport, mine, budget)
    assert transport.posts == 2
    assert taken == plan(mine, budget_bytes=budget).policy()


@pytest.mark.parametrize(
    "other",
    [
        {"constraints": Constraints(headroom_bytes=1)},
        {"constraints": Constraints(pin_save=("*/aten.mm.default#0",))},
        {"constraints": Constraints(forward_budget_bytes=GIB - 1)},
        {"gap": 0.02},
        {"budget": GIB - 1},
    ],
)
def test_one_made_for_something_else_is_not_taken(
    in_app: Transport, step: Profile, other: dict[str, Any]
) -> None:
    """Both ways: neither does a call with `other` get the plain policy, nor a plain call that of `other`."""
    for first, second in (({}, other), (other, {})):
        transport = in_app(InProcess(plan))
        profile = step.model_copy(update={"model": f"Chain {bool(first)}"})  # the two share a database
        ask(transport, profile, **first)
        ask(transport, profile, **second)
        assert transport.posts == 2
        for again in (first, second):
            assert ask(transport, profile, **again).constraints == again.get("constraints", Constraints())
        assert transport.posts == 2


def test_two_requests_with_one_answer_are_both_found(in_app: Transport, step: Profile) -> None:
    """Where everything can be saved the policy is the same text under any gap."""
    transport = in_app(InProcess(plan))
    made = [ask(transport, step, gap=gap) for gap in (0.01, 0.02, 0.01, 0.02)]
    assert made == [made[0]] * 4
    assert transport.posts == 2


def stopped_early(profile: Profile, **options: Any) -> Planned:
    made = save_all(profile, **options).policy()
    return Planned(made.model_copy(update={"predicted": made.predicted.model_copy(update={"gap": 0.5})}))


def test_one_whose_solver_had_less_time_and_missed_the_gap_is_not_taken(
    in_app: Transport, step: Profile
) -> None:
    transport = in_app(InProcess(stopped_early))
    ask(transport, step, time_limit_s=10)
    ask(transport, step, time_limit_s=5)
    assert transport.posts == 1
    ask(transport, step, time_limit_s=20)
    assert transport.posts == 2
    ask(transport, step, time_limit_s=1e6)  # the service gives nobody more than 120 s
    ask(transport, step, time_limit_s=2e6)
    assert transport.posts == 3


def test_one_whose_solver_reached_the_gap_is(in_app: Transport, step: Profile) -> None:
    transport = in_app(InProcess(plan))
    ask(transport, step, tightest(step), time_limit_s=10)
    ask(transport, step, tightest(step), time_limit_s=100)
    assert transport.posts == 1


def test_one_that_does_not_fit_on_this_profile_is_not_taken(in_app: Transport, step: Profile) -> None:
    """Temporaries are not part of the fingerprint and count at the peak."""
    transport = in_app(InProcess(plan))
    budget = tightest(step)
    made = ask(transport, step, budget)
    assert fits(made, step, budget, 0)
    steps = (hungrier(step, nbytes) for nbytes in range(0, budget, budget // 100))
    hungry = next(one for one in steps if not fits(made, one, budget, 0))
    assert hungry.fingerprint == step.fingerprint
    assert ask(transport, hungry, budget) == plan(hungry, budget_bytes=budget).policy()
    assert transport.posts == 2
    assert ask(transport, hungry, budget) == plan(hungry, budget_bytes=budget).policy()
    assert transport.posts == 2  # the newest is looked at first


def test_headroom_and_the_limit_of_forward_are_kept(step: Profile) -> None:
    everything = plan(step, budget_bytes=GIB)
    policy = everything.policy()
    assert fits(policy, step, everything.peak, 0)
    assert not fits(policy, step, everything.peak, 1)
    limited = policy.model_copy(update={"constraints": Constraints(forward_budget_bytes=1)})
    assert not fits(limited, step, GIB, 0)


def test_policy_with_use_groups_is_judged_with_them(step: Profile) -> None:
    """An op that runs twice is freed in between."""
    graph = with_use_groups(build(step), {OpId(1): (OpId(2), OpId(1))})
    peaks, judged = set(), 0
    for saved in map(frozenset, subsets(op.id for op in graph.ops if op.id not in later_runs(graph))):
        made = plan_of(SearchProblem(graph, Options(use_groups=False)), step, GIB, saved)
        twice, once = made.policy(), {**made.policy().decisions, step.keys()[1]: "recompute"}
        if "recompute@2" not in twice.decisions.values():
            continue
        single = twice.model_copy(update={"decisions": once, "use_groups": {}})
        assert fits(twice, step, made.peak, 0)
        assert not fits(twice, step, made.peak - 1, 0)
        peaks.add(fits(single, step, made.peak, 0))
        judged += 1
    assert judged
    assert False in peaks


def test_moves_are_not_taken_without_rates_of_a_link() -> None:
    """Without the rates, no move would take any time."""
    link = LinkRates(out_bytes_per_us=20e3, in_bytes_per_us=20e3, latency_us=1.0)
    step = timed(chain_profile(*2 * SIZES), *(1000.0,) * 10).model_copy(update={"link": link})
    rules, budget = Constraints(host_budget_bytes=GIB), tightest(step) * 2 // 3
    policy = plan_with_host(step, budget_bytes=budget, constraints=rules).policy()
    assert policy.moves
    assert fits(policy, step, budget, 0)
    assert not fits(policy, step.model_copy(update={"link": None}), budget, 0)


def subsets(ops: Iterable[OpId]) -> Iterator[tuple[OpId, ...]]:
    ids = list(ops)
    return itertools.chain.from_iterable(itertools.combinations(ids, n) for n in range(len(ids)))


def test_empty_set_of_constraints_is_none(in_app: Transport, step: Profile) -> None:
    transport = in_app(InProcess(plan))
    ask(transport, step)
    assert ask(transport, step, constraints=Constraints()).constraints == Constraints()
    assert transport.posts == 1


def test_key_that_may_only_read_gets_what_is_stored(
    in_app: Transport, step: Profile, database: Database
) -> None:
    with database.write() as connection:
        read = create_key(connection, "reader", Scope.READ)[1]
        full = create_key(connection, "planner", Scope.PLAN)[1]
    transport = in_app(InProcess(plan))
    with pytest.raises(ServiceRefused, match="403: the key must have the scope plan"):
        ask(transport, step, token=read)
    made = ask(transport, step, token=full)
    assert ask(transport, step, token=read) == made


# --- another try ----------------------------------------------------------------------------------------


class Flaky(httpx2.BaseTransport):
    """Goes wrong so many times, and then to the app."""

    def __init__(self, app: InApp, *wrong: httpx2.Response | Exception) -> None:
        self.app, self.wrong = app, list(wrong)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if self.wrong:
            found = self.wrong.pop(0)
            if isinstance(found, Exception):
                raise found
            return found
        return self.app.handle_request(request)


def busy(status: int, **headers: str) -> httpx2.Response:
    return httpx2.Response(status, headers={name.replace("_", "-"): text for name, text in headers.items()})


def test_service_that_is_away_for_a_moment_is_asked_again(
    in_app: Transport, step: Profile, pauses: list[float]
) -> None:
    flaky = Flaky(in_app(), httpx2.ConnectError("refused"), busy(503), busy(429, retry_after="7"))
    assert ask(flaky, step).model == "Chain"
    assert len(pauses) == 3
    assert pauses[0] < pauses[1] < pauses[2]
    assert pauses[2] >= 7  # as the service said


def test_tries_are_bounded_in_number_and_in_time(step: Profile, pauses: list[float]) -> None:
    asked = []

    def never(request: httpx2.Request) -> httpx2.Response:
        asked.append(request)
        return busy(503, retry_after="1")

    with pytest.raises(ServiceUnavailable, match="503"):
        ask(httpx2.MockTransport(never), step)
    assert len(asked) == ac_client.service_client.connection.TRIES == 1 + len(pauses)
    with pytest.raises(ServiceUnavailable, match="503"):
        ask(httpx2.MockTransport(never), step, timeout_s=0.9)
    assert len(pauses) == ac_client.service_client.connection.TRIES - 1  # a second would have been too long


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"items": [{"id": "../keys"}]}', '{"items": [{"id": 1}]}', "<"]
)
def test_answer_other_than_a_list_of_policies_is_unavailable(step: Profile, text: str) -> None:
    with pytest.raises(ServiceUnavailable, match="other than a list of policies"):
        ask(httpx2.MockTransport(lambda request: httpx2.Response(200, text=text)), step)


def test_omitted_parameters_of_the_search_have_the_defaults_of_a_request(serve: Serve, step: Profile) -> None:
    """Omitted parameters have the defaults of a request; without all three, any policy is found."""
    http = serve(InProcess(plan))
    http.post("/v1/policies", json={"profile": step.model_dump(mode="json"), "budget_gb": 1, "gap": 0.5})
    found = [
        len(http.get("/v1/policies", params=params).json()["items"])
        for params in (
            {},
            {"gap": 0.5},
            {"gap": 0.4},
            {"constraints_digest": ""},
            {"gap": 0.5, "constraints_digest": "0" * 64},
        )
    ]
    assert found == [1, 1, 0, 0, 0]
    assert http.get("/v1/policies", params={"constraints_digest": "x"}).status_code == 422
