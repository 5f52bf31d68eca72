"""Check on a GPU what nothing else can settle, one finding after the other.

Each check is a generator. If a check raises an error, its earlier findings stay, the error becomes a finding,
and the next check runs. After an error of the device itself, torch can no longer use the device, so the
findings that follow name the same error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import ac_client
from ac_client.doctor.device_facts import datasheet_like
from ac_client.doctor.gpu_report import GpuFinding, Result, finding_of_error
from ac_client.doctor.sample_models import FULL, LAYER, SAMPLES, TINY, Attention, Size
from ac_client.doctor.sample_training import PRECISIONS, Case, Numbers, Trained, release_memory, train
from ac_client.doctor.two_ranks import check_two_ranks
from ac_client.measure.memory_timeline import AllocatorTimeline
from ac_client.measure.recording_overhead import host_times, recording_us
from autoac.planner import Profile, bounds, build
from autoac.planner.units import GIB, format_bytes
from autoac.profiler import CannotProfile, Device, KernelKind, observe
from autoac.profiler.timing.roofline import kind_of

BUDGET = 0.5  # of the way from the smallest peak found to the one with nothing recomputed
PEAK_TOLERANCE = 0.01  # of the predicted peak
TIME_NOTE, TIME_WRONG = 1.25, 2.0  # factors between predicted and measured time
SHORT_MS = 5.0  # of device time: in shorter steps, an op takes less time than the events that time it
HOST_BOUND = 1.2  # wall time to device time
NOISE = 4.0  # a planned step may differ from a plain one by this factor of what two plain ones differ
SHOWN = 5  # differing ops
RECOMPUTED_STEPS = 3  # the first is observed, without a plan

Findings = Iterator[GpuFinding]
Check = Callable[[], Findings]


def checks_of(device: torch.device, size: Size) -> dict[str, Check]:
    """Return what `autoac doctor --gpu` checks, as functions by name, in the order in which they run."""
    cases = [Case(sample, precision, size, device) for sample in SAMPLES for precision in PRECISIONS]
    llama = next(case for case in cases if case.name == "Llama-like, bf16")
    layer = replace(llama.sample, name="wide layer")
    wide = replace(llama, sample=layer, size=LAYER if size is FULL else size)
    return {
        "event tree": partial(check_event_tree, cases[0]),
        **{
            check: partial(check_attention, check, device, form, dtype)
            for name, form in _ATTENTIONS.items()
            for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
            for check in [f"attention, {name}, {precision}"]
        },
        **{case.name: partial(check_case, case) for case in cases},
        "cudnn.benchmark": partial(check_cudnn_benchmark, next(c for c in cases if "ResNet" in c.name)),
        "wide layer": partial(check_profile, wide),
        "graph capture": partial(check_capture, cases[0]),
        "profiler": partial(check_profiler, cases[0]),
        "overhead": check_overhead,
        "two GPUs": partial(check_two_ranks, device),
    }


def run_check(name: str, check: Check) -> Findings:
    """Yield the findings of one check; an error is the last of them."""
    try:
        yield from check()
    except Exception as error:  # noqa: BLE001 - the error is the finding
        yield finding_of_error(name, error)
    try:
        release_memory()
    except RuntimeError as error:  # an error of the device shows here too
        yield finding_of_error(f"{name}: release memory", error)


def check_event_tree(case: Case) -> Findings:
    """Compare torch.profiler's record of a step with the counters of the allocator."""
    model, _, batch = case.made()
    before = torch.cuda.memory_allocated(case.device)
    with AllocatorTimeline(case.device) as timeline, case.autocast():
        model(**batch).backward()
    after = torch.cuda.memory_allocated(case.device)
    live = [event.live_bytes for event in timeline.events]
    figures = {
        "events": len(live),
        "recorded_end": live[-1] if live else before,
        "counted_end": after,
        "recorded_peak": max([before, *live]),
        "counted_peak": timeline.peak_bytes,
    }
    same = figures["recorded_end"] == after and figures["recorded_peak"] == timeline.peak_bytes
    text = (
        f"{len(live)} allocations and frees; live at the end {figures['recorded_end']} recorded, {after} "
        f"counted; peak {figures['recorded_peak']} recorded, {timeline.peak_bytes} counted"
    )
    yield GpuFinding("event tree", Result.OK if same else Result.WRONG, text, figures)


