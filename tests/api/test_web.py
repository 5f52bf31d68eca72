"""The pages as they are sent: no data in them, no key for them, and nothing but their own scripts."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from conftest import Serve
from service_fakes import chain_profile, request

from autoac.api import child
from autoac.api.web import OURS, assets

JSON = {"Content-Type": "application/json"}
TOKEN = "a token of more than sixteen"
ID = "0" * 64
PAGES = ("/", f"/models/{ID}", f"/policies/{ID}", "/difference", "/jobs")


@pytest.mark.parametrize("path", PAGES)
def test_a_page_needs_no_key_and_asks_for_nothing_but_what_is_here(serve: Serve, path: str) -> None:
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
        found = http.get(url)
        assert found.status_code == 200
        assert "immutable" in found.headers["cache-control"]
        digest = hashlib.sha256(found.content).digest()
        assert integrity == f"sha256-{base64.b64encode(digest).decode()}"
    again = http.get(path, headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_every_script_and_style_is_served_and_nothing_else_is(serve: Serve) -> None:
    http = serve()
    here = Path(child.__file__).with_name("web") / "static"
    assert sorted(OURS) == sorted(file.name for file in here.iterdir())
    for asset in assets().values():
        assert http.get(asset.url).content == asset.content
    url = assets()["service.js"].url
    for wrong in (
        url.replace("service.js", "jobs.js"),
        "/assets/0000000000000000/service.js",
        "/assets/x/..",
    ):
        assert http.get(wrong).status_code == 404


def test_scripts_make_no_markup_of_text() -> None:
    for asset in assets().values():
        if asset.name != "uPlot.iife.min.js":
            text = asset.content.decode()
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text)


def test_jobs_of_one_profile(serve: Serve) -> None:
    http = serve()
    for profile in (chain_profile(), chain_profile(1 << 20)):
        made = http.post("/v1/policies", content=request(profile), headers=JSON)
        assert made.status_code == 201, made.text
    (job,) = http.get("/v1/jobs", params={"profile": chain_profile().digest}).json()["items"]
    assert job["profile_digest"] == chain_profile().digest
    assert http.get("/v1/jobs", params={"profile": ID}).json()["items"] == []
