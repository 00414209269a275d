"""The chat page's files, read once at start and served from memory, with headers that let nothing else in.

The content security policy allows this server's own scripts, styles and socket and nothing more: no inline script, no
other host, no frame around the page. Whatever a model writes, the browser runs none of it.
"""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".ts": "text/plain; charset=utf-8",
}
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class _File(NamedTuple):
    content: bytes
    zipped: bytes
    media_type: str
    etag: str


class Pages:
    """GET / and GET /<file>. A browser asks each time whether its copy is the current one, and mostly gets a 304."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {path.name: _read(path) for path in sorted(folder.iterdir()) if path.suffix in _TYPES}

    async def serve(self, request: Request) -> Response:
        """One file by its name; nothing is looked up on disk."""
        file = self._files.get(request.path_params.get("name") or INDEX)
        if file is None:
            return PlainTextResponse("There is no such page.", 404, headers=SECURITY_HEADERS)
        headers = {**SECURITY_HEADERS, "cache-control": "no-cache", "etag": file.etag, "vary": "accept-encoding"}
        if file.etag in [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]:
            return Response(status_code=304, headers=headers)
        content = file.content
        if "gzip" in request.headers.get("accept-encoding", ""):
            content, headers["content-encoding"] = file.zipped, "gzip"
        return Response(content, media_type=file.media_type, headers=headers)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _File(content, gzip.compress(content, mtime=0), _TYPES[path.suffix], etag)
