"""Apply a memory budget to a model, and carry out its plan with the same gradients.

The public names stand in `__init__.pyi`. Each is imported when it is first used (PEP 562).
"""

import logging

import lazy_loader

from autoac.planner.units import printable

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _with_printable_names(record: logging.LogRecord) -> bool:
    """Change a record so that names from a policy or a service cannot steer the terminal."""
    record.msg, record.args = printable(record.getMessage()), ()
    return True


logging.getLogger(__name__).addFilter(_with_printable_names)
