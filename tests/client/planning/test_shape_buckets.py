"""One policy for each shape of batch: the smallest that covers it runs, with the plain model's gradients."""

from __future__ import annotations

import collections
import logging
from pathlib import Path
from typing import Any

import pytest
import stepping
import torch
from stepping import binding_budget, scalar, seeded
from torch import Tensor, nn

import ac_client
from ac_client.planning import choose_policy, plan_batch
from ac_client.planning.batch_shape import key_of, shape_of
from ac_client.planning.loaded_policy import LoadedPolicy, PlannedBucket
from ac_client.planning.policy_store import ShapeBuckets
from ac_client.planning.trained_parameters import SAMPLED_PER_FORWARD
from autoac.planner import bounds, build, find_minimum_peak, plan
from autoac.planner.units import GIB
from autoac.profiler import profile
from benchmarks.models.modules import Transformer

WIDTH = 32
SMALL, TALL, WIDE, LARGE = (2, 16), (6, 16), (2, 48), (6, 48)


def new_model() -> Transformer:
    return seeded(Transformer, layers=2, width=WIDTH)


def batch(of: tuple[int, int]) -> Tensor:
    torch.manual_seed(of[0] * 100 + of[1])
    return torch.randn(*of, WIDTH)


@pytest.fixture(scope="module")
def budget_gb() -> float:
    """Binds for the largest batch, and for none of the others."""
    return binding_budget(profile(new_model(), batch(LARGE))) / GIB


def gradients(model: nn.Module, of: tuple[int, int], **kwargs: Any) -> list[Tensor]:
    return stepping.gradients(model, batch(of), **kwargs)


def assert_as_plain(planned: nn.Module, plain: nn.Module, of: tuple[int, int], **kwargs: Any) -> None:
    want, got = gradients(plain, of, **kwargs), gradients(planned, of, **kwargs)
    assert len(want) == len(got)
    assert all(map(torch.equal, want, got))


def shape(of: tuple[int, int]) -> dict[str, str]:
    return {"0": f"float32[{of[0]}, {of[1]}, {WIDTH}]"}


def test_each_shape_runs_under_the_smallest_bucket_that_covers_it(budget_gb: float) -> None:
    plain, planned = new_model(), ac_client.apply(new_model(), budget_gb)
    at = ac_client.applied(planned)
    ran = {}
    for of in (SMALL, TALL, WIDE, LARGE, SMALL, WIDE, LARGE, TALL):
        assert_as_plain(planned, plain, of)
        ran[of] = at.policy
    assert [bucket.shape for bucket in at.policies.buckets] == [
        shape(of) for of in (SMALL, TALL, WIDE, LARGE)
    ]
    for bucket in at.policies.buckets:
        assert ran[eval_shape(bucket.shape)] == bucket.policy
    assert "recompute" in ran[LARGE].decisions.values()
    assert at.report().buckets == 4
    assert at.report().off_path == ""
    # (1, 40) is covered by WIDE and LARGE, (5, 17) by LARGE alone.
    for of, bucket in (((1, 40), WIDE), ((5, 17), LARGE), ((2, 16), SMALL), ((3, 2), TALL)):
        assert_as_plain(planned, plain, of)
        assert at.policy is ran[bucket]
    assert at.report().buckets == 4
    assert "4 buckets" in str(at.report())


def eval_shape(shape: dict[str, str]) -> tuple[int, int]:
    a, b, _ = shape["0"].removeprefix("float32[").removesuffix("]").split(", ")
    return int(a), int(b)


def test_short_last_batch_is_not_planned(budget_gb: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, planned = new_model(), ac_client.apply(new_model(), budget_gb)
    assert_as_plain(planned, plain, LARGE)
    policy = ac_client.applied(planned).policy
    monkeypatch.setattr(plan_batch, "ObservedStep", None)  # observing now fails
    assert_as_plain(planned, plain, (5, 48))
    assert ac_client.applied(planned).policy is policy


def test_backwards_in_another_order_than_forwards_have_each_its_own_policy(budget_gb: float) -> None:
    got = []
    for model in (new_model(), ac_client.apply(new_model(), budget_gb)):
        torch.manual_seed(3)
        losses = [scalar(model(batch(of))) for of in (SMALL, LARGE, TALL)]
        for i in (1, 2, 0):
            losses[i].backward()
        got.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *got))


