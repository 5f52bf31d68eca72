"""Run random programs on several streams at the worst timing: `make bench-streams`."""

from __future__ import annotations

from standin import cuda
from standin.library import library

if __name__ == "__main__":
    device = cuda.load(library())

    from benchmarks import stream_programs

    stream_programs.main(device.take_races)