class _Form(NamedTuple):
    """A form of attention with eight heads of queries."""

    head: int = 64
    kv_heads: int = 8
    causal: bool = True
    dropout: float = 0.0
    masked: bool = False


_ATTENTIONS = {
    "causal": _Form(),
    "full": _Form(causal=False),
    "dropout 0.1": _Form(dropout=0.1),
    "masked": _Form(causal=False, masked=True),
    "grouped": _Form(kv_heads=2),
    "heads of 128": _Form(head=128),
    "heads of 256": _Form(head=256),
}
_TOKENS = 64


def check_attention(check: str, device: torch.device, form: _Form, dtype: torch.dtype) -> Findings:
    """Compare the attention kernel that runs with the one that a fake step predicts, and recompute it.

    The first steps of a plan also compare the contents of what they recompute.
    """
    size, groups = replace(TINY, width=8 * form.head, heads=8), 8 // form.kv_heads
    model = Attention(size, causal=form.causal, dropout=form.dropout, groups=groups).to(device, dtype)
    x = torch.randn(2, _TOKENS, 8 * form.head, device=device, dtype=dtype)
    mask = torch.ones(_TOKENS, _TOKENS, device=device, dtype=torch.bool)
    batch = (x, mask) if form.masked else (x,)
    real, fake = observe(model, batch, {}), observe(model, batch, {}, on=datasheet_like(device))
    yield _ops_finding(check, real, fake)

    def gradients() -> Numbers:
        found: dict[str, Tensor] = {}
        for i in range(RECOMPUTED_STEPS):
            model.zero_grad()
            torch.manual_seed(i)
            model(*batch).float().square().mean().backward()
            named = ((name, parameter.grad) for name, parameter in model.named_parameters())
            found |= {f"step {i}, {name}": grad.cpu() for name, grad in named if grad is not None}
        return Numbers(found)

    plain, again = gradients(), gradients()
    ac_client.pin(model, "must_recompute")
    at = ac_client.applied(ac_client.apply(model, torch.cuda.mem_get_info(device)[0] / GIB))
    planned = gradients()
    recomputed = at.report().recomputed
    at.remove()
    yield _numbers_finding(f"{check}: recomputed", plain, again, planned, recomputed)


def check_profile(case: Case) -> Generator[GpuFinding, None, Profile]:
    """Compare the profile of a model here with that of a fake step, and return it."""
    profile = case.profiled()
    sheet = datasheet_like(case.device)
    fake = case.faked(sheet)
    yield _ops_finding(f"{case.name}: ops", profile, fake)
    yield _fake_peak_finding(f"{case.name}: peak of the fake step", profile, fake)
    if profile.keys() == fake.keys():
        yield _kinds_finding(f"{case.name}: roofline", profile, fake, sheet)
    return profile


def check_case(case: Case) -> Findings:
    """Profile, plan and train one model: its ops, peaks, times and gradients."""
    profile = yield from check_profile(case)
    known = bounds(build(profile))
    budget = int(known.floor + BUDGET * (known.ceiling - known.floor))
    plain = train(case)
    yield _peak_finding(f"{case.name}: plain peak", known.ceiling, plain)
    step_ms = (sum(profile.ops.runtime_us) + sum(profile.backward.runtime_us)) / 1e3
    yield _time_finding(f"{case.name}: plain time", step_ms, plain, profile)
    planned = train(case, budget)
    report = planned.report
    assert report is not None, "it was planned"
    assert report.predicted_peak_bytes is not None, "it ran"
    yield _peak_finding(f"{case.name}: planned peak", report.predicted_peak_bytes, planned, budget)
    if report.off_path:
        yield GpuFinding(f"{case.name}: path", Result.WRONG, report.off_path)
    planned_ms = step_ms + (report.recompute_us or 0.0) / 1e3
    yield _time_finding(f"{case.name}: planned time", planned_ms, planned, profile)
    name = f"{case.name}: gradients"
    if budget >= known.ceiling:
        yield GpuFinding(name, Result.NOTE, "nothing recomputed: no plan has a smaller peak than plain")
        return
    yield _numbers_finding(name, plain.numbers, train(case).numbers, planned.numbers, report.recomputed)


def check_cudnn_benchmark(case: Case) -> Findings:
    """Train a model whose convolutions run each algorithm of cuDNN once, with workspaces of their own."""
    named = replace(case.sample, name=f"{case.sample.name}, cudnn.benchmark")
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        yield from check_case(replace(case, sample=named))


