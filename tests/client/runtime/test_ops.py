"""Test that every operator in torch's own tests gives the bits of the plain step when it is recomputed.

The samples are from `torch.testing._internal`. AUTOAC_OP_SAMPLES sets how many samples of each operator and
dtype run. Without it there are two, and one complex sample. With a number or "all", each dtype of DTYPES
runs.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from stepping import EventLog, recomputed, seed
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from autoac.tape.runtime.policy_context import save_recompute_policy

Function = Callable[..., Any]

SAMPLES = os.environ.get("AUTOAC_OP_SAMPLES", "")
DTYPES = (torch.float64, torch.complex128, torch.float32, torch.bfloat16, torch.int64, torch.bool)

UNINITIALISED = "shows memory as it finds it"
READS_UNINITIALISED = "LAPACK's driver reads memory as it finds it"
LOSES_OUT = "torch: under any dispatch mode, also an empty one, the result does not get into `out`"
OTHER_ALGORITHM = "torch: under any dispatch mode, also an empty one, another algorithm, and other last bits"

# Operators that may give other bits, and why.
EXCEPTIONS = {
    "empty": UNINITIALISED,
    "empty_like": UNINITIALISED,
    "empty_permuted": UNINITIALISED,
    "empty_strided": UNINITIALISED,
    "new_empty": UNINITIALISED,
    "new_empty_strided": UNINITIALISED,
    "linalg.lstsq": READS_UNINITIALISED,
    "linalg.lstsq.grad_oriented": READS_UNINITIALISED,
    "linalg.matrix_rank": LOSES_OUT,
    "linalg.matrix_rank.hermitian": LOSES_OUT,
    "linalg.cond": OTHER_ALGORITHM,  # with out=, like the two norms
    "linalg.matrix_norm": OTHER_ALGORITHM,
    "linalg.norm": OTHER_ALGORITHM,
    "norm.nuc": OTHER_ALGORITHM,
    "linalg.pinv": OTHER_ALGORITHM,  # for complex numbers
    "linalg.pinv.singular": OTHER_ALGORITHM,
    "pinverse": OTHER_ALGORITHM,
    "linalg.polar": OTHER_ALGORITHM,  # for complex numbers; new in torch 2.14, like the next
    "linalg.matrix_sqrth": OTHER_ALGORITHM,
}


def called(function: Function, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def under_autocast(function: Function, args: Any, kwargs: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(*args, **kwargs)


def in_place(function: Function, args: Any, kwargs: Any) -> Any:
    """Return variants of in-place writes: to a whole tensor, to a part of one, and after a read."""
    first, *rest = args
    larger = torch.stack([first, first])
    before = first.clone() if first.dtype == torch.bool else first + 1
    function(first, *rest, **kwargs)
    function(larger[0], *rest, **kwargs)
    return first, larger, before


def through_out(function: Function, args: Any, kwargs: Any) -> Any:
    """Return variants of out=: buffers of the right size, and buffers that the op enlarges."""
    with torch.no_grad():
        like = function(*args, **kwargs)
        right = tree_map_only(Tensor, torch.zeros_like, like)
        empty = tree_map_only(Tensor, lambda t: t.new_empty(0), like)
        for out in (right, empty):
            function(*args, **kwargs, out=out)
    return right, empty


FORMS: dict[str, tuple[Function, Callable[[Any], Function | None]]] = {
    "called": (called, lambda op: op.op),
    "under autocast": (under_autocast, lambda op: op.op),
    "in place": (in_place, lambda op: op.inplace_variant),
    "through out=": (through_out, lambda op: op.op if op.supports_out else None),
}


def samples(op: Any, *, complex_too: bool) -> Iterator[tuple[str, Any]]:
    """Yield samples of an operator with their names."""
    dtypes = [dtype for dtype in DTYPES if dtype in op.supported_dtypes("cpu")]
    if not SAMPLES:
        dtypes = [d for d in dtypes[:2] if d is dtypes[0] or (complex_too and d.is_complex)]
    for dtype in dtypes:
        differentiable = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        number = None if SAMPLES == "all" else int(SAMPLES) if SAMPLES else 2 if dtype is dtypes[0] else 1
        found = op.sample_inputs("cpu", dtype, requires_grad=differentiable)
        for i, sample in enumerate(islice(found, number)):
            yield f"{op.full_name} {dtype} #{i}", sample


def results(
    run: Callable[..., Any], given: Any, policy: Any, log: EventLog | None = None
) -> list[Tensor | None]:
    """Return the outputs of `run`, its inputs afterwards, all gradients, and the generator state.

    Backward reads every tensor, also those without a derivative, for the gradient of a factor. So recomputed
    tensors are compared.
    """
    seed(0)
    leaves = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), given)
    factor = torch.tensor(1.25, dtype=torch.float64, requires_grad=True)
    with save_recompute_policy(policy, log=log) if policy is not None else contextlib.nullcontext():
        arguments = tree_map_only(Tensor, torch.clone, leaves)  # tensors that are not saved
        out = run(*arguments)
        made = [t for t in tree_leaves((out, arguments)) if isinstance(t, Tensor)]
        products = [t * factor for t in made if t.layout is torch.strided and not t.is_nested]
    ends = [t for t in (*products, *made) if t.requires_grad]
    starts = [t for t in (*tree_leaves(leaves), factor) if isinstance(t, Tensor) and t.requires_grad]
    gradients = torch.autograd.grad(ends, starts, [torch.ones_like(t) for t in ends], allow_unused=True)
    return [*(t.detach().clone() for t in made), *gradients, torch.get_rng_state()]


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return True if two results have the same bits; all NaNs count as equal."""
    if a is None or b is None:
        return a is b
    if (a.layout, a.dtype, a.shape) != (b.layout, b.dtype, b.shape):
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    if a.element_size() > 1:
        a, b = (t.masked_fill(t.isnan(), torch.nan) for t in (a, b))
    a, b = (t.contiguous().view(bits) for t in (a, b))
    return torch.equal(a, b)


