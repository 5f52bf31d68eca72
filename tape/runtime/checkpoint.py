"""Define `checkpoint` and `checkpoint_sequential` with torch's signatures.

Each call is a region under the policy "recompute_all". Backward runs recorded ops again, not the Python
function. All differences from `torch.utils.checkpoint` follow from that; docs/semantics.md lists them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CellType
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import checkpoint as torchs

from autoac.tape.checkpoints.own_checkpoints import (
    call_plainly,
    checkpoints_are_needed,
    checkpoints_are_plain,
)
from autoac.tape.runtime.cursor import UseGroup
from autoac.tape.runtime.nested_policies import TorchFunctionPolicy
from autoac.tape.runtime.policy_context import save_recompute_policy
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.inductor import dynamo_is_active
from autoac.tape.torch_facts.private import tree_leaves
from autoac.tape.torch_facts.storage_table import is_wrapper
from autoac.tape.unseen.checked_code import site_of_function

R = TypeVar("R")
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@overload
def checkpoint(function: Callable[..., R], *args: Any, **kwargs: Any) -> R: ...
@overload
def checkpoint(function: None = None, **options: Any) -> Callable[[Callable[..., R]], Callable[..., R]]: ...
def checkpoint(
    function: Callable[..., Any] | None = None,
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Contexts = torchs.noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)`, and let backward recompute its saved tensors.

    Inside another region the policy is pushed like any other, so "must_save_all" around it still saves.

    These calls go to `torch.utils.checkpoint.checkpoint` with all its rules: `use_reentrant=True` or None;
    calls in a planned model that needs its checkpoints (NOTE [ Needed checkpoints ] in own_checkpoints.py);
    calls that torch.compile, `make_fx` or fake tensors trace; a compiled `function`, whose ops a region does
    not see; arguments or parameters that wrap other tensors (DTensor) or are nested, whose ops cannot be
    replayed one by one; and a `context_fn` whose second context is neither selective nor a nullcontext,
    because recomputation must run Python under it.

    Args:
        function: the function to run. Its side effects are not repeated in backward. Without it, return a
            decorator of functions, as torch does since 2.14.
        use_reentrant: True selects torch's older variant, and None does so with torch's warning.
        preserve_rng_state: for torch only. Here random ops always draw the same numbers again.
        context_fn: return two contexts. Those of `create_selective_checkpoint_contexts` are not entered;
            their policy function is called after each op that is not a view. Of other pairs, the first is
            entered around `function`.
        determinism_check: "default" or "none", for torch only. Here `function` does not run twice.
        debug: for torch only, which shows how two runs of `function` differ.
        early_stop: for torch only. Here recomputation never runs more than backward needs.
        respect_saved_tensors_hooks: for torch only, since 2.14. Here saved-tensor hooks around the call get
            what its selective contexts save.

    Raises:
        ValueError: `determinism_check` is not allowed, or `debug` is combined with `context_fn`.
        RuntimeError: the first context swallowed an exception of `function`.
    """
    if torch.compiler.is_compiling() and function is not None:
        # Dynamo recognizes torch's function, and the default of context_fn, by identity at the call.
        if context_fn is torchs.noop_context_fn:
            return torchs.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
        return torchs.checkpoint(
            function, *args, use_reentrant=use_reentrant, context_fn=context_fn, **kwargs
        )
    options: dict[str, Any] = {
        "use_reentrant": use_reentrant,
        "preserve_rng_state": preserve_rng_state,
        "context_fn": context_fn,
        "determinism_check": determinism_check,
        "debug": debug,
        "early_stop": early_stop,
        **kwargs,
    }
    if respect_saved_tensors_hooks is not None:
        options["respect_saved_tensors_hooks"] = respect_saved_tensors_hooks
    if function is None:
        return functools.partial(_decorated, options)
    call_torch = functools.partial(torchs.checkpoint, function, *args, **options)
    if (
        use_reentrant is None
        or use_reentrant
        or checkpoints_are_needed()
        or dynamo_is_active()
        or any(getattr(function, mark, None) is not None for mark in _COMPILED)
        or private.is_proxy_tracing()
        or private.detect_fake_mode(args) is not None
        or _takes_wrapped(function, args, kwargs)
    ):
        return call_torch()
    _check(context_fn, determinism_check, debug)
    first, second = context_fn()
    if not torch.is_grad_enabled() or (context_fn is torchs.noop_context_fn and checkpoints_are_plain()):
        return call_plainly(function, *args, **kwargs)
    selective = None
    if (type(first), type(second)) == private.selective_context_classes:  # subclasses may do more
        selective = TorchFunctionPolicy(cast("Any", first).policy_fn)
    site = site_of_function(function)
    if selective is not None:
        with save_recompute_policy(selective, checkpoint=UseGroup(0), site=site):
            return function(*args, **kwargs)
    if type(second) is not contextlib.nullcontext:
        return call_torch(context_fn=lambda: (first, second))
    swallowed: BaseException | None = None
    try:
        with save_recompute_policy("recompute_all", checkpoint=UseGroup(0), site=site), first:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                swallowed = error
                raise
        raise RuntimeError(
            "the first context of context_fn swallowed an exception of the checkpointed function, so there "
            "is nothing to return; let the exception pass, and catch it around checkpoint(...)"
        ) from swallowed
    finally:
        swallowed = None  # the exception refers to this frame: a cycle


