"""The image's health check: ends with 0 if the service or the worker of this container answers, else 1."""

from __future__ import annotations

import os
import sys
from urllib.request import ProxyHandler, build_opener

TIMEOUT_S = 2.0
opener = build_opener(ProxyHandler({}))  # what the environment says of proxies is not for this machine


def answers(url: str) -> bool:
    """Return True if `url` answers with 200 in time."""
    try:
        with opener.open(url, timeout=TIMEOUT_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def main() -> int:
    """Ask the service, or the worker, under the ports that their settings have."""
    service, worker = os.environ.get("AUTOAC_PORT", "8421"), os.environ.get("AUTOAC_WORKER_PORT", "")
    urls = [f"http://127.0.0.1:{service}/livez"]
    if worker:
        urls.append(f"http://127.0.0.1:{worker}/metrics")
    return 0 if any(answers(url) for url in urls) else 1


if __name__ == "__main__":
    sys.exit(main())