def all_same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("ignore")
def test_recomputed_op_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # For each sample torch inspects the stack for a unittest.TestCase. That finds none, in 80 % of the time.
    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)

    form, variant = FORMS[name]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    log = EventLog()
    for op in op_db:
        function = variant(op)
        if function is None:
            continue
        for what, sample in samples(op, complex_too=form is called):

            def run(
                first: Any, rest: Any, kwargs: Any, function: Any = function, sample: Any = sample
            ) -> Any:
                out = form(function, (first, *rest), kwargs)
                # The vectors of a decomposition are only determined up to a phase.
                return sample.output_process_fn_grad(out) if form in (called, under_autocast) else out

            given = (sample.input, sample.args, sample.kwargs)
            try:
                plain, again = results(run, given, None), results(run, given, None)
            except Exception:  # noqa: BLE001
                counts["raises plainly"] += 1
                continue
            if not all_same(plain, again):
                counts["differs plainly"] += 1
                continue
            counts["compared"] += 1
            try:
                planned = results(run, given, "recompute_all", log)
            except Exception as error:  # noqa: BLE001
                wrong.append(f"{what}: {type(error).__name__}: {error}")
                continue
            if all_same(plain, planned):
                continue
            if op.full_name in EXCEPTIONS:
                counts["excepted"] += 1
            else:
                wrong.append(f"{what}: other bits")
    print(name, dict(counts), dict(Counter(kind for kind, _ in log.events)))
    assert not wrong, "\n".join(wrong)
    # Require that enough was compared and recomputed.
    assert counts["compared"] > 2 * (counts["raises plainly"] + counts["differs plainly"])
    assert len(recomputed(log)) > counts["compared"]


def conjugates_and_negatives(x: Tensor, c: Tensor) -> Any:
    mirrored, negative = c.conj(), c.conj().imag
    written = (c * 2).conj()
    before = written + 1
    written.mul_(c)
    written.imag.add_(1.5)
    return mirrored * c, mirrored.t() @ c, negative * c.real, negative.exp(), written.sin(), before.sin()


def written_through_a_negative(x: Tensor, c: Tensor) -> Any:
    with torch.no_grad():
        other = (c * 2).conj()
        torch.mul(c, c, out=other)
        torch.sin(c.real, out=other.imag)
    return other * c


def quantized(x: Tensor, c: Tensor) -> Any:
    coarse = torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.qint8)
    return coarse.dequantize() * x, coarse[1:].dequantize() * x[1:], coarse.int_repr() * x


BY_HAND = (conjugates_and_negatives, written_through_a_negative, quantized)


def one_in(number: int, rest: int) -> Callable[..., bool]:
    """Return a policy that saves every n-th op."""
    calls = iter(range(10**9))
    return lambda ctx, out, op, *args, **kwargs: next(calls) % number == rest


POLICIES = {
    "recompute all": lambda: "recompute_all",
    "must recompute": lambda: CheckpointPolicy.MUST_RECOMPUTE,
    "save the first of two": lambda: one_in(2, 0),
    "save the second of two": lambda: one_in(2, 1),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", BY_HAND)
@pytest.mark.filterwarnings("ignore")
def test_ops_without_samples_give_the_same_bits(case: Function, policy: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    c = torch.randn(3, 6, dtype=torch.complex128, generator=generator, requires_grad=True)
    plain = results(case, (x, c), None)
    assert all_same(plain, results(case, (x, c), None))
    assert all_same(plain, results(case, (x, c), POLICIES[policy]()))
