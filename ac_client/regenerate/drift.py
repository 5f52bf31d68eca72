"""Find policies that are out of date, plan them again, and write them; or only report them.

NOTE [ Drift ]

A policy has drifted if one of these holds:

- The file does not exist, is not a policy, or is not the text that its lock was written with.
- Its settings in `autoac.toml` differ from those that it was planned with.
- The model's fingerprint changed: ops, sizes, lifetimes, batch, torch release or kind of device; or the size
  of its gradients did.
- On a profile with other run times (a newer roofline, or a new measurement because of `measure`) the policy
  exceeds its budget, or a new plan is faster by more than the gap that was asked for. With measured times, a
  gain of less than 5 % of the step counts as noise.

Other run times alone are not drift: two measurements never agree, and a plan that is within its gap by one of
them is worth keeping. So a model that did not change is not solved again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ac_client.errors import CommandError
from ac_client.files import write_whole
from ac_client.regenerate.config import LOCAL, Config, ModelTable, budget_name, lock_file, policy_file
from ac_client.regenerate.lock import Lock, sha256
from ac_client.regenerate.model_source import ModelSource
from ac_client.regenerate.outcome import PolicyResult, RegenerateOutcome, StepNumbers, Verdict
from ac_client.regenerate.step_changes import ChangedLayer, changed_layers, changed_step
from ac_client.regenerate.stored_policies import StoredPolicies, stale_files
from autoac.planner import (
    Constraints,
    InfeasibleBudget,
    Plan,
    PlannerError,
    Policy,
    Profile,
    Progress,
    Stopped,
    carried,
    difference,
    plan_with_host,
)
from autoac.planner.units import bytes_from_gb, format_bytes, format_us
from autoac.profiler import ProfilerError

NOISE = 0.05  # of a measured step: the gain of a new plan from which the stored one counts as drifted


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of the command line of `autoac regenerate`."""

    only: tuple[str, ...] = ()  # names of models; empty: all
    check: bool = False  # write nothing
    force: bool = False  # plan also models that did not change
    prune: bool = False  # remove files of models and budgets that the config does not list any more
    measure: bool = False  # judge policies of the local device by a new measurement


def regenerate(
    config: Config,
    config_file: Path,
    options: RunOptions,
    on_task: Callable[[str], None] = lambda task: None,
    progress: Callable[[Progress], bool | None] | None = None,
) -> RegenerateOutcome:
    """Bring the policies in the folder up to date; with `options.check`, only report what would change.

    All policies of a model are written, then its lock. If one of them cannot be planned, none is written.
    Each file is written whole or not at all. If a model fails, the other models are still processed.

    Args:
        config: the contents of `config_file`.
        config_file: entries are imported from its folder first, and policies are below it.
        options: what to do.
        on_task: called with a few words before each long task.
        progress: called by the solver; returning True stops it.

    Raises:
        OSError: a file cannot be written or removed.
    """
    home = config_file.resolve().parent
    folder = config_file.parent / config.policies
    stale = tuple(stale_files(config, folder, options.only))
    results: list[PolicyResult] = []
    for name, table in config.models.items():
        if not options.only or name in options.only:
            results += _ModelRun(name, table, home, folder, options, on_task, progress).run()
    if options.prune and not options.check:
        for path in stale:
            path.unlink(missing_ok=True)
    return RegenerateOutcome(config_file, folder, options.check, tuple(results), stale, options.prune)


