"""Decides which policies are out of date, plans those anew, and writes them; or only says so.

NOTE [ Drift ]

A policy has drifted if

- it is not there, is no policy, or is not the text that its lock was written with;
- its settings in `autoac.toml` are others than those that it was planned under;
- the model's fingerprint is another: other ops, sizes, lifetimes, batch, torch release or kind of device; or
  its gradients take more or less;
- on a profile with other times (a newer roofline, or measured anew because `measure` asks for it) it no
  longer fits in its budget, or a new plan is faster by more than the gap that was asked for. Of measured
  times a gain of less than 5 % of the step is noise and no drift.

Times alone are no drift as long as nobody asks: two measurements never agree, and a plan that is within its
gap by one of them is a plan worth keeping. So what is unchanged is not solved again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from ac_client.cli.output import CommandError
from ac_client.files import write_whole
from ac_client.regenerate.config import LOCAL, ModelTable, Settings, budget_name, lock_file, policy_file
from ac_client.regenerate.lock import Lock, Moved, UnreadableLock, changed_ops, changed_step, sha256
from ac_client.regenerate.model_source import Observed
from autoac.planner import (
    Constraints,
    Difference,
    InfeasibleBudget,
    Plan,
    PlannerError,
    Policy,
    Profile,
    carried,
    difference,
)
from autoac.planner import plan as plan_profile
from autoac.planner.solver.highs import OnProgress, Stopped
from autoac.planner.units import bytes_from_gb, format_bytes, format_us
from autoac.profiler import ProfilerError

NOISE = 0.05  # of a measured step: what a new plan has to gain before the old one counts as drifted


class Verdict(StrEnum):
    """What came of one policy."""

    UNCHANGED = "unchanged"
    DRIFTED = "drifted"  # found by a check, which writes nothing
    WRITTEN = "written"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Of a step under a policy. Bytes and microseconds."""

    peak: int
    recompute_us: float
    step_us: float  # with nothing recomputed


@dataclass(frozen=True, slots=True)
class Result:
    """One policy of one model: what came of it, and why."""

    model: str  # its name in autoac.toml
    file: Path
    budget_gb: float
    limit: int  # the budget less the headroom, in bytes
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    layers: tuple[Moved, ...] = ()  # what changed in the model, by layer
    stored: Numbers | None = None  # as the policy in the folder predicted
    carried: Numbers | None = None  # the same policy on the model as it is now
    planned: Numbers | None = None  # a new plan on the model as it is now
    difference: Difference | None = None  # from the stored policy to the new one
    notes: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the whole file."""

    config: Path
    folder: Path
    check: bool
    results: tuple[Result, ...]
    stale: tuple[Path, ...]  # files of models or budgets that are no longer listed
    pruned: bool  # whether they go

    @property
    def drifted(self) -> bool:
        """Whether a check found what the same run without `check` would change."""
        return self.check and self.out_of_date

    @property
    def out_of_date(self) -> bool:
        """Return True if the folder was not what such a run leaves there."""
        fine = (Verdict.UNCHANGED, Verdict.FAILED)
        changed = any(result.verdict not in fine for result in self.results)
        return changed or (self.pruned and bool(self.stale))

    @property
    def failed(self) -> bool:
        """Whether a model could not be profiled or planned."""
        return any(result.verdict is Verdict.FAILED for result in self.results)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a run beside the settings."""

    only: tuple[str, ...] = ()  # names of models; none: all
    check: bool = False  # write nothing
    force: bool = False  # plan also what did not change
    prune: bool = False  # remove files of what is no longer listed
    measure: bool = False  # judge policies of the local device by a new measurement


@dataclass(frozen=True, slots=True)
class _Stored:
    """What the folder holds of one model."""

    lock: Lock | None
    why_none: str  # why there is no lock
    policies: dict[str, Policy] = field(default_factory=dict)  # by file name
    broken: dict[str, str] = field(default_factory=dict)  # why a file is to be made again


