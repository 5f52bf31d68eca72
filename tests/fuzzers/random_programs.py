"""Run a fuzzer of random programs from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch


class TriedProgram(Protocol):
    """The outcome of one program; `differs` is empty if it ran as it should."""

    @property
    def differs(self) -> str: ...


T = TypeVar("T", bound=TriedProgram)


def run_programs(
    doc: str | None, tried: Callable[[int], T], summary: Callable[[Sequence[T]], str], programs: int = 1000
) -> None:
    """Run the programs that the command line asks for, and exit with 1 if one of them failed.

    Args:
        doc: of the command.
        tried: runs the program of a seed.
        summary: what ran, as text.
        programs: the default count.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=programs)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [tried(seed) for seed in range(options.first, options.first + options.programs)]
    print(summary(found))
    failures = [one for one in found if one.differs]
    print(f"{len(failures)} failures", *failures, sep="\n")
    raise SystemExit(bool(failures))
