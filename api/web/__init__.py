"""The pages that people look at: shells without data, and the scripts that fill them from the JSON API.

A shell is the same for everybody, so it needs no key; what is in it comes from routes that do. Scripts and
styles are ours, from here and from `autoac.planner.report.page`, and each has a hash in its address and in
its element.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import jinja2

from autoac.planner.report.page import read

CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

SHARED = ("vendor/uPlot.min.css", "timeline.css", "vendor/uPlot.iife.min.js", "parts.js", "timeline.js")
"""The parts that `autoac.planner.report.page` provides."""
OURS = (
    "service.css",
    "service.js",
    "stored.js",
    "profile.js",
    "policy.js",
    "difference.js",
    "jobs.js",
)
_HERE = files("autoac.api.web")
_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}


@dataclass(frozen=True, slots=True)
class Asset:
    """A script or a style sheet that the pages of the service load."""

    name: str
    content: bytes
    media_type: str
    integrity: str  # of the element that loads it
    path: str  # below the service's address; has the hash, so what is there never changes


@cache
def assets() -> dict[str, Asset]:
    """Every script and style, by its file's name."""
    found = {name: read(name).encode() for name in SHARED}
    found |= {name: _HERE.joinpath("static", name).read_bytes() for name in OURS}
    return {(made := _asset(name, content)).name: made for name, content in found.items()}


def _asset(name: str, content: bytes) -> Asset:
    name = name.rpartition("/")[2]
    digest = hashlib.sha256(content).digest()
    return Asset(
        name=name,
        content=content,
        media_type=_TYPES[name.rpartition(".")[2]],
        integrity=f"sha256-{base64.b64encode(digest).decode()}",
        path=f"assets/{digest.hex()[:16]}/{name}",
    )


@cache
def shell(name: str) -> bytes:
    """Render a page of `templates`, without any data."""
    templates = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _HERE.joinpath("templates", name).read_text("utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    timeline = read("timeline.parts.html")
    return templates.get_template(name).render(assets=assets(), timeline=timeline).encode()
