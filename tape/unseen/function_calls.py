"""See each call of a `torch.autograd.Function` as one op: what it makes, and if it may run again.

Theory of operation
===================

Functions are the unit in which kernels come that PyTorch does not dispatch (Triton, pybind, ctypes). What
such a kernel writes is not an output of a visible op, so the ops inside of a Function must not run again one
by one. Its `forward` may run again as a whole: it is the user's Python, unseen kernels included.

While a recording mode is active, `Function.apply` goes through `run_function` of that mode. The mode makes a
`FunctionCall`, which watches the call:

1. Visible ops inside say which storages the call *made*, and if it communicated or wrote anything else.
2. After `forward`, autograd packs what the call saved, in order; then the call returns. The storages among
   these that the call made are its *slots*: the outputs of the op that it is.
3. A `FunctionRerun` calls `forward` again and returns the contents of the slots.

NOTE [ What a Function does unseen ]
The first call of a kind (Function, types of its arguments) is examined: arguments are fingerprinted before
and after, and `forward` runs a second time and must make the same contents. A kind that makes other numbers
the second time, or writes more than `SMALL` bytes of its arguments, is saved from then on (`reason`). The
kinds are remembered for the life of the process, like the facts about ops.

A call that writes little (a history of maxima, a counter) may run again: on copies of what it writes, with
the contents from before the call. So the arguments have the values that the call in forward gave them.

In backward, `forward` may read other Python state than it did in forward. So the first backward that runs
calls of a kind again, by module or code (`FunctionRerun.is_compared`), compares contents. If they differ,
the kind is saved from then on.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoac.planner.formats.profile import (
    CAPTURED,
    COMMUNICATES,
    DIFFERS,
    OWN_GENERATOR,
    WRAPPED,
    WRITES_ARGUMENTS,
    WRITES_OUTSIDE,
)
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.op_facts import OpFacts, written_tensors
from autoac.tape.torch_facts.op_signature import outputs_of, tensors_in
from autoac.tape.torch_facts.storage_table import has_storage
from autoac.tape.torch_facts.view_recipes import make_view, recipe_of
from autoac.tape.unseen.ambient_state import AmbientState
from autoac.tape.unseen.call_arguments import CallArguments, Placeholder
from autoac.tape.unseen.fingerprints import (
    Comparison,
    Fingerprint,
    KeptWeights,
    can_compare,
    fingerprint,
    fingerprint_of,
    same_contents,
)

Apply = Callable[..., Any]

SMALL = 64 * 1024
"""Bytes of the arguments that a call may write and run again; a copy lives from the call to its backward."""


class _Kind(NamedTuple):
    """Facts about the calls of one kind that no visible op shows."""

    reason: str  # why they must be saved; "" if they may run again
    written: tuple[int, ...]  # which of the storages of their arguments they write
    unseen: bool  # kernels that PyTorch does not dispatch write them


_known: weakref.WeakKeyDictionary[type, dict[Any, _Kind]] = weakref.WeakKeyDictionary()
# Kinds whose contents a backward has compared, each with the module or the code that calls the Function.
_compared: weakref.WeakKeyDictionary[type, set[tuple[Any, Any]]] = weakref.WeakKeyDictionary()
_facts: weakref.WeakKeyDictionary[type, OpFacts] = weakref.WeakKeyDictionary()


def watch_functions() -> None:
    """Send calls of Functions through the innermost recording mode of their thread, from now on.

    A Function's `apply` is often looked up once and kept (`apply = F.apply`). So what it calls is replaced.
    Since torch 2.14 it calls nothing that can be: one that was looked up earlier is refused while a mode
    records.
    """
    if "apply" not in private.SingleLevelFunction.__dict__:
        private.SingleLevelFunction.apply = classmethod(_apply)
        function: Any = torch.autograd.Function
        if not isinstance(vars(function)["apply"], classmethod):  # it is C++
            function.apply = classmethod(_apply)
            private.BackwardCFunction.__init__ = _check_seen


def _apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    plain = super(private.SingleLevelFunction, cls).apply
    run = _recording(cls)
    if run is None:
        if (note_wrappers := _innermost("note_wrappers")) is not None:
            # Such as that of DTensor.to_local, which runs no op on the DTensor.
            note_wrappers([arg for arg in args if isinstance(arg, Tensor)])
        return plain(*args, **kwargs)
    return run(cls, args, kwargs, partial(_seen, cls, plain))


def _innermost(method: str) -> Any:
    """Return a method of the innermost recording mode; None if nothing records."""
    modes = private.get_current_dispatch_mode_stack() if private.len_dispatch_stack() else ()
    return next((getattr(mode, method) for mode in reversed(modes) if hasattr(mode, method)), None)


def _recording(cls: type) -> Any:
    """Return what the innermost recording mode does with a call of a Function; None if nothing records it."""
    return None if _is_known(cls) else _innermost("run_function")


class _Calls(threading.local):
    seen: type | None = None  # the Function whose node comes next


_calls = _Calls()


def _seen(cls: type, plain: Apply, *args: Any, **kwargs: Any) -> Any:
    _calls.seen = cls
    return plain(*args, **kwargs)


def _check_seen(node: Any) -> None:
    """Refuse a call of a Function that a recording mode does not see, when torch makes its node."""
    cls, seen = type(node)._forward_cls, _calls.seen
    _calls.seen = None
    if seen is not cls and private.graph_of_function(cls) is None and _recording(cls) is not None:
        raise RuntimeError(
            f"{cls.__qualname__}.apply was looked up before anything was planned, and torch "
            f"{torch.__version__} shows its calls to nobody: call {cls.__name__}.apply(...) by its name, or "
            "look it up after a first ac_client.checkpoint or planned step"
        )


def _is_known(cls: type) -> bool:
    """Return True for the Functions of torch itself and of this package, whose kernels are all dispatched.

    Those of compiled graphs are not known, except where running again would have effects.
    """
    if (graph := private.graph_of_function(cls)) is not None:
        return bool(graph.tokens) or any(info.mutates_data for info in graph.input_info)
    return cls.__module__.partition(".")[0] in ("torch", "autoac")


def facts_of_function(cls: type) -> OpFacts:
    """Return facts about a Function, in the form of those about an op."""
    facts = _facts.get(cls)
    if facts is None:
        name = "".join(c if c.isalnum() or c == "_" else "_" for c in cls.__name__)
        facts = _facts[cls] = OpFacts(name=name, name_in_keys=name, call=cls, function=True)
    return facts


class FunctionRerun:
    """Runs the forward of a recorded call again, and returns the contents of its slots, in order.

    Attributes:
        slots: of the call.
        has_run: True if backward ran the call again.
    """

    def __init__(self, cls: type, kind: Any, arguments: CallArguments, ambient: AmbientState) -> None:
        self._cls = cls
        self._kind = kind
        self._arguments = arguments
        self._ambient = ambient
        self.slots: list[_Slot] = []
        self.has_run = False

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run forward on `tensors`, which take the place of the tensors of the call.

        Raises:
            RuntimeError: forward did not make what it made the first time.
        """
        cls: Any = self._cls
        self.has_run = True
        args, kwargs = self._arguments.with_tensors(tensors)
        _calls.seen = cls
        context = cls._backward_cls()
        context.needs_input_grad = self._arguments.needs_grad
        with self._ambient.restored(), torch.no_grad():
            if private.is_setup_context_defined(cls.setup_context):
                out = cls.forward(*args, **kwargs)
                cls.setup_context(context, tuple(args), out)
            else:
                out = cls.forward(context, *args, **kwargs)
        saved = [tensor for tensor in context.to_save or () if tensor is not None]
        found = {True: saved, False: list(outputs_of(out))}
        contents = []
        for slot in self.slots:
            made = found[slot.is_saved]
            tensor = made[slot.position] if slot.position < len(made) else None
            if tensor is None or _layout(tensor) != slot.layout:
                raise self._mismatch(slot, tensor)
            contents.append(tensor.detach())
        return tuple(contents)

    def is_compared(self, where: Any) -> bool:
        """Return True if a backward has compared calls of this kind in `where`, a module or code."""
        return (self._kind, where) in _compared.get(self._cls, ())

    def note_compared(self, where: Any) -> None:
        """Note that a backward has compared calls of this kind in `where`."""
        _compared.setdefault(self._cls, set()).add((self._kind, where))

    def note_difference(self) -> None:
        """Have calls of this kind saved from now on."""
        known = _known[self._cls]
        kind = known.get(self._kind, _Kind("", (), False))
        known[self._kind] = kind._replace(reason=DIFFERS)

    def _mismatch(self, slot: _Slot, tensor: Tensor | None) -> RuntimeError:
        self.note_difference()
        what = f"{'saved tensor' if slot.is_saved else 'output'} {slot.position}"
        return RuntimeError(
            f"{self._cls.__name__}.forward must make in backward what it made in forward, got for {what}: "
            f"{_layout(tensor) if tensor is not None else 'nothing'}; expected {slot.layout}. It depends on "
            "something besides its arguments. Keep it from running again with "
            'ac_client.pin(module, "must_save")'
        )


