"""Check the house rules that a reader relies on: imports, unique names, sizes.

Imports point one way, `ac_client -> profiler -> tape -> planner <- api`, and inside each package from the
parts named below to the parts named above. `TABLE` is the whole list; a new arrow is a decision and gets a
line here. Inside a part no files import each other in a circle.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("planner", "tape", "profiler", "api", "ac_client")

# The group of each file that lies directly in its package. Other files belong to the folder that they lie in.
GROUP_OF_FILE = {
    "planner": {
        "base": ("errors", "units", "budget"),
        "plans": (
            "plan",
            "as_planned",
            "minimum_peak",
            "frontier",
            "infeasibility",
            "shared_code",
            "offload",
        ),
    },
    "tape": {
        "base": ("errors",),
    },
    "profiler": {
        "base": ("errors",),
        "static": ("static_memory", "model_device"),
        "entry": (
            "observe",
            "observed_step",
            "fake_step",
            "step_profile",
            "plain_step",
            "to_profile",
            "environment",
            "autocast",
        ),
    },
    "api": {
        "base": ("errors", "settings", "requests", "problems"),
        "report": ("policy_report",),
        "error_mapping": ("error_mapping",),
        "service": ("service", "request_body", "request_reader"),
        "app": ("app",),
    },
    "ac_client": {
        "base": ("errors", "files", "model_loader"),
        "entry": ("apply", "applied_model", "arguments", "pins", "executor"),
        "sizes": ("fit", "layouts", "profiled_sizes", "timed_sizes"),
    },
}

# Each group may import the groups of its line, no others. A word without "/" is a group of the same package;
# "planner", "profiler" and "ac_client" are the public names of a package.
TABLE = """
planner/base:
planner/formats:        base
planner/problem:        base formats
planner/memory:         base formats problem
planner/solver:         base formats problem memory
planner/plans:          base formats problem memory solver
planner/sizes:          base formats
planner/report:         base formats problem memory solver plans
planner:                plans report sizes
tape/base:              planner/base
tape/torch_facts:       base planner/formats
tape/checkpoints:       torch_facts
tape/unseen:            torch_facts checkpoints planner/formats
tape/distributed:       base torch_facts
tape/capture:           base torch_facts unseen checkpoints distributed planner/base planner/formats
tape/runtime:           torch_facts unseen checkpoints distributed capture planner/base planner/formats
tape:
profiler/base:          tape/base
profiler/compiler:      planner/formats tape tape/base tape/torch_facts
profiler/timing:        planner/formats tape/torch_facts tape/capture
profiler/static:        timing planner/base planner/formats tape/base tape/torch_facts tape/distributed
profiler/joint_graph:   compiler tape/torch_facts tape/capture
profiler/gpu_dispatch:  timing tape/base tape/torch_facts
profiler/steps:         planner/formats tape/base tape/torch_facts tape/distributed tape/capture
profiler/entry:         compiler timing static steps joint_graph gpu_dispatch planner/base planner/formats
                        tape/base tape/torch_facts tape/checkpoints tape/distributed tape/capture
                        tape/runtime
profiler:               base timing static entry
ac_client/base:         planner planner/base planner/formats tape/base profiler
ac_client/measure:      planner planner/base tape/runtime tape/torch_facts tape/distributed profiler
ac_client/service_client: planner planner/base planner/formats planner/problem planner/memory
                        planner/plans
ac_client/compiled:     base planner planner/formats tape/runtime profiler/compiler profiler/joint_graph
ac_client/planning:     base service_client compiled measure planner planner/base planner/formats
                        planner/problem planner/memory planner/plans tape/runtime tape/base tape/torch_facts
                        tape/unseen
                        tape/distributed tape/checkpoints profiler profiler/compiler profiler/static
                        profiler/entry
ac_client/entry:        base service_client measure planning planner planner/base planner/formats
                        planner/report tape/runtime tape/torch_facts tape/checkpoints tape/distributed
                        profiler profiler/compiler profiler/static
ac_client/sizes:        base entry measure planning planner planner/base planner/formats planner/problem
                        planner/memory planner/plans planner/report planner/sizes profiler profiler/entry
                        profiler/static profiler/steps
ac_client:              base entry sizes planner/base
ac_client/integrations: base planning planner planner/base profiler ac_client
ac_client/regenerate:   base planner planner/base planner/formats profiler
ac_client/demo:         measure planner planner/report ac_client
ac_client/doctor:       base planner planner/base tape/capture profiler profiler/timing ac_client
ac_client/cli:          base regenerate demo doctor planner planner/base planner/formats planner/problem
                        planner/report profiler ac_client api/cli
