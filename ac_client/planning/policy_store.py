"""Which policy runs a batch: one that serves every batch, its bucket's, one that is planned now, or none.

docs/shapes.md has the buckets, docs/ranks.md what several ranks agree on.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ac_client.errors import ShapeNotPlanned
from ac_client.measure.recording_overhead import replay_us_of_process
from ac_client.planning.batch_shape import Key, key_of, shape_of
from ac_client.planning.loop_watch import LoopWatch
from ac_client.planning.optimizer_steps import ModelOptimizers
from ac_client.planning.peak_counter import AllocatorPeak, allocator_peak
from ac_client.planning.ranks import AUTO, Group, Need, Ranks, Terms, meet, ranks_of
from ac_client.planning.replan import Planning
from ac_client.planning.service_client import RemoteError
from ac_client.planning.shape_buckets import MOST_BUCKETS, Buckets, Loaded, largest
from ac_client.runtime.saved_tensor_hooks import enter_saved_tensor_hooks
from autoac.planner import InfeasibleBudget, Plan, PlannerError, Policy, PolicySet, Profile
from autoac.planner.formats.policy_set import Bucket, Shape, shape_in_words
from autoac.planner.units import format_bytes
from autoac.profiler import NothingToProfile, ProfilerBusy, device_of, observe
from autoac.profiler.distributed.fsdp import parameters_of, process_group_of
from autoac.profiler.errors import ProfilerError
from autoac.profiler.static_memory import optimizer_bytes, static_bytes
from autoac.profiler.steps.training_loop import Loop, Loss
from autoac.profiler.torch_facts.gradients import gradient_of
from autoac.profiler.torch_facts.inductor import compiled_parts
from autoac.profiler.torch_facts.torch_trace import profiler_is_running

log = logging.getLogger("ac_client")

MOST_TRIES = 8  # batches that are profiled to find one that runs more modules
PROBES = 8  # parameters that are asked whether gradients exist
ASKED = 16  # parameters that each forward asks whether they train

Shapes = Literal["bucket", "first"]
Kinds = tuple[tuple[bool, torch.dtype], ...]
"""By parameter: does it train, and in which dtype. What is saved depends on both."""


class _Thread(threading.local):
    """What this thread is doing."""

    profiling = False


class Choosing:
    """The policies of one model, and the making of those that are missing.

    Attributes:
        allocator: what counts on the model's device, once something was planned here.
        ranks: those that run each forward together; not known before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        planning: Planning,
        watch: LoopWatch,
        *,
        optimizers: ModelOptimizers,
        loss: Loss | None,
        loss_takes_all: bool,
        policy: Policy | PolicySet | None,
        strict: bool,
        shapes: Shapes,
        group: Group,
    ) -> None:
        self._name = planning.name
        self._planning = planning
        self._watch = watch
        self._optimizers = optimizers
        self._loss = loss
        self._loss_takes_all = loss_takes_all  # the outputs of all forwards in flight, in a list
        self._strict = strict
        self._shapes = shapes
        self._group = (process_group_of(model) or AUTO) if group is None or group is AUTO else group
        self.ranks: Ranks | None = None
        self.allocator: AllocatorPeak | None = None
        self._to_meet = policy is None and group is not None  # in the first forward of all of them
        self._lock = threading.RLock()
        self._thread = _Thread()
        self._told: set[str] = set()
        self._given = [Loaded(None, policy)] if isinstance(policy, Policy) else []
        if isinstance(policy, PolicySet):
            self._given = [Loaded(bucket.shape, bucket.policy) for bucket in policy.buckets]
        self._looked_at: tuple[list[weakref.ref[nn.Parameter]], Kinds] = [], ()
        self._training = True  # the model's mode by then
        self._turn = 0  # of those that are asked whether they still do
        self._probes: list[weakref.ref[nn.Parameter]] = []  # to see whether gradients exist
        self._by_trained: dict[tuple[bool, Kinds], Buckets] = {}  # the mode decides which ops run
        self._look_at_parameters(model)
        for loaded in self._given:
            self._told_of(loaded)

    @property
    def profiling(self) -> bool:
        """Whether the forward that runs on this thread is one that is only profiled."""
        return self._thread.profiling

    @property
    def all(self) -> list[Loaded]:
        """What was planned or given so far."""
        planned = (one for buckets in self._by_trained.values() for one in buckets.all)
        return list(dict.fromkeys(planned))  # what was given is there for each set of parameters

    @property
    def serves_all(self) -> Loaded | None:
        """The one policy that runs every batch, if there is such."""
        return self._buckets.serves_all

    def policies(self) -> PolicySet:
        """One policy for each shape of batch that was planned. A policy given alone has no shape."""
        return PolicySet(
            buckets=tuple(
                Bucket(shape=dict(loaded.shape), policy=loaded.policy)
                for loaded in self._buckets.all
                if loaded.shape is not None
            )
        )

    def for_batch(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        give_up: Callable[[], None],
        waiting: int = 0,
    ) -> Loaded | None:
        """What runs this batch, planned if need be; None: it runs unplanned.

        So many forwards are `waiting` for their backward. `give_up` is called before an error goes on that
        leaves the model without any plan.

        Raises:
            ShapeNotPlanned: strict, and beyond all buckets.
            PlannerError, RemoteError: there is no plan.
        """
        if self.others_train() or model.training is not self._training:
            self._look_at_parameters(model)
        loaded = self._buckets.serves_all
        if self.ranks is None:
            self.ranks = ranks_of(model, self._group)
        if self._to_meet and self.ranks is not None:
            loaded = self._meet_ranks(model, args, kwargs, self.ranks, give_up)
        elif loaded is None:
            key = key_of(args, kwargs)
            loaded = self._buckets.known.get(key) or self._meet(model, args, kwargs, key, give_up)
        if loaded is not None:
            loop = self._watch.wanted(loaded, waiting)
            if loaded.knows_no_gradients and self._gradients_exist():
                loaded = self._plan_with_gradients(model, args, kwargs, loaded, loop)
            if loaded.profile is not None and self._planning.budget_bytes is not None:
                if loaded.optimizers != self._optimizers.adopted:
                    self._count_optimizers(model, loaded)
                if loaded.met and not waiting and not self._watch.fits(loaded):
                    loaded = self._plan_for_more_modules(model, args, kwargs, loaded)
                self._planning.count_beside(loaded)
                if loop != loaded.loop:
                    loaded = self._plan_for_loop(model, args, kwargs, loaded, loop)
        return loaded

    def plan_for(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Policy:
        """Plan for one more shape of batch."""
        with self._lock:
            if self._others_train(slice(None)) or model.training is not self._training:
                self._look_at_parameters(model)
            return self._plan(model, args, kwargs, shape_of(args, kwargs)).policy

    def others_train(self) -> bool:
        """Return True if parameters train that did not, or changed their dtype, since they were looked at.

        Asking all of them would take longer than everything else here. Each call asks some, evenly spread,
        and the next call their neighbours: what is frozen or thawed by layers is seen at once, a parameter
        alone within a few forwards.
        """
        every = -(-len(self._looked_at[0]) // ASKED) or 1
        self._turn = (self._turn + 1) % every
        return self._others_train(slice(self._turn, None, every))

    def _others_train(self, some: slice) -> bool:
        """Of `some`, those that are still there.

        A layer that is taken out is none that is frozen: the forward leaves its policy, and says so.
        """
        parameters, trained = self._looked_at
        known = zip(parameters[some], trained[some], strict=True)
        return any(
            (p := ref()) is not None and (p.requires_grad != kind[0] or p.dtype is not kind[1])
            for ref, kind in known
        )

    def _look_at_parameters(self, model: nn.Module) -> None:
        """Note which train, and in which dtype: that decides what is saved, and how large it is."""
        with self._lock:
            parameters = list(parameters_of(model))
            trained = tuple((p.requires_grad, p.dtype) for p in parameters)
            self._looked_at = [weakref.ref(p) for p in parameters], trained
            self._training = model.training
            trainable = [weakref.ref(p) for p in parameters if p.requires_grad]
            self._probes = trainable[:: max(1, len(trainable) // PROBES)]
            if (self._training, trained) not in self._by_trained:
                planned = bool(self.all)
                buckets = self._by_trained[self._training, trained] = Buckets()
                for loaded in self._given:
                    buckets.add(loaded)
                if len(self._given) == 1 and self._given[0].shape is None:
                    buckets.serves_all = self._given[0]
                if planned and buckets.serves_all is None:
                    log.info(
                        "%s: other parameters train, or in another dtype or mode: batches are planned again",
                        self._name,
                    )
            self._buckets = self._by_trained[self._training, trained]

    def _meet(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: Key,
        give_up: Callable[[], None],
    ) -> Loaded | None:
        """The policy for a batch whose key is new, planned if no bucket covers it; None: run it unplanned.

        Raises:
            ShapeNotPlanned: strict, and beyond all buckets.
        """
        if key in self._buckets.unplanned:
            return None
        with self._lock:  # a forward on another thread waits for the plan
            loaded = self._buckets.covering(key, args, kwargs)
            if loaded is None:
                shape = shape_of(args, kwargs)
                first = not self.all
                if self._strict and self._buckets.all:
                    planned = [b.shape for b in self._buckets.all if b.shape is not None]
                    raise ShapeNotPlanned(shape, planned, self._planning.budget_bytes is not None)
                if not first and (self._planning.budget_bytes is None or len(self.all) >= MOST_BUCKETS):
                    return self._beyond(shape, key)
                _check_hooks()
                try:
                    loaded = self._plan(model, args, kwargs, shape)
                except ProfilerBusy as busy:
                    return self._unplanned_now(busy)
                except (ProfilerError, PlannerError, RemoteError) as error:
                    # Not what forward itself raises, or Ctrl-C: the next batch may be planned.
                    if first:
                        give_up()
                    elif isinstance(error, NothingToProfile):
                        self._buckets.unplanned.add(key)
                        return None
                    elif isinstance(error, InfeasibleBudget) and not self._buckets.all:
                        loaded = self._of_another_set(key, args, kwargs, error)
                        self._buckets.remember(key, loaded)
                        return loaded
                    raise
            if self._buckets.serves_all is None:
                self._buckets.remember(key, loaded)
        return loaded

    def _of_another_set(
        self, key: Key, args: Sequence[Any], kwargs: Mapping[str, Any], error: InfeasibleBudget
    ) -> Loaded:
        """Return what runs a batch where other parameters train than before, and no plan fits for them."""
        covering = (buckets.covering(key, args, kwargs) for buckets in self._by_trained.values())
        loaded = next((one for one in covering if one is not None), None) or largest(self.all)
        self._tell_once(
            "another set",
            "%s: other parameters train, or in another dtype or mode, and no plan for that fits (%s): it "
            "runs under the plan made before, and goes over the budget",
            self._name,
            str(error).partition("\n")[0],
        )
        return loaded

    def _unplanned_now(self, busy: ProfilerBusy) -> Loaded | None:
        """What runs a batch that cannot be profiled yet."""
        if planned := self.all:
            return largest(self._buckets.all or planned)
        self._tell_once("busy", "%s runs unplanned, and will be planned later: %s", self._name, busy)
        return None

    def _meet_ranks(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        ranks: Ranks,
        give_up: Callable[[], None],
    ) -> Loaded | None:
        """The policy for the first batch, agreed on by all ranks; None: this time all run unplanned.

        See NOTE [ Where ranks meet ] in ranks.py. Each rank profiles its own batch, and some plan.
        """
        with self._lock:
            if ranks.any(profiler_is_running()):
                return self._unplanned_now(ProfilerBusy())
            profile: Profile | None = None
            need: Need | Exception
            shape = shape_of(args, kwargs)
            try:
                profile = self._profiled(model, args, kwargs, Loop(self._watch.forwards))
                need = Need(shape, self._planning.limit, profile.static.total)
            except Exception as error:  # noqa: BLE001 - told to all ranks, and raised on each
                need = error
            made: list[Plan | None] = [None]

            def plan(terms: Terms) -> Policy:
                assert profile is not None
                policy, made[0] = self._planning.first(profile, terms)
                return policy

            try:
                agreed = meet(ranks, need, plan)
            except BaseException as error:
                if isinstance(error, ProfilerBusy):
                    return self._unplanned_now(error)
                give_up()
                raise
            self._to_meet = False
            assert profile is not None
            for one in agreed.made:
                loaded = Loaded(
                    one.shape,
                    one.policy,
                    made[0] if one.planner == ranks.rank else None,
                    profile if one.shape == shape else None,
                    agreed.static - profile.static.total,
                    Loop(self._watch.forwards),
                )
                self._keep(model, loaded)
                log.info("%s: planned by rank %d of %d", self._name, one.planner, ranks.size)
            covering = self._buckets.covering(key_of(args, kwargs), args, kwargs)
            assert covering is not None
            if self._shapes == "first":
                covering.shape = None
                self._buckets.serves_all = covering
            return covering

    def _gradients_exist(self) -> bool:
        return any((p := ref()) is not None and gradient_of(p) is not None for ref in self._probes)

    def _plan_with_gradients(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loaded: Loaded, loop: Loop
    ) -> Loaded:
        """Plan again where gradients exist before a step that was planned as one that makes them.

        So it is with microbatches after the first, and with `zero_grad(set_to_none=False)`. The new plan
        then serves first microbatches too, which need less.
        """
        shape = shape_of(args, kwargs)
        if shape != loaded.planned_for:
            return loaded  # wait for a batch like the one that was profiled
        loaded.knows_no_gradients = False  # asked once, whatever comes of it
        with self._lock:
            try:
                again = self._plan(model, args, kwargs, shape, loop)
            except ProfilerBusy:
                loaded.knows_no_gradients = True
                return loaded
            except (PlannerError, RemoteError) as error:
                self._tell_once(
                    "gradients",
                    "%s: gradients exist before the step, and no plan leaves room for them (%s): it stays",
                    self._name,
                    str(error).partition("\n")[0],
                )
                return loaded
        loaded.hand_on(again)
        log.info("%s: planned again, since gradients exist before the step", self._name)
        return again

    def _plan_for_loop(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loaded: Loaded, loop: Loop
    ) -> Loaded:
        """Plan again for a loop of another form than the one that `loaded` was planned for."""
        shape = shape_of(args, kwargs)
        if shape != loaded.planned_for:
            return loaded  # wait for a batch like the one that was profiled
        with self._lock:
            try:
                again = self._plan(model, args, kwargs, shape, loop, running=True)
            except ProfilerBusy:
                return loaded
            except (ProfilerError, PlannerError, RemoteError) as error:
                loaded.loop = loaded.seen_loop = loop  # asked once
                self._tell_once(
                    "loop",
                    "%s: its loop has %s, and it could not be planned for that (%s): its plan stays",
                    self._name,
                    _in_words(loop),
                    str(error).partition("\n")[0],
                )
                return loaded
        loaded.hand_on(again)
        log.info("%s: planned again, for a loop with %s", self._name, _in_words(loop))
        return again

    def _plan_for_more_modules(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loaded: Loaded
    ) -> Loaded:
        """Plan this batch, if its forward runs more modules than the one that `loaded` was planned for.

        Which of its modules a forward runs may be drawn (stochastic depth), so only its own profile tells.
        """
        shape = shape_of(args, kwargs)
        if shape != loaded.planned_for or loaded.tries >= MOST_TRIES or loaded.profile is None:
            return loaded
        with self._lock:
            loaded.tries += 1
            try:
                profile = self._profiled(model, args, kwargs, loaded.loop)
                if len(profile.ops) <= len(loaded.profile.ops):
                    return loaded
                beside = self._planning.held_beside()
                words = "in a forward that runs more modules than the one before"
                policy, made = self._planning.tightest(profile, words, beside)
            except ProfilerBusy:
                return loaded
            except (ProfilerError, PlannerError, RemoteError):
                loaded.tries = MOST_TRIES
                return loaded
            again = Loaded(loaded.shape, policy, made, profile, beside, loaded.loop)
            again.planned_for, again.tries, again.beside = shape, loaded.tries, beside
            loaded.hand_on(again)
            if self._buckets.serves_all is loaded:
                self._buckets.serves_all = again
            self._keep(model, again)
        log.info("%s: planned again, for a forward that runs more modules", self._name)
        return again

    def _count_optimizers(self, model: nn.Module, loaded: Loaded) -> None:
        """Plan again with the state of optimizers that were not passed to `apply` and have stepped."""
        assert loaded.profile is not None
        with self._lock:
            loaded.optimizers = self._optimizers.adopted
            static, device = loaded.profile.static, device_of(model)
            needs = optimizer_bytes(self._optimizers.all, device)
            if needs.state <= static.optimizer_state and (
                needs.workspace <= loaded.profile.optimizer_workspace_nbytes
            ):
                return
            more = needs.state - static.optimizer_state
            loaded.profile = loaded.profile.model_copy(
                update={
                    "static": static.model_copy(update={"optimizer_state": needs.state}),
                    "optimizer_workspace_nbytes": needs.workspace,
                }
            )
            names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self._optimizers.all))
            why = f"{format_bytes(needs.state)} of it the state of {names}"
            try:
                loaded.load(*self._planning.tightest(loaded.profile, why, loaded.extra_static))
            except (PlannerError, RemoteError) as error:
                log.warning(
                    "%s: %s steps it, and no plan leaves room for its state (%s): its plan stays",
                    self._name,
                    names,
                    str(error).partition("\n")[0],
                )
                return
        self._tell_once(
            "optimizer",
            "%s: %s steps it and was not passed to ac_client.apply: planned again with %s of state. Pass "
            "optimizer=... to have it counted from the first step on",
            self._name,
            names,
            format_bytes(more),
        )

    def _beyond(self, shape: Shape, key: Key) -> Loaded:
        """What runs a batch that no bucket covers and that is not planned."""
        loaded = largest(self._buckets.all or self.all)
        self._tell_once(
            "beyond",
            "%s: no bucket covers a batch of %s, and none is added (%s): it runs under the largest of %d, "
            "and may need more memory than that was planned for",
            self._name,
            shape_in_words(shape),
            "no budget_gb was given" if self._planning.budget_bytes is None else f"there are {MOST_BUCKETS}",
            len(self.all),
        )
        self._buckets.remember(key, loaded)
        return loaded

    def _plan(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        shape: Shape,
        loop: Loop | None = None,
        *,
        running: bool = False,
    ) -> Loaded:
        """Profile a batch and plan it; a loop that is `running` takes the tightest plan where none fits."""
        loop = loop or Loop(self._watch.forwards)
        profile = self._profiled(model, args, kwargs, loop)
        try:
            if running:
                policy, made = self._planning.tightest(profile, f"with {_in_words(loop)}")
            else:
                policy, made = self._planning.first(profile)
        except InfeasibleBudget as error:
            if parts := compiled_parts(model):
                more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
                error.add_note(
                    f"Compiled parts are saved whole, and Inductor's cannot be recomputed: "
                    f"{', '.join(parts[:3])}{more}. With fewer of them the step needs less."
                )
            raise
        beside = self._planning.held_beside()
        loaded = self._keep(model, Loaded(shape, policy, made, profile, beside, loop))
        loaded.beside = beside
        if self._shapes == "first":
            loaded.shape = None
            self._buckets.serves_all = loaded
        return loaded

    def _profiled(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loop: Loop
    ) -> Profile:
        _check_hooks()
        self._say_what_copies_need(model, args, kwargs)
        self._thread.profiling = True
        loss = self._loss
        if loss is not None and loop.forwards > 1 and not self._loss_takes_all:
            loss = _summed(loss)
        accumulates = True if loop.retains else None  # the second backward finds the gradients of the first
        try:
            found = observe(
                model,
                args,
                kwargs,
                loss=loss,
                optimizer=self._optimizers.all,
                accumulates=accumulates,
                loop=loop,
            )
            if found.environment.device_type != "cpu":
                return found  # it runs behind its host, whose time does not count
            return found.model_copy(update={"replay_us": replay_us_of_process()})
        finally:
            self._thread.profiling = False

    def _say_what_copies_need(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Warn if profiling goes over a budget that has room for the model, since it copies buffers."""
        if self._planning.budget_bytes is None or any(map(is_lazy, model.parameters())):
            return
        device = device_of(model, args, kwargs)
        static = static_bytes(model, args, kwargs, self._optimizers.state_nbytes(device), device)
        needs, limit = static.total + static.buffers, self._planning.limit
        if static.total <= limit < needs:
            self._tell_once(
                "copies",
                "%s: profiling a step copies the model's buffers (%s) and so holds at least %s, which is "
                "over the budget of %s; to profile without memory, plan for a datasheet and pass policy=...",
                self._name,
                format_bytes(static.buffers),
                format_bytes(needs),
                format_bytes(limit),
            )

    def _keep(self, model: nn.Module, loaded: Loaded) -> Loaded:
        """Carry out what was planned here."""
        if self.allocator is None:
            self.allocator = allocator_peak(device_of(model))
        loaded.optimizers = self._optimizers.adopted
        if loaded.profile is not None and not compiled_parts(model):
            loaded.skipped = _skipped(model, loaded.profile)
        self._buckets.add(loaded)
        self._told_of(loaded)
        return loaded

    def _told_of(self, loaded: Loaded) -> None:
        policy = loaded.policy
        log.info(
            "%s: predicted peak %s, %d of %d ops recomputed",
            self._name,
            format_bytes(policy.predicted.peak_bytes),
            sum(decision == "recompute" for decision in policy.decisions.values()),
            len(policy.decisions),
        )

    def _tell_once(self, what: str, message: str, *args: Any) -> None:
        if what not in self._told:
            self._told.add(what)
            log.warning(message, *args)


def _skipped(model: nn.Module, profile: Profile) -> frozenset[str]:
    """Return the paths of modules with parameters of their own, of which the profiled forward ran nothing."""
    ran = set(profile.modules)
    return frozenset(
        path
        for path, module in model.named_modules()
        if path and path not in ran and any(True for _ in module.parameters(recurse=False))
    )


def _summed(loss: Loss) -> Loss:
    """Return the loss of several outputs, of each of which `loss` is taken."""

    def of_all(outs: Sequence[Any]) -> Tensor:
        total = loss(outs[0])
        for out in outs[1:]:
            total = total + loss(out)
        return total

    return of_all


def _in_words(loop: Loop) -> str:
    """Return what a loop does, in words."""
    n = loop.forwards
    words = f"{n} forward{'s' if n > 1 else ''} before one backward"
    if loop.retains:
        words += " that retains its graph"
    return words + (", and outputs that are dropped before it" if loop.drops else "")


def _check_hooks() -> None:
    """Raises what stands in the way of saved-tensor hooks, before anything has run."""
    enter_saved_tensor_hooks(hooks := torch.autograd.graph.saved_tensors_hooks(_same, _same))
    hooks.__exit__()


def _same(tensor: Tensor) -> Tensor:
    return tensor
