"""Run random programs at the worst timing: `make bench-streams`, and with moves `make bench-moves`."""

from __future__ import annotations

import sys

from standin import cuda
from standin.library import library

if __name__ == "__main__":
    device = cuda.load(library())

    from benchmarks import stream_programs
    from benchmarks.fuzzers import moved_programs

    if "moves" in sys.argv[1:]:
        sys.argv.remove("moves")
        moved_programs.main(device.take_races)
    else:
        stream_programs.main(device.take_races)
