"""usage: inferengine ws [--config FILE] [--section.key VALUE ...]

Run the websocket front end: many requests over one socket, and the chat page (ws.host, ws.port). It needs no model
files, may start before the engine and outlive it. A listening socket handed over by systemd is used instead of
ws.host and ws.port.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferengine.cli.common import resolve
from inferengine.process import stdio as output
from inferengine.process.reload import Reload


def run(arguments: Sequence[str]) -> int:
    """Run the websocket front end until it is told to stop."""
    config = resolve(arguments)
    reload = Reload(config, lambda: resolve(arguments))
    output.protect(json_lines=config.log.format == "json")
    from frontends.websocket.process import run_websocket

    return run_websocket(config, reload)