def _planned(case: Case) -> Callable[[], None]:
    """Apply a budget of the whole memory, and return a function that takes one training step."""
    model, optimizer, batch = case.made()
    memory = torch.cuda.get_device_properties(case.device).total_memory
    ac_client.apply(model, memory / GIB, optimizer=optimizer)

    def step() -> None:
        with case.autocast():
            loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def check_capture(case: Case) -> Findings:
    """Capture a first step into a CUDA graph, which must be refused: observing it waits for the device."""
    step = _planned(case)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step()
    except CannotProfile as error:
        yield GpuFinding("graph capture", Result.OK, f"first step refused: {error}")
    else:
        yield GpuFinding("graph capture", Result.WRONG, "a first step was observed while it was captured")


def check_profiler(case: Case) -> Findings:
    """Profile a planned step with the user's own profiler, after ours has run.

    torch's first profiler in a process decides if any can record the device (pytorch/pytorch#186036).
    """
    step = _planned(case)
    for _ in range(2):  # the first is observed
        step()
    activities = torch.profiler.supported_activities()
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        step()
    events = profiler.events() or ()
    kernels = sum(event.device_type.name == "CUDA" for event in events)
    text = f"{len(events)} events of a planned step, {kernels} of them on the device"
    if not kernels:
        text += ": the first profiler in this process probably recorded the host alone (docs/gpu.md)"
    verdict = Result.OK if kernels else Result.NOTE if events else Result.WRONG
    yield GpuFinding("profiler", verdict, text, {"kernels": kernels})


def _attention_ops(profile: Profile) -> str:
    names = [profile.overloads[row] for row in profile.ops.overload]
    return ", ".join(dict.fromkeys(name for name in names if "attention" in name)) or "no fused attention"


def _ops_finding(check: str, real: Profile, fake: Profile) -> GpuFinding:
    ran, predicted = list(real.keys()), list(fake.keys())
    text = f"{len(ran)} ops; {_attention_ops(real)}"
    if ran == predicted:
        return GpuFinding(check, Result.OK, text, {"ops": len(ran)})
    only_ran = sorted(set(ran) - set(predicted))[:SHOWN]
    only_predicted = sorted(set(predicted) - set(ran))[:SHOWN]
    text += f"; predicted {len(predicted)}, {_attention_ops(fake)}; only ran: {', '.join(only_ran) or 'none'}"
    text += f"; only predicted: {', '.join(only_predicted) or 'none'}"
    return GpuFinding(check, Result.WRONG, text, {"ops": len(ran), "predicted_ops": len(predicted)})


def _fake_peak_finding(check: str, real: Profile, fake: Profile) -> GpuFinding:
    """Compare the save-all peak of a fake step with that of a step on this device.

    A fake step does not know what kernels allocate inside themselves.
    """
    static = real.static.model_copy(update={"workspaces": fake.static.workspaces})
    same = {"static": static, "optimizer_workspace_nbytes": real.optimizer_workspace_nbytes}
    fake = fake.model_copy(update=same)
    measured, predicted = (bounds(build(profile)).ceiling for profile in (real, fake))
    text = f"{format_bytes(predicted)} without a GPU, {format_bytes(measured)} profiled here"
    text += f" ({measured / predicted - 1:+.2%})"
    return GpuFinding(check, Result.NOTE, text, {"predicted": predicted, "measured": measured})


def _kinds_finding(check: str, real: Profile, fake: Profile, sheet: Device) -> GpuFinding:
    """Compare the measured run time of each kind of kernel with the time that the roofline estimates.

    The ratio of the two says by how much the efficiency of that kind in the datasheet is off.
    """
    measured_us: defaultdict[KernelKind, float] = defaultdict(float)
    estimated_us: defaultdict[KernelKind, float] = defaultdict(float)
    for i, row in enumerate(real.ops.overload):
        packet, _, overload = real.overloads[row].removeprefix("aten.").partition(".")
        func = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        kind = kind_of(func, f"aten.{packet}", real.ops.flops[i])
        measured_us[kind] += real.ops.runtime_us[i]
        estimated_us[kind] += fake.ops.runtime_us[i]
    ratios = {kind: measured_us[kind] / estimated_us[kind] for kind in KernelKind if estimated_us[kind]}
    text = ", ".join(
        f"{kind} {measured_us[kind] / 1e3:.2f} ms measured, {estimated_us[kind] / 1e3:.2f} estimated"
        for kind in ratios
    )
    figures = {str(kind): round(ratio, 3) for kind, ratio in ratios.items()}
    text = f"times by kind of kernel, estimated by the datasheet of {sheet.name}: {text}"
    return GpuFinding(check, Result.NOTE, text, figures)


