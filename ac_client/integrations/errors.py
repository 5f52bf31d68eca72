"""What an integration refuses.

    MissingLibrary (ModuleNotFoundError)   the library is not installed
    CompiledModel (ApplyError)             the whole model is compiled

and ApplyError itself, where a training cannot be planned for another reason.
"""

from __future__ import annotations

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from ac_client.errors import ApplyError


class MissingLibrary(ModuleNotFoundError):
    """The library that an integration is for is not installed."""

    def __init__(self, name: str, install: str) -> None:
        self.install = install
        super().__init__(f"{name} is not installed: pip install {install}", name=name)

    def __reduce__(self) -> tuple[type[MissingLibrary], tuple[str | None, str]]:
        return MissingLibrary, (self.name, self.install)


class CompiledModel(ApplyError):
    """The whole model is compiled: then it is one op to a plan, with nothing to recompute."""

    def __init__(self, where: str, how: str) -> None:
        self.where, self.how = where, how
        super().__init__(
            f"{where} compiles the whole model, and what compiled code saves is for the compiler to choose: "
            f"{how}, or set torch._functorch.config.activation_memory_budget and leave ac_client out"
        )

    def __reduce__(self) -> tuple[type[CompiledModel], tuple[str, str]]:
        return CompiledModel, (self.where, self.how)


def check_not_compiled(model: nn.Module, how: str) -> None:
    """Refuse a model that torch.compile was called on.

    Args:
        how: what to do instead.

    Raises:
        CompiledModel.
    """
    if isinstance(model, OptimizedModule):
        raise CompiledModel(f"torch.compile({type(model._orig_mod).__name__})", how)
    if model._compiled_call_impl is not None:
        raise CompiledModel(f"{type(model).__name__}.compile()", how)
