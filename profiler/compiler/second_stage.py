"""Hold a compiled graph back between the two stages of AOTAutograd, until it is known what the graph saves.

Dynamo hands each graph to its backend, and nearly every backend hands it to AOTAutograd. Its first stage
traces forward and backward into one *joint graph*. Its second stage cuts the joint graph, which decides
what is saved, and compiles both halves. Dynamo has all of its guards after the first stage.

    Dynamo -> backend -> first stage -> joint graph -> CompiledPart
    call of the CompiledPart -> its carrier decides what is saved -> second stage, once for each decision

So a graph is traced once, whatever is planned for it later: another budget, another shape of batch, or
another layer that shares the code runs the second stage alone. Without a carrier, the second stage follows
the first at once, as if this file did not exist. Dynamo keeps the code of planned forwards apart from all
other code (`with_code_of_plans`), so the two kinds do not replace each other.

NOTE [ Caches of compiled code ]
AOTAutograd's cache on disk finds a graph before the first stage, by a key that does not say what a plan
saves. So while a carrier is active, `custom_partitioner_fn` of Inductor's configuration holds an object whose
`uuid` is a digest of our own source, and the graph has another key, under which nothing is stored. Inductor's
own cache finds both halves of a cut again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from autoac import tape
from autoac.planner.formats.profile import ANOTHER_GRAPH
from autoac.profiler.compiler import private_compiler
from autoac.profiler.compiler.compile_context import CompileContext
from autoac.profiler.compiler.source_digest import source_digest
from autoac.tape.torch_facts.inductor import (
    backend_of_plans,
    opaque_region,
    recording_modes,
    use_code_of_plans,
    with_code_of_plans,
)

log = logging.getLogger("autoac.profiler")

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
    resumes: bool = False  # a second stage runs on what a first stage has left


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
    """Make `carrier` decide what graphs called on this thread save; return the carrier before it.

    Raises:
        UnsupportedTorch: this torch was not tested. Nothing was changed.
    """
    if carrier is not None:
        private_compiler.check_version()
    before, _current.carrier = _current.carrier, carrier
    use_code_of_plans(carrier is not None)
    if carrier is not None and "torch._dynamo" in sys.modules:
        _hold_back_graphs()
    if (before is None) != (carrier is None) and "torch._inductor.config" in sys.modules:
        _keep_from_cache(carrier is not None)
    return before


@dataclasses.dataclass(frozen=True, slots=True)
class _FirstStage:
    """Hold what AOTAutograd hands to its second stage, and what surrounds it."""

    state: Any
    capture: Any
    partition: Any  # of the user's backend
    compilers: tuple[Any, Any]
    context: CompileContext


class CompiledPart:
    """A graph that Dynamo captured, after the first stage. Calling it runs the second stage if need be.

    Attributes:
        notes: what carriers remember of the graph.
        compiled: the results of the second stage, by what a carrier chose as their key.
    """

    _boxed_call = True

    def __init__(self, first: _FirstStage) -> None:
        self.notes: dict[str, Any] = {}
        self.compiled: dict[Any, BoxedCall] = {}
        self._first = first
        self._after_passes: Any = None  # the joint graph that Inductor's passes have left

    @property
    def joint(self) -> Any:
        """Return the joint graph. The second stage works on copies of it."""
        return self._first.capture.graph_module

    @property
    def metadata(self) -> Any:
        """Return AOTAutograd's facts about inputs and outputs."""
        return self._first.state.fw_metadata

    @property
    def fuses(self) -> bool:
        """Return True if the backend is Inductor, which fuses ops."""
        inductor = sys.modules.get("torch._inductor.compile_fx")
        return inductor is not None and self._first.partition is inductor.partition_fn

    def __call__(self, args: list[Any]) -> Any:
        carrier = _current.carrier
        if carrier is None:
            return self.compile(None, self._first.partition)(args)  # as the user's backend would
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

    def decided(self, decisions: Hashable, partition: Partition) -> BoxedCall:
        """Return the code for `decisions`, which `partition` carries out."""
        try:
            return self.compile(decisions, partition)
        except Exception:
            if not private_compiler.suppresses_errors():
                raise
            log.warning("a compiled graph runs op by op: its backend cannot compile it", exc_info=True)
            return self.compile(decisions, partition, private_compiler.compilers_that_run_ops())

    def compile(
        self,
        key: Any,
        partition: Partition,
        compilers: tuple[Any, Any] | None = None,
    ) -> BoxedCall:
        """Run the second stage with `partition`, unless it ran before for `key`.

        Args:
            key: names the result in `compiled`.
            partition: cuts the joint graph. Inductor's passes over the joint graph run before it.
            compilers: of the forward and the backward graph; by default those of the user's backend.
        """
        if key not in self.compiled:
            first = self._first
            joint = self._after_passes if partition is not first.partition else None
            module = private_compiler.copied_graph_module(joint or first.capture.graph_module)
            metadata = copy.copy(first.state.fw_metadata)
            metadata.dynamic_saved_tensors_idxs = dict(metadata.dynamic_saved_tensors_idxs)
            config = dataclasses.replace(first.state.aot_config, cache_info=None)
            if partition is not first.partition:
                config = dataclasses.replace(config, force_non_lazy_backward_lowering=compilers is not None)
            state = dataclasses.replace(first.state, fw_metadata=metadata, aot_config=config)
            capture = dataclasses.replace(first.capture, graph_module=module)
            if partition is not first.partition:
                partition = self._after_joint_passes(partition, module)
            _current.resumes = True
            try:
                with (
                    first.context.entered(metadata, state.fake_mode),
                    contextlib.nullcontext()
                    if compilers is None
                    else private_compiler.no_donated_buffers(metadata),
                ):
                    second_stage = private_compiler.aot_graph_compile().aot_stage2_autograd.__wrapped__
                    self.compiled[key], _ = second_stage(
                        state, capture, partition, *(compilers or self._users_compilers())
                    )
            finally:
                _current.resumes = False
        return self.compiled[key]

    def _users_compilers(self) -> tuple[Any, Any]:
        forward, backward = self._first.compilers
        if _current.carrier is None:
            return forward, backward
        return private_compiler.reporting_compiler(forward, _warn_of_held_inputs), backward

    def _after_joint_passes(self, partition: Partition, module: Any) -> Partition:
        """Return `partition` with the passes that the user's backend runs before its own cut.

        The backend's own function still cuts nested graphs. Inductor's passes run once, and their result is
        kept, unless a nested graph or a pass of the user could notice.
        """
        users = self._first.partition
        runs_passes = self.fuses and self._after_passes is None

        def keeping(graph: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
            if not private_compiler.has_passes_before_cut(graph):
                self._after_passes = private_compiler.copied_graph_module(graph)
            return partition(graph, inputs, **options)

        def cut(graph: Any, inputs: Any, **options: Any) -> tuple[Any, Any]:
            if graph is not module:
                return users(graph, inputs, **options)  # type: ignore[no-any-return]
            if runs_passes:
                return users(graph, inputs, partitioner_fn_override=keeping, **options)  # type: ignore[no-any-return]
            return partition(graph, inputs, **options)

        return cut


def _warn_of_held_inputs() -> None:
    log.warning(
        "the step may need more than is planned: code of the backend %r holds its inputs until it returns, "
        "in backward all saved tensors. Let its compilers return functions that empty the list of "
        "their arguments (not make_boxed_func), or compile with backend='inductor' or 'aot_eager'",
        backend_of_plans(),
    )


def _keep_from_cache(begins: bool) -> None:
    """Change the keys of AOTAutograd's cache while a carrier is active."""
    config = private_compiler.compiler_configs()[-1]
    if begins:
        _current.partitioner = config.custom_partitioner_fn
        ours = (Path(__file__).parents[1], Path(tape.__file__).parent)
        config.custom_partitioner_fn = private_compiler.named_partitioner(
            " ".join(("autoac", *map(source_digest, ours)))
        )
    elif getattr(config.custom_partitioner_fn, "name", "").startswith("autoac "):
        config.custom_partitioner_fn = _current.partitioner


def forget_code_that_calls(model: nn.Module) -> None:
    """Have Dynamo compile again the code that calls `model`, since it does not notice new hooks of the model.

    The model's own code stays: its hooks run before it, and planned forwards have code of their own.
    """
    if private_compiler.is_tested() and "torch._dynamo" in sys.modules:
        private_compiler.reset_code_with(type(model), but=getattr(type(model).forward, "__code__", None))


def _hold_back_graphs() -> None:
    """Make AOTAutograd stop after its first stage while a carrier is active."""
    second_stage = private_compiler.aot_graph_compile().aot_stage2_autograd
    if hasattr(second_stage, "__wrapped__"):
        return

    @functools.wraps(second_stage)
    def held_back(state: Any, capture: Any, partition: Any, forward: Any, backward: Any) -> Any:
        if _current.carrier is None:
            return second_stage(state, capture, partition, forward, backward)
        private_compiler.compute_scalars_as_tensors(capture.graph_module)  # may have Dynamo trace again
        context = CompileContext.now()
        first = _FirstStage(state, capture, partition, (forward, backward), context)
        return CompiledPart(first), state.fw_metadata

    private_compiler.replace_second_stage(held_back, lambda: _current.resumes)
    private_compiler.wrap_callback(with_code_of_plans)
