"""Check that everything compose.yaml and deploy/ name exists. This needs neither Docker nor a cluster."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoac.api import Settings
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


def test_tables_are_upgraded_before_services_start() -> None:
    for name in ("api", "worker"):
        assert COMPOSE["services"][name]["depends_on"] == {
            "upgrade": {"condition": "service_completed_successfully"}
        }


def test_pods_have_probes_and_limits() -> None:
    for manifest in PODS:
        for container in manifest["spec"]["template"]["spec"]["containers"]:
            assert container["resources"]["limits"]["memory"]
            if manifest["kind"] == "Deployment":
                assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
                start = container["startupProbe"]
                assert start["httpGet"] == container["livenessProbe"]["httpGet"]
                assert start["periodSeconds"] * start["failureThreshold"] >= 120
    api = next(m for m in PODS if m["metadata"]["name"] == "autoac-api")
    assert api["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_worker_memory_covers_its_parallel_solves() -> None:
    worker = next(m for m in PODS if m["metadata"]["name"] == "autoac-worker")
    container = worker["spec"]["template"]["spec"]["containers"][0]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    needed = int(variables["AUTOAC_SOLVE_MEMORY_BYTES"]) * int(variables["AUTOAC_SOLVES_AT_ONCE"])
    assert int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30 > needed


def test_every_setting_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "service.md").read_text()
    missing = [name for name in Settings.model_fields if f"`AUTOAC_{name.upper()}`" not in page]
    assert missing == []


def test_pods_run_with_least_privileges() -> None:
    for manifest in PODS:
        pod = manifest["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert re.fullmatch(r"autoac:[\d.]+", container["image"])
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {c["image"] for m in PODS for c in m["spec"]["template"]["spec"]["containers"]} == {
        f"autoac:{version}"
    }


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


def test_secrets_of_compose_are_files() -> None:
    services = COMPOSE["services"]
    for name in ("upgrade", "api", "worker"):
        assert services[name]["environment"]["AUTOAC_SECRETS_DIR"] == "/run/secrets"
        assert services[name]["secrets"] == ["AUTOAC_TOKEN", "AUTOAC_DATABASE_URL"]
    (password,) = services["postgres"]["secrets"]
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD_FILE"] == f"/run/secrets/{password}"
    assert COMPOSE["secrets"] == {
        name: {"file": f"secrets/{name}"} for name in ("AUTOAC_TOKEN", "AUTOAC_DATABASE_URL", password)
    }


def test_memory_of_compose_covers_the_children() -> None:
    for name, children in (("api", "AUTOAC_READS_AT_ONCE"), ("worker", None)):
        service = COMPOSE["services"][name]
        environment = service["environment"]
        each = environment.get("AUTOAC_SOLVE_MEMORY_BYTES", Settings().solve_memory_bytes)
        at_once = environment[children] if children else 2  # the default of the file
        assert int(service["mem_limit"].removesuffix("g")) << 30 > each * at_once


def test_compose_runs_the_service_with_least_privileges() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    for name in ("upgrade", "api", "worker"):
        service = compose["services"][name]
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])


def test_dockerignore_allows_every_copied_file() -> None:
    sources = re.findall(r"^COPY (\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert [source for source in sources if f"!{source}" not in allowed] == []
