"""Test the image without Docker: follow the Dockerfile in a virtual environment and run the result."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
import yaml
from prometheus_client import start_http_server
from service_app import TOKEN
from service_fakes import request

from autoac.planner import Policy, Profile

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

Step = tuple[str, str]


def steps() -> list[Step]:
    """Return the Dockerfile's instructions and their arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, rest) for name, rest in lines]


def said(name: str) -> str:
    """Return the arguments of the last instruction of that name."""
    return [rest for instruction, rest in steps() if instruction == name][-1]


@dataclass(frozen=True)
class Image:
    """The programs of the image."""

    bin: Path  # of its Python

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.bin / command[0], *command[1:]], cwd="/", capture_output=True, text=True, timeout=60
        )


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Follow COPY and `RUN pip` into a folder and a clean environment."""
    base = tmp_path_factory.mktemp("image")
    src = base / "src"
    src.mkdir()
    made = Image(base / "venv" / "bin")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", base / "venv"], check=True)
    for name, rest in steps():
        words = shlex.split(rest)
        if name == "COPY":
            origin, target = ROOT / words[0], src / words[1]
            if origin.is_dir():
                shutil.copytree(origin, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(origin, target)
        elif name == "RUN" and words[0] in ("pip", "python"):
            # The cache is the machine's, and so are the mirror and pip; nothing else is taken over.
            arguments = [word for word in words[1:] if word != "--no-cache-dir"]
            python = made.bin / "python"
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
            done = subprocess.run(
                [*(pip if words[0] == "pip" else [python]), *arguments],
                cwd=src,
                capture_output=True,
                text=True,
                env=os.environ | {"PIP_NO_COMPILE": "1"},  # of thousands of modules, few are imported
            )
            assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(src)  # what runs is what was installed
    return made


@pytest.fixture(scope="module")
def url(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the image's CMD on a free port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("run") / "log"
    command = json.loads(said("CMD"))
    environment = {
        "PATH": f"{image.bin}:{os.environ['PATH']}",
        **dict(pair.split("=", 1) for pair in shlex.split(said("ENV"))),
        "AUTOAC_HOST": "127.0.0.1",
        "AUTOAC_PORT": str(port),
        "AUTOAC_TOKEN": TOKEN,
        "XDG_DATA_HOME": str(log.parent),  # in the image a volume
    }
    with log.open("wb") as stream:
        service = subprocess.Popen(
            [image.bin / command[0], *command[1:]], env=environment, cwd="/", stdout=stream, stderr=stream
        )
    try:
        while "Uvicorn running" not in log.read_text():
            assert service.poll() is None, log.read_text()
            signal.sigtimedwait([], 0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        service.terminate()
        service.wait(20)


def test_image_has_neither_torch_nor_packages_that_need_it(image: Image) -> None:
    for package in ("torch", "ac_client", "autoac.profiler", "transformers"):
        done = image.run("python", "-c", f"import {package}")
        assert "ModuleNotFoundError" in done.stderr, package


def test_image_has_the_licenses(image: Image) -> None:
    (folder,) = image.bin.parent.glob("lib/python*/site-packages/autoac-*.dist-info/licenses")
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert found == ["LICENSE", "planner/report/vendor/uPlot.LICENSE"]


def test_image_starts_answers_and_plans(image: Image, url: str, profile: Profile) -> None:
    assert httpx2.get(f"{url}/livez").json() == {"status": "alive"}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    response = httpx2.post(f"{url}/v1/policies", content=request(profile), headers=headers, timeout=60)
    assert response.status_code == 201, response.text
    policy = Policy.from_json(response.content)
    assert policy.fingerprint == profile.fingerprint
    assert list(policy.decisions) == profile.keys()
    assert policy.tools["autoac"] != "unknown"


def healthy(image: Image, **ports: str) -> bool:
    """Return True if the image's health check passes."""
    command = json.loads(said("HEALTHCHECK").partition("CMD ")[2])
    environment = os.environ | {"AUTOAC_PORT": "9", "AUTOAC_WORKER_PORT": "9"} | ports
    done = subprocess.run([image.bin / command[0], *command[1:]], env=environment, capture_output=True)
    assert done.returncode in (0, 1), done.stderr
    assert not done.stderr
    return done.returncode == 0


def test_health_check_passes_while_the_service_runs(image: Image, url: str) -> None:
    assert healthy(image, AUTOAC_PORT=url.rpartition(":")[2])
    assert not healthy(image)


def test_health_check_passes_for_a_worker(image: Image) -> None:
    server = start_http_server(0, addr="127.0.0.1")[0]  # it answers any path, as a worker does
    try:
        assert healthy(image, AUTOAC_WORKER_PORT=str(server.server_port))
    finally:
        server.shutdown()
        server.server_close()
    assert "AUTOAC_WORKER_PORT=9421" in said("ENV")


def test_image_runs_as_the_user_of_the_manifests() -> None:
    assert f"--uid {said('USER')} " in "".join(rest for name, rest in steps() if name == "RUN")
    manifests = yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text())
    deployments = [m for m in manifests if m["kind"] == "Deployment"]
    users = {m["spec"]["template"]["spec"]["securityContext"]["runAsUser"] for m in deployments}
    assert users == {int(said("USER"))}
    assert said("FROM") == "python:3.11-slim"
