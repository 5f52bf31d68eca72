"""Lets the tests of this folder import `graphs` and `oracles` beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # the import mode adds no folder by itself
