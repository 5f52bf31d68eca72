"""Check the files around the code: targets, pages, packages, vendored files."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
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
    assert commands == [
        "make browser",
        "make check",
        "make policies-check",
        "make check-install",
        "make test",
    ]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.removeprefix("make ") for command in commands} <= set(targets)


def test_links_of_the_package_page_are_absolute(tmp_path):
    """Build the metadata as pip does."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(VENDORED[0], tmp_path / VENDORED[0].relative_to(ROOT))
    build = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('out'))"
    text = (tmp_path / "pyproject.toml").read_text()
    packages = re.compile(r"^packages = \[.*?^\]\n", re.MULTILINE | re.DOTALL)
    (tmp_path / "pyproject.toml").write_text(packages.sub("packages = []\n", text))
    (tmp_path / "out").mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    metadata = next(tmp_path.glob("out/*/METADATA")).read_text()
    repository = tomllib.loads(text)["project"]["urls"]["Repository"]
    links = re.findall(r"\]\(([^)\s]+)\)", metadata)
    assert f"{repository}/blob/v0.1.0/docs/gpu.md#as-deterministic-as-the-kernels" in links
    assert [link for link in links if not link.startswith("https://")] == []
    for line in ("License-Expression: Apache-2.0 AND MIT", "Author: The autoac authors"):
        assert line in metadata.splitlines()


def test_every_package_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = set()
    for folder in ("planner", "tape", "profiler", "api", "ac_client"):
        for init in (ROOT / folder).rglob("__init__.py"):
            name = ".".join(init.parent.relative_to(ROOT).parts)
            found.add(name if folder == "ac_client" else f"autoac.{name}")
    assert found == listed


def test_what_is_installed_has_its_pages():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert set(data["ac_client.demo"]) >= {"page.html", "page.js"}
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
