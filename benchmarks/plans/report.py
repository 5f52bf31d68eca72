"""Write the comparisons as Markdown, with a plot for each model."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from autoac.planner.units import GIB, format_bytes
from benchmarks.plans.baselines import BASELINES
from benchmarks.plans.compare import (
    GAP,
    GROWTH,
    LEAST_RATIO,
    Comparison,
    Point,
    beaten,
    best_within,
    geometric_mean,
    pareto,
    ratio,
    selected,
)
from benchmarks.results import markdown_table, write_result

AIM = 0.75  # upper limit of the geometric mean of ours / best baseline at its peak
STRONGEST = ("gpt2_xl", "lstm")  # models whose ratio is far below the others'
_GROWTH = re.compile(rf"^{GROWTH}(\d+)\.")


# Figures.


def rivals(done: Comparison) -> list[Point]:
    """Return the baseline points at whose peak we have an answer."""
    return [p for p in selected(done.points, done.ceiling) if done.at(p.peak) is not None]


def to_best(done: Comparison) -> list[float]:
    """Return our recompute time / the best baseline's within the same peak, at each baseline's peaks."""
    found = []
    for peak in sorted({p.peak for p in rivals(done)}):
        ours, best = done.at(peak), best_within(done.points, peak)
        if ours is not None and best is not None:
            found.append(ratio(ours.recompute_us, best.recompute_us))
    return [r for r in found if r is not None]


def of_models(against: Iterable[Comparison], *, without: Sequence[str] = ()) -> float | None:
    """Return the geometric mean of `to_best`; each model counts once, whatever its devices and peaks."""
    models: dict[str, list[float]] = {}
    for c in against:
        name = c.name.partition(".")[0]
        mean = geometric_mean(to_best(c))
        if mean is not None and name not in without:
            models.setdefault(name, []).append(mean)
    means = [geometric_mean(of_devices) for of_devices in models.values()]
    return geometric_mean(mean for mean in means if mean is not None)


def growth(done: Iterable[Comparison]) -> list[tuple[int, Comparison]]:
    """Return the comparisons that differ only in layers, by number of layers."""
    return sorted(
        ((int(match[1]), c) for c in done if (match := _GROWTH.match(c.name))), key=lambda item: item[0]
    )


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float | None:
    """Return the `k` of time ~ size**k, by least squares on logarithms; 1 is linear."""
    pairs = [(math.log(s), math.log(t)) for s, t in zip(sizes, times, strict=True) if s > 0 and t > 0]
    if len(pairs) < 2:
        return None
    mean_x, mean_y = (statistics.fmean(column) for column in zip(*pairs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread if spread else None


# Sections of the page.


def page(done: Sequence[Comparison], plots: str | None = None) -> str:
    """Return the whole page."""
    against = [c for c in done if c.points]
    parts = [
        "# Our plans and nine baselines\n\n"
        "Profiles are of whole training steps, with run times from the datasheet of a device. One\n"
        "simulator judges every save set, ours and theirs (docs/memory-model.md). Our plans ask for a gap\n"
        f"of {GAP:.0%}.",
        verdict(done, against),
        models_table(done),
        growth_section(done),
        plots_section(against, plots) if plots else "",
        footnotes(done),
    ]
    return "\n\n".join(part for part in parts if part)


def verdict(done: Sequence[Comparison], against: Sequence[Comparison]) -> str:
    """Return the claims that must hold, each with yes or no."""
    points = sum(len(rivals(c)) for c in against)
    lost = sum(len(beaten(c)) for c in against)
    mean, plain = of_models(against), of_models(against, without=STRONGEST)
    answers = [a for c in done for a in c.answers]
    tight = sum(a.gap <= GAP for a in answers)
    lines = [
        f"- Never beaten: {_yes(not lost)}; at {points} peaks of baselines ours is slower at {lost}.",
        f"- Geometric mean of our recompute time to the best baseline's at that peak: {_ratio(mean)} "
        f"(at most {AIM}: {_yes(mean is not None and mean <= AIM)}).\n"
        f"  Each model counts once, a ratio below {LEAST_RATIO} as that.\n"
        f"  Without {' and '.join(STRONGEST)}, where it is smallest: "
        f"{_ratio(plain)}.",
        f"- Gap proven to be at most {GAP:.0%}: {_yes(tight == len(answers))}; "
        f"{tight} of {len(answers)} plans.",
    ]
    return "\n".join(lines)


def models_table(done: Sequence[Comparison]) -> str:
    """Return a row for each model: its sizes, our results, planning time."""
    rows = []
    for c in done:
        times = [a.cpu_s for a in c.answers]
        rows.append(
            [
                c.name,
                f"{c.ops:,}",
                format_bytes(c.static_bytes),
                format_bytes(c.floor_found),
                format_bytes(c.floor_proven),
                format_bytes(c.ceiling),
                f"{len(beaten(c))} of {len(rivals(c))}" if c.points else "",
                _ratio(geometric_mean(to_best(c))) if c.points else "",
                f"{max((a.gap for a in c.answers), default=0):.2%}",
                f"{statistics.median(times):.1f}" if times else "",
                f"{max(times):.1f}" if times else "",
            ]
        )
    head = [
        "model",
        "ops",
        "static",
        "minimum peak found",
        "proven bound",
        "save-all peak",
        "beaten",
        "to the best",
        "worst gap",
        "median s",
        "most s",
    ]
    return (
        markdown_table(head, rows) + "\n\nNo save set has a smaller peak than the *proven bound*. "
        "*to the best*: geometric mean of our recompute time to that of the fastest baseline within\n"
        "the same peak. *median s*, *most s*: processor seconds from Profile to Plan, over all budgets."
    )


def growth_section(done: Sequence[Comparison]) -> str:
    """Return planning time by number of layers."""
    sizes = growth(done)
    if len(sizes) < 2:
        return ""
    medians = [statistics.median(a.cpu_s for a in c.answers) if c.answers else 0.0 for _, c in sizes]
    rows = [
        [str(layers), f"{c.ops:,}", f"{median:.2f}", f"{max((a.cpu_s for a in c.answers), default=0):.2f}",
         f"{1000 * median / c.ops:.2f}", f"{max((a.gap for a in c.answers), default=0):.2%}"]
        for (layers, c), median in zip(sizes, medians, strict=True)
    ]  # fmt: skip
    power = exponent([c.ops for _, c in sizes], medians)
    head = ["layers", "ops", "median s", "most s", "median s a 1,000 ops", "worst gap"]
    grows = f"\n\nMedian time grows as ops to the power {power:.2f}." if power is not None else ""
    return "## Growth with layers\n\n" + markdown_table(head, rows) + grows


def plots_section(against: Sequence[Comparison], folder: str) -> str:
    """Return a link to the plot of each model."""
    if not against:
        return ""
    return "## Frontiers\n\n" + "\n\n".join(f"![{c.name}]({folder}/{c.name}.svg)" for c in against)


def footnotes(done: Sequence[Comparison]) -> str:
    """Return the points where ours is slower, and the baselines that failed."""
    lines = []
    for c in done:
        for point, ours in beaten(c):
            lines.append(
                f"- {c.name}: {point.baseline} ({point.setting}) takes {_us(point.recompute_us)} us at "
                f"{format_bytes(point.peak)}, ours {_us(ours.recompute_us)} us ({ours.stopped})."
            )
        for baseline, why in c.failures.items():
            lines.append(f"- {c.name}: {baseline} does not work on it: {why}")
    return "## Where it fails\n\n" + "\n".join(lines) if lines else ""


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _us(value: float | None) -> str:
    return "none" if value is None else f"{value:,.0f}"


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


# Plots.


def draw(done: Comparison, path: Path) -> None:
    """Draw the frontier of one model: ours, and each baseline's front."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "autoac"  # the same picture for the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5))
    share = 100 / done.step_us if done.step_us else 0.0

    def series(points: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
        ordered = sorted(points)
        return [nbytes / GIB for nbytes, _ in ordered], [us * share for _, us in ordered]

    for marker, baseline in zip("sv^<>DPX*h", BASELINES, strict=False):
        front = pareto(p for p in done.points if p.baseline == baseline and p.peak < done.ceiling)
        if front:
            x, y = series((p.peak, p.recompute_us) for p in front)
            axes.plot(x, y, marker=marker, linestyle=":", linewidth=0.8, markersize=5, label=baseline)
    ours = [(float(a.budget), a.recompute_us) for a in done.answers if a.recompute_us is not None]
    x, y = series([*ours, (float(done.ceiling), 0.0)])
    axes.plot(x, y, color="black", marker=".", linewidth=1.6, label="ours")
    axes.axvline(done.floor_proven / GIB, color="gray", linewidth=0.8, linestyle="--", label="proven bound")
    axes.set_xlabel("peak, GiB")
    axes.set_ylabel("recomputed, % of the step's run time")
    axes.set_title(done.name)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def write(done: Sequence[Comparison], target: Path | None) -> None:
    """Write the page, and its plots into a folder next to it; print the page if `target` is None."""
    if target is None:
        print(page(done))
        return
    plots = target.with_suffix("")
    for comparison in done:
        if comparison.points:
            draw(comparison, plots / f"{comparison.name}.svg")
    write_result(page(done, plots.name), target)