def test_strict_refuses_what_no_bucket_covers_before_anything_runs(budget_gb: float) -> None:
    model = ac_client.apply(new_model(), budget_gb, strict=True)
    at = ac_client.applied(model)
    gradients(model, SMALL)
    ran: list[str] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda *_: ran.append("block"))
    state = torch.get_rng_state()
    with pytest.raises(
        ac_client.ShapeNotPlanned, match=r"float32\[6, 16, 32\]; planned are 0=float32"
    ) as raised:
        model(batch(TALL))
    assert raised.value.shape == shape(TALL)
    assert ran == []
    handle.remove()
    torch.set_rng_state(state)
    at.plan_for(batch(TALL))
    assert at.report().buckets == 2
    assert_as_plain(model, new_model(), TALL)
    with pytest.raises(ac_client.ShapeNotPlanned):
        model(batch(SMALL), scale={"by": torch.ones(WIDTH)})  # the same sizes, and another argument


def test_planning_ahead_changes_nothing(budget_gb: float) -> None:
    model = ac_client.apply(new_model(), budget_gb)
    at = ac_client.applied(model)
    x, state = batch(LARGE), torch.get_rng_state()
    at.plan_for(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    assert at.report().steps == 0
    assert_as_plain(model, new_model(), TALL)
    assert at.report().buckets == 1
    model.eval()
    with pytest.raises(RuntimeError, match=r"model.train\(\)"):
        at.plan_for(batch(TALL))
    with pytest.raises(RuntimeError, match="budget_gb"):
        ac_client.applied(ac_client.apply(new_model(), policy=at.policies)).plan_for(batch(LARGE))


def test_shape_that_does_not_fit_runs_under_its_tightest_plan(
    budget_gb: float, caplog: pytest.LogCaptureFixture
) -> None:
    plain, planned = new_model(), ac_client.apply(new_model(), budget_gb)
    assert_as_plain(planned, plain, SMALL)
    for _ in range(2):
        assert_as_plain(planned, plain, (30, 240))
        assert_as_plain(planned, plain, SMALL)
    at = ac_client.applied(planned)
    assert at.report().buckets == 2
    (said,) = [message for message in caplog.messages if "cannot be kept" in message]
    assert "30" in said
    assert "240" in said
    with pytest.raises(ac_client.InfeasibleBudget):
        at.plan_for(batch((31, 240)))


def test_set_is_carried_out_from_a_file(
    budget_gb: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, first = new_model(), ac_client.apply(new_model(), budget_gb)
    for of in (SMALL, LARGE):
        gradients(first, of)
    policies = ac_client.applied(first).policies
    path = tmp_path / "policies.json"
    path.write_text(policies.to_json())

    second = ac_client.apply(new_model(), policy=path)
    at = ac_client.applied(second)
    for of, bucket in ((LARGE, 1), (SMALL, 0), ((6, 17), 1)):
        assert_as_plain(second, plain, of)
        assert at.policy == policies.buckets[bucket].policy
    with caplog.at_level(logging.WARNING):
        for of in ((7, 48), (8, 48)):  # beyond, and nothing to plan for: the largest's decisions, op by op
            assert_as_plain(second, plain, of)
            assert at.policy == policies.buckets[1].policy
    assert sum("no bucket covers" in message for message in caplog.messages) == 1
    strict = ac_client.apply(new_model(), policy=policies, strict=True)
    with pytest.raises(ac_client.ShapeNotPlanned, match="Pass budget_gb as well as the policies"):
        strict(batch((7, 48)))
    filled = ac_client.apply(new_model(), 1.0, policy=policies)
    assert_as_plain(filled, plain, (7, 48))
    assert ac_client.applied(filled).report().buckets == 3
    with pytest.raises(ac_client.InvalidBudget, match="plan again for less"):
        ac_client.apply(new_model(), budget_gb / 4, policy=policies)
    with pytest.raises(ac_client.InvalidBudget, match="no buckets"):
        ac_client.apply(new_model(), policy=ac_client.PolicySet(buckets=()))


def test_loop_with_ever_larger_batches_does_not_plan_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose_policy, "MOST_BUCKETS", 2)
    plain, planned = new_model(), ac_client.apply(new_model(), 1.0)
    with caplog.at_level(logging.WARNING):
        for length in (1, 2, 3, 4):
            assert_as_plain(planned, plain, (1, length))
    assert ac_client.applied(planned).report().buckets == 2
    assert sum("no bucket covers" in message for message in caplog.messages) == 1


def test_largest_bucket_serves_larger_batches_while_torchs_profiler_runs(budget_gb: float) -> None:
    plain, planned = new_model(), ac_client.apply(new_model(), budget_gb)
    at = ac_client.applied(planned)
    for of in (TALL, SMALL):
        assert_as_plain(planned, plain, of)
    with torch.profiler.profile():
        assert_as_plain(planned, plain, LARGE)
    assert at.policy == at.policies.buckets[0].policy
    assert at.report().buckets == 1
    assert_as_plain(planned, plain, LARGE)
    assert at.report().buckets == 2


def test_measured_step_on_a_batch_that_no_bucket_covers_corrects_nothing(
    budget_gb: float, caplog: pytest.LogCaptureFixture
) -> None:
    plain, planned = new_model(), ac_client.apply(new_model(), budget_gb)
    at = ac_client.applied(planned)
    for _ in range(2):
        assert_as_plain(planned, plain, SMALL)
    policy = at.policy
    with at.measure():
        assert_as_plain(planned, plain, LARGE)
    assert at.policy is policy
    assert at.report().corrections == 0
    assert sum("no bucket covers" in message for message in caplog.messages) == 1


def test_shape_with_nothing_to_differentiate_runs_plain() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, detached: bool = False) -> Tensor:
            out = self.linear(x)
            return out.detach() if detached else out

    model = ac_client.apply(Sometimes(), 1.0)
    x = torch.randn(2, 4)
    model(x).sum().backward()
    for _ in range(2):
        assert not model(x, detached=True).requires_grad
    model(x).sum().backward()
    assert ac_client.applied(model).report().buckets == 1