def _decorated(options: Mapping[str, Any], function: Callable[..., R]) -> Callable[..., R]:
    @functools.wraps(function)
    def checkpointed(*args: Any, **kwargs: Any) -> R:
        return checkpoint(function, *args, **options, **kwargs)

    return checkpointed


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = False,
    **kwargs: Any,
) -> Any:
    """Run `functions` in sequence, in `segments` parts, each part but the last through `checkpoint`.

    Args:
        functions: functions of one argument; each receives the output of the one before it.
        segments: number of parts, at most the number of functions.
        input: the argument of the first function.
        use_reentrant: as for `checkpoint`.
        preserve_rng_state: as for `checkpoint`; the only other keyword.

    Raises:
        ValueError: an unknown keyword, or `segments` is not from 1 to the number of functions.
    """
    if use_reentrant is None:
        # torch warns about None.
        return torchs.checkpoint_sequential(functions, segments, input, use_reentrant=None, **kwargs)
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    steps = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not 1 <= segments <= len(steps):
        raise ValueError(f"segments must be from 1 to {len(steps)}, the number of functions, got {segments}")
    length = len(steps) // segments
    last = length * (segments - 1)  # the last segment takes the remainder
    for start in range(0, last, length):
        input = checkpoint(
            _chain,
            steps[start : start + length],
            input,
            use_reentrant=use_reentrant,
            preserve_rng_state=preserve_rng_state,
        )
    return _chain(steps[last:], input)


def _chain(steps: Sequence[Callable[..., Any]], value: Any) -> Any:
    for step in steps:
        value = step(value)
    return value


# Attributes of what torch.compile returns, and of a module after module.compile().
_COMPILED = ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl")


def _takes_wrapped(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an argument, or a parameter of a module that `function` calls, is not a plain tensor.

    FSDP's sharded parameters do not count, because plain tensors replace them during forward.
    """
    if any(_is_wrapped(leaf) for leaf in tree_leaves((args, kwargs))):
        return True
    stack = list(_modules_of(function))
    while stack:
        module = stack.pop()
        if hasattr(module, "unshard"):  # an FSDPModule, without importing it
            return False
        if any(type(p) is not Parameter and _is_wrapped(p) for p in module._parameters.values()):
            return True
        stack += [child for child in module._modules.values() if child is not None]
    return False


def _is_wrapped(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_nested or is_wrapper(leaf))


def _modules_of(function: Any) -> Iterator[nn.Module]:
    """Yield the modules that `function` is, is bound to, or has in its closure."""
    while isinstance(function, functools.partial):
        function = function.func
    cells = getattr(function, "__closure__", None) or ()
    for candidate in (function, getattr(function, "__self__", None), *map(_content, cells)):
        if isinstance(candidate, nn.Module):
            yield candidate


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _check(context_fn: Contexts, determinism_check: str, debug: bool) -> None:
    if private.checkpoint_debugs(debug) and context_fn is not torchs.noop_context_fn:
        raise ValueError("debug=True is incompatible with non-default context_fn")
    if determinism_check not in (allowed := private.determinism_checks):
        raise ValueError(f"determinism_check should be one of {allowed}, but got {determinism_check}")
