"""GET /docs and /redoc: /openapi.json as Swagger UI and as Redoc show it, without a network.

Both are published bundles, unchanged (static/vendor/README.md). The pages and their files are the same for everybody
and need no key; the document they show does where there are keys, and they ask for one.
"""

from __future__ import annotations

import json
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response

FOLDER = Path(__file__).resolve().parents[1] / "static"
VENDOR = FOLDER / "vendor"
PREFIX = "/docs/"  # of the files' paths
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".txt": "text/plain"}
# Both bundles set styles from scripts and hold their images as data; Redoc's search runs in a worker made of a blob.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src data:; connect-src 'self'; worker-src blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def _versioned() -> dict[str, str]:
    """The path of each vendored file with the version of its library, so that browsers may keep it."""
    libraries = json.loads((VENDOR / "manifest.json").read_text(encoding="utf-8"))["libraries"]
    return {name: f"{PREFIX}{name}?{library['version']}" for library in libraries for name in library["files"]}


VENDORED = _versioned()
_FILES = {path.name: path for path in (*VENDOR.iterdir(), *FOLDER.iterdir()) if path.suffix in _TYPES}
_PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>InferEngine API</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    "{links}<main id=api>Loading …</main>{scripts}</html>"
)
_SWAGGER = _PAGE.format(
    links=f'<link rel="stylesheet" href="{VENDORED["swagger-ui.css"]}">'
    '<link rel="stylesheet" href="/docs/api_pages.css">',
    scripts=f'<script src="{VENDORED["swagger-ui-bundle.js"]}"></script>'
    '<script type="module" src="/docs/swagger_page.js"></script>',
)
_REDOC = _PAGE.format(
    links='<link rel="stylesheet" href="/docs/api_pages.css">',
    scripts=f'<script src="{VENDORED["redoc.standalone.js"]}"></script>'
    '<script type="module" src="/docs/redoc_page.js"></script>',
)


async def swagger(request: Request) -> Response:
    """The API's reference as a page on which each route can be tried (Swagger UI)."""
    return Response(_SWAGGER, media_type="text/html; charset=utf-8", headers=HEADERS)


async def redoc(request: Request) -> Response:
    """The API's reference as a page to read (Redoc)."""
    return Response(_REDOC, media_type="text/html; charset=utf-8", headers=HEADERS)


async def file(request: Request) -> Response:
    """One file of these pages by its name."""
    path = _FILES.get(request.path_params["file"])
    if path is None:
        return PlainTextResponse("There is no such file.", 404, headers=HEADERS)
    age = "max-age=31536000, immutable" if path.name in VENDORED and request.url.query else "no-cache"
    return FileResponse(path, media_type=_TYPES[path.suffix], headers={**HEADERS, "cache-control": age})
