"""Run random programs at the worst timing: `make bench-streams`, and with moves `make bench-moves`."""

from __future__ import annotations

import sys

from standin import cuda
from standin.library import library

if __name__ == "__main__":
    device = cuda.load(library())

    from fuzzers import moved_programs, stream_programs

    from benchmarks import below_minimum

    which = {"moves": moved_programs, "below-minimum": below_minimum}.get(sys.argv[1] if sys.argv[1:] else "")
    if which is not None:
        del sys.argv[1]
    (which or stream_programs).main(device.take_races)
