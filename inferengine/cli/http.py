"""usage: inferengine http [--config FILE] [--section.key VALUE ...]

Run the HTTP front end: OpenAI-compatible routes, Server-Sent Events, health and metrics (http.host, http.port).
It needs no model files: tokenizer and chat template come from the engine over the wire. It may start before the
engine and outlive it. A listening socket handed over by systemd is used instead of http.host and http.port.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferengine.cli.common import resolve
from inferengine.process import stdio as output
from inferengine.process.reload import Reload


def run(arguments: Sequence[str]) -> int:
    """Run the HTTP front end until it is told to stop."""
    config = resolve(arguments)
    reload = Reload(config, lambda: resolve(arguments))
    output.protect(json_lines=config.log.format == "json")
    from frontends.http.process import run_http

    return run_http(config, reload)
