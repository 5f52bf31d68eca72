"""Warn of each subject once."""

from __future__ import annotations

import logging

log = logging.getLogger("ac_client")


class WarnOnce:
    """Logs warnings for one model, one for each subject.

    Attributes:
        name: of the model, at the head of each message.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._warned: set[str] = set()

    def __call__(self, subject: str, message: str) -> None:
        """Log a warning, unless there was one on `subject` before."""
        if subject not in self._warned:
            self._warned.add(subject)
            log.warning("%s: %s", self.name, message)