def regenerate(
    settings: Settings,
    config: Path,
    wanted: Wanted,
    telling: Callable[[str], None] = lambda what: None,
    progress: OnProgress | None = None,
) -> Outcome:
    """Bring the policies in the folder up to date; with `wanted.check` only say what that would change.

    All policies of a model are written, then its lock; or, where one cannot be planned, none of them. Each
    file is written whole or not at all. A failure is the model's own: the others go on.

    Args:
        settings: what `config` says.
        config: the file; entries are imported from its folder first, and policies are below it.
        wanted: what to do.
        telling: told what is done next, in a few words.
        progress: of the solver; returning True stops it.

    Raises:
        OSError: a file cannot be written or removed.
    """
    home = config.resolve().parent
    folder = config.parent / settings.policies
    stale = tuple(_stale(settings, folder, wanted.only))
    results: list[Result] = []
    for name, table in settings.models.items():
        if not wanted.only or name in wanted.only:
            results += _Model(name, table, home, folder, wanted, telling, progress).run()
    if wanted.prune and not wanted.check:
        for path in stale:
            path.unlink(missing_ok=True)
    return Outcome(config, folder, wanted.check, tuple(results), stale, wanted.prune)


class _Model:
    """One listed model on its way."""

    def __init__(
        self,
        name: str,
        table: ModelTable,
        home: Path,
        folder: Path,
        wanted: Wanted,
        telling: Callable[[str], None],
        progress: OnProgress | None,
    ) -> None:
        self.name, self.table, self.home, self.folder = name, table, home, folder
        self.wanted, self.telling, self.progress = wanted, telling, progress
        self.files = {policy_file(name, gb): gb for gb in table.budgets_gb}

    def run(self) -> list[Result]:
        """A result for each budget."""
        stored = _stored(self.folder, self.name, self.files)
        self.telling(f"{self.name}: looking at the model")
        try:
            observed = Observed(self.name, self.table, self.home)
            now = self._lock(observed.seen(), observed.seen(), {})
        except (CommandError, ProfilerError) as error:
            return [self._failed(stored, file, _why(stored, file), (), error) for file in self.files]
        reasons, layers = self._reasons(stored, now)
        judging = self._times_moved(observed, stored, reasons)
        results, fresh = [], {}
        for file in self.files:
            why = [*_why(stored, file), *reasons]
            if not (why or judging or self.wanted.force):
                results.append(self._result(stored, file, Verdict.UNCHANGED))
                continue
            try:
                result, policy = self._planned(observed, stored, file, why, layers)
            except (CommandError, ProfilerError, PlannerError) as error:
                result, policy = self._failed(stored, file, why, layers, error), None
            results.append(result)
            if policy is not None:
                fresh[file] = policy.to_json()
        if self.wanted.check:
            return results
        if any(result.verdict is Verdict.FAILED for result in results):
            held = "not written, since another budget of this model failed"
            return [
                replace(result, verdict=Verdict.FAILED, error=held)
                if result.verdict is Verdict.WRITTEN
                else result
                for result in results
            ]
        self._write(observed, stored, fresh)
        return results

    def _result(self, stored: _Stored, file: str, verdict: Verdict, **more: Any) -> Result:
        kept = stored.policies.get(file)
        gb = self.files[file]
        limit = bytes_from_gb(gb) - bytes_from_gb(self.table.headroom_gb)
        return Result(self.name, self.folder / file, gb, limit, verdict, stored=_predicted(kept), **more)

    def _failed(
        self,
        stored: _Stored,
        file: str,
        why: Sequence[str],
        layers: tuple[Moved, ...],
        error: Exception,
    ) -> Result:
        said = " ".join(str(error).split())
        return self._result(stored, file, Verdict.FAILED, reasons=tuple(why), layers=layers, error=said)

    def _lock(self, seen: Profile, made_from: Profile, digests: Mapping[str, str]) -> Lock:
        return Lock.of(self.name, self.table.device, seen, made_from, self.table.asked(), digests)

    def _reasons(self, stored: _Stored, now: Lock) -> tuple[list[str], tuple[Moved, ...]]:
        """Why all of the model's policies are to be made again, and the layers that changed."""
        was = stored.lock
        if was is None:
            return [stored.why_none], ()
        reasons = [
            f"{key} is {_setting(now.asked.get(key))} in autoac.toml, was {_setting(was.asked.get(key))}"
            for key in dict.fromkeys([*was.asked, *now.asked])
            if was.asked.get(key) != now.asked.get(key)
        ]
        layers: tuple[Moved, ...] = ()
        if was.fingerprint != now.fingerprint:
            layers = changed_ops(was.ops, now.ops)
            changed = changed_step(was, now)
            if not layers and not changed:
                changed = ["when tensors are made and released in the step is different"]
            reasons += changed
            if layers:
                reasons.append("layers of the model changed")
        elif (was.device, was.gradient_nbytes) != (now.device, now.gradient_nbytes):
            reasons += changed_step(was, now)
        return reasons, layers

    def _times_moved(self, observed: Observed, stored: _Stored, reasons: Sequence[str]) -> bool:
        """Whether policies that are not out of date otherwise are to be judged by other times."""
        if stored.lock is None or reasons:
            return False
        if observed.estimated:
            return stored.lock.digest != observed.seen().digest
        return self.wanted.measure

    def _planned(
        self,
        observed: Observed,
        stored: _Stored,
        file: str,
        why: Sequence[str],
        layers: tuple[Moved, ...],
    ) -> tuple[Result, Policy | None]:
        """The result of a budget that is planned, and its new policy; none if there is nothing to write."""
        elsewhere = self._elsewhere(observed, stored)
        if elsewhere and self.wanted.check:
            verdict = Verdict.DRIFTED if why else Verdict.UNCHANGED
            notes = (f"{elsewhere}: what would be planned cannot be told here",)
            return self._result(stored, file, verdict, reasons=tuple(why), layers=layers, notes=notes), None
        if elsewhere:
            raise CommandError(
                f"{elsewhere}; run this where that device is, or pass --force to plan for {observed.here}"
            )
        gb, constraints = self.files[file], self.table.constraints.constraints()
        profile = observed.measured()
        made = self._plan(profile, gb, constraints)
        kept = stored.policies.get(file)
        old, unknown = None, frozenset[str]()
        if kept is not None:
            unknown = frozenset(profile.keys()).difference(kept.decisions)
            asked = {"budget_bytes": bytes_from_gb(gb), "constraints": constraints}
            old = carried(kept.model_copy(update=asked), profile)
        if old is not None and not why:
            why = self._no_longer_good(old, made, measured=not observed.estimated)
            same = made.policy() == kept
            if not why and (same or not self.wanted.force):
                still = (
                    "planned again, and it is the same" if same else "run times moved; still within its gap"
                )
                told = self._result(stored, file, Verdict.UNCHANGED, carried=_numbers(old), notes=(still,))
                return told, None
            why = why or ["planned again, as --force asks"]
        told_of: list[str] = []
        if made.stopped is Stopped.TIME_LIMIT:
            told_of.append(
                f"the solver ran out of time at a gap of {made.gap:.1%}; another machine may find another "
                f"plan: allow more than time_limit_s = {self.table.time_limit_s:g}, or a larger gap"
            )
        result = self._result(
            stored,
            file,
            Verdict.DRIFTED if self.wanted.check else Verdict.WRITTEN,
            reasons=tuple(why),
            layers=layers,
            carried=_numbers(old),
            planned=_numbers(made),
            difference=difference(old, made, unknown) if old is not None else None,
            notes=tuple(told_of),
        )
        return result, made.policy()

    def _elsewhere(self, observed: Observed, stored: _Stored) -> str:
        """Why plans of the local device cannot be made here; "" if they can."""
        lock = stored.lock
        if observed.estimated or self.wanted.force or lock is None or lock.device != LOCAL:
            return ""
        if lock.planned_on == observed.here:
            return ""
        return f"policies of {self.name} are for {lock.planned_on}, and this machine has {observed.here}"

    def _plan(self, profile: Profile, gb: float, constraints: Constraints | None) -> Plan:
        self.telling(f"{self.name}: planning for {gb:g} GiB")
        try:
            return plan_profile(
                profile,
                budget_gb=gb,
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
            raise CommandError(
                f"no plan of {self.name} fits in {gb:g} GiB less a headroom of {self.table.headroom_gb:g} "
                f"(peak at {error.peak_at}){why}; the smallest budget is {_least_gb(needs, self.table)}: "
                f"change budgets_gb of [models.{self.name}]"
            ) from error

    def _no_longer_good(self, old: Plan, made: Plan, *, measured: bool) -> list[str]:
        """Why a policy that was made with other times is to be made again. See NOTE [ Drift ]."""
        if old.peak > made.budget:
            return [f"its peak is {format_bytes(old.peak)} now, over {format_bytes(made.budget)}"]
        gain = old.recompute_us - made.recompute_us
        noise = max(self.table.gap * old.recompute_us, NOISE * made.step_us if measured else 0.0)
        if gain > noise:
            return [f"run times are other ones: a new plan recomputes {format_us(gain)} less"]
        return []

    def _write(self, observed: Observed, stored: _Stored, fresh: Mapping[str, str]) -> None:
        """Write what is new, and last the lock, so that a run that is cut short is seen by the next one."""
        if not fresh and not observed.estimated:
            return  # a lock says what was measured, and nothing was
        before = stored.lock.policies if stored.lock is not None else {}
        digests = {  # of what is listed, and of what is not and still lies there
            file: digest
            for file, digest in before.items()
            if file in self.files or ((self.folder / file).is_file() and not self.wanted.prune)
        } | {file: sha256(text.encode()) for file, text in fresh.items()}
        lock = self._lock(observed.seen(), observed.measured(), digests)
        self.folder.mkdir(parents=True, exist_ok=True)
        for file, text in fresh.items():
            write_whole(self.folder / file, text)
        if lock != stored.lock:
            write_whole(self.folder / lock_file(self.name), lock.to_json())


# --- what the folder holds --------------------------------------------------------------------------------


def _stored(folder: Path, name: str, files: dict[str, float]) -> _Stored:
    """The lock and the policies of model `name`, as far as they can be read."""
    path = folder / lock_file(name)
    lock, why_none = None, ""
    try:
        lock = Lock.from_json(path.read_bytes())
    except FileNotFoundError:
        why_none = "nothing was planned yet"
    except UnreadableLock as error:
        why_none = f"{path.name} cannot be read: {error}"
    policies: dict[str, Policy] = {}
    broken: dict[str, str] = {}
    for file in files:
        try:
            text = (folder / file).read_bytes()
            policies[file] = Policy.from_json(text)
        except FileNotFoundError:
            if lock is not None:
                broken[file] = "there is no such file"
            continue
        except PlannerError as error:
            broken[file] = " ".join(str(error).split())
            continue
        if lock is not None and lock.policies.get(file) != sha256(text):
            broken[file] = f"it is not what was written with {path.name}: edited by hand, or merged"
    return _Stored(lock, why_none, policies, broken)


def _stale(settings: Settings, folder: Path, only: Sequence[str]) -> Iterator[Path]:
    """Files that a lock names and the settings do not. What no lock names is not ours."""
    listed = {lock_file(name) for name in settings.models}
    current = {policy_file(n, gb) for n, table in settings.models.items() for gb in table.budgets_gb}
    for path in sorted(folder.glob("*.lock.json")):
        try:
            lock = Lock.from_json(path.read_bytes())
        except UnreadableLock:
            continue
        if path.name != lock_file(lock.name) or (only and lock.name not in only):
            continue
        yield from _gone(lock, folder, current)
        if path.name not in listed:
            yield path


def _gone(lock: Lock, folder: Path, current: set[str]) -> Iterator[Path]:
    for file in lock.policies:
        if file not in current and file.startswith(f"{lock.name}-") and (folder / file).is_file():
            yield folder / file


# --- words and numbers ------------------------------------------------------------------------------------


def _why(stored: _Stored, file: str) -> list[str]:
    return [stored.broken[file]] if file in stored.broken else []


def _predicted(policy: Policy | None) -> Numbers | None:
    if policy is None:
        return None
    told = policy.predicted
    return Numbers(told.peak_bytes, told.recompute_us, told.step_us)


def _numbers(made: Plan | None) -> Numbers | None:
    return None if made is None else Numbers(made.peak, made.recompute_us, made.step_us)


def _setting(value: object) -> str:
    return "not set" if value is None else str(value)


def _least_gb(nbytes: int, table: ModelTable) -> str:
    """A budget that leaves `nbytes` for the plan, in GiB as the file would spell it."""
    whole = nbytes + bytes_from_gb(table.headroom_gb)
    return budget_name(-(-whole * 10**6 // 2**30) / 10**6)