api/base:               planner/base planner/formats planner/solver planner/plans
api/telemetry:
api/report:             planner/formats planner/plans planner/report
api/storage:            base planner planner/base planner/formats
api/error_mapping:      base storage planner/base
api/solving:            base telemetry report storage error_mapping planner/base planner/solver
                        planner/formats planner/plans
api/service:            base telemetry storage solving
api/web:                planner/report
api/routes:             base telemetry report storage service web planner/base planner/formats planner/plans
                        planner/report
api/app:                base telemetry storage error_mapping solving service routes planner/base
                        planner/formats
api:                    app cli
api/cli:                base telemetry storage solving app planner/base
"""


def arrows_of_table() -> dict[str, set[str]]:
    found = {}
    for line in TABLE.replace("\n  ", " ").split("\n")[1:-1]:
        group, _, words = line.partition(":")
        own = group.split("/")[0]
        found[group] = {
            word if "/" in word or word in PACKAGES else f"{own}/{word}" for word in words.split()
        }
    return found


ARROWS = arrows_of_table()

# Lines of code (`code_lines`) that a folder may have: what goes in, something goes out for.
# The second figure holds until the step is the unit of planning.
BUDGETS = {
    "planner": (8_200, 0),
    "tape": (7_300, 200),
    "profiler": (3_900, 200),
    "api": (4_200, 0),
    "ac_client": (7_000, 900),
    "tests": (33_000, 0),
}

MOST_FILES = 16  # in one folder
MOST_PARAMETERS = 10
MANY_PARAMETERS = 7
MOST_WITH_MANY = 10  # functions with more than that
# Users read the parameters of these in one place; inside, they are one value.
ENTRY_POINTS = {"apply", "plan", "profile", "observe"}
# The same layer of sibling packages, by the same name.
SHARED_NAMES = {"__init__.py", "__main__.py", "errors.py", "settings.py", "options.py"}
# The callback of each training library has the name that users of both know.
SHARED_CLASS_NAMES = {"AutoACCallback"}

# The callback for transformers needs accelerate only inside a Trainer that uses it.
LATE_IMPORTS = {"ac_client/integrations/transformers.py"}


def product_files(package: str) -> Iterator[Path]:
    for path in sorted((ROOT / package).rglob("*.py")):
        if "migrations" not in path.parts:  # alembic names these, and each stands alone
            yield path.relative_to(ROOT)


@functools.cache
def modules() -> dict[str, Path]:
    """Return the file of each module by the name under which it is imported."""
    found = {}
    for package in PACKAGES:
        for path in product_files(package):
            name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
            found[name if package == "ac_client" else f"autoac.{name}"] = path
    return found


def group_of(path: Path) -> str:
    package = path.parts[0]
    if len(path.parts) > 2:
        return f"{package}/{path.parts[1]}"
    groups = GROUP_OF_FILE[package].items()
    return next((f"{package}/{group}" for group, stems in groups if path.stem in stems), package)


@functools.cache
def public_names(package: str) -> set[str]:
    """Return the names that a package exports lazily; some, such as `plan`, are also names of its modules."""
    stub = ROOT / modules().get(package, Path("-")).with_suffix(".pyi")
    if not stub.exists():
        return set()
    exports = [node for node in ast.walk(ast.parse(stub.read_text())) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in exports for alias in node.names}


def imported(node: ast.AST) -> list[Path]:
    """Return the files of our modules that an import statement names."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        public = public_names(str(node.module))
        names = [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public]
        names = [name if name in modules() else str(node.module) for name in names]
        if len(names) < len(node.names):
            names.append(str(node.module))
    else:
        return []
    return [modules()[name] for name in names if name in modules()]


def parsed(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def arrows(path: Path) -> set[str]:
    targets = {group_of(target) for node in ast.walk(parsed(path)) for target in imported(node)}
    return targets - {group_of(path)}


def code_lines(text: str) -> int:
    """Return how many lines are neither blank, comment nor docstring."""
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        n for token in tokens if token.type not in blank for n in range(token.start[0], token.end[0] + 1)
    }
    lines.discard(len(text.splitlines()) + 1)  # of the end marker
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def loaded_by(module: str) -> set[str]:
    """Return the names in `sys.modules` of a child process that imported `module`."""
    code = f"import {module}, sys; print('\\n'.join(sys.modules))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return set(child.stdout.split())


