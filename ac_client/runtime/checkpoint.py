"""`checkpoint` and `checkpoint_sequential` with torch's signatures, on our runtime.

A call is a region under the policy "recompute_all". What differs from `torch.utils.checkpoint` follows
from one thing, that backward runs recorded ops again and not the Python function:

    side effects of the function        happen once, in forward; BatchNorm's statistics move once
    determinism_check, debug            there is no second run that could differ; checked as arguments only
    preserve_rng_state=False            random ops draw the same numbers all the same
    early_stop=False                    a value that nothing asks for is not made again
    a second context of context_fn      has nothing to be entered around; see `checkpoint`
    saved tensors unpacked twice,       work
    backward twice through a selective
    region with retain_graph=True
    a checkpoint in a checkpoint        lowers no peak further, and its ops run again once, not twice

docs/checkpoint.md shows them one by one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CellType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import checkpoint as torchs

from ac_client.runtime.nested_policies import TorchFunctionPolicy
from ac_client.runtime.policy_context import save_recompute_policy
from autoac.profiler.torch_facts import private
from autoac.profiler.torch_facts.inductor import dynamo_is_active
from autoac.profiler.torch_facts.private import tree_leaves
from autoac.profiler.torch_facts.storage_table import is_wrapper

R = TypeVar("R")
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def checkpoint(
    function: Callable[..., R],
    *args: Any,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Contexts = torchs.noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> R:
    """Run `function(*args, **kwargs)`, and let backward make its saved tensors again.

    Inside another region its policy is pushed like any other, so "must_save_all" around it still saves.

    Handed over to `torch.utils.checkpoint.checkpoint`, with all its rules: `use_reentrant=True` (or None);
    calls that torch.compile, `make_fx` or fake tensors trace; a `function` that is compiled, as its inside
    is not seen; arguments or parameters that wrap other tensors (DTensor) or are nested, as their ops cannot
    be run again one by one; and a `context_fn` whose second context is neither of the selective kind nor a
    nullcontext, because recomputation must run Python under it.

    Args:
        function: runs once. What it does beside computing tensors is not repeated in backward.
        use_reentrant: torch's older variant if True. None is torch's default of old, with its warning.
        preserve_rng_state: for torch. Here the numbers that were drawn are drawn again in any case.
        context_fn: gives two contexts. Those of `create_selective_checkpoint_contexts` are not entered:
            their policy function decides, asked after each op that is not a view. With any others the
            first is entered around `function`.
        determinism_check: "default" or "none". There is nothing to check: the ops themselves are run again.
        debug: for torch, which shows how two runs of `function` differ.
        early_stop: for torch. Recomputation never runs more than what is asked for.

    Raises:
        ValueError: `determinism_check` is neither; `debug` together with `context_fn`.
        RuntimeError: the first context swallowed an exception of `function`.
    """
    if torch.compiler.is_compiling():
        # Written for Dynamo: it knows torch's function and default by identity, where they stand.
        if context_fn is torchs.noop_context_fn:
            out: R = torchs.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
        else:
            out = torchs.checkpoint(
                function, *args, use_reentrant=use_reentrant, context_fn=context_fn, **kwargs
            )
        return out
    torchs_own: Callable[..., R] = functools.partial(
        torchs.checkpoint,
        function,
        *args,
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        context_fn=context_fn,
        determinism_check=determinism_check,
        debug=debug,
        early_stop=early_stop,
        **kwargs,
    )
    if use_reentrant is None or use_reentrant or _traced(function, args) or _wraps(function, args, kwargs):
        return torchs_own()
    _check(context_fn, determinism_check, debug)
    first, second = context_fn()
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    selective = _selective_policy(first, second)
    if selective is not None:
        with save_recompute_policy(selective):
            return function(*args, **kwargs)
    if type(second) is not contextlib.nullcontext:
        return torchs_own(context_fn=lambda: (first, second))
    swallowed: BaseException | None = None
    try:
        with save_recompute_policy("recompute_all"), first:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                swallowed = error
                raise
        raise RuntimeError(
            "the first context of context_fn swallowed an exception of the checkpointed function, so there "
            "is nothing to return; let it pass, and catch it around checkpoint(...)"
        ) from swallowed
    finally:
        swallowed = None  # an exception that this frame holds would hold this frame: a cycle


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = False,
    **kwargs: Any,
) -> Any:
    """Run `functions` one after another in `segments` parts, each but the last through `checkpoint`.

    Args:
        functions: each takes what the one before returned.
        segments: at most as many as there are functions.
        input: of the first.
        use_reentrant: as for `checkpoint`.
        preserve_rng_state: as for `checkpoint`; the only further keyword.

    Raises:
        ValueError: another keyword, or `segments` is not from 1 to the number of functions.
    """
    if use_reentrant is None:
        # The warning is torch's to give.
        return torchs.checkpoint_sequential(functions, segments, input, use_reentrant=None, **kwargs)
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    steps = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not 1 <= segments <= len(steps):
        raise ValueError(f"segments must be from 1 to the {len(steps)} functions, got {segments}")
    length = len(steps) // segments
    last = length * (segments - 1)  # the last segment takes what does not divide
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


# On what torch.compile returns, and on a module after module.compile().
_COMPILED = ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl")


def _traced(function: Any, args: Sequence[Any]) -> bool:
    """Whether the tensors inside stand for others or are not seen, so that recording would say nothing."""
    if dynamo_is_active() or any(getattr(function, mark, None) is not None for mark in _COMPILED):
        return True
    return private.is_proxy_tracing() or private.detect_fake_mode(args) is not None


def _wraps(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an argument, or a parameter of a module that `function` calls, is not a plain tensor.

    FSDP's sharded parameters do not count: inside of forward plain ones stand in for them.
    """
    if any(_is_wrapped(leaf) for leaf in tree_leaves((args, kwargs))):
        return True
    waiting = list(_modules_of(function))
    while waiting:
        module = waiting.pop()
        if hasattr(module, "unshard"):  # an FSDPModule, without importing it
            return False
        if any(type(p) is not Parameter and _is_wrapped(p) for p in module._parameters.values()):
            return True
        waiting += [child for child in module._modules.values() if child is not None]
    return False


def _is_wrapped(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_nested or is_wrapper(leaf))


def _modules_of(function: Any) -> Iterator[nn.Module]:
    """The modules that a callable is, is bound to, or has in its closure."""
    while isinstance(function, functools.partial):
        function = function.func
    cells = getattr(function, "__closure__", None) or ()
    for found in (function, getattr(function, "__self__", None), *map(_content, cells)):
        if isinstance(found, nn.Module):
            yield found


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _check(context_fn: Contexts, determinism_check: str, debug: bool) -> None:
    enabled = torchs._checkpoint_debug_enabled
    if (debug if enabled is None else enabled) and context_fn is not torchs.noop_context_fn:
        raise ValueError("debug=True is incompatible with non-default context_fn")
    allowed = list(torchs._allowed_determinism_checks_to_fns)
    if determinism_check not in allowed:
        raise ValueError(f"determinism_check should be one of {allowed}, but got {determinism_check}")


def _selective_policy(first: object, second: object) -> TorchFunctionPolicy | None:
    """The policy of torch's selective contexts; None if they are others. Subclasses may do anything."""
    if (
        type(first) is not torchs._CachingTorchDispatchMode
        or type(second) is not torchs._CachedTorchDispatchMode
    ):
        return None
    return TorchFunctionPolicy(first.policy_fn)
