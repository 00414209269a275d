"""Serve the chat page's files from memory, with headers that forbid everything else.

The content security policy allows this server's own scripts, styles, fonts and socket: no inline script or style, no
other host, no frame around the page. Only DOMPurify may turn text into HTML (trusted types).
"""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

FOLDER = Path(__file__).parent / "static"
CLIENT = tuple(Path(__file__).parent / "client" / name for name in ("client.js", "client.d.ts"))  # of the npm package
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".ts": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class _File(NamedTuple):
    content: bytes
    zipped: bytes | None  # None where gzip makes it no smaller: fonts
    media_type: str
    etag: str


class StaticFiles:
    """Serves GET / and GET /<path>. Browsers revalidate each time and get a 304 for a current copy."""

    def __init__(self, folder: Path = FOLDER) -> None:
        paths = [path for path in sorted(folder.rglob("*")) if path.suffix in _TYPES]
        self._files = {path.relative_to(folder).as_posix(): _read(path) for path in paths}
        self._files |= {path.name: _read(path) for path in CLIENT}

    async def serve(self, request: Request) -> Response:
        """Serve one file by its path in the folder; nothing is looked up on disk."""
        file = self._files.get(request.path_params.get("path") or INDEX)
        if file is None:
            return PlainTextResponse("There is no such page.", 404, headers=SECURITY_HEADERS)
        headers = {**SECURITY_HEADERS, "cache-control": "no-cache", "etag": file.etag, "vary": "accept-encoding"}
        if file.etag in [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]:
            return Response(status_code=304, headers=headers)
        content = file.content
        if file.zipped is not None and "gzip" in request.headers.get("accept-encoding", ""):
            content, headers["content-encoding"] = file.zipped, "gzip"
        return Response(content, media_type=file.media_type, headers=headers)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    zipped = gzip.compress(content, mtime=0)
    return _File(content, zipped if len(zipped) < len(content) else None, _TYPES[path.suffix], etag)