class _ModelRun:
    """Brings the policies of one model in `autoac.toml` up to date."""

    def __init__(
        self,
        name: str,
        table: ModelTable,
        home: Path,
        folder: Path,
        options: RunOptions,
        on_task: Callable[[str], None],
        progress: Callable[[Progress], bool | None] | None,
    ) -> None:
        self.name, self.table, self.home, self.folder = name, table, home, folder
        self.options, self.on_task, self.progress = options, on_task, progress
        self.budgets_gb = {policy_file(name, gb): gb for gb in table.budgets_gb}  # by file name
        self.stored = StoredPolicies.read(folder, name, self.budgets_gb)

    def run(self) -> list[PolicyResult]:
        """Return a result for each budget; write what changed, unless the run is a check."""
        self.on_task(f"{self.name}: loading the model")
        try:
            source = ModelSource(self.name, self.table, self.home)
            now = self._lock(source.identity, source.identity, {})
        except (CommandError, ProfilerError) as error:
            return [self._failure(file, self.stored.reasons(file), (), error) for file in self.budgets_gb]
        reasons, layers = self._drift(now)
        new_times = not reasons and self._has_new_times(source)
        results, fresh = [], {}
        for file in self.budgets_gb:
            why = (*self.stored.reasons(file), *reasons)
            if not (why or new_times or self.options.force):
                results.append(self._result(file, Verdict.UNCHANGED))
                continue
            try:
                result, policy = self._plan_again(source, file, why, layers)
            except (CommandError, ProfilerError, PlannerError) as error:
                result, policy = self._failure(file, why, layers, error), None
            results.append(result)
            if policy is not None:
                fresh[file] = policy.to_json()
        if self.options.check:
            return results
        if any(result.verdict is Verdict.FAILED for result in results):
            error_text = "not written, since another budget of this model failed"
            return [
                replace(result, verdict=Verdict.FAILED, error=error_text)
                if result.verdict is Verdict.WRITTEN
                else result
                for result in results
            ]
        self._write(source, fresh)
        return results

    def _result(self, file: str, verdict: Verdict, **more: Any) -> PolicyResult:
        policy = self.stored.policies.get(file)
        gb = self.budgets_gb[file]
        limit = bytes_from_gb(gb) - bytes_from_gb(self.table.headroom_gb)
        stored = None if policy is None else StepNumbers.predicted(policy)
        return PolicyResult(self.name, self.folder / file, gb, limit, verdict, stored=stored, **more)

    def _failure(
        self, file: str, why: Sequence[str], layers: tuple[ChangedLayer, ...], error: Exception
    ) -> PolicyResult:
        text = " ".join(str(error).split())
        return self._result(file, Verdict.FAILED, reasons=tuple(why), layers=layers, error=text)

    def _lock(self, identity: Profile, planned_from: Profile, digests: Mapping[str, str]) -> Lock:
        settings = self.table.plan_settings()
        return Lock.of(self.name, self.table.device, identity, planned_from, settings, digests)

    def _drift(self, now: Lock) -> tuple[list[str], tuple[ChangedLayer, ...]]:
        """Return why all policies of the model are out of date, and the layers that changed."""
        was = self.stored.lock
        if was is None:
            return [self.stored.why_no_lock], ()
        reasons = [
            f"{key} is {_setting(now.asked.get(key))} in autoac.toml, was {_setting(was.asked.get(key))}"
            for key in dict.fromkeys([*was.asked, *now.asked])
            if was.asked.get(key) != now.asked.get(key)
        ]
        layers: tuple[ChangedLayer, ...] = ()
        if was.fingerprint != now.fingerprint:
            layers = changed_layers(was.ops, now.ops)
            changed = changed_step(was, now)
            if not layers and not changed:
                changed = ["tensors of the step are created or released at other times"]
            reasons += changed
            if layers:
                reasons.append("layers of the model changed")
        elif (was.device, was.gradient_nbytes) != (now.device, now.gradient_nbytes):
            reasons += changed_step(was, now)
        return reasons, layers

    def _has_new_times(self, source: ModelSource) -> bool:
        """Return True if policies of an unchanged model must be judged by other run times."""
        if self.stored.lock is None:
            return False
        if source.is_estimated:
            return self.stored.lock.digest != source.identity.digest
        return self.options.measure

    def _plan_again(
        self, source: ModelSource, file: str, why: Sequence[str], layers: tuple[ChangedLayer, ...]
    ) -> tuple[PolicyResult, Policy | None]:
        """Plan one budget. Return its result, and the new policy; None if there is nothing to write."""
        other_device = self._other_device(source)
        if other_device and self.options.check:
            verdict = Verdict.DRIFTED if why else Verdict.UNCHANGED
            notes = (f"{other_device}: a new plan cannot be made here",)
            return self._result(file, verdict, reasons=tuple(why), layers=layers, notes=notes), None
        if other_device:
            raise CommandError(
                f"{other_device}; run this where that device is, or pass --force to plan for "
                f"{source.local_device_name}"
            )
        constraints = self.table.constraints.constraints()
        profile = source.profile
        new = self._plan(profile, self.budgets_gb[file], constraints)
        stored = self.stored.policies.get(file)
        old, unknown = None, frozenset[str]()
        if stored is not None:
            unknown = frozenset(profile.keys()).difference(stored.decisions)
            budget_bytes = bytes_from_gb(self.budgets_gb[file])
            update = {"budget_bytes": budget_bytes, "constraints": constraints}
            old = carried(stored.model_copy(update=update), profile)
        if old is not None and not why:
            why = self._why_replace(old, new, measured=not source.is_estimated)
            same = new.policy() == stored
            if not why and (same or not self.options.force):
                note = (
                    "planned again, with the same result" if same else "other run times; still within its gap"
                )
                numbers = StepNumbers.of(old)
                return self._result(file, Verdict.UNCHANGED, carried=numbers, notes=(note,)), None
            why = why or ["planned again because of --force"]
        warnings: tuple[str, ...] = ()
        if new.stopped is Stopped.TIME_LIMIT:
            warnings = (
                f"the solver reached its time limit at a gap of {new.gap:.1%}, and another machine may find "
                f"another plan: raise time_limit_s = {self.table.time_limit_s:g}, or allow a larger gap",
            )
        if new.why_unmoved:
            warnings += (f"nothing moves to the host: {new.why_unmoved}",)
        result = self._result(
            file,
            Verdict.DRIFTED if self.options.check else Verdict.WRITTEN,
            reasons=tuple(why),
            layers=layers,
            carried=None if old is None else StepNumbers.of(old),
            planned=StepNumbers.of(new),
            difference=None if old is None else difference(old, new, unknown),
            notes=warnings,
        )
        return result, new.policy()

    def _other_device(self, source: ModelSource) -> str:
        """Say why plans for the local device cannot be made here; return "" if they can."""
        lock = self.stored.lock
        if source.is_estimated or self.options.force or lock is None or lock.device != LOCAL:
            return ""
        here = source.local_device_name
        if lock.planned_on in (here, "cpu"):  # "cpu": as earlier releases named every CPU
            return ""
        return f"policies of {self.name} are for {lock.planned_on}, and this machine has {here}"

    def _plan(self, profile: Profile, gb: float, constraints: Constraints | None) -> Plan:
        self.on_task(f"{self.name}: planning for {gb:g} GiB")
        try:
            return plan_with_host(
                profile,
                budget_bytes=bytes_from_gb(gb),
                headroom_bytes=bytes_from_gb(self.table.headroom_gb),
                constraints=constraints,
                gap=self.table.gap,
                time_limit_s=self.table.time_limit_s,
                clock=time.monotonic,
                progress=self.progress,
            )
        except InfeasibleBudget as error:
            needs = error.smallest_found if error.smallest_found is not None else error.proven_floor
            why = f": {' '.join(culprits)}" if (culprits := getattr(error, "culprits", ())) else ""
            headroom_gb = self.table.headroom_gb
            less = f" less a headroom of {headroom_gb:g}" if headroom_gb else ""
            raise CommandError(
                f"no plan of {self.name} fits in {gb:g} GiB{less} "
                f"(peak at {error.peak_at}){why}; the smallest budget is {_least_gb(needs, self.table)}: "
                f"change budgets_gb of [models.{self.name}]"
            ) from error

    def _why_replace(self, old: Plan, new: Plan, *, measured: bool) -> list[str]:
        """Say why `new` must replace `old`, which was planned with other run times. See NOTE [ Drift ]."""
        if old.peak > new.budget:
            return [f"its peak is {format_bytes(old.peak)} now, over {format_bytes(new.budget)}"]
        gain = old.extra_us - new.extra_us
        noise = max(self.table.gap * old.extra_us, NOISE * new.step_us if measured else 0.0)
        if gain > noise:
            return [f"run times changed: a new plan takes {format_us(gain)} less"]
        return []

    def _write(self, source: ModelSource, fresh: Mapping[str, str]) -> None:
        """Write new policies, and the lock last, so that the next run notices an interrupted one."""
        if not fresh and not source.is_estimated:
            return  # the lock records a measurement, and nothing was measured
        lock = self.stored.lock
        before = lock.policies if lock is not None else {}
        digests = {  # of files that are listed, and of files that are not listed but still exist
            file: digest
            for file, digest in before.items()
            if file in self.budgets_gb or ((self.folder / file).is_file() and not self.options.prune)
        } | {file: sha256(text.encode()) for file, text in fresh.items()}
        new_lock = self._lock(source.identity, source.profile, digests)
        self.folder.mkdir(parents=True, exist_ok=True)
        for file, text in fresh.items():
            write_whole(self.folder / file, text)
        if new_lock != lock:
            write_whole(self.folder / lock_file(self.name), new_lock.to_json())


def _setting(value: object) -> str:
    return "not set" if value is None else str(value)


def _least_gb(nbytes: int, table: ModelTable) -> str:
    """Format a budget that leaves `nbytes` for the plan, in GiB as `autoac.toml` would spell it."""
    with_headroom = nbytes + bytes_from_gb(table.headroom_gb)
    return budget_name(-(-with_headroom * 10**6 // 2**30) / 10**6)
