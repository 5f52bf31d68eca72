"""The errors of profiling that callers catch: `autoac.tape.errors` defines them."""

from autoac.tape.errors import CannotCapture as CannotCapture
from autoac.tape.errors import CannotFake as CannotFake
from autoac.tape.errors import CannotProfile as CannotProfile
from autoac.tape.errors import NothingToProfile as NothingToProfile
from autoac.tape.errors import ProfilerBusy as ProfilerBusy
from autoac.tape.errors import ProfilerError as ProfilerError
from autoac.tape.errors import UnsupportedTorch as UnsupportedTorch
