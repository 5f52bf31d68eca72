"""Load the stand-in where this module is imported: a server of processes imports it before torch."""

from __future__ import annotations

from standin import cuda
from standin.library import library

device = cuda.load(library())
