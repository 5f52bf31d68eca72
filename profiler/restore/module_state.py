"""Restore the state that a model keeps in Python objects, after forwards that must not count.

A step is profiled by several forwards. A module that counts its calls, averages its inputs or fills a cache
would do so in each of them, and the first real step would compute with the wrong state. So the state is
captured before, and restored after.

NOTE [ What is restored ]
The walk starts at the modules and follows every reference: attributes, slots, items of containers,
closures, defaults of functions, bound methods, hooks, and the attributes of the user's own classes. For
each object it keeps the references, not copies (object_holders.py). It copies only the numbers of numpy
arrays and the states of random generators. Tensors are fake, or copies.

The walk does not follow Python modules, objects of the standard library and of torch (locks, queues,
optimizers), and objects that hold a running thread, since another thread's changes must not be undone.

Some changes cannot be undone. An iterator (a generator, `zip`, `itertools.count`) cannot be moved back, so
`ModuleState.guarded` replaces it by a guard, which raises CannotProfile when it is read. A large array is not
copied but compared by a checksum.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autoac.profiler.restore.object_holders import (
    MOST_COPIED_NBYTES,
    NOT_FOLLOWED,
    THREADS,
    Attributes,
    ClassAttributes,
    ClosureCells,
    FixedParts,
    Holder,
    NumpyArray,
    Slots,
    Treatment,
    attributes_of,
    kind_of,
    top_package,
)
from autoac.tape.errors import CannotProfile
from autoac.tape.torch_facts import private
from autoac.tape.torch_facts.storage_table import has_storage

log = logging.getLogger("autoac.profiler")

MOST_HOLDERS = 200_000
"""The most containers and objects that are followed in one model. A warning names a model with more."""


class ModuleState:
    """The present state of `model` and of everything that it refers to. See NOTE [ What is restored ].

    Parameters, buffers, submodules and hooks that a forward registers are removed by `restore`.

    Args:
        model: the root.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name = type(model).__name__
        self._holders: list[Holder] = []
        self._with_threads: list[tuple[Attributes, Holder, Any]] = []  # not restored; owner and key
        self._iterators: list[tuple[Holder, Any, Any]] = []  # owner, key, iterator
        self._tensors: list[tuple[Tensor, Tensor, int]] = []  # tensor, copy, version counter
        self._kinds: dict[type, tuple[Treatment, Callable[[Any], Holder] | None]] = {}
        self._slots: dict[type, Sequence[Any]] = {}
        self._seen: set[int] = set()
        modules = dict(model.named_modules())
        self._seen.update(map(id, modules.values()))
        for path, module in modules.items():
            self._add(Attributes(module.__dict__, path), None, None)
            self._slots_of(type(module))
            for value in module.__dict__.values():
                if isinstance(value, Tensor) and has_storage(value) and not value.is_inference():
                    self._tensors.append((value, value.detach().clone(), value._version))
        i = 0
        while i < len(self._holders):
            self._follow(self._holders[i])
            i += 1
        if i > MOST_HOLDERS:
            log.warning(
                "%s refers to more than %d objects: changes that a forward makes in further objects are not "
                "undone after a profile",
                self._name,
                MOST_HOLDERS,
            )

    def _follow(self, holder: Holder) -> None:
        seen, kinds = self._seen, self._kinds
        for key, value in holder.items():
            cls = type(value)
            kind, hold = kinds.get(cls) or kinds.setdefault(cls, kind_of(cls))
            if kind is Treatment.PLAIN or id(value) in seen:
                continue
            if len(self._holders) > MOST_HOLDERS:
                return
            seen.add(id(value))
            if hold is not None:
                self._add(hold(value), holder, key)
                if cls.__module__ not in ("builtins", "collections"):
                    self._add_object(value, holder, key)  # a derived class may add attributes
            elif kind is Treatment.OBJECT:
                self._add_object(value, holder, key)
            elif kind is Treatment.FUNCTION:
                self._add_function(value, holder, key)
            else:
                self._iterators.append((holder, key, value))

    def _add(self, holder: Holder, owner: Holder | None, key: Any) -> None:
        holder.owner, holder.key = owner, key
        self._holders.append(holder)

    def _add_object(self, value: Any, owner: Holder, key: Any) -> None:
        slots = self._slots_of(type(value))
        attributes = attributes_of(value)
        if attributes is not None:
            holder = Attributes(attributes)
            if any(isinstance(item, THREADS) for item in attributes.values()):
                self._with_threads.append((holder, owner, key))
                return
            self._add(holder, owner, key)
        if slots:
            self._add(Slots(value, slots), owner, key)

    def _add_function(self, value: types.FunctionType, owner: Holder, key: Any) -> None:
        if top_package(value) in NOT_FOLLOWED:
            return
        if value.__closure__:
            self._add(ClosureCells(value), owner, key)
        if value.__dict__:
            self._add(Attributes(value.__dict__), owner, key)
        if value.__defaults__ or value.__kwdefaults__:
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            self._add(FixedParts(defaults), owner, key)

    def _slots_of(self, cls: type) -> Sequence[Any]:
        """Return the slots of a class, and hold the attributes of the class and its bases."""
        known = self._slots.get(cls)
        if known is not None:
            return known
        slots: list[Any] = []
        self._slots[cls] = slots
        for base in cls.__mro__:
            if "__slots__" in vars(base):
                slots += [d for d in vars(base).values() if type(d) is types.MemberDescriptorType]
            if id(base) not in self._seen and top_package(base) not in NOT_FOLLOWED:
                self._seen.add(id(base))
                self._add(ClassAttributes(base), None, None)
        return slots

    def restore(self) -> None:
        """Put back the references and tensors that were there when this object was made."""
        for holder in self._holders:
            holder.restore()
        for tensor, copy, version in self._tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(copy)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Raise an error for any change in the with-block that `restore` cannot undo. Then call `restore`.

        Raises:
            CannotProfile: a forward in the block reads from an iterator; or, when the block ends, a large
                array has changed.
        """
        for holder, key, value in self._iterators:
            guard = _IteratorGuard(self._name, holder.path(key), type(value).__name__)
            while not holder.replace(key, guard) and holder.owner is not None:
                holder, key = holder.owner, holder.key
        yield
        for holder in self._holders:
            if isinstance(holder, NumpyArray) and holder.changed():
                assert holder.owner is not None
                raise CannotProfile(
                    self._name,
                    f"its forward writes to {holder.owner.path(holder.key)}, a numpy array of more than "
                    f"{MOST_COPIED_NBYTES >> 20} MiB, and a profile runs several forwards",
                    "keep these numbers in a tensor",
                )
        for attributes, owner, key in self._with_threads:
            if attributes.changed():
                log.warning(
                    "%s: %s holds a thread, so changes to it while the step was profiled are not undone: "
                    "a counter in it counts every forward of the profile",
                    self._name,
                    owner.path(key),
                )


class _IteratorGuard:
    """Raise CannotProfile when a profiled forward reads the iterator that this object replaces."""

    def __init__(self, model: str, path: str, kind: str) -> None:
        self.__where = model, path, kind

    def __iter__(self) -> NoReturn:
        self.__refuse()

    def __next__(self) -> NoReturn:
        self.__refuse()

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        self.__refuse()

    def __getitem__(self, _key: Any) -> NoReturn:
        self.__refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__refuse()

    def __refuse(self) -> NoReturn:
        model, path, kind = self.__where
        raise CannotProfile(
            model,
            f"its forward reads {path}, a {kind}, which cannot be moved back, and a profile runs several "
            "forwards",
            "keep the items in a list with a position, or pass them in the batch",
        )


@contextmanager
def modules_restored(model: nn.Module) -> Iterator[None]:
    """Restore the state of `model` at the end.

    Raises:
        CannotProfile: a forward inside makes a change that cannot be undone.
    """
    before = ModuleState(model)
    try:
        with before.guarded():
            yield
    finally:
        before.restore()


@contextmanager
def parametrization_cache_restored() -> Iterator[None]:
    """Restore what `torch.nn.utils.parametrize.cached` holds: inside, it is computed from other
    parameters."""
    before = dict(private.parametrization_cache())
    try:
        yield
    finally:
        clear_parametrization_cache()
        private.parametrization_cache().update(before)


def clear_parametrization_cache() -> None:
    """Have parametrized weights computed again."""
    private.parametrization_cache().clear()