class Pair(collections.namedtuple("Pair", "a b")):
    __slots__ = ()


class Graph:
    """An object that neither Python's containers nor torch's pytree know."""

    def __init__(self, rows: int) -> None:
        self.name = "a batch"
        self.features = {"x": torch.ones(rows, 4)}


def test_larger_object_is_planned_as_a_larger_batch() -> None:
    class OnGraph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(
                *(m for _ in range(4) for m in (nn.Linear(4, 64), nn.GELU(), nn.Linear(64, 4)))
            )

        def forward(self, graph: Graph) -> Tensor:
            return self.layers(graph.features["x"]).square().mean()

    budget = binding_budget(profile(OnGraph(), Graph(64)))
    model = ac_client.apply(OnGraph(), budget / GIB)
    for rows in (16, 64):
        model(Graph(rows)).backward()
    with ac_client.applied(model).measure():
        model(Graph(64)).backward()
    report = ac_client.applied(model).report()
    assert report.buckets == 2
    assert report.measured_peak_bytes <= budget


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (([1],), ([2],), True),
        (([],), (False,), False),
        (([1],), (True,), False),
        ((None,), (False,), False),
        ((1,), (1.0,), False),
        ((torch.ones(2),), (torch.zeros(2),), True),
        ((torch.ones(2),), (torch.ones(2, dtype=torch.float64),), False),
        ((torch.ones(2),), ([torch.ones(2)],), False),
        (({"a": torch.ones(2)},), ({"b": torch.ones(2)},), False),
        ((collections.UserDict(a=torch.ones(2)),), (collections.UserDict(a=torch.ones(3)),), False),
        ((Pair(torch.ones(2), 1),), (Pair(torch.ones(3), 1),), False),
        (([torch.ones(1), torch.ones(2)],), ([torch.ones(1)], torch.ones(2)), False),
        ((object(),), (object(),), True),
        ((Graph(2),), (Graph(2),), True),
        ((Graph(2),), (Graph(3),), False),
        (({"1": torch.ones(2)},), ({1: torch.ones(2)},), False),
        (({True: torch.ones(2)},), ({1: torch.ones(2)},), False),
    ],
)
def test_batches_of_one_key_have_one_shape(one: tuple[Any, ...], other: tuple[Any, ...], same: bool) -> None:
    assert (key_of(one, {}) == key_of(other, {})) is same
    if same:
        assert shape_of(one, {}) == shape_of(other, {})


@pytest.mark.parametrize("first", [0, 1])
def test_bucket_covers_a_batch_whose_arguments_come_in_another_order(first: int) -> None:
    """Dimensions are compared leaf by leaf, also where their number is the same."""
    policy = plan(profile(nn.Linear(4, 4), torch.randn(2, 4)), budget_gb=1.0).policy()
    long, wide = torch.empty(2, 48), torch.empty(48, 2)
    buckets = ShapeBuckets()
    shape = shape_of((), {"long": long, "wide": wide, "boxes": [{"b": wide, "a": long}]})
    bucket = PlannedBucket(shape, LoadedPolicy(policy))
    buckets.add(bucket)
    met = {"boxes": [{"a": long[:, :9], "b": wide[:9]}], "wide": wide[:9], "long": long[:, :9]}
    batches = [met, {**met, "wide": long[:, :9]}]
    for batch in batches[first:] + batches[:first]:
        covered = batch is met
        assert (buckets.covering((), batch) is bucket) is covered
    assert buckets.covering((), {"other": long}) is None


