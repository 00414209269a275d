"""MetricsServer: Prometheus text from the engine itself, for a scraper that should not depend on any front end.

One thread of its own, on loopback, and two paths: /metrics and /health. It asks the I/O thread for the figures, never
the loop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from inferengine.observability.prometheus import render
from inferengine.process.listen import AddressTaken

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CLIENT_TIMEOUT_S = 5.0  # one scraper is served at a time


class MetricsServer:
    """Serves until `close`."""

    def __init__(self, port: int, read: Callable[[], dict[str, Any] | None]) -> None:
        """`read` gives the statistics, or None when the engine does not answer. Raises AddressTaken."""

        class Handler(BaseHTTPRequestHandler):
            timeout = CLIENT_TIMEOUT_S
            server_version = "inferengine"
            sys_version = ""

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path not in ("/metrics", "/health"):
                    self._answer(404, b"there are /metrics and /health\n", "text/plain")
                    return
                stats = read()
                if stats is None:
                    self._answer(503, b"the engine does not answer\n", "text/plain")
                elif path == "/health":
                    self._answer(200, f"{stats['state']}\n".encode(), "text/plain")
                else:
                    self._answer(200, render([stats]), CONTENT_TYPE)

            def log_message(self, format: str, *arguments: Any) -> None:
                logger.debug(format, *arguments)

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        try:
            self._server = HTTPServer((HOST, port), Handler)
        except OSError as error:
            message = f"engine.metrics_port {port} on {HOST} cannot be bound ({error.strerror}): choose another"
            raise AddressTaken(message) from None
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="inferengine-metrics", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(CLIENT_TIMEOUT_S)