def _peak_finding(check: str, predicted: int, trained: Trained, budget: int | None = None) -> GpuFinding:
    """Compare the predicted peak of a training with the measured one, and the measured one with `budget`.

    A difference of up to `PEAK_TOLERANCE` is only a note. CUDA's allocator leaves up to 1 MiB of a large
    block unsplit, which no plan foresees; `slack_bytes` has the sum at the peak.
    """
    measured, slack = trained.peak_bytes, trained.slack_bytes
    figures: dict[str, int | None] = {"predicted": predicted, "measured": measured, "slack": slack}
    text = f"predicted {predicted}, measured {measured} ({measured - predicted:+d} bytes, "
    text += f"{measured / predicted - 1:+.3%}), blocks hold {slack} more than was asked for"
    wrong = abs(measured - predicted) > PEAK_TOLERANCE * predicted
    if budget is not None:
        figures["budget"] = budget
        text += f", budget {budget}"
        wrong |= measured > budget
    verdict = Result.WRONG if wrong else Result.OK if measured == predicted else Result.NOTE
    return GpuFinding(check, verdict, text, figures)


def _time_finding(check: str, predicted_ms: float, trained: Trained, profile: Profile) -> GpuFinding:
    figures = {
        "predicted_ms": round(predicted_ms, 3),
        "device_ms": round(trained.device_ms, 3),
        "host_ms": round(trained.host_ms, 3),
        "wall_ms": round(trained.wall_ms, 3),
    }
    text = f"forward and backward: predicted {predicted_ms:.2f} ms, device {trained.device_ms:.2f}, "
    text += f"host {trained.host_ms:.2f}, together {trained.wall_ms:.2f}"
    if trained.wall_ms > HOST_BOUND * trained.device_ms:
        text += "; host-bound: use a larger batch or torch.compile"
    late = [note for note in profile.notes if "time of the host" in note]
    factor = max(predicted_ms / trained.device_ms, trained.device_ms / predicted_ms)
    if late and "cannot queue" in late[0]:
        return GpuFinding(check, Result.NOTE, f"{text}; {late[0]}", figures)
    wrong = factor > TIME_WRONG and trained.device_ms >= SHORT_MS
    verdict = Result.WRONG if wrong else Result.NOTE if factor > TIME_NOTE else Result.OK
    return GpuFinding(check, verdict, "; ".join([text, *late]), figures)


def _numbers_finding(
    check: str, plain: Numbers, again: Numbers, planned: Numbers, recomputed: int
) -> GpuFinding:
    """Compare the numbers of a run that recomputed `recomputed` ops with those of a plain run.

    Two plain runs are compared as well: kernels that are not deterministic differ from run to run.
    """
    noisy, noise = plain.distance(again)
    differing, distance = plain.distance(planned)
    count = len(plain.tensors)
    figures = {"tensors": count, "plain_differ": noisy, "plain_distance": noise}
    figures |= {"planned_differ": differing, "planned_distance": distance, "recomputed": recomputed}
    if not recomputed:
        return GpuFinding(check, Result.WRONG, "nothing was recomputed", figures)
    if not noisy:
        text = f"plain equals plain bit for bit; planned ({recomputed} ops recomputed) "
        text += "too" if not differing else f"differs in {differing} of {count} tensors, by {distance:.2e}"
        return GpuFinding(check, Result.WRONG if differing else Result.OK, text, figures)
    text = f"plain differs from plain in {noisy} of {count} tensors, by {noise:.2e}: kernels of this device "
    text += f"are not deterministic here; planned differs from plain in {differing}, by {distance:.2e}"
    return GpuFinding(check, Result.WRONG if distance > NOISE * noise else Result.NOTE, text, figures)


def check_overhead() -> Findings:
    """Measure what recording and replaying an op cost the host of this device."""
    recording, (plain, replay) = recording_us(), host_times()
    text = f"an op takes {plain:.1f} us of the host, recording it {recording:.1f} more, "
    text += f"recording and replaying it {replay:.1f} more"
    figures = {"plain_us": plain, "recording_us": recording, "replay_us": replay}
    yield GpuFinding("overhead", Result.NOTE, text, figures)
