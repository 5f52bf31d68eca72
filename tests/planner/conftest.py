"""Let the tests of this folder import `graphs` and `oracles`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # the import mode adds no folder by itself
