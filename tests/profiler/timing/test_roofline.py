"""Test the estimates from a datasheet: kinds of kernel, their efficiencies, peaks by type."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch

from autoac.profiler import DATASHEETS, Device, KernelKind
from autoac.profiler.timing.roofline import kind_of
from autoac.tape.torch_facts.op_facts import facts_of
from autoac.tape.torch_facts.op_signature import flops_of

aten = torch.ops.aten


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


QUERY = on_meta(1, 4, 64, 64)
CALLS: dict[KernelKind, list[tuple[Any, tuple[Any, ...]]]] = {
    KernelKind.PRODUCT: [
        (aten.mm.default, (on_meta(64, 32), on_meta(32, 16))),
        (aten.addmm.default, (on_meta(16), on_meta(64, 32), on_meta(32, 16))),
        (
            aten.convolution.default,
            (on_meta(2, 3, 8, 8), on_meta(4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        ),
    ],
    KernelKind.ATTENTION: [(aten._scaled_dot_product_flash_attention.default, (QUERY, QUERY, QUERY))],
    KernelKind.CUDNN_ATTENTION: [
        (aten._scaled_dot_product_cudnn_attention.default, (QUERY, QUERY, QUERY, None, True))
    ],
    KernelKind.NORM: [
        (aten.native_layer_norm.default, (on_meta(8, 32), [32], None, None, 1e-5)),
        (aten._softmax.default, (on_meta(8, 32), -1, False)),
        (aten.sum.dim_IntList, (on_meta(8, 32), [1])),
    ],
    KernelKind.POINTWISE: [
        (aten.gelu.default, (on_meta(8, 32),)),
        (aten.add.Tensor, (on_meta(8, 32), on_meta(8, 32))),
        (aten._to_copy.default, (on_meta(8, 32),)),
    ],
    KernelKind.OTHER: [
        (aten.embedding.default, (on_meta(10, 32), on_meta(8, dtype=torch.int64))),
        (aten.sort.default, (on_meta(8, 32),)),
    ],
}


def at_efficiency(kind: KernelKind, efficiency: float) -> Device:
    """Return a device with one peak for arithmetic and one for moving, on which `kind` is slower."""
    parts = dict.fromkeys(KernelKind, 1.0) | {kind: efficiency}
    return Device("a device", {}, 1e12, 1e9, 2**30, launch_us=0.0, efficiency=parts)


@pytest.mark.parametrize(
    ("kind", "func", "args"), [(k, *call) for k, calls in CALLS.items() for call in calls]
)
def test_op_is_slower_by_the_efficiency_of_its_kind_alone(kind: KernelKind, func: Any, args: Any) -> None:
    out = func(*args)
    full, halved = (
        at_efficiency(kind, part).runtime_us(facts_of(func), func, args, {}, out) for part in (1, 0.5)
    )
    assert halved == 2 * full > 0
    assert kind_of(func, str(func).rpartition(".")[0], flops_of(func, args, {}, out)) is kind


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_convolution_does_twice_the_work_in_backward_for_any_groups(groups: int) -> None:
    """The flop counter of torch forgets the groups in the gradient of the weight."""
    x, weight = on_meta(2, 8, 16, 16), on_meta(8, 8 // groups, 3, 3)
    layout = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    func, out = aten.convolution.default, on_meta(2, 8, 16, 16)
    forward = flops_of(func, (x, weight, None, *layout), {}, out)
    backward_args = (out, x, weight, None, *layout, [True, True, False])
    assert flops_of(aten.convolution_backward.default, backward_args, {}, (x, weight, None)) == 2 * forward


def test_attention_with_fewer_heads_of_keys_counts_as_with_as_many() -> None:
    """Up to 2.12, torch has no count for it and raises, in the user's forward."""
    query, key, grouped = on_meta(2, 8, 64, 16), on_meta(2, 8, 64, 16), on_meta(2, 2, 64, 16)
    forward, rest = aten._scaled_dot_product_flash_attention.default, (None, None, 64, 64, 0.0, False)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    assert flops_of(forward, (query, grouped, grouped), {}, (query,)) == 2 * 2 * 2 * 8 * 64 * 64 * 16
    assert flops_of(backward, (query, query, grouped, grouped, query, query, *rest), {}, (query,)) == (
        flops_of(backward, (query, query, key, key, query, query, *rest), {}, (query,))
    )


