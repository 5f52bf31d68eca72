"""Put the planner tests' shared builders on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "planner"))  # pytest's import mode adds no folder by itself
