"""Write the page of the benchmark, losses first, with a picture and a CSV file of all planners."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from autoac.planner.units import format_bytes
from benchmarks.public.run import BOUND, OURS, PUBLISHED, REFERENCES, STATED, Row
from benchmarks.results import write_result

SAME = 1e-6  # of the step: smaller differences are rounding
LEAST_RATIO = 0.1  # of ours / theirs, in a mean
STRONGEST = ("gpt2_xl",)  # the ratio of this model is far below the others'

TEXT = Path(__file__).with_name("page.md")


class Case:
    """All rows of one graph within one budget."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = {row.planner: row for row in rows}
        self.first = rows[0]

    def extra(self, planner: str) -> float | None:
        """Return a planner's time of recomputes as a fraction of the step."""
        return row.extra if (row := self.rows.get(planner)) else None

    @property
    def best_other(self) -> float | None:
        return self._least(set(self.rows) - {OURS, BOUND})

    @property
    def best_baseline(self) -> float | None:
        """Return the least of the baselines, programs with hours or full freedom left out."""
        return self._least(set(self.rows) - {OURS, BOUND, STATED, *REFERENCES})

    def _least(self, planners: Iterable[str]) -> float | None:
        return min((e for name in planners if (e := self.extra(name)) is not None), default=None)

    @property
    def loss(self) -> float:
        """Return by how much ours is worse than the best other, as a fraction of the step."""
        mine, other = self.extra(OURS), self.best_other
        if mine is None:
            return 0.0 if other is None else math.inf
        return -math.inf if other is None else mine - other


def cases_of(rows: Iterable[Row]) -> list[Case]:
    """Return the cases, the largest loss first."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.graph, row.budget), []).append(row)
    return sorted((Case(group) for group in groups.values()), key=lambda case: -case.loss)


def mean_ratio(cases: Iterable[Case], *, planner: str = OURS, without: Sequence[str] = ()) -> float | None:
    """Return the geometric mean of ours / best baseline; each graph counts once, whatever its budgets.

    With BOUND as the planner, only cases count in which ours has a schedule, so that the means compare.
    """
    graphs: dict[str, list[float]] = {}
    for case in cases:
        mine, other = case.extra(planner), case.best_baseline
        if mine is not None and case.extra(OURS) is not None and other and case.first.graph not in without:
            graphs.setdefault(case.first.graph, []).append(math.log(max(mine / other, LEAST_RATIO)))
    means = [statistics.fmean(logs) for logs in graphs.values()]
    return math.exp(statistics.fmean(means)) if means else None


def summary(rows: Sequence[Row]) -> str:
    """Return the counts and the means, as a list."""
    cases = cases_of(rows)
    losses = [case for case in cases if case.loss > SAME]
    ties = [case for case in cases if abs(case.loss) <= SAME]
    published = [case for case in cases if PUBLISHED in case.rows and _published(case) is not None]
    judged = [row for row in rows if row.planner not in (BOUND, STATED) and row.again_us is not None]
    own = [case for case in cases if case.first.source.startswith("our profile")]
    broken = sum(row.violation for row in rows)
    lines = [
        f"- {len(cases)} instances (a graph within a budget): ours is worse than the best other on\n"
        f"  {len(losses)}, equal on {len(ties)}, better on {len(cases) - len(losses) - len(ties)}.",
        f"- {len(judged)} schedules replayed by the checker; {broken} broke a rule.",
        "- Our recompute time / the best baseline's within the same budget, geometric mean, each graph\n"
        f"  once: {_ratio(mean_ratio(cases))}; on our profiles alone {_ratio(mean_ratio(own))}, and "
        f"{_ratio(mean_ratio(own, without=STRONGEST))} without {' and '.join(STRONGEST)}.",
        "- The same with *bound* in place of ours, which no schedule of whatever planner is below:\n"
        f"  {_ratio(mean_ratio(cases, planner=BOUND))}, {_ratio(mean_ratio(own, planner=BOUND))} and "
        f"{_ratio(mean_ratio(own, planner=BOUND, without=STRONGEST))}.",
    ]
    if published:
        worst = max(published, key=_against_published)
        against = [_against_published(case) for case in published]
        lines.append(
            f"- Against {len(published)} published schedules: better on {sum(a < -SAME for a in against)}, "
            f"equal on {sum(abs(a) <= SAME for a in against)},\n  worse on "
            f"{sum(a > SAME for a in against)}; the worst, {worst.first.graph} at "
            f"{format_bytes(worst.first.budget)}: {_signed(max(against))}."
        )
    return "\n".join(lines)


def _published(case: Case) -> float | None:
    replayed = case.extra(PUBLISHED)
    return case.extra(STATED) if replayed is None else replayed


def _against_published(case: Case) -> float:
    mine, other = case.extra(OURS), _published(case)
    assert other is not None
    return math.inf if mine is None else mine - other


def _ratio(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _signed(share: float) -> str:
    return "ours found no schedule" if math.isinf(share) else f"{share:+.2%} of the step"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def all_planners_table(cases: Sequence[Case]) -> str:
    """Return a row for each instance with every planner's time, as CSV."""
    own = (OURS, BOUND, STATED)
    names = list(dict.fromkeys(name for case in cases for name in case.rows if name not in own))
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["graph", "budget", "ours is", OURS, BOUND, *names])
    for case in cases:
        cells = [case.first.graph, format_bytes(case.first.budget), _outcome(case)]
        cells += [_cell(case, OURS), _cell(case, BOUND)]
        for name in names:
            stated = name == PUBLISHED and case.extra(name) is None and STATED in case.rows
            cells.append(f"{_cell(case, STATED)} *" if stated else _cell(case, name))
        table.writerow(cells)
    return text.getvalue().rstrip()


