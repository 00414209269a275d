"""SIGHUP: read again what can change while a service runs. It never ends one.

The configuration is read from where it came from. `log.level` is applied; of other keys that have changed the log says
that they need a restart. One that cannot be read changes nothing. What else a process reads again (API keys) it adds.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from inferengine.config import Config
from inferengine.errors import ConfigError
from inferengine.observability import logging as logs

logger = logging.getLogger(__name__)

APPLIED = ("log.level",)


class Reload:
    """Notes each SIGHUP from its construction on, in the main thread; `run_if_due` does the work where it is safe."""

    def __init__(self, config: Config, read: Callable[[], Config]) -> None:
        """`read` makes the configuration anew; raises ConfigError."""
        self.on_signal: Callable[[], None] = lambda: None  # called in the signal handler: only what is safe there
        self._config = config
        self._read = read
        self._due = False
        signal.signal(signal.SIGHUP, lambda *_: self.note())

    def run_if_due(self, also: Callable[[], None] = lambda: None) -> None:
        """After a SIGHUP: reload, then call `also`."""
        if not self._due:
            return
        self._due = False
        logger.info("SIGHUP: reading the configuration again")
        try:
            fresh = self._read()
        except ConfigError as error:
            logger.error("%s: nothing is changed", error)
        else:
            self._apply(fresh)
        also()

    def note(self) -> None:
        """There was a SIGHUP."""
        self._due = True
        self.on_signal()

    def _apply(self, fresh: Config) -> None:
        changed = _changed(self._config, fresh)
        if changed & set(APPLIED):
            logs.set_level(fresh.log.level)
            logger.info("log.level is %s", fresh.log.level)
            self._config = self._config.with_values(log={"level": fresh.log.level})
        if waiting := sorted(changed - set(APPLIED)):
            logger.warning("changed, and in force after a restart only: %s", ", ".join(waiting))


def _changed(before: Config, after: Config) -> set[str]:
    old, new = before.resolved(), after.resolved()
    return {f"{section}.{key}" for section, values in new.items() for key in values if values[key] != old[section][key]}