def test_attention_of_a_shape_that_torch_does_not_count_counts_nothing() -> None:
    query = on_meta(8, 64, 16)
    assert flops_of(aten._scaled_dot_product_flash_attention.default, (query,) * 3, {}, (query,)) == 0


@pytest.mark.parametrize("name", DATASHEETS)
def test_datasheet_has_an_efficiency_for_each_kind(name: str) -> None:
    sheet = DATASHEETS[name]
    assert set(sheet.efficiency) == set(KernelKind)
    assert all(0 < part <= 1 for part in sheet.efficiency.values())
    assert isinstance(sheet.efficiency, MappingProxyType), "datasheets are shared"


def test_flash_attention_is_slower_than_that_of_cudnn_on_hopper_only() -> None:
    """Its kernel predates the instructions of that architecture."""
    parts = {name: sheet.efficiency for name, sheet in DATASHEETS.items()}
    slower = {
        name for name, part in parts.items() if part[KernelKind.ATTENTION] < part[KernelKind.CUDNN_ATTENTION]
    }
    assert slower == {"h100", "h200"}


@pytest.mark.parametrize("packet", [aten.mm, aten.addmm, aten.bmm, aten.baddbmm])
def test_products_with_a_type_for_their_output_count_as_others(packet: Any) -> None:
    batch = [2] if packet in (aten.bmm, aten.baddbmm) else []
    a, b = on_meta(*batch, 4, 8, dtype=torch.bfloat16), on_meta(*batch, 8, 6, dtype=torch.bfloat16)
    added = [on_meta(*batch, 4, 6)] if packet in (aten.addmm, aten.baddbmm) else []
    out = on_meta(*batch, 4, 6)
    assert flops_of(packet.dtype, [*added, a, b, torch.float32], {}, out) == 2 * 4 * 8 * 6 * (
        2 if batch else 1
    )


def product_us(name: str, dtype: torch.dtype) -> float:
    sheet, n = DATASHEETS[name], 8192
    args = on_meta(n, n, dtype=dtype), on_meta(n, n, dtype=dtype).t(), *(on_meta(dtype=torch.float32),) * 2
    func = aten._scaled_mm.default
    return (
        sheet.runtime_us(facts_of(func), func, args, {"out_dtype": torch.bfloat16}, on_meta(n, n))
        - sheet.launch_us
    )


@pytest.mark.parametrize(
    ("name", "dtype", "ratio"),
    [
        ("h100", torch.float8_e4m3fn, 2.0),
        ("h200", torch.float8_e5m2, 2.0),
        ("l40s", torch.float8_e4m3fn, 2.0),
        ("rtx4090", torch.float8_e4m3fn, 2.0),
        ("mi300x", torch.float8_e4m3fnuz, 2.0),
    ],
)
def test_float8_product_has_its_own_peak(name: str, dtype: torch.dtype, ratio: float) -> None:
    assert product_us(name, torch.bfloat16) / product_us(name, dtype) == pytest.approx(ratio, rel=0.03)


def test_memory_is_that_which_torch_reports() -> None:
    """Vendors say GB and mean GiB: an H100 of "80 GB" has 85.0 * 10**9 bytes."""
    nominal = {"h100": 80, "h200": 141, "a100": 80, "mi300x": 192, "l40s": 48, "rtx4090": 24}
    for name, gb in nominal.items():
        assert 0.92 * gb < DATASHEETS[name].memory_bytes / 2**30 <= gb
    assert DATASHEETS["h100"].memory_bytes > 80e9
