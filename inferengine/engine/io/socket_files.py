"""Unix sockets whose file was removed under a running engine are bound again.

A cleaner of temporary files removes them, or the end of a login session does with its runtime directory. Connections
live on, so nothing is seen until a front end starts anew and finds nobody. Binding the same address once more makes
the file again and ends no connection: the old listener stays, and cannot be reached any more.
"""

from __future__ import annotations

import logging

from inferengine.engine.io.endpoint import Endpoint
from inferengine.errors import ConfigError
from inferengine.process.listen import AddressTaken

logger = logging.getLogger(__name__)

CHECK_S = 2.0


class SocketFiles:
    """The files of the unix sockets. Used by the I/O thread only."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.num_restored = 0
        self._endpoint = endpoint
        self._due_s = 0.0
        self._complained: set[str] = set()  # addresses without a file that cannot be bound again, logged once each

    def tick(self, now: float) -> None:
        """Look for the files every CHECK_S."""
        if now < self._due_s:
            return
        self._due_s = now + CHECK_S
        missing = self._endpoint.addresses_without_file()
        self._complained &= set(missing)
        for address in missing:
            try:
                self._endpoint.restore_file(address)
            except (AddressTaken, ConfigError, OSError) as error:
                if address not in self._complained:
                    self._complained.add(address)
                    logger.error("the file of %s was removed and cannot be made again: %s", address, error)
            else:
                self.num_restored += 1
                logger.warning("the file of %s was removed: it is bound again", address)
