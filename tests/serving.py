"""Run the service on a thread of this process, and pages in Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import uvicorn
from waiting import until

NO_CHROMIUM = "Chromium is missing; `make browser` installs it"

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

in_chromium = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Yield the address on which `app` listens, with a free port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on"))
    thread = Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        assert server.started
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser; skip the test where none can be driven."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is in the extra `dev`")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield launched
        finally:
            launched.close()


class Tab:
    """A tab of a browser, its errors, and its requests."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
        self.page.set_default_timeout(60_000)
        self.complaints: list[str] = []
        self.requests: list[Any] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request))

    def close(self, *own: str) -> None:
        """Close the tab, which had no errors, and asked for nothing but what begins with one of `own`."""
        self.page.close()
        assert self.complaints == []
        assert [one.url for one in self.requests if not one.url.startswith(("data:", *own))] == []