class _Slot(NamedTuple):
    """A storage that a call made: where to find it when the call runs again, and how large it is."""

    position: int
    is_saved: bool  # True: found among what save_for_backward got, False: in what was returned
    layout: tuple[Any, ...]


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return *recipe_of(tensor), tensor.untyped_storage().nbytes()


class FunctionCall:
    """One call of a Function while it runs. See the theory of operation above.

    Attributes:
        facts: of the Function, in the form of those about an op.
        arguments: of the call.
        reason: why the call must be saved; "" if it may run again. It may be set until autograd packs what
            the call saves or `run` returns, and for the first call of a kind, by `examine`.
        written: the arguments that the call writes, a tensor on each storage. Complete once `run` returns.
        unseen: True if kernels that PyTorch does not dispatch write some of them.
        small: the arguments on storages of at most `SMALL` bytes, a tensor on each.
        made: the storages that visible ops inside have made, by address.
        rerun: runs the call again; None if it was known beforehand that the call must be saved.
        hiding: in it, contents are compared.
    """

    def __init__(self, cls: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._cls = cls
        self.facts = facts_of_function(cls)
        self._args, self._kwargs = args, kwargs
        self.arguments = CallArguments(args, kwargs)
        self.made: set[int] = set()
        self._compiled = private.graph_of_function(cls) is not None
        self.reason = WRAPPED if self.arguments.wrapped else ""
        plain = [tensor for tensor in self.arguments.tensors if has_storage(tensor)]
        if len(plain) < len(self.arguments.tensors):
            self.reason = self.reason or WRAPPED
        self._given = {tensor.untyped_storage()._cdata: tensor for tensor in plain}
        storages = list(self._given.values())
        order = {address: i for i, address in enumerate(self._given)}
        aliases = tuple(order[tensor.untyped_storage()._cdata] for tensor in plain)
        # Each graph has a Function of its own.
        kind = () if self._compiled else (_kind_of(self.arguments), aliases)
        known = _known.setdefault(cls, {}).get(kind)
        self.small = [tensor for tensor in storages if tensor.untyped_storage().nbytes() <= SMALL]
        self.hiding: Callable[[], AbstractContextManager[None]] = nullcontext
        self._examination: _Examination | None = None
        self.written: list[Tensor] = []
        self.unseen = known is not None and known.unseen
        self._writing: list[Tensor] = []  # what the visible op writes that runs
        if known is not None:
            self.reason = self.reason or known.reason
            for i in known.written:
                self._note_written(storages[i])
        elif not self.reason and Comparison.enabled and all(map(can_compare, plain)):
            self._examination = _Examination(kind, storages, self.small)
        self.rerun: FunctionRerun | None = None
        if not self.reason:
            device = plain[0].device if plain else torch.device("cpu")
            self.rerun = FunctionRerun(cls, kind, self.arguments, AmbientState(device))
        self._slots: dict[int, int] = {}
        self._n_saved = 0

    @property
    def examined(self) -> bool:
        """Return True if this is the first call of its kind."""
        return self._examination is not None

    def run(self, apply: Apply) -> Any:
        """Call the Function and return what it returned."""
        if self._examination is not None:
            with self.hiding():
                self._examination.begin()
        out = apply(*self._args, **self._kwargs)
        self._conclude()
        self._args, self._kwargs = (), {}
        return out

    def is_forward_over(self, depth: int) -> bool:
        """Return True if autograd packs what the call saves, and not what a graph inside of it saves.

        Args:
            depth: number of Python frames from the caller of this method up to what autograd called.
        """
        caller = sys._getframe(depth + 1)  # `_seen`, which `run` calls
        over = caller.f_code is _SEEN and caller.f_back is not None and caller.f_back.f_code is _RUN
        if over:
            self._conclude()
        return over

    def note_captured(self) -> None:
        """Note that the compiled code of the call is a CUDA graph, which owns its outputs."""
        self.reason = self.reason or CAPTURED
        self._compiled = False

    def note_op(self, facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note a visible op inside of the call, which is about to run."""
        if facts.collective:
            self.reason = self.reason or COMMUNICATES
        if facts.mutates:
            for tensor in written_tensors(facts, args, kwargs):
                if not self.made_storage(tensor):
                    self._note_written(tensor)
                    if self._examination is not None and has_storage(tensor):
                        with self.hiding():
                            self.unseen |= self._examination.is_changed(tensor)
                        self._writing.append(tensor)
        if facts.random and any(isinstance(arg, torch.Generator) for arg in (*args, *kwargs.values())):
            self.reason = self.reason or OWN_GENERATOR

    def _note_written(self, tensor: Tensor) -> None:
        given = self._given.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None
        if given is None:
            self.reason = self.reason or WRITES_OUTSIDE
            return
        if all(given is not other for other in self.written):
            self.written.append(given)
        if sum(other.untyped_storage().nbytes() for other in self.written) > SMALL:
            self.reason = self.reason or WRITES_ARGUMENTS

    def note_outputs(self, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Note the storages that a visible op inside of the call has made."""
        while self._writing and self._examination is not None:
            with self.hiding():
                self._examination.note_contents(self._writing.pop())
        given = {t.untyped_storage()._cdata for t in tensors_in(args, kwargs) if has_storage(t)}
        for tensor in outputs_of(out):
            if has_storage(tensor) and (address := tensor.untyped_storage()._cdata) not in given:
                self.made.add(address)

    def made_storage(self, tensor: Tensor) -> bool:
        """Return True if the call has made the storage of `tensor`: by visible ops, or by compiled code."""
        if not has_storage(tensor):
            return False
        address = tensor.untyped_storage()._cdata
        return address in self.made or (self._compiled and address not in self._given)

    def saved_slot(self, tensor: Tensor) -> int | None:
        """Return the slot of a tensor that the call saves; None for one that it did not make."""
        self._n_saved += 1
        return self._slot_of(tensor, self._n_saved - 1, is_saved=True)

    def returned_slots(self, out: Any) -> Iterator[tuple[int, Tensor]]:
        """Yield the outputs that the call made, each with its slot."""
        for i, tensor in enumerate(outputs_of(out)):
            slot = self._slot_of(tensor, i, is_saved=False)
            if slot is not None:
                yield slot, tensor

    def _slot_of(self, tensor: Tensor, index: int, *, is_saved: bool) -> int | None:
        if not self.made_storage(tensor):
            return None
        address = tensor.untyped_storage()._cdata
        slot = self._slots.get(address)
        if slot is None:
            slot = self._slots[address] = len(self._slots)
            if self.rerun is not None:
                self.rerun.slots.append(_Slot(index, is_saved, _layout(tensor)))
            if self._examination is not None:
                self._examination.contents.append(tensor.detach())
        return slot

    def _conclude(self) -> None:
        if self._examination is None:
            return
        with self.hiding():
            written = self._examination.written()
        for tensor in written:
            self.unseen = True
            self._note_written(tensor)

    def examine(self) -> list[Tensor]:
        """Run the first call of its kind a second time, compare, and remember the result for all calls.

        Call it after `returned_slots`, where dispatch modes do not record. Return the contents of the slots,
        if this is the first call.
        """
        first, self._examination = self._examination, None
        if first is None:
            return []
        if first.contents and not self.reason and self.rerun is not None:
            try:
                again = self.rerun(*first.arguments(self.arguments.tensors))
                same = all(map(same_contents, map(fingerprint, first.contents), map(fingerprint, again)))
            except RuntimeError:  # what it makes has another shape, or it cannot run twice
                same = False
            self.rerun.has_run = False  # in backward
            if not same:
                self.reason = DIFFERS
        _known[self._cls][first.kind] = _Kind(self.reason, first.positions(self.written), self.unseen)
        return first.contents

    def finish(self) -> None:
        """Forget the tensors of the call."""
        self.arguments.release()
        self.written, self.small, self._given = [], [], {}


_RUN: CodeType = FunctionCall.run.__code__
_SEEN: CodeType = _seen.__code__


class _Examination:
    """Compares what the first call of a kind reads and makes: NOTE [ What a Function does unseen ].

    Attributes:
        kind: of the call.
        contents: of the slots.
    """

    def __init__(self, kind: Any, storages: Sequence[Tensor], small: Sequence[Tensor]) -> None:
        self.kind = kind
        self.contents: list[Tensor] = []
        self._storages = storages  # of the arguments: a tensor on each
        self._small = small  # of these: what a call may write and run again
        self._copies: dict[int, torch.UntypedStorage] = {}  # of `small`, from before the call
        self._expected: dict[int, Fingerprint] = {}  # of storages, as visible ops have left them
        self._weights: KeptWeights | None = None

    def begin(self) -> None:
        """Take the fingerprints of the arguments, and copies of the small ones."""
        hidden = private.DisableTorchDispatch()  # in force until it is deleted
        for tensor in self._small:
            self._copies[tensor.untyped_storage()._cdata] = tensor.untyped_storage().clone()
        del hidden
        self._weights = KeptWeights()
        for tensor in self._storages:
            self.note_contents(tensor)

    def note_contents(self, tensor: Tensor) -> None:
        """Note the contents of the storage of `tensor`: those before the call, or what a visible op wrote."""
        self._expected[tensor.untyped_storage()._cdata] = fingerprint_of(tensor.untyped_storage())

    def is_changed(self, tensor: Tensor) -> bool:
        """Return True if the storage of an argument has contents that were not noted."""
        expected = self._expected.get(tensor.untyped_storage()._cdata)
        return expected is not None and not same_contents(expected, fingerprint_of(tensor.untyped_storage()))

    def written(self) -> list[Tensor]:
        """Return the arguments that no visible op has written; [] if this was called before."""
        written = [tensor for tensor in self._storages if self.is_changed(tensor)]
        self._expected.clear()
        return written

    def arguments(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return `tensors`, the small ones on copies from before the call, which a second run may write."""
        copies = [self._copies.get(tensor.untyped_storage()._cdata) for tensor in tensors]
        pairs = zip(tensors, copies, strict=True)
        return [tensor if copy is None else make_view(copy, recipe_of(tensor)) for tensor, copy in pairs]

    def positions(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the positions of `tensors` among the storages of the arguments."""
        written = {id(tensor) for tensor in tensors}
        return tuple(i for i, tensor in enumerate(self._storages) if id(tensor) in written)


def _kind_of(arguments: CallArguments) -> Any:
    """Return a key: calls of one Function with the same key are expected to do the same to their tensors."""

    def describe(value: Any) -> Any:
        kind = type(value)
        if kind is Placeholder:
            tensor = arguments.tensors[value]
            return tensor.dtype, tensor.dim(), tensor.requires_grad, tensor.device.type
        if kind is tuple or kind is list:
            return kind, tuple(describe(item) for item in value)
        if kind is dict:
            return kind, tuple((str(key), describe(item)) for key, item in value.items())
        return value if kind in (bool, int, str, type(None)) else kind

    named = tuple((name, describe(arg)) for name, arg in arguments.kwargs.items())
    return (*(describe(arg) for arg in arguments.args), *named, torch.is_grad_enabled())
