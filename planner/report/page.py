"""Build web pages from templates, scripts and styles, so that no data can become markup.

A page is one file and asks the network for nothing: all that it needs is inlined, and its content security
policy lets only its own scripts and styles run. This module knows nothing of planning. The client and the
service both take parts from here; the service serves them as they are.

timeline.html, alone.js         memory over one training step, in one file (`timeline_page`)
timeline.parts.html, .js, .css  the same as a part of any page
parts.js                        what the scripts of several pages share
vendor/                         uPlot, as vendor/manifest.json says
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

__all__ = ["embedded", "fill", "page", "read", "timeline_page"]

_HERE = files("autoac.planner.report")
_PART = re.compile("@@([A-Z_]+)@@")


def timeline_page(data: Mapping[str, Any]) -> str:
    """Return the page of memory over one training step, from `timeline.Picture.data()`."""
    return page(
        read("timeline.html"),
        styles=[read("timeline.css")],
        scripts=[read("parts.js"), read("timeline.js"), read("alone.js")],
        parts={
            "TITLE": html.escape(f"{data['model']}: memory over one training step"),
            "TIMELINE": read("timeline.parts.html"),
        },
        data=data,
    )


def page(
    template: str, *, styles: list[str], scripts: list[str], parts: Mapping[str, str], data: object
) -> str:
    """Return a page with uPlot, in one file.

    Args:
        template: HTML with `@@HEAD@@` in its head, `@@SCRIPTS@@` at its end, and further `@@PARTS@@`.
        styles, scripts: CSS and JavaScript of the page itself, which follow uPlot's.
        parts: HTML for the further parts, escaped by the caller.
        data: put as JSON into the element `#data`, for the scripts.
    """
    css = [read("vendor/uPlot.min.css"), *styles]
    js = [read("vendor/uPlot.iife.min.js"), *scripts]
    allowed = "; ".join(
        [
            "default-src 'none'",
            f"style-src {_hashes(css)}",
            f"script-src {_hashes(js)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    head = "\n".join(
        [
            f'<meta http-equiv="Content-Security-Policy" content="{allowed}">',
            f"<!-- uPlot, inlined below:\n{html.escape(read('vendor/uPlot.LICENSE'))}\n-->",
            *(f"<style>{style}</style>" for style in css),
        ]
    )
    end = "\n".join(
        [
            f'<script type="application/json" id="data">{embedded(data)}</script>',
            *(f"<script>{script}</script>" for script in js),
        ]
    )
    return fill(template, {**parts, "HEAD": head, "SCRIPTS": end})


def fill(template: str, parts: Mapping[str, str]) -> str:
    """Return `template` with each `@@NAME@@` replaced; a name inside a part stays as it is.

    Raises:
        KeyError: the template has a name that `parts` lacks.
    """
    return _PART.sub(lambda match: parts[match[1]], template)


def embedded(data: object) -> str:
    """Return JSON that is safe inside a script element, with any strings in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def read(name: str) -> str:
    """Return the text of a file of this package."""
    return _HERE.joinpath(name).read_text("utf-8")


def _hashes(sources: list[str]) -> str:
    digests = (hashlib.sha256(source.encode()).digest() for source in sources)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
