"""SIGHUP: reloads what can change while a service runs. It never ends the service.

The configuration is read again from its source. `log.level` is applied; other keys that have changed are logged as
needing a restart. A configuration that cannot be read changes nothing. A process may reload more, such as API keys.
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
    """Records each SIGHUP in a handler; `run_if_due`, called outside of the handler, reloads. Create it in the main
    thread."""

    def __init__(self, config: Config, read: Callable[[], Config]) -> None:
        """`read` reads the configuration again, and raises ConfigError."""
        self.on_signal: Callable[[], None] = lambda: None  # runs in the signal handler, so it must be safe there
        self._config = config
        self._read = read
        self._due = False
        signal.signal(signal.SIGHUP, lambda *_: self.request())

    def run_if_due(self, also: Callable[[], None] = lambda: None) -> None:
        """Reload and then call `also`, if there was a SIGHUP."""
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

    def request(self) -> None:
        """Record a SIGHUP."""
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
