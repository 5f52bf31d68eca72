"""Hold a compiled graph back between the two stages of AOTAutograd, until it is known what the graph saves.

Dynamo hands each graph to its backend, and nearly every backend hands it to AOTAutograd. Its first stage
traces forward and backward into one *joint graph*. Its second stage cuts the joint graph, which decides
what is saved, and compiles both halves. Dynamo has all of its guards after the first stage.

    Dynamo -> backend -> first stage -> joint graph -> CompiledPart
    call of the CompiledPart -> its carrier decides what is saved -> second stage, once for each decision

So a graph is traced once, whatever is planned for it later: another budget, another shape of batch, or
another layer that shares the code runs the second stage alone.

NOTE [ Caches of compiled code ]
AOTAutograd's cache on disk finds a graph before the first stage, and a hit never comes here. So while a
carrier is active, `custom_partitioner_fn` of Inductor's configuration holds an object whose `uuid` makes the
key of every graph another one. No entry is written under that key, since the key does not say what is saved.
Inductor's cache of forward and backward graphs is keyed by their content, so a second process traces again
and compiles nothing.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from autoac.planner.formats.profile import ANOTHER_GRAPH
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.inductor import opaque_region, recording_modes

BoxedCall = Callable[[list[Any]], Any]
"""A compiled function. It takes its arguments in a list, which it empties."""

Partition = Callable[..., tuple[Any, Any]]
"""Cuts a joint graph: (module, inputs, num_fwd_outputs=...) -> modules of forward and backward."""


class Carrier(Protocol):
    """Decide what the compiled graphs of a forward save."""

    def callable_of(self, part: CompiledPart) -> BoxedCall:
        """Return the compiled code that runs this call of `part`."""


class _Current(threading.local):
    carrier: Carrier | None = None
    partitioner: Any = None  # of the user, while a carrier is active


_current = _Current()


@contextlib.contextmanager
def carried_by(carrier: Carrier | None) -> Iterator[None]:
    """Let `carrier` decide for the graphs that are called on this thread."""
    before = set_carrier(carrier)
    try:
        yield
    finally:
        set_carrier(before)


def set_carrier(carrier: Carrier | None) -> Carrier | None:
    """Make `carrier` decide what graphs called on this thread save; return the carrier before it."""
    before, _current.carrier = _current.carrier, carrier
    if carrier is not None and "torch._dynamo" in sys.modules:
        _hold_back_graphs()
    if (before is None) != (carrier is None) and "torch._inductor.config" in sys.modules:
        _keep_from_cache(carrier is not None)
    return before


class CompiledPart:
    """A graph that Dynamo captured, after the first stage. Calling it runs the second stage if need be.

    Attributes:
        joint: the joint graph; the second stage works on copies.
        metadata: AOTAutograd's facts about inputs and outputs.
        compiled: the results of the second stage, by what a carrier chose as their key.
        notes: what carriers remember of the graph.
    """

    _boxed_call = True

    def __init__(self, state: Any, capture: Any, partition: Any, compilers: tuple[Any, Any]) -> None:
        self._state, self._capture = state, capture
        self._partition, self._compilers = partition, compilers
        self._context = _CompileContext.now(state)
        self.compiled: dict[Any, BoxedCall] = {}
        self.notes: dict[str, Any] = {}

    @property
    def joint(self) -> Any:
        return self._capture.graph_module

    @property
    def metadata(self) -> Any:
        return self._state.fw_metadata

    @property
    def fuses(self) -> bool:
        """Return True if the backend is Inductor, which fuses ops."""
        inductor = sys.modules.get("torch._inductor.compile_fx")
        return inductor is not None and self._partition is inductor.partition_fn

    def __call__(self, args: list[Any]) -> Any:
        carrier = _current.carrier
        if carrier is None:
            return self.as_user_compiled()(args)
        code = carrier.callable_of(self)
        if not (modes := recording_modes()):
            return code(args)
        for mode in modes:
            mode.hold([arg for arg in args if isinstance(arg, Tensor)], ANOTHER_GRAPH)
        with opaque_region(self._written_among(args)):
            return code(args)

    def _written_among(self, args: list[Any]) -> list[Tensor]:
        infos = self.metadata.input_info
        return [args[i] for i, info in enumerate(infos) if info.mutates_data and isinstance(args[i], Tensor)]

    def as_user_compiled(self) -> BoxedCall:
        """Return the code that the user's backend makes without a plan."""
        return self.compile(None, self._partition)

    def compile(self, key: Any, partition: Partition, compilers: tuple[Any, Any] | None = None) -> BoxedCall:
        """Run the second stage with `partition`, unless it ran before for `key`.

        Args:
            key: names the result in `compiled`.
            partition: cuts the joint graph. Inductor's passes over the joint graph run before it.
            compilers: of the forward and the backward graph; by default those of the user's backend.
        """
        if key not in self.compiled:
            module = private.copied_graph_module(self._capture.graph_module)
            metadata = copy.copy(self._state.fw_metadata)
            metadata.dynamic_saved_tensors_idxs = dict(metadata.dynamic_saved_tensors_idxs)
            config = self._state.aot_config
            if partition is not self._partition:
                config = dataclasses.replace(
                    config, cache_info=None, force_non_lazy_backward_lowering=compilers is not None
                )
            state = dataclasses.replace(self._state, fw_metadata=metadata, aot_config=config)
            capture = dataclasses.replace(self._capture, graph_module=module)
            if partition is not self._partition:
                partition = self._after_joint_passes(partition, module)
            with self._context.entered(metadata):
                second_stage = private.aot_graph_compile().aot_stage2_autograd.__wrapped__
                self.compiled[key], _ = second_stage(
                    state, capture, partition, *(compilers or self._compilers)
                )
        return self.compiled[key]

    def _after_joint_passes(self, partition: Partition, module: Any) -> Partition:
        """Return `partition` with what the user's backend runs before it, which also cuts nested graphs."""
        users = self._partition
        fuses = self.fuses

        def cut(graph: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
            if graph is not module:
                return users(graph, inputs, **options)  # type: ignore[no-any-return]
            if fuses:
                return users(graph, inputs, partitioner_fn_override=partition, **options)  # type: ignore[no-any-return]
            return partition(graph, inputs, **options)

        return cut


@dataclasses.dataclass(frozen=True, slots=True)
class _CompileContext:
    """Keep what surrounds the second stage from the moment at which a graph was held back."""

    state: Any
    tracing: Any
    compiling: Any
    configs: tuple[tuple[Any, dict[str, Any]], ...]  # modules of configuration, with what differs from now

    @classmethod
    def now(cls, state: Any) -> _CompileContext:
        """Return what surrounds this call."""
        configs = [(module, private.config_values(module)) for module in private.compiler_configs()]
        return cls(state, private.tracing_context(), private.compile_context(), tuple(configs))

    @contextlib.contextmanager
    def entered(self, metadata: Any) -> Iterator[None]:
        """Run the second stage inside as if AOTAutograd had gone on after the first."""
        tracing = copy.copy(self.tracing)
        if tracing is not None:
            tracing.fw_metadata = metadata
        with contextlib.ExitStack() as stack:
            stack.enter_context(private.disable_current_modes())
            for module, values in self.configs:
                now = private.config_values(module)
                stack.enter_context(
                    module.patch({name: value for name, value in values.items() if now[name] != value})
                )
            for context in private.second_stage_contexts(self.state, tracing, self.compiling):
                stack.enter_context(context)
            yield


def _keep_from_cache(begins: bool) -> None:
    """Change the keys of AOTAutograd's cache while a carrier is active."""
    config = private.compiler_configs()[-1]
    if begins:
        _current.partitioner = config.custom_partitioner_fn
        config.custom_partitioner_fn = private.named_partitioner("autoac")
    elif getattr(config.custom_partitioner_fn, "name", "") == "autoac":
        config.custom_partitioner_fn = _current.partitioner


def forget_compiled_code() -> None:
    """Have all compiled code compiled again: Dynamo does not guard on the hooks that a plan has added."""
    if private.anything_traced():
        _hold_back_graphs()
        private.reset_code_caches()


def _hold_back_graphs() -> None:
    """Make AOTAutograd stop after its first stage, and discard the code that was compiled earlier."""
    module = private.aot_graph_compile()
    second_stage = module.aot_stage2_autograd
    loaded = private.graphs_loaded_from_cache()
    if not hasattr(second_stage, "__wrapped__"):

        def held_back(state: Any, capture: Any, partition: Any, forward: Any, backward: Any) -> Any:
            part = CompiledPart(state, capture, partition, (forward, backward))
            return part, state.fw_metadata

        held_back.__wrapped__ = second_stage  # type: ignore[attr-defined]
        module.aot_stage2_autograd = held_back
    elif loaded == _loaded_before:
        return
    _set_loaded_before(loaded)
    private.reset_code_caches()


_loaded_before = 0  # graphs that came from AOTAutograd's cache, whole, before the code was last forgotten


def _set_loaded_before(loaded: int) -> None:
    global _loaded_before
    _loaded_before = loaded
