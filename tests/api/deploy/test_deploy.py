"""Check that everything compose.yaml and deploy/ name exists. This needs neither Docker nor a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoac.api import Settings, create_app
from autoac.api.cli.commands import main

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
MANIFESTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
PODS = [m for m in MANIFESTS if m["kind"] in ("Job", "Deployment")]


def containers() -> list[tuple[str, list[str], dict[str, str]]]:
    """Return name, command and environment of every container with our image."""
    found = [
        (name, service["command"], service["environment"])
        for name, service in COMPOSE["services"].items()
        if service["image"] == "autoac"
    ]
    for pod in PODS:
        for container in pod["spec"]["template"]["spec"]["containers"]:
            variables = {entry["name"]: entry["value"] for entry in container.get("env", [])}
            found.append((pod["metadata"]["name"], container["command"], variables))
    return found


CONTAINERS = {name: (command, environment) for name, command, environment in containers()}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_command_exists(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, _ = CONTAINERS[name]
    assert command[:3] == ["python", "-m", "autoac.api"]
    assert main([*command[3:], "--help"]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_variable_is_a_setting(name: str) -> None:
    _, environment = CONTAINERS[name]
    for variable in environment.keys() - {"AUTOAC_SECRETS_DIR"}:
        assert variable.removeprefix("AUTOAC_").lower() in Settings.model_fields, variable


def test_every_setting_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "service.md").read_text()
    missing = [name for name in Settings.model_fields if f"`AUTOAC_{name.upper()}`" not in page]
    assert missing == []


def test_policies_and_budgets_select_existing_pods() -> None:
    labels = [m["spec"]["template"]["metadata"]["labels"] for m in PODS]
    selectors = [
        m["spec"].get("selector") or m["spec"]["podSelector"]
        for m in MANIFESTS
        if m["kind"] in ("PodDisruptionBudget", "NetworkPolicy")
    ]
    assert len(selectors) == 3
    for selector in selectors:
        assert any(selector["matchLabels"].items() <= has.items() for has in labels)


def test_dockerignore_allows_every_copied_file() -> None:
    sources = re.findall(r"^COPY (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert [source for source in sources if f"!{source}" not in allowed] == []


def test_containers_run_with_least_privileges_and_are_probed_on_routes_that_exist() -> None:
    routes = create_app(Settings()).openapi()["paths"].keys()
    for manifest in PODS:
        pod = manifest["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            probes = [container[name] for name in container if name.endswith("Probe")]
            assert {probe["httpGet"]["path"] for probe in probes} <= routes
            assert bool(probes) == (manifest["kind"] == "Deployment")
    for name in ("upgrade", "api", "worker"):
        service = COMPOSE["services"][name]
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["secrets"] == ["AUTOAC_TOKEN", "AUTOAC_DATABASE_URL"]
        assert name == "upgrade" or "upgrade" in service["depends_on"]


def test_memory_limits_cover_what_children_may_take() -> None:
    worker = next(m for m in PODS if m["metadata"]["name"] == "autoac-worker")
    container = worker["spec"]["template"]["spec"]["containers"][0]
    variables = {entry["name"]: int(entry["value"]) for entry in container["env"] if entry["value"].isdigit()}
    needed = variables["AUTOAC_SOLVE_MEMORY_BYTES"] * variables["AUTOAC_SOLVES_AT_ONCE"]
    assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30 > needed
    for name, children in (("api", "AUTOAC_READS_AT_ONCE"), ("worker", None)):
        service = COMPOSE["services"][name]
        environment = service["environment"]
        each = environment.get("AUTOAC_SOLVE_MEMORY_BYTES", Settings().solve_memory_bytes)
        at_once = environment[children] if children else 2  # the default of the file
        assert int(service["mem_limit"].removesuffix("g")) << 30 > each * at_once
