"""Lets the tests here import `benchmarks` from the root, and what the planner's tests share."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
for folder in (ROOT, ROOT / "tests" / "planner"):
    if str(folder) not in sys.path:  # the import mode adds no folder by itself
        sys.path.append(str(folder))
