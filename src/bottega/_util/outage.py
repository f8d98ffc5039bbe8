"""Log of outages: one message when a service fails, and one when it recovers."""

from __future__ import annotations

import logging


class OutageLog:
    """Logger for one service that many calls use. It logs only the first failure of an outage."""

    def __init__(self, log: logging.Logger) -> None:
        self.lasts = False
        self._log = log

    def failed(self, message: str, *values: object) -> None:
        if not self.lasts:
            self.lasts = True
            self._log.error(message, *values)

    def ended(self, message: str, *values: object) -> None:
        """Log the message if there was an outage."""
        if self.lasts:
            self.lasts = False
            self._log.warning(message, *values)
