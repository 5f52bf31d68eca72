"""Check the files around the code: targets, pages, packages, vendored files."""

import hashlib
import json
import os
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VENDORED = (ROOT / "planner" / "report" / "vendor", ROOT / "tests" / "vendor")
MANIFESTS = {folder: json.loads((folder / "manifest.json").read_text())["files"] for folder in VENDORED}


def test_makefile_has_the_targets_that_the_readme_names():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "test-fast", "check", "policies", "policies-check", "bench", "fmt"} <= targets
    assert {"make demo", "make test"} <= set(re.findall(r"make \w+", (ROOT / "README.md").read_text()))


def test_readme_leads_to_every_page():
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_continuous_integration_runs_these_targets_and_nothing_else():
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    commands = [line for line in run.read_text().splitlines() if line.startswith("make")]
    assert commands == ["make check", "make policies-check", "make test"]


def test_every_package_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = set()
    for folder in ("planner", "profiler", "api", "ac_client"):
        for init in (ROOT / folder).rglob("__init__.py"):
            name = ".".join(init.parent.relative_to(ROOT).parts)
            found.add(name if folder == "ac_client" else f"autoac.{name}")
    assert found == listed


def test_what_is_installed_has_its_pages():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert set(data["ac_client.demo"]) >= {"page.html"}
    patterns = data["autoac.planner.report"]
    report = ROOT / "planner" / "report"
    for path in report.rglob("*.*"):
        if path.suffix not in (".py", ".pyc"):
            assert any(path.relative_to(report).match(pattern) for pattern in patterns), path


def test_torch_is_pinned_where_the_makefile_looks_for_it():
    assert re.search(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("folder", "name"), [(folder, name) for folder in VENDORED for name in MANIFESTS[folder]]
)
def test_vendored_file_is_what_its_manifest_says(folder, name):
    assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == MANIFESTS[folder][name]["sha256"]


@pytest.mark.parametrize("folder", VENDORED)
def test_every_vendored_file_is_in_the_manifest(folder):
    assert {path.name for path in folder.iterdir()} == {*MANIFESTS[folder], "manifest.json"}
