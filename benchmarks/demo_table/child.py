"""Measure rows of the table: those of the demo, and torch's selective checkpoint."""

from __future__ import annotations

from functools import partial

from ac_client.demo.child import Wrappers, main
from benchmarks.torch_checkpoint import BASELINES, wrap_blocks

WRAPPERS: Wrappers = {baseline: partial(wrap_blocks, baseline=baseline) for baseline in BASELINES}

if __name__ == "__main__":
    main(WRAPPERS)
