"""usage: inferengine engine [MODEL] [--config FILE] [--section.key VALUE ...]

Run the engine alone. It loads the model, binds its ZeroMQ socket and serves until SIGTERM, which lets running requests
finish (engine.drain_timeout_s); a second SIGTERM ends at once. SIGHUP reads the configuration again (log.level). MODEL
is a checkpoint folder or a hub id in the local cache; without it the embedded model is served.

Exit codes: 0 drained, 1 crash, 2 configuration, 3 the model cannot be loaded, 4 it does not fit in memory,
5 the socket cannot be bound, 6 the loop or the I/O thread stopped turning, 7 a step stalled, 130 drain cut short.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferengine.cli.common import resolve
from inferengine.config import share_cores_with_others
from inferengine.process import stdio as output
from inferengine.process.reload import Reload


def run(arguments: Sequence[str]) -> int:
    """Run the engine until it is told to stop."""
    config = resolve(arguments, takes_model=True)
    reload = Reload(config, lambda: resolve(arguments, takes_model=True))
    output.protect(json_lines=config.log.format == "json")
    share_cores_with_others()
    from inferengine.engine.process import run_engine

    return run_engine(config, reload)
