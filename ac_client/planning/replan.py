"""Makes policies for one budget, and makes them again where the allocator says otherwise.

docs/budget.md is the page. See NOTE [ The counter is the user's ] in peaks.py for what is compared.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from torch import nn

from ac_client.planning.optimizer_steps import ModelOptimizers
from ac_client.planning.peak_counter import MOST_CORRECTIONS, AllocatorPeak, too_little, too_much
from ac_client.planning.ranks import Terms
from ac_client.planning.service_client import RemoteError, ServiceUnavailable, request_policy
from ac_client.planning.shape_buckets import Loaded
from autoac.planner import Constraints, InfeasibleBudget, Plan, PlannerError, Policy, Profile, plan
from autoac.planner.problem.graph import SaveSet
from autoac.planner.units import format_bytes
from autoac.profiler import device_of

log = logging.getLogger("ac_client")

TIGHTER = 0.9  # of a planned peak that the device did not have room for


def _nothing(_nbytes: int) -> None:
    return None


def _of_others(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} of it held by other planned models on the device"


class Planning:
    """Plans and corrects for one model."""

    def __init__(
        self,
        name: str,
        budget_bytes: int | None,
        headroom_bytes: int,
        constraints: Constraints | None,
        optimizers: ModelOptimizers,
        service: str | None,
        require_service: bool = False,
    ) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.headroom_bytes = headroom_bytes
        self.constraints = constraints
        self._optimizers = optimizers
        self._service = service
        self._require_service = require_service
        self._lock = threading.Lock()  # of corrections
        self.held_beside: Callable[[], int] = int  # bytes that other planned models hold on the device
        self.ask_for_room: Callable[[int], None] = _nothing  # have them hold so many bytes less

    @property
    def limit(self) -> int:
        """The most bytes that a planned peak may have."""
        assert self.budget_bytes is not None
        return self.budget_bytes - self.headroom_bytes

    def first(self, profile: Profile, terms: Terms | None = None) -> tuple[Policy, Plan | None]:
        """A policy within the budget; within all ranks' budgets, if there are terms."""
        if terms is None:
            if beside := self.held_beside():
                policy, made = self.tightest(profile, _of_others(beside), beside)
                self._ask_for_room(policy.predicted.peak_bytes)
                return policy, made
            return self.planned(profile, self.limit)
        return self.planned(profile, terms.limit, terms.extra_static)

    def planned(
        self, profile: Profile, within: int, extra_static: int = 0, start: SaveSet | None = None
    ) -> tuple[Policy, Plan | None]:
        """A policy whose peak is within so many bytes, by the service if there is one.

        `extra_static` bytes of the peak are not in the profile. `start` is a save set that may fit already.

        Raises:
            PlannerError: there is none.
            ServiceUnavailable: the service is away, and is required.
            ServiceRefused: the service said no.
        """
        budget = within + self.headroom_bytes
        constraints = self.constraints
        if extra_static:
            constraints = constraints or Constraints()
            more = constraints.extra_static_bytes + extra_static
            constraints = constraints.model_copy(update={"extra_static_bytes": more})
        if self._service is not None:
            try:
                return (
                    request_policy(
                        self._service,
                        profile,
                        budget,
                        headroom_bytes=self.headroom_bytes,
                        constraints=constraints,
                    ),
                    None,
                )
            except ServiceUnavailable as error:
                if self._require_service:
                    raise ServiceUnavailable(
                        f"{error}. require_service=True forbids planning in this process: start the service, "
                        "or leave require_service out"
                    ) from error
                log.warning("planning in-process, because %s", error)
        made = plan(
            profile,
            budget_bytes=budget,
            headroom_bytes=self.headroom_bytes,
            constraints=constraints,
            clock=time.monotonic,
            start=() if start is None else (start,),
        )
        return made.policy(), made

    def tightest(self, profile: Profile, why: str, extra_static: int = 0) -> tuple[Policy, Plan | None]:
        """Plan within the limit, or return the tightest plan with a warning if none is.

        For a loop that is running, which an error would break off.

        Args:
            profile, extra_static: as for `planned`.
            why: what the step needs so much for, in words.

        Raises:
            PlannerError, RemoteError: as `planned`, if no plan at all was found.
        """
        try:
            return self.planned(profile, self.limit, extra_static)
        except InfeasibleBudget as error:
            if error.smallest_found is None:
                raise
            policy, made = self.planned(profile, error.smallest_found, extra_static, error.save_set)
        self.warn_not_kept(policy.predicted.peak_bytes, why)
        return policy, made

    def count_beside(self, loaded: Loaded) -> None:
        """Plan again with what other planned models hold by now.

        That is if the plan leaves no room for it, if no plan did and they hold less now, or if they asked for
        room themselves.
        """
        more = self.held_beside() - loaded.beside
        over = loaded.policy.predicted.peak_bytes > self.limit
        makes_room, loaded.makes_room = loaded.makes_room, False
        if loaded.profile is None or not (
            makes_room or self.lacks_room(loaded, more) or (over and loaded.beside and more < 0)
        ):
            return
        loaded.beside += more
        loaded.extra_static += more
        with self._lock:
            try:
                needs = self._plan_again(loaded)
            except (PlannerError, RemoteError) as error:
                log.warning(
                    "%s: no plan leaves room for %s (%s): its plan stays",
                    self.name,
                    _of_others(loaded.beside),
                    str(error).partition("\n")[0],
                )
                return
        if needs is None or loaded.withheld:
            log.info("%s: planned again, %s", self.name, _of_others(loaded.beside))
        else:
            self.warn_not_kept(needs, _of_others(loaded.beside))
            self._ask_for_room(needs)

    def _ask_for_room(self, needs: int) -> None:
        if needs > self.limit:
            self.ask_for_room(needs - self.limit)

    def lacks_room(self, loaded: Loaded, more: int) -> bool:
        """Return True if the step goes over the budget with so many bytes more."""
        return self.budget_bytes is not None and (
            more > 0 and loaded.policy.predicted.peak_bytes + more > self.limit
        )

    def warn_not_kept(self, needs: int, why: str) -> None:
        """Warn that no plan keeps the budget."""
        log.warning(
            "%s: the budget of %s cannot be kept: the step needs at least %s, %s. It runs under its tightest "
            "plan",
            self.name,
            format_bytes(self.budget_bytes or 0),
            format_bytes(needs),
            why,
        )

    def judge(self, model: nn.Module, loaded: Loaded, *, whole: bool) -> None:
        """Plan again if the steps seen were over the budget; or, `whole` ones, far from using it."""
        if self.budget_bytes is None or loaded.seen is None or loaded.replaced:
            return
        limit = self.limit
        predicted = loaded.policy.predicted.peak_bytes
        if rise := too_much(loaded.seen, predicted, limit):
            if loaded.profile is None or loaded.corrections >= MOST_CORRECTIONS:
                if not loaded.told:
                    loaded.told = True
                    log.warning(
                        "%s: measured %s where %s is the limit; %s, so its plan stays",
                        self.name,
                        format_bytes(loaded.seen.at_least),
                        format_bytes(limit),
                        "it was planned elsewhere"
                        if loaded.profile is None
                        else f"it was corrected {loaded.corrections} times",
                    )
                return
            self._correct(loaded, rise)
        elif (
            whole
            and loaded.profile is not None
            and loaded.recomputes
            # Only at first: what turns out too loose can then still be tightened.
            and not loaded.corrections
            and not loaded.withheld
            and self.state_exists(model, loaded.profile)
            and (fall := too_little(loaded.seen, predicted, limit))
        ):
            self._correct(loaded, -fall)

    def state_exists(self, model: nn.Module, profile: Profile) -> bool:
        """Return True if the optimizer has all the state that the profile counts."""
        return self._optimizers.state_nbytes(device_of(model)) >= profile.static.optimizer_state

    def _correct(self, loaded: Loaded, change: int) -> None:
        """Add what the prediction missed to it, and plan again."""
        assert loaded.seen is not None
        seen = loaded.seen.at_least if change > 0 else loaded.seen.at_most
        predicted = loaded.policy.predicted.peak_bytes
        with self._lock:
            loaded.corrections += 1
            loaded.correction += change
            try:
                needs = self._plan_again(loaded)
            except (PlannerError, RemoteError) as error:
                loaded.correction -= change
                log.warning(
                    "%s: measured %s where %s was predicted, and planning again failed (%s): its plan stays",
                    self.name,
                    format_bytes(seen or 0),
                    format_bytes(predicted),
                    str(error).partition("\n")[0],
                )
                return
        if needs is not None:
            loaded.told = True
            self.warn_not_kept(
                needs,
                f"measured {format_bytes(seen or 0)} where {format_bytes(predicted)} was predicted, of which "
                f"{format_bytes(change)} are in no plan",
            )
            return
        log.warning(
            "%s: measured %s where %s was predicted and %s is the budget: planned again, corrected by %s; "
            "%d of %d ops recomputed, predicted %s",
            self.name,
            format_bytes(seen or 0),
            format_bytes(predicted),
            format_bytes(self.budget_bytes or 0),
            format_bytes(change),
            sum(decision == "recompute" for decision in loaded.policy.decisions.values()),
            len(loaded.policy.decisions),
            format_bytes(loaded.policy.predicted.peak_bytes),
        )

    def tighten(self, loaded: Loaded, allocator: AllocatorPeak | None, before: int) -> None:
        """Plan again for less than the device turned out not to have.

        Args:
            loaded: whose step ran out of memory.
            allocator: of the device, if it counts by itself.
            before: what it counted before the step.

        Raises:
            PlannerError: there is no tighter plan.
            RemoteError: the service would not make one.
        """
        limit = self.limit
        had = loaded.policy.predicted.peak_bytes
        aim = int(had * TIGHTER)
        if allocator is not None and (seen := allocator.allocated_peak()) > before:
            aim = min(aim, seen)  # so much the device had
        withheld = loaded.withheld
        with self._lock:
            loaded.withheld = max(0, limit - aim)
            try:
                self._plan_again(loaded, tighter=True)
            except (PlannerError, RemoteError):
                loaded.withheld = withheld
                raise
        log.warning(
            "%s ran out of memory under a plan for %s: planned again for %s, and the step runs again",
            self.name,
            format_bytes(had),
            format_bytes(loaded.policy.predicted.peak_bytes),
        )

    def _plan_again(self, loaded: Loaded, *, tighter: bool = False) -> int | None:
        """As first, with `loaded`'s corrections; where that is too tight, the tightest plan there is.

        Returns the bytes that the step then needs, corrections included; None if they are within the limit.

        Args:
            tighter: raise if the tightest plan has no smaller peak than the present one.

        Raises:
            PlannerError: no plan was found.
            RemoteError: the service would not make one.
        """
        assert loaded.profile is not None
        within = max(1, self.limit - loaded.correction - loaded.withheld)
        needs = None
        try:
            policy, made = self.planned(loaded.profile, within, loaded.extra_static)
        except InfeasibleBudget as error:
            if error.smallest_found is None:
                raise
            policy, made = self.planned(
                loaded.profile, error.smallest_found, loaded.extra_static, error.save_set
            )
            had = loaded.policy.predicted.peak_bytes - loaded.correction
            if tighter and policy.predicted.peak_bytes >= had:
                raise
            needs = policy.predicted.peak_bytes + loaded.correction + loaded.withheld
        predicted = policy.predicted
        moved = {
            name: max(0, getattr(predicted, name) + loaded.correction)
            for name in ("peak_bytes", "save_all_peak_bytes", "static_bytes")
        }
        policy = policy.model_copy(
            update={
                "budget_bytes": self.budget_bytes,
                "corrected_by_bytes": loaded.correction + loaded.withheld,
                "predicted": predicted.model_copy(update=moved),
            }
        )
        loaded.load(policy, made)
        return needs