def _outcome(case: Case) -> str:
    if case.loss > SAME:
        return "worse"
    if abs(case.loss) <= SAME:
        return "equal"
    return "better"


def _cell(case: Case, planner: str) -> str:
    row = case.rows.get(planner)
    if row is None:
        return ""
    if row.violation:
        return "**broken**"
    return "-" if row.extra is None else _percent(row.extra)


def page(rows: Sequence[Row], name: str, steps: str = "") -> str:
    """Return the whole page; `name` is that of its files, `steps` the table of training.py."""
    sections = {
        "summary": summary(rows),
        "picture": f"![Share of instances solved within an extra time]({name}.svg)",
        "table": f"[{name}.csv]({name}.csv)",
        "steps": steps or "Not measured in this run.",
    }
    text = TEXT.read_text().rstrip()
    for key, section in sections.items():
        text = text.replace(f"<!-- {key} -->", section)
    return text


def draw(cases: Sequence[Case], path: Path) -> None:
    """Draw for each planner the share of instances that it solves within an extra time of the best known."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "autoac"  # the same picture for the same numbers
    from matplotlib import pyplot

    solvable = [case for case in cases if case.extra(OURS) is not None or case.best_other is not None]
    best = [min(e for name in c.rows if name != BOUND and (e := c.extra(name)) is not None) for c in solvable]
    figure, axes = pyplot.subplots(figsize=(8.5, 5))
    names = list(dict.fromkeys(name for case in cases for name in case.rows if name not in (BOUND, STATED)))
    for i, name in enumerate(names):
        extras = [(case.extra(name), least) for case, least in zip(solvable, best, strict=True)]
        losses = sorted(extra - least for extra, least in extras if extra is not None)
        if not losses:
            continue
        x = [max(100 * loss, 1e-3) for loss in losses]
        y = [100 * (k + 1) / len(solvable) for k in range(len(losses))]
        color, width = ("black", 2.2) if name == OURS else (None, 1.0)
        line = "-" if i < 10 else "--"
        axes.step([*x, 300.0], [*y, y[-1]], line, where="post", label=name, color=color, linewidth=width)
    axes.set_xscale("log")
    axes.set_xlim(1e-3, 300)
    axes.set_ylim(0, 101)
    axes.set_xlabel("recompute time above that of the best schedule known, % of the step")
    axes.set_ylabel("instances, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def steps_of(text: str) -> str:
    """Return the table of real steps in the text of a page; "" if it has none."""
    before, after = TEXT.read_text().split("<!-- steps -->")
    line_before, line_after = before.rstrip().rpartition("\n")[2], after.strip().partition("\n")[0]
    return text.partition(line_before)[2].partition(line_after)[0].strip()


def write(rows: Sequence[Row], target: Path, steps: str = "") -> None:
    """Write the page, its picture and its table. Without `steps`, the page keeps those that it has."""
    cases = cases_of(rows)
    draw(cases, target.with_suffix(".svg"))
    write_result(all_planners_table(cases), target.with_suffix(".csv"))
    if not steps and target.exists():
        steps = steps_of(target.read_text())
    write_result(page(rows, target.stem, steps), target)
