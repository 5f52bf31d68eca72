"""Run tests in the process with the stand-in: read their ids, and send back the reports of each.

    python -m standin.child LIBRARY DESCRIPTOR

One id is read from a line of standard input; an answer is a line of JSON on the descriptor. All tests run
in one session, because the end of a session of pytest takes longer than most of them.
"""

from __future__ import annotations

import gc
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

    class OnDemand:
        """Run the tests that are asked for, and collect the reports of each."""

        def __init__(self) -> None:
            self.asked = os.fdopen(os.dup(0))  # pytest closes its own standard input
            self.answers = os.fdopen(descriptor, "w")
            self.reports: list[object] = []

        def pytest_runtestloop(self, session: pytest.Session) -> bool:
            items = {item.nodeid: item for item in session.items}
            gc.collect()
            gc.freeze()  # what is imported by now; tests collect garbage often
            for line in self.asked:
                self.reports = []
                item = items[line.rstrip("\n")]
                item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
                self.answers.write(json.dumps(self.reports) + "\n")
                self.answers.flush()
            return True

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item: pytest.Item) -> object:
            report = yield
            self.reports.append(
                item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            )
            return report

    folder = str(Path(__file__).parent)
    pytest.main([folder, "-p", "no:cacheprovider", "-p", "no:randomly"], plugins=[OnDemand()])


if __name__ == "__main__":
    # Tests import this module by its name, and find the device there.
    from standin import child

    child.main()
