"""Run a stage of AOTAutograd later, as if Dynamo and the backend were still around it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autoac.profiler.compiler import private_compiler
from autoac.tape.torch_facts import private


@dataclass(frozen=True, slots=True)
class CompileContext:
    """Keep what surrounds AOTAutograd from the moment at which a graph was held back."""

    tracing: Any
    compiling: Any
    configs: tuple[tuple[Any, dict[str, Any]], ...]  # modules of configuration, with their values then

    @classmethod
    def now(cls) -> CompileContext:
        """Return what surrounds this call."""
        configs = [
            (module, private_compiler.config_values(module)) for module in private_compiler.compiler_configs()
        ]
        return cls(private_compiler.tracing_context(), private_compiler.compile_context(), tuple(configs))

    @contextlib.contextmanager
    def entered(self, metadata: Any = None, fake_mode: Any = None) -> Iterator[None]:
        """Run the body as if AOTAutograd had gone on.

        Args:
            metadata, fake_mode: those of the first stage, if the body runs the second one.
        """
        tracing = copy.copy(self.tracing)
        if tracing is not None and metadata is not None:
            tracing.fw_metadata = metadata
        with contextlib.ExitStack() as stack:
            stack.enter_context(private.disable_current_modes())
            for module, values in self.configs:
                now = private_compiler.config_values(module)
                stack.enter_context(
                    module.patch({name: value for name, value in values.items() if now[name] != value})
                )
            for context in private_compiler.compile_contexts(tracing, self.compiling):
                stack.enter_context(context)
            if fake_mode is not None:
                for context in private_compiler.second_stage_contexts(fake_mode):
                    stack.enter_context(context)
            yield