def test_shape_names_each_leaf() -> None:
    x = torch.zeros(2, 3)
    assert shape_of((x, [x, 1]), {"scale": {"by": x}, "flag": True, "mask": None}) == {
        "0": "float32[2, 3]",
        "1[0]": "float32[2, 3]",
        "1[1]": "int",
        "scale['by']": "float32[2, 3]",
        "flag": "True",
        "mask": "None",
    }


def train_only(model: Transformer, count: int) -> None:
    """Leave only the last `count` parameters trainable."""
    parameters = list(model.parameters())
    for i, parameter in enumerate(parameters):
        parameter.requires_grad_(i >= len(parameters) - count)
        parameter.grad = None


def test_other_parameters_that_train_have_a_plan_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    profiled = collections.Counter[str]()

    def observed(*args: Any, **kwargs: Any) -> Any:
        profiled["times"] += 1
        return unwatched(*args, **kwargs)

    unwatched = plan_batch.ObservedStep
    monkeypatch.setattr(plan_batch, "ObservedStep", observed)
    plain, planned = new_model(), new_model()
    most = len(list(plain.parameters()))
    peaks: dict[int, float] = {}
    for count in (2, most):  # what the plain step takes with so many
        train_only(plain, count)
        found = profile(plain, batch(LARGE))
        peaks[count] = bounds(build(found)).ceiling
        smallest = find_minimum_peak(found, time_limit_s=5).found
    assert peaks[2] < peaks[most]
    budget = max(smallest, (smallest + int(peaks[most])) // 2)
    ac_client.apply(planned, budget / GIB)
    at = ac_client.applied(planned)
    policies = {}
    for count in (2, most, 2, most):
        train_only(plain, count)
        train_only(planned, count)
        assert_as_plain(planned, plain, LARGE)
        assert policies.setdefault(count, at.policy) is at.policy, "it was planned when it was met first"
        assert at.policy.predicted.peak_bytes <= budget
    assert "recompute" in policies[most].decisions.values()
    assert "recompute" not in policies[2].decisions.values()
    assert profiled["times"] == 2
    assert at.report().buckets == 2


def test_forwards_in_flight_of_other_parameters_are_not_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    """A discriminator is frozen for the generator's step, and sees two batches in its own."""
    caplog.set_level(logging.INFO)
    model = ac_client.apply(new_model(), 1.0)

    def step(forwards: int) -> None:
        model.requires_grad_(forwards > 1)
        x = batch(SMALL).requires_grad_() * 1
        sum(model(x)["logits"].sum() for _ in range(forwards)).backward()
        model.zero_grad()

    for forwards in (1, 2, 1, 2):
        step(forwards)
    assert sum("observing one step" in message for message in caplog.messages) == 2
    assert not any(record.levelno >= logging.WARNING for record in caplog.records)


def test_single_frozen_parameter_is_noticed_within_a_few_forwards(budget_gb: float) -> None:
    planned, plain = new_model(), new_model()
    ac_client.apply(planned, 2 * budget_gb)
    assert_as_plain(planned, plain, LARGE)
    before = ac_client.applied(planned).policy
    assert len(list(planned.parameters())) > SAMPLED_PER_FORWARD
    for model in (planned, plain):
        list(model.parameters())[5].requires_grad_(False)
    for _ in range(len(list(planned.parameters())) // SAMPLED_PER_FORWARD + 1):
        assert_as_plain(planned, plain, LARGE)
    assert ac_client.applied(planned).policy is not before


def test_policy_that_was_given_serves_whatever_trains(budget_gb: float) -> None:
    first = ac_client.apply(new_model(), budget_gb)
    gradients(first, LARGE)
    planned, plain = new_model(), new_model()
    ac_client.apply(planned, policy=ac_client.applied(first).policy)
    for count in (2, len(list(plain.parameters())), 2):
        train_only(plain, count)
        train_only(planned, count)
        assert_as_plain(planned, plain, LARGE)
        assert ac_client.applied(planned).policy is ac_client.applied(first).policy
    assert ac_client.applied(planned).report().buckets == 1
