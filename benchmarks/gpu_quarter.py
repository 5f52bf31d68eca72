"""Answer in nine minutes on one GPU of 80 GB what only a GPU can answer, the most valuable first.

    python -m benchmarks.gpu_quarter --out FOLDER [--seconds 540] [--only PATTERN ...] [--size tiny]
    python -m benchmarks.gpu_quarter --out FOLDER --predict h100

Each row runs in a process of its own, under a time limit, and adds a line to `results.jsonl` when it ends.
`page.md` has the tables for docs/gpu.md, and names the rows that failed or had no time. `--predict` runs
nothing: it writes `predicted.md` from fake steps on a datasheet.

Budgets lie between the peak of torch's checkpoint around every block ("+0 %") and that of its selective
checkpoint ("+100 %"), or for the U-Net that of plain training. Rows of one `batch` run at the same time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from filelock import FileLock
from torch import Tensor, nn
from torch.nn import functional as F

import ac_client
from ac_client.doctor.device_facts import error_in_words, machine_facts
from ac_client.files import write_whole
from ac_client.planning import plan_batch
from autoac.planner import Constraints, InfeasibleBudget, build
from autoac.planner.memory.simulate import peak_bytes
from autoac.planner.plan import step_time_us
from autoac.planner.units import GIB, format_bytes
from autoac.profiler import DATASHEETS, link_of, observe
from autoac.profiler.timing.on_device import seconds
from autoac.profiler.timing.roofline import kind_of
from benchmarks import gpu_kernels
from benchmarks.models.modules import DoubleConv
from benchmarks.models.samples import CARD, FULL, LAYER, SAMPLES, TINY, Sample, Size
from benchmarks.plans.block_rules import SELECTIVE, as_run, per_block, selective
from benchmarks.results import markdown_table
from benchmarks.sample_training import Case, datasheet_like, train
from benchmarks.torch_checkpoint import Baseline, wrap_blocks

LARGE = replace(CARD, layers=12, batch=8, images=64, stages=FULL.stages)
HOST_BYTES = 32 << 30  # of the host, for moved tensors
PRELOAD = ("benchmarks.gpu_quarter",)
COMPILED_SHARE = 0.6  # of what plain training saves, for compiled models
CAPTURED_SHARE = 0.8  # the same, for an eager step that is captured
STATE = 4  # parameter, gradient and two moments of AdamW
MOST_BATCHES = 4  # times the batch of the case, to exceed a card
KERNELS_S = 60.0
LEAST_S = 8.0  # in which a row can still say something

Figures = dict[str, Any]
Found = Mapping[str, Figures]
"""Figures by the names of rows that have run."""


class UNet(nn.Module):
    """Four levels of two convolutions each, with skip connections, and a classifier."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        widths = [size.channels << level for level in range(4)]
        down = [DoubleConv(*pair) for pair in zip([3, *widths], widths, strict=False)]
        self.blocks = nn.ModuleList([*down, *(DoubleConv(2 * width, width) for width in widths[-2::-1])])
        self.rises = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in widths[-2::-1]
        )
        self.head = nn.Conv2d(size.channels, 10, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        levels = len(self.rises)
        x, skips = self.blocks[0](images), list[Tensor]()
        for block in self.blocks[1 : levels + 1]:
            skips.append(x)
            x = block(F.max_pool2d(x, 2))
        for rise, block in zip(self.rises, self.blocks[levels + 1 :], strict=True):
            x = block(torch.cat([rise(x), skips.pop()], 1))
        return F.cross_entropy(self.head(x).mean((2, 3)).float(), labels)


LLAMA, VIT = (replace(sample, name=name) for sample, name in ((SAMPLES[1], "Llama"), (SAMPLES[2], "ViT-H")))
U_NET = Sample("U-Net", UNet, SAMPLES[2].batch)
SIZES = {
    "full": {
        "Llama large": LARGE,
        "Llama 1B": replace(CARD, layers=18, batch=8),
        "ViT-H": replace(CARD, layers=32, width=1280, images=96),
        "U-Net": replace(CARD, image=256, images=48, channels=64),
        "compiled": replace(CARD, layers=4, batch=4),  # five of them fit on a card
    },
    "tiny": dict.fromkeys(("Llama large", "Llama 1B", "ViT-H", "U-Net", "compiled"), TINY),
}


class Way(NamedTuple):
    """One way to train: plain, in torch's checkpoints, or planned for a share of the way to `upper`."""

    name: str
    baseline: Baseline | None = None
    share: float | None = None
    moves: bool = False


def planned(*shares: float, moves: Sequence[bool] = (False, True)) -> list[Way]:
    return [
        Way(f"ours +{share:.0%}{', moves' * moved}".replace("%", " %"), None, share, moved)
        for share in shares
        for moved in moves
    ]


PLAIN = Way("plain")
TORCHS = (PLAIN, Way("checkpoint", "checkpoint"), Way("selective", "selective"))
TRAINED: tuple[tuple[str, Sample, Sequence[Way]], ...] = (
    ("Llama large", LLAMA, [*TORCHS, *planned(0, 1, moves=[False])]),
    ("Llama 1B", LLAMA, [*TORCHS, *planned(0, 1, 0.5)]),
    ("ViT-H", VIT, [*TORCHS, *planned(0), *planned(1, moves=[False])]),
    ("U-Net", U_NET, [*TORCHS[:2], *planned(0), *planned(0.5, moves=[False])]),
)
LATER: tuple[tuple[str, Sample, Sequence[Way]], ...] = (("Llama 1B", LLAMA, planned(0.25, 0.75)),)
COMPILED = {
    "plan": (None, False),
    "plan, moves": (None, True),
    "reduce-overhead, plain": ("reduce-overhead", None),
    "reduce-overhead, plan": ("reduce-overhead", False),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One question to the GPU."""

    name: str
    run: Callable[[Found], Figures]
    limit_s: float
    batch: str = ""  # rows of one batch run at the same time


def case_of(name: str, sample: Sample, size: str, device: str = "cuda:0") -> Case:
    return Case(replace(sample, name=name), "bf16", SIZES[size][name], torch.device(device))


def rows(size: str) -> list[Row]:
    """Return all rows, the most valuable first."""
    compiled = case_of("compiled", LLAMA, size)

    def trained(cases: Iterable[tuple[str, Sample, Sequence[Way]]]) -> list[Row]:
        return [
            Row(
                f"{name}: {way.name}",
                partial(train_way, case_of(name, sample, size), way),
                75.0 if way.share is None else 200.0,
                "" if way.share is None else f"{name}, ours",
            )
            for name, sample, ways in cases
            for way in ways
        ]

    return [
        Row("machine", lambda _: dict(machine_facts(torch.device("cuda:0"))), 40.0),
        *trained(TRAINED),
        Row('Llama 1B: budget_gb="device"', partial(on_card, case_of("Llama 1B", LLAMA, size)), 120.0),
        Row("compiled: plain", partial(train_compiled, compiled, None, None), 75.0),
        *(
            Row(f"compiled: {name}", partial(train_compiled, compiled, *way), 100.0, "compiled")
            for name, way in COMPILED.items()
        ),
        Row("eager: captured step", partial(captured, compiled), 90.0, "compiled"),
        *(
            Row(f"kernels: {make.__name__}", partial(kernels, make), KERNELS_S, "kernels")
            for make in gpu_kernels.CASES
        ),
        Row("wide layer", partial(wide_layer, size), KERNELS_S, "kernels"),
        *trained(LATER),
    ]


def gpu_lock() -> FileLock:
    """Return the lock of the rows that run at the same time: its holder has the GPU to itself."""
    return FileLock(Path(tempfile.gettempdir()) / f"autoac-gpu-quarter-{os.getppid()}.lock")


def measured(
    case: Case,
    budget: int | Literal["device"] | None = None,
    host_bytes: int = 0,
    *,
    is_compiled: bool = False,
) -> Figures:
    """Train a case, and return its figures: sizes in bytes, times in milliseconds.

    The GPU is left to other rows of the batch while this one plans, or compiles.
    """
    began, lock = time.monotonic(), gpu_lock()

    def plan_meanwhile(*args: Any, **terms: Any) -> Any:
        lock.release()
        start = time.monotonic()
        try:
            return plan(*args, **terms)
        finally:
            plan_s.append(time.monotonic() - start)
            lock.acquire()

    plan, plan_s = plan_batch.plan, list[float]()
    if is_compiled:
        ran = train(case, budget, host_bytes, norms_only=True, timing=lock)
    else:
        vars(plan_batch)["plan"] = plan_meanwhile  # this process is of one row
        with lock:
            ran = train(case, budget, host_bytes, norms_only=True)
    figures: Figures = {"budget": budget, "peak": ran.peak_bytes, "reserved": ran.reserved_bytes}
    figures |= {"device_ms": ran.device_ms, "host_ms": ran.host_ms, "wall_ms": ran.wall_ms}
    figures |= {"norms": {n: float(norm) for n, norm in ran.numbers.tensors.items() if not norm.dim()}}
    if (report := ran.report) is not None:
        figures |= {
            "predicted": report.predicted_peak_bytes,
            "predicted_reserved": ran.predicted_reserved_bytes,
            "predicted_ms": (report.predicted_step_us or 0) / 1e3,
            "recompute_ms": (report.recompute_us or 0) / 1e3,
            "stall_ms": report.stall_us / 1e3,
            "moved": report.moved_bytes,
            "save_all": report.save_all_peak_bytes,
            "gap": report.gap,
            "corrections": report.corrections,
            "off_path": report.off_path,
            "plan_s": plan_s,
        }
    return figures | {"seconds": time.monotonic() - began}


def budget_at(name: str, share: float, found: Found) -> int:
    """Return the budget of a share of the way between two measured peaks."""
    low, high = (found[f"{name}: {way}"]["peak"] for way in ("checkpoint", upper(name)))
    return int(low + share * (high - low))


def upper(name: str) -> str:
    """Return the way whose peak is +100 %: a U-Net has no matrix products."""
    return "plain" if name == "U-Net" else "selective"


def wrapped(case: Case, baseline: Baseline) -> Case:
    """Return the case with torch's checkpoint around every block."""

    def make(size: Size) -> nn.Module:
        model = case.sample.make(size)
        blocks: nn.ModuleList = model.get_submodule("blocks")  # type: ignore[assignment]
        wrap_blocks(blocks, baseline)
        return model

    return replace(case, sample=replace(case.sample, make=make))


def train_way(case: Case, way: Way, found: Found) -> Figures:
    if way.baseline is not None:
        return measured(wrapped(case, way.baseline))
    if way.share is None:
        return measured(case)
    return measured(case, budget_at(case.sample.name, way.share, found), HOST_BYTES * way.moves)


def state_bytes(case: Case) -> int:
    """Return the bytes of parameters, gradients and optimizer state."""
    with torch.device("meta"):
        return STATE * sum(p.numel() * p.element_size() for p in case.sample.make(case.size).parameters())


def on_card(case: Case, found: Found) -> Figures:
    """Train with a batch that plain training has no room for on this card."""
    state, (free, total) = state_bytes(case), torch.cuda.mem_get_info(case.device)
    each = (found[f"{case.sample.name}: plain"]["peak"] - state) / case.size.batch
    batch = math.ceil(1.25 * (total - state) / each)
    batch = min(batch, MOST_BATCHES * case.size.batch)
    figures = measured(replace(case, size=replace(case.size, batch=batch)), "device")
    return figures | {"batch": batch, "free": free, "plain_needs": int(state + batch * each)}


def train_compiled(case: Case, mode: str | None, moves: bool | None, found: Found) -> Figures:
    """Train a compiled model: plainly if `moves` is None, else planned."""

    def make(size: Size) -> nn.Module:
        model = case.sample.make(size)
        model.compile(mode=mode)
        return model

    budget = None if moves is None else compiled_budget(case, found)
    compiled = replace(case, sample=replace(case.sample, make=make))
    return measured(compiled, budget, HOST_BYTES * bool(moves), is_compiled=True)


def compiled_budget(case: Case, found: Found) -> int:
    state = state_bytes(case)
    return int(state + COMPILED_SHARE * (found["compiled: plain"]["peak"] - state))


def captured(case: Case, found: Found) -> Figures:
    """Capture a planned step into a CUDA graph, and compare a replay of it with the step itself."""
    state, plain = state_bytes(case), measured(case)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model, optimizer, batch = case.made()
    budget = int(state + CAPTURED_SHARE * (plain["peak"] - state))
    ac_client.apply(model, budget / GIB, optimizer=optimizer, host_budget_gb=0)

    def step() -> Tensor:
        with case.autocast():
            loss: Tensor = model(**batch)
        loss.backward()
        return loss

    def norms() -> list[float]:
        return [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]

    aside = torch.cuda.Stream(case.device)
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for number in range(3):
            optimizer.zero_grad()
            loss = step()
            if number < 2:
                optimizer.step()
    torch.cuda.current_stream().wait_stream(aside)
    eager, eager_loss = norms(), loss.item()
    optimizer.zero_grad()
    del loss
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    replay_s = statistics.median(seconds(graph.replay, case.device, lambda: None) for _ in range(5))
    differ = max(abs(a - b) / (a or 1) for a, b in zip(eager, norms(), strict=True))
    report = ac_client.applied(model).report()
    peak, predicted = torch.cuda.max_memory_allocated(), report.predicted_peak_bytes or 0
    return {
        "text": f"{report.recomputed} ops recomputed; peak {format_bytes(peak)}, predicted "
        f"{format_bytes(predicted)}, budget {format_bytes(budget)}, plain {format_bytes(plain['peak'])}; "
        f"{replay_s * 1e3:.1f} ms, plain and eager {plain['device_ms']:.1f}; loss {eager_loss:.6f}, "
        f"replayed {loss.item():.6f}; norms of gradients differ by at most {differ:.1e}",
    }


def kernels(make: type[gpu_kernels.KernelModel], found: Found) -> Figures:
    row = gpu_kernels.compare(make)
    text = f"plain differs by {row.plain_distance:.1e}, planned by {row.distance:.1e}; {row.recomputed} ops "
    text += f"recomputed; peak {format_bytes(row.peak)} of {format_bytes(row.budget)}, predicted within "
    return {"wrong": row.is_wrong, "text": text + format_bytes(row.error)}


def wide_layer(size: str, found: Found) -> Figures:
    """Compare run times of a layer as wide as Llama 8B's, by kind of kernel, with those of a datasheet.

    The ratio of the two says by how much the efficiency of that kind in the datasheet is off.
    """
    width = LAYER if size == "full" else TINY
    case = Case(replace(LLAMA, name="wide layer"), "bf16", width, torch.device("cuda:0"))
    sheet, real = datasheet_like(case.device), case.profiled()
    fake = case.faked(sheet)
    if real.keys() != fake.keys():
        return {
            "wrong": True,
            "text": f"{len(real.ops)} ops ran, a fake step predicts {len(fake.ops)} others",
        }
    measured_us, estimated_us = defaultdict[str, float](float), defaultdict[str, float](float)
    for i, row in enumerate(real.ops.overload):
        packet, _, overload = real.overloads[row].removeprefix("aten.").partition(".")
        func = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        kind = str(kind_of(func, f"aten.{packet}", real.ops.flops[i]))
        measured_us[kind] += real.ops.runtime_us[i]
        estimated_us[kind] += fake.ops.runtime_us[i]
    times = [f"{kind} {us / 1e3:.2f} ms, {estimated_us[kind] / 1e3:.2f}" for kind, us in measured_us.items()]
    return {"text": f"measured, and by the datasheet of {sheet.name}: {'; '.join(times)}"}


def _child(size: str, name: str, out: Path) -> None:
    """Run one row, and write its line."""
    os.setpgid(0, 0)  # killed with the processes that it starts
    figures: Figures
    try:
        row = next(row for row in rows(size) if row.name == name)
        figures = row.run(results(out))
    except InfeasibleBudget as error:
        figures = {"error": f"needs {format_bytes(error.smallest_found or 0)}"}
    except KeyError as error:
        figures = {"error": f"needs the row {error}"}
    except Exception as error:  # noqa: BLE001 - the error is the result
        figures = {"error": error_in_words(error)}
    write_line(out, name, figures)
    os._exit(0)  # threads of the device, or compilers, may not end


def write_line(out: Path, name: str, figures: Figures) -> None:
    with (out / "results.jsonl").open("a") as lines:
        lines.write(json.dumps({"row": name, **figures}) + "\n")
    print(name, {key: value for key, value in figures.items() if key != "norms"}, flush=True)


def results(out: Path) -> dict[str, Figures]:
    """Return the figures of the rows that have run so far."""
    path = out / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {line.pop("row"): line for line in map(json.loads, lines)}


def run(todo: Sequence[Row], size: str, out: Path, seconds: float, preload: Sequence[str] = PRELOAD) -> None:
    """Run rows until the time is up. The page is written after each batch."""
    ends, method = time.monotonic() + seconds, "forkserver"
    multiprocessing.set_forkserver_preload([*preload])
    for _, batch in groupby(todo, lambda row: row.batch or row.name):
        started = []
        for row in batch:
            left = ends - time.monotonic()
            if left < LEAST_S:
                write_line(out, row.name, {"error": "no time was left"})
                continue
            context: Any = multiprocessing.get_context(method)
            process = context.Process(target=_child, args=(size, row.name, out))
            process.start()
            started.append((row, process, time.monotonic() + min(row.limit_s, left)))
        for row, process, deadline in started:
            process.join(max(0.0, deadline - time.monotonic()))
            late = process.is_alive()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            if row.name not in results(out):
                why = f"ran into the limit of {row.limit_s:.0f} s or the end" if late else "the process died"
                write_line(out, row.name, {"error": f"{why} ({process.exitcode})"})
        if "error" in results(out).get("machine", {}):
            method = "spawn"  # the server of processes has used the device, which no fork survives
        write_whole(out / "page.md", page(results(out)))


HEAD = (
    *("row", "budget", "peak", "predicted", "error", "reserved", "predicted", "device, ms", "predicted"),
    *("/ plain", "idle to idle, ms", "host, ms", "moved", "norms differ by", "took, s"),
)


def page(found: Found) -> str:
    """Return the tables as Markdown."""
    machine = found.get("machine", {})
    named = ", ".join(str(machine[key]) for key in ("device", "torch", "driver") if key in machine)
    lines, texts = [], []
    for name, figures in found.items():
        plain = found.get(name.partition(": ")[0] + ": plain", {})
        if "wall_ms" in figures:
            lines.append(_cells(name, figures, plain))
        if "error" in figures or "text" in figures:
            verdict = "failed" if "error" in figures else "WRONG" if figures.get("wrong") else "ok"
            text = str(figures.get("error") or figures["text"]).replace("|", "\\|")
            texts.append([name, verdict, text])
        if "plain_needs" in figures:
            text = (
                f"batch {figures['batch']}: plain needs about {format_bytes(figures['plain_needs'])}, free "
            )
            texts.append([name, "note", text + format_bytes(figures["free"])])
    return (
        f"{named}\n\n{markdown_table(HEAD, lines)}\n\n{markdown_table(('row', 'verdict', 'found'), texts)}\n"
    )


def _cells(name: str, figures: Figures, plain: Figures) -> list[str]:
    def size(key: str) -> str:
        return (
            format_bytes(figures[key]) if isinstance(figures.get(key), int) else str(figures.get(key) or "")
        )

    def ms(key: str) -> str:
        return f"{figures[key]:.1f}" if figures.get(key) else ""

    predicted, norms, theirs = figures.get("predicted"), figures["norms"], plain.get("norms", {})
    differ = [abs(norms[one] - theirs[one]) / (abs(theirs[one]) or 1) for one in norms if one in theirs]
    return [
        *(name, size("budget"), size("peak"), size("predicted")),
        f"{figures['peak'] / predicted - 1:+.2%}" if predicted else "",
        *(size("reserved"), size("predicted_reserved"), ms("device_ms"), ms("predicted_ms")),
        f"{figures['device_ms'] / plain['device_ms']:.3f}" if "device_ms" in plain else "",
        *(ms("wall_ms"), ms("host_ms"), size("moved") if figures.get("moved") else ""),
        f"{max(differ):.1e}" if differ and "batch" not in figures else "",
        f"{figures['seconds']:.0f}",
    ]


def predict(
    size: str, sheet: str, trained: Sequence[tuple[str, Sample, Sequence[Way]]] = (*TRAINED, *LATER)
) -> Iterator[list[str]]:
    """Yield a line for each way to train: what a fake step on a datasheet predicts for it."""
    for name, sample, ways in trained:
        case = case_of(name, sample, size, "meta")
        with case.device:
            model = sample.make(case.size).train()
        batch = {key: value.to("meta") for key, value in sample.batch(case.size).items()}
        optimizer = torch.optim.AdamW(model.parameters())
        profile = observe(
            model, (), batch, optimizer=optimizer, on=DATASHEETS[sheet], autocast=torch.bfloat16
        ).model_copy(update={"link": link_of(DATASHEETS[sheet])})
        graph = build(profile)
        step_ms, peaks = step_time_us(graph) / 1e3, {"plain": peak_bytes(graph, graph.everything)}
        peaks["checkpoint"] = peak_bytes(graph, per_block(graph)["depth 1"])
        setting = "every matmul, depth 1"
        peaks["selective"] = peak_bytes(*as_run(graph, SELECTIVE, setting, selective(graph)[setting]))
        for way in ways:
            line = [f"{name}: {way.name}"]
            if way.share is None:
                yield [
                    *line,
                    format_bytes(peaks[way.name]),
                    "",
                    f"{step_ms:.1f}" if way is PLAIN else "",
                    "",
                    "",
                ]
                continue
            budget = int(peaks["checkpoint"] + way.share * (peaks[upper(name)] - peaks["checkpoint"]))
            began = time.process_time()
            try:
                plan = plan_batch.plan(
                    profile,
                    budget_bytes=budget,
                    constraints=Constraints(host_budget_bytes=HOST_BYTES) if way.moves else None,
                    progress=plan_batch.PlanNotice(name),
                )
            except InfeasibleBudget as error:
                yield [*line, f"needs {format_bytes(error.smallest_found or 0)}", "", "", "", ""]
                continue
            took = time.process_time() - began
            reserved = plan.peak + (plan.fragment_bytes() or 0)
            extra_ms = plan.extra_us / 1e3
            yield [
                *(*line, format_bytes(plan.peak), format_bytes(reserved), f"{step_ms + extra_ms:.1f}"),
                *(format_bytes(plan.moved_bytes) if way.moves else "", f"{took:.1f}"),
            ]


PREDICTED = ("row", "peak", "reserved", "device, ms", "moved", "planned in, CPU s")


def main() -> int:
    """Run the command in the module docstring; return 1 if a row failed or found something wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--only", nargs="*", default=["*"], metavar="PATTERN", help="rows, such as 'ViT*'")
    parser.add_argument("--size", default="full", choices=SIZES)
    parser.add_argument("--predict", choices=DATASHEETS, metavar="DATASHEET", help="such as h100")
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    if options.predict is not None:
        lines = []
        for line in predict(options.size, options.predict):
            lines.append(line)
            print(*line, sep=" | ", flush=True)
            write_whole(out / "predicted.md", markdown_table(PREDICTED, lines) + "\n")
        return 0
    todo = [row for row in rows(options.size) if any(fnmatchcase(row.name, one) for one in options.only)]
    (out / "results.jsonl").unlink(missing_ok=True)
    run(todo, options.size, out, options.seconds)
    return int(any("error" in figures or figures.get("wrong") for figures in results(out).values()))


if __name__ == "__main__":
    raise SystemExit(main())
