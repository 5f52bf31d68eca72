"""Derive facts about each op once: what it writes, whether it draws random numbers, why it must be saved.

Profiler and runtime use the same facts, so both see the same ops. An op's schema is not complete
(`aten.native_batch_norm` writes running statistics; every attention overload is tagged random, with dropout
or without). The tables of this file list what schemas leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoac.planner.formats.op_key import name_in_keys
from autoac.planner.formats.profile import DECIDES, FUNCTIONAL_COLLECTIVE, LIFTABLE, SHAPED_BY_DATA
from autoac.tape.torch_facts.nested_ops import NestedOp
from autoac.tape.torch_facts.op_signature import Args, Kwargs, outputs_of, tensors_in
from autoac.tape.torch_facts.private import HigherOrderOperator, OpOverload, tree_leaves
from autoac.tape.torch_facts.rng import as_compiled
from autoac.tape.torch_facts.storage_table import has_storage


def _names(names: str, namespace: str = "aten") -> frozenset[str]:
    return frozenset(f"{namespace}::{name}" for name in names.split())


# Return a view of their input, which their schema does not say.
_HIDDEN_VIEWS = _names("_unsafe_view lift_fresh _reshape_alias")

# Return a property of a tensor. Only fake and wrapper tensors dispatch them.
_QUESTIONS = {"prim::device"}

# Tell the allocator of a reader, and write nothing, although their schema says so.
_NOTICES = {"aten::record_stream"}

_LABELS = "profiler"  # namespace of record_function, which labels a stretch of code and computes nothing

_STATISTICS = (3, 4)  # running_mean and running_var as arguments of a batch norm

# Write these arguments in training, which their schema does not say.
_HIDDEN_WRITES = {
    "aten::native_batch_norm": _STATISTICS,
    "aten::cudnn_batch_norm": _STATISTICS,
    "aten::miopen_batch_norm": _STATISTICS,
}

# Return new running statistics in place of writing them; no other result of training depends on the old ones.
_NEW_STATISTICS = _names("_native_batch_norm_legit_functional _batch_norm_with_update_functional")

# Higher-order ops that write some of their arguments.
_WRITING_HIGHER_ORDER = {"triton_kernel_wrapper_mutation", "inductor_compiled_code", "auto_functionalized"}

# The shape of their output depends on an index or a mask. The same argument gives the same shape.
_SHAPED_BY_ARGUMENT = _names("index.Tensor masked_select")

# Return a workspace of which they write a part only, so that the rest differs from run to run.
_LEAVE_BYTES_UNWRITTEN = frozenset({"aten.mkldnn_rnn_layer.default"})


def leaves_bytes_unwritten(name: str, dtype: torch.dtype) -> bool:
    """Return True if an output of op `name` may have bytes that the op has not written.

    Fused attention returns two integers, the seed and the offset of its dropout. Without dropout, it does not
    write them.
    """
    of_attention = name.startswith("aten.") and "_attention" in name
    return name in _LEAVE_BYTES_UNWRITTEN or (
        of_attention and not dtype.is_floating_point and not dtype.is_complex
    )


# Draw from a state that cuDNN or MIOpen keeps (an argument) and advance it, which their schema does not say.
# Run again they would draw other numbers, whatever the state of torch's generators.
_OWN_STATE = _names("_cudnn_rnn miopen_rnn _cudnn_init_dropout_state")

# Fill this argument after autograd has packed it, without a change of its version counter.
_FILLS_PACKED = {"aten::rrelu_with_noise": 1, "aten::rrelu_with_noise_": 1}

# Give a tensor another storage, or a storage another size. Recomputed on a private buffer, they would have no
# effect on the tensors that view the old storage.
_REBINDS = _names("set_ set resize_ resize resize_as_ resize_as_sparse_ _resize_output_ _resize_output")

# Their outputs decide where something goes or how large it is. Without bitwise determinism, a kernel could
# decide otherwise the second time.
_DECIDING = _names(
    "argmax argmin topk sort argsort msort kthvalue mode multinomial bucketize searchsorted histc bincount "
    "eq ne lt le gt ge isnan isinf isfinite any all logical_and logical_or logical_not logical_xor "
    "is_nonzero equal _local_scalar_dense allclose isclose isin signbit cummax cummin frexp"
)
_DECIDING_OVERLOADS = _names("max.dim min.dim median.dim nanmedian.dim")

# Return memory as the allocator left it. What is read from it later was written by someone: a visible op, or
# a kernel that PyTorch does not dispatch.
_BLANK = _names("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")

# Write in place without reading what they write over; some of them only a part of it.
_FILLS = _names(
    "copy_ fill_ zero_ bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_ "
    "_foreach_copy_ _foreach_zero_ index_copy_ index_fill_ index_put_ _index_put_impl_ masked_fill_ "
    "masked_scatter_ scatter_ set_ rrelu_with_noise rrelu_with_noise_"
)

# Read the shape and type of their first argument, and no contents.
_DESCRIBES = _names(
    "zeros_like ones_like full_like rand_like randn_like new_zeros new_ones new_full bernoulli.p"
)

# With beta=0 they do not read their first argument.
_SCALES_FIRST = _names("addmm addbmm baddbmm addmv addr addmm_ addbmm_ baddbmm_ addmv_ addr_")

# Call ops that autocast casts, and have no autocast rule of their own.
_NESTED = _names("_trilinear linalg_pinv.atol_rtol_tensor")

# Ops of which torch's own function runs this very overload, and takes less time to read its arguments.
_FUNCTIONS = _names(
    "add.Tensor addmm bmm cat convolution div.Tensor embedding mean.dim mm mul.Tensor native_batch_norm "
    "native_dropout native_layer_norm permute sub.Tensor transpose.int unsqueeze _softmax _log_softmax"
)

# Collectives of torch whose schemas mark what they write, except for those in `_RECEIVES`.
_MARKED_COLLECTIVES = {"_c10d_functional", "_c10d_functional_autograd", "_dtensor"}

# Those of them that return new memory and write nothing: `Constraints.save_collectives`.
_FUNCTIONAL = _names(
    "all_gather_into_tensor all_reduce all_to_all_single broadcast reduce_scatter_tensor", "_c10d_functional"
)

_OWN_NAMESPACES = {"aten", "prims", "prim", "c10d"} | _MARKED_COLLECTIVES  # torch's own: tagged if they draw

_COLLECTIVE_NAMESPACES = (
    {"c10d", "symm_mem", "torchcomms", "nvshmem"}
    | {"deepep", "deep_ep", "hybridep", "hybrid_ep", "uccl", "mori", "flux"}
    | _MARKED_COLLECTIVES
)

# Communicate and write nothing.
_SENDS = _names("send barrier monitored_barrier_ check_for_nan", "c10d")

# Write these arguments, which their schema does not say. With `async_op=True` the contents arrive after the
# op has returned. Nothing may read the argument before the caller has waited, so the op counts as the write.
_RECEIVES = {
    **dict.fromkeys(
        _names(
            "allreduce_ allreduce_coalesced_ broadcast_ reduce_ allgather_ _allgather_base_ "
            "allgather_coalesced_ allgather_into_tensor_coalesced_ reduce_scatter_ _reduce_scatter_base_ "
            "reduce_scatter_tensor_coalesced_ alltoall_ alltoall_base_ gather_ gather_into_tensor_ "
            "scatter_ recv_ recv_any_source_",
            "c10d",
        ),
        (0,),
    ),
    "_c10d_functional::irecv": (0,),
    "_c10d_functional::batch_p2p_ops": (3,),
}

# An argument of such a type, or a string with such a name, names the ranks that an op communicates with.
_GROUP_TYPES = ("torch.classes.c10d.", "torch.classes.torchcomms.")
_GROUP_NAMES = ("group", "group_name", "pg", "pg_name")
_STRINGS = {"str", "Any", "Optional[str]", "Optional[Any]"}

_DROPOUT_ARGUMENTS = ("dropout_p", "p")


@dataclass(frozen=True, slots=True)
class OpFacts:
    """Facts that hold for every call of one overload.

    Invariant: `mutates` is True if the op may write any argument.
    """

    name: str  # "aten.addmm.default"
    name_in_keys: str  # the same, or what equivalent kernels share
    call: Callable[..., Any]  # calls the op from a mode, through the function that its own __call__ calls
    view: bool = False  # returns a view, or computes nothing: not recorded
    writes: tuple[int, ...] = ()  # positional arguments that it writes
    writes_named: tuple[str, ...] = ()  # keyword arguments that it writes
    in_place: bool = False  # returns only arguments that it writes
    random: bool = False  # may draw from a generator
    dropout_at: int = -1  # position of the dropout probability; -1: draws for all arguments
    must_save: str = ""  # why its outputs are saved by default; "" if they are not
    collective: bool = False  # communicates with other ranks
    writes_any: bool = False  # may write any argument
    never_recomputed: bool = False  # whatever a policy says, but for what `again` says
    again: Callable[..., Any] | None = None  # a functional collective that waits, for plans that repeat it
    opaque: bool = False  # a higher-order op: the ops inside are not seen
    fills_packed: int = -1  # argument that it fills after autograd has packed it
    statistics: tuple[int, ...] = ()  # arguments that it updates, and that do not affect its outputs
    shaped_by_argument: bool = False  # the values of a mask or an index set the shape of its output
    function: bool = False  # a torch.autograd.Function, which runs as one op (function_calls.py)
    blank: bool = False  # returns memory that nobody has written
    may_skip_first: bool = False  # may leave the contents of its first argument unread
    scales_first: bool = False  # leaves them unread only if beta is 0
    nested: bool = False  # its kernel may call other ops that autocast casts; `call` is a NestedOp
    mutates: bool = field(init=False)
    plain: bool = field(init=False)  # a decision to save or to recompute it is all that there is to know

    def __post_init__(self) -> None:
        writes = bool(self.writes or self.writes_named or self.writes_any or self.opaque)
        object.__setattr__(self, "mutates", writes)
        special = self.opaque or self.writes_any or self.never_recomputed or self.fills_packed >= 0
        object.__setattr__(self, "plain", not special and self.must_save in LIFTABLE)

    def call_again(self) -> Callable[..., Any]:
        """Return a function that calls the op in backward. Call this from the mode that records the op."""
        return self.call.rerun() if isinstance(self.call, NestedOp) else self.again or self.call

    def draws(self, args: Args, kwargs: Kwargs) -> bool:
        """Return True if a call draws random numbers: not if its dropout probability is 0."""
        if not self.random or self.dropout_at < 0:
            return self.random
        if self.dropout_at < len(args):
            return bool(args[self.dropout_at])
        return any(bool(kwargs.get(name)) for name in _DROPOUT_ARGUMENTS)


def facts_of(op: Any) -> OpFacts:
    """Return the facts about `op`, derived at its first use and kept as an attribute of the op."""
    try:
        facts: OpFacts = op._autoac_facts
    except AttributeError:
        facts = op._autoac_facts = _derive(op)
    return facts


def _derive(op: OpOverload[Any, Any] | HigherOrderOperator) -> OpFacts:
    if not isinstance(op, OpOverload):
        # The ops inside are not seen, so its outputs are always saved.
        return OpFacts(
            name=f"higher_order.{op.name()}",
            name_in_keys=f"higher_order.{op.name()}",
            call=op,
            must_save="higher-order op",
            writes_any=op.name() in _WRITING_HIGHER_ORDER,
            never_recomputed=True,
            opaque=True,
        )
    schema = op._schema
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    hidden = _HIDDEN_WRITES.get(schema.name, ())
    positional = [a for a in schema.arguments if not a.kwarg_only]
    # Few authors of ops outside torch tag those that draw, so all of them may.
    random = torch.Tag.nondeterministic_seeded in op.tags or op.namespace not in _OWN_NAMESPACES
    aliases = [r for r in schema.returns if r.alias_info is not None and not r.alias_info.is_write]
    collective = _is_collective(op)
    received = _RECEIVES.get(schema.name, ())
    # Few ops outside torch have autocast rules, and their kernels are often Python.
    own = op.namespace in _OWN_NAMESPACES or op.namespace == _LABELS
    nested = type(op) is OpOverload and (not own or _key(op) in _NESTED)
    return OpFacts(
        name=str(op),
        name_in_keys=name_in_keys(str(op)),
        call=NestedOp(op) if nested else as_compiled(op) or (_function(op) if type(op) is OpOverload else op),
        view=(bool(aliases) and not written and not collective)
        or schema.name in _HIDDEN_VIEWS | _QUESTIONS | _NOTICES
        or op.namespace == _LABELS,
        writes=tuple(i for i, a in enumerate(positional) if a in written) + hidden + received,
        writes_named=tuple(a.name for a in written if a.kwarg_only),
        in_place=bool(written) and all(r.alias_info is not None for r in schema.returns),
        random=random,
        dropout_at=_dropout_position(positional) if random else -1,
        must_save=_must_save(op, collective),
        collective=collective,
        writes_any=collective
        and not (written or received)
        and op.namespace not in _MARKED_COLLECTIVES
        and schema.name not in _SENDS,
        never_recomputed=collective or schema.name in _REBINDS | _OWN_STATE,
        again=partial(_run_and_wait, op) if schema.name in _FUNCTIONAL else None,
        fills_packed=_FILLS_PACKED.get(schema.name, -1),
        statistics=hidden,
        shaped_by_argument=_key(op) in _SHAPED_BY_ARGUMENT,
        blank=schema.name in _BLANK,
        may_skip_first=schema.name in _BLANK | _FILLS | _SCALES_FIRST or _key(op) in _DESCRIBES,
        scales_first=schema.name in _SCALES_FIRST,
        nested=nested,
    )


def _function(op: OpOverload[Any, Any]) -> Callable[..., Any]:
    """Return the function that calls `op` in the least time."""
    key, name = _key(op), op._schema.name.removeprefix("aten::")
    if key in ("aten::expand", "aten::view"):
        return getattr(torch.Tensor, name)  # type: ignore[no-any-return]
    return getattr(torch if key in _FUNCTIONS else None, name, op._op)


def _key(op: OpOverload[Any, Any]) -> str:
    """Return the name of `op` in the tables above: with its overload, if that is not the default."""
    name: str = op._schema.name
    return f"{name}.{op._schema.overload_name}" if op._schema.overload_name else name


def _is_collective(op: OpOverload[Any, Any]) -> bool:
    """Return True if `op` communicates: by its namespace, or because it takes a process group or its name."""
    if op.namespace in _COLLECTIVE_NAMESPACES:
        return True
    if op.namespace in _OWN_NAMESPACES:
        return False
    types = [(a.name, str(a.type)) for a in op._schema.arguments]
    return any(
        any(group in kind for group in _GROUP_TYPES) or (kind in _STRINGS and name.endswith(_GROUP_NAMES))
        for name, kind in types
    )


def _run_and_wait(op: OpOverload[Any, Any], *args: Any, **kwargs: Any) -> Any:
    """Run a functional collective, and wait for what it returns."""
    out = op(*args, **kwargs)
    torch.ops._c10d_functional.wait_tensor.default(out)
    return out


def _dropout_position(positional: Sequence[Any]) -> int:
    names = [a.name for a in positional]
    # Only an op that also does something else is not random at probability 0: bernoulli's p does not count.
    return names.index("dropout_p") if "dropout_p" in names else -1


def _must_save(op: OpOverload[Any, Any], collective: bool) -> str:
    if collective:
        return FUNCTIONAL_COLLECTIVE if op._schema.name in _FUNCTIONAL else "collective"
    by_data = torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags
    if by_data and _key(op) not in _SHAPED_BY_ARGUMENT:
        return SHAPED_BY_DATA
    name = op._schema.name
    if name in _DECIDING or _key(op) in _DECIDING_OVERLOADS:
        return DECIDES
    if name in _REBINDS:
        return "it moves a tensor to another storage"
    if name in _OWN_STATE:
        return "it draws from a state that its library keeps"
    return ""


def decides(facts: OpFacts, args: Args, kwargs: Kwargs, out: Any) -> bool:
    """Return True if a call turns floating-point numbers into integers or bools: indices or conditions.

    Integers computed from integers are the same a second time, for every kernel.
    """
    types = [tensor.dtype for tensor in outputs_of(out)]
    if not types or any(dtype.is_floating_point or dtype.is_complex for dtype in types):
        return False
    if facts.name.startswith("aten.new_") or facts.name.partition(".")[2].partition(".")[0].endswith("_like"):
        return False  # reads no number of its argument
    return any(t.dtype.is_floating_point or t.dtype.is_complex for t in tensors_in(args, kwargs))


def unread_argument(facts: OpFacts, args: Args, kwargs: Kwargs | None) -> Any:
    """Return the first argument if a call reads no contents of it, but only writes it or reads its shape."""
    if not (facts.may_skip_first and args):
        return None
    if facts.scales_first and not (kwargs and kwargs.get("beta") == 0):
        return None
    return args[0]


def written_tensors(facts: OpFacts, args: Args, kwargs: Kwargs | None) -> list[Tensor]:
    """Return the tensors that a call writes."""
    if facts.writes == (0,) and args and isinstance(args[0], Tensor) and not facts.writes_named:
        return [args[0]]  # an op in place
    kwargs = kwargs or {}
    if facts.writes_any:
        return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    batch_norm = bool(facts.writes) and facts.name.startswith("aten.") and "batch_norm" in facts.name
    unchanged = _STATISTICS if batch_norm and not _trains(args, kwargs) else ()
    positions = [i for i in facts.writes if i < len(args) and i not in unchanged]
    named = [kwargs[name] for name in facts.writes_named if name in kwargs]
    return list(tensors_in([*(args[i] for i in positions), *named], {}))


def tensor_versions(operands: Any) -> list[tuple[Tensor, int]]:
    """Return the plain tensors among `operands` with their version counters, which writes advance."""
    return [
        (leaf, leaf._version)
        for leaf in tree_leaves(operands)
        if isinstance(leaf, Tensor) and has_storage(leaf) and not leaf.is_inference()
    ]


def updates_statistics(facts: OpFacts, args: Args, kwargs: Kwargs) -> bool:
    """Return True if a call updates `facts.statistics`: batch norm in training."""
    return bool(facts.statistics) and _trains(args, kwargs)


def old_statistics(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments that change only the running statistics that a call returns, in compiled code.

    Args:
        name: of the op, such as "aten.mm.default".
        args: tensors, or the nodes of a graph in their place.
    """
    packet = "::".join(name.split(".")[:2])
    trains = packet.endswith("_with_update_functional") or (len(args) > 5 and args[5] is True)
    return [args[i] for i in _STATISTICS] if packet in _NEW_STATISTICS and trains else ()


def _trains(args: Args, kwargs: Kwargs) -> bool:
    """Return True if a batch norm call uses, and so updates, the statistics of its batch (argument 5)."""
    return bool(args[5] if len(args) > 5 else kwargs.get("training", True))