def test_the_table_of_arrows_has_no_cycle() -> None:
    assert set().union(*ARROWS.values()) <= ARROWS.keys()
    graphlib.TopologicalSorter(ARROWS).prepare()  # raises CycleError


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {path: set[Path]() for path in modules().values() if path.name != "__init__.py"}
    for path, targets in files.items():
        targets |= {target for node in ast.walk(parsed(path)) for target in imported(node)} & files.keys()
    graphlib.TopologicalSorter(files).prepare()  # raises CycleError


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_follows_an_arrow(package: str) -> None:
    broken = {
        str(path): sorted(extra)
        for path in product_files(package)
        if path.name != "__init__.py" and (extra := arrows(path) - ARROWS[group_of(path)])
    }
    assert not broken, "import from the group that owns the name, or decide on a new arrow in TABLE"


def test_blank_lines_comments_and_docstrings_are_no_lines_of_code() -> None:
    head = ["'The docstring.'", "", "# why", "x = (1,  # one", "    2)"]
    body = ["def f():", "    'No.'", "    return 'yes'", ""]
    assert code_lines("\n".join(head + body)) == 4


@pytest.mark.parametrize("folder", BUDGETS)
def test_no_folder_has_more_lines_of_code_than_its_budget(folder: str) -> None:
    """If it has, take a concept out. To raise a budget is a decision."""
    lines = sum(code_lines((ROOT / path).read_text()) for path in product_files(folder))
    assert lines <= sum(BUDGETS[folder])


def test_functions_do_not_import_our_modules() -> None:
    def is_exempt(path: Path) -> bool:
        return path.name == "__init__.py" or "cli" in path.parts or str(path) in LATE_IMPORTS

    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    late = {
        f"{path}:{node.lineno}"
        for path in modules().values()
        if not is_exempt(path)
        for function in ast.walk(parsed(path))
        if isinstance(function, functions)
        for node in ast.walk(function)
        if imported(node)
    }
    assert not late, "import at the head of the file; only a package's __init__ and the CLI load late"


def test_no_folder_has_more_than_sixteen_python_files() -> None:
    counts = Counter(path.parent for package in PACKAGES for path in product_files(package))
    assert not {str(folder): count for folder, count in counts.items() if count > MOST_FILES}


def test_few_functions_have_many_parameters() -> None:
    """Entry points and commands may have more: they pass them on as one value."""
    counts = Counter[str]()
    for path in (path for package in PACKAGES for path in product_files(package)):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "cli" not in path.parts:
                names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                counts[f"{path} {node.name}"] = len(names) - (names[:1] in (["self"], ["cls"]))
    many = {
        name: n for name, n in counts.items() if n > MANY_PARAMETERS and name.split()[1] not in ENTRY_POINTS
    }
    assert not {name for name, n in many.items() if n > MOST_PARAMETERS}
    assert len(many) <= MOST_WITH_MANY, many


def test_no_two_product_files_share_a_name() -> None:
    names = Counter(path.name for path in modules().values())
    shared = {name for name, count in names.items() if count > 1}
    assert shared <= SHARED_NAMES


def class_names(package: str) -> list[str]:
    return [
        node.name
        for path in product_files(package)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_name_of_a_package_is_defined_twice_in_the_product(package: str) -> None:
    names = Counter(name for each in PACKAGES for name in class_names(each))
    assert {name for name in class_names(package) if names[name] > 1} <= SHARED_CLASS_NAMES


@pytest.mark.parametrize("module", ["autoac.planner", "autoac.planner.report.page", "autoac.api"])
def test_importing_costs_no_torch(module: str) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    assert not {name for name in loaded if name.split(".")[0] in ("torch", "transformers")}


@pytest.mark.parametrize(
    ("module", "others"),
    [
        ("autoac.planner", {"autoac.api", "autoac.profiler", "autoac.planner.report.page", "ac_client"}),
        ("autoac.planner.report.page", {"autoac.api", "autoac.profiler", "ac_client"}),
        ("autoac.api", {"autoac.profiler", "ac_client"}),
        ("autoac.profiler", {"autoac.api", "autoac.planner.report.page", "ac_client"}),
        ("autoac.tape.runtime.cuts", {"autoac.api", "autoac.profiler", "ac_client"}),
        ("ac_client", {"autoac.api"}),
        ("ac_client.integrations.loop", {"transformers", "accelerate", "lightning", "pytorch_lightning"}),
    ],
)
def test_importing_loads_nothing_from_above(module: str, others: set[str]) -> None:
    assert not loaded_by(module) & others
