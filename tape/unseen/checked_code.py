"""Remember for which code and which parameters the contents of regions were compared.

A region outside of any plan has no profile that shows which values a kernel writes that PyTorch does not
dispatch. So a region compares contents (tracked_storages.py) until a backward has run over what its code, and
the parameters that it reads, have recorded: the whole first step. Later steps trust what was found then. If
an unseen write was found, later steps compare as well, and a warning says so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable
from types import CodeType
from typing import Any

from torch.nn import Parameter

from autoac.tape.torch_facts.private import WeakIdKeyDictionary

log = logging.getLogger("ac_client")

_checked_sites: set[Hashable] = set()
_checked_parameters: Any = WeakIdKeyDictionary()


class CheckedCode:
    """The code of one region: functions or with-statements, and parameters.

    Attributes:
        is_new: True if some of it was not compared before, or must be compared each time.
    """

    def __init__(self) -> None:
        self._sites: list[Hashable] = []
        self._parameters: list[Parameter] = []
        self._written_unseen = False
        self.is_new = False

    def note_site(self, site: Hashable) -> None:
        """Note a with-statement that opens the region, or a function that runs in it."""
        if site not in _checked_sites:
            self._sites.append(site)
            self.is_new = True

    def note_parameter(self, parameter: Parameter) -> None:
        """Note a parameter that an op in the region reads."""
        if parameter not in _checked_parameters:
            self._parameters.append(parameter)
            self.is_new = True

    def note_unseen_write(self, op: str) -> None:
        """Note that an unseen kernel wrote over what `op` has written, so that the code is never trusted."""
        self._written_unseen = True
        _warn(op)

    def confirm(self) -> None:
        """Trust the code and the parameters from now on, because backward ran over what they recorded."""
        if self.is_new and not self._written_unseen:
            _checked_sites.update(self._sites)
            for parameter in self._parameters:
                _checked_parameters[parameter] = True
            self._sites, self._parameters, self.is_new = [], [], False


@functools.cache
def _warn(op: str) -> None:
    log.warning(
        "a kernel that PyTorch does not dispatch writes over what %s has written, so checkpoints and regions "
        "with it compare contents in every step, and wait for the device each time. Call the kernel inside "
        "a torch.autograd.Function or a torch.library.custom_op",
        op,
    )


def site_of_function(function: Any) -> Hashable:
    """Return a key for a function, method or module: its code, or its type if it has none."""
    while hasattr(function, "func") and callable(function.func):  # functools.partial
        function = function.func
    function = getattr(function, "forward", function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return (code if isinstance(code, CodeType) else type(function),)
