"""Run tests in the process with the stand-in: read their ids, and send back the reports of each.

    python -m standin.child LIBRARY DESCRIPTOR

One id is read from a line of standard input; an answer is a line of JSON on the descriptor.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType

from standin import cuda

device: ModuleType  # returned by the tests' fixture


def main() -> None:
    global device
    library, descriptor = Path(sys.argv[1]), int(sys.argv[2])
    device = cuda.load(library)
    import pytest

    class Reports:
        """Collect the reports of one test."""

        def __init__(self) -> None:
            self.sent: list[object] = []

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item: pytest.Item) -> object:
            report = yield
            self.sent.append(
                item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            )
            return report

    with os.fdopen(descriptor, "w") as answers:
        for line in sys.stdin:
            reports = Reports()
            pytest.main([line.rstrip("\n"), "-p", "no:cacheprovider", "-p", "no:randomly"], plugins=[reports])
            answers.write(json.dumps(reports.sent) + "\n")
            answers.flush()


if __name__ == "__main__":
    # Tests import this module by its name, and find the device there.
    from standin import child

    child.main()
