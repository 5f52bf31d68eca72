"""Check the health of a container: exit with 0 if its service or worker answers, else with 1."""

from __future__ import annotations

import os
import sys
from urllib.request import ProxyHandler, build_opener

TIMEOUT_S = 2.0
opener = build_opener(ProxyHandler({}))  # proxies of the environment do not apply to this machine


def answers(url: str) -> bool:
    """Return True if `url` answers with 200 in time."""
    try:
        with opener.open(url, timeout=TIMEOUT_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def main() -> int:
    """Return the exit code: 0 if the service or the worker answers on the port of its setting."""
    service, worker = os.environ.get("AUTOAC_PORT", "8421"), os.environ.get("AUTOAC_WORKER_PORT", "")
    urls = [f"http://127.0.0.1:{service}/livez"]
    if worker:
        urls.append(f"http://127.0.0.1:{worker}/livez")
    return 0 if any(answers(url) for url in urls) else 1


if __name__ == "__main__":
    sys.exit(main())
