"""Test the pages as sent: no data, no key, only their own scripts."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from urllib.parse import urljoin

import pytest
from service_app import JSON, TOKEN, Serve
from service_fakes import chain_profile, request

import autoac.api.web
from autoac.api.web import OURS, assets

ID = "0" * 64
PAGES = ("/", f"/profiles/{ID}", f"/policies/{ID}", "/difference", "/jobs")


@pytest.mark.parametrize("path", PAGES)
def test_pages_need_no_key_and_load_only_local_files(serve: Serve, path: str) -> None:
    http = serve(token=TOKEN)
    page = http.get(path)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"\s(on\w+|style)=", page.text)
    scripts = re.findall(r"<script ([^>]*)>(.*?)</script>", page.text, re.DOTALL)
    assert len(scripts) >= 3
    assert all(not inline for _, inline in scripts)
    loaded = re.findall(r'(?:src|rel="stylesheet" href)="([^"]*)" integrity="([^"]*)"', page.text)
    assert len(loaded) == len(scripts) + 3
    for url, integrity in loaded:
        found = http.get(urljoin(path, url))
        assert found.status_code == 200
        assert "immutable" in found.headers["cache-control"]
        digest = hashlib.sha256(found.content).digest()
        assert integrity == f"sha256-{base64.b64encode(digest).decode()}"
    again = http.get(path, headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_only_scripts_and_styles_are_served(serve: Serve) -> None:
    http = serve()
    here = Path(autoac.api.web.__file__).parent / "static"
    assert sorted(OURS) == sorted(file.name for file in here.iterdir())
    for asset in assets().values():
        assert http.get(f"/{asset.path}").content == asset.content
    url = "/" + assets()["service.js"].path
    for wrong in (
        url.replace("service.js", "jobs.js"),
        "/assets/0000000000000000/service.js",
        "/assets/x/..",
    ):
        assert http.get(wrong).status_code == 404


def test_scripts_never_build_markup_from_text() -> None:
    for asset in assets().values():
        if asset.name != "uPlot.iife.min.js":
            text = asset.content.decode()
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)


def test_pages_use_relative_addresses(serve: Serve) -> None:
    """Below a proxy's path, an address that begins with a slash belongs to another service."""
    http = serve()
    for path in PAGES:
        named = re.findall(r'(?:src|href)="([^"]*)"', http.get(path).text)
        assert len(named) > 5
        assert not [url for url in named if url.startswith("/")]
        base = path.count("/") - 1
        assert all(url.startswith(("../" * base) or "./") for url in named if url[0] not in "#d")


def test_jobs_are_filtered_by_profile(serve: Serve) -> None:
    http = serve()
    for profile in (chain_profile(), chain_profile(1 << 20)):
        made = http.post("/v1/policies", content=request(profile), headers=JSON)
        assert made.status_code == 201, made.text
    (job,) = http.get("/v1/jobs", params={"profile": chain_profile().digest}).json()["items"]
    assert job["profile_digest"] == chain_profile().digest
    assert http.get("/v1/jobs", params={"profile": ID}).json()["items"] == []
