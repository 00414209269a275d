"""The pages for people: GET / tells what this port serves and where the chat page is; GET /docs and /redoc show
/openapi.json as Swagger UI and as Redoc, without a network.

`/` is a page for browsers, JSON for other clients. It tells no more than /openapi.json, and needs no key, because a
browser that opens the address sends none. Swagger UI and Redoc are published bundles, unchanged
(static/vendor/README.md). Their pages and files are the same for everybody and need no key; the document they show does
where there are keys, and they ask for one.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from frontends.http.respond import JsonBytes
from inferengine import __version__
from inferengine.config import Config

_HOST = re.compile(r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]")
_PROXY_HEADERS = frozenset({"forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"})
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.55 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 56rem; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1rem; margin: 2rem 0 .25rem; }
li span { opacity: .8; } a { color: light-dark(#0b62c4, #7db8ff); }
pre { overflow-x: auto; padding: .9rem 1rem; border-radius: .5rem; background: light-dark(#f2f3f5, #1c1f24); }
code { font: .875rem/1.5 ui-monospace, monospace; }
ul { list-style: none; margin: 0; padding: 0; }
li { display: grid; grid-template-columns: minmax(0, 23rem) minmax(0, 1fr); gap: 0 1.25rem; padding: .4rem 0;
  border-top: 1px solid light-dark(#e3e5e9, #2c3037); }
li code { overflow-wrap: anywhere; } li b { display: inline-block; min-width: 4.2rem; font-weight: 600; }
@media (max-width: 40rem) { li { grid-template-columns: 1fr; } }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "vary": "accept",
}


async def index(request: Request) -> Response:
    """List the routes, with the address of the chat page."""
    config: Config = request.app.state.service.config
    routes = list(_listed(request.app.routes))
    is_proxied = not _PROXY_HEADERS.isdisjoint(request.headers)  # where the chat page is from there is not known here
    chat = None if is_proxied else chat_address(config, request.headers.get("host", ""))
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(_page(routes, chat, _own_address(request)), headers=HEADERS)
    document: dict[str, Any] = {
        "service": "InferEngine",
        "version": __version__,
        "chat": chat,
        "openapi": "/openapi.json",
        "routes": {f"{method} {path}": summary for method, path, summary in routes},
    }
    return JsonBytes(document)


def chat_address(config: Config, host: str) -> str | None:
    """Return where the websocket front end of the same configuration serves its page. `host`: what the client called
    this one, for a page that listens on all addresses. None where the port is not known beforehand."""
    if not config.ws.port:
        return None
    name = config.ws.host
    if name in ("0.0.0.0", "::", ""):
        called = _HOST.match(host)
        name = called[0] if called else "127.0.0.1"
    elif ":" in name:
        name = f"[{name}]"
    return f"{'https' if config.ws.tls_certificate else 'http'}://{name}:{config.ws.port}/"


def _listed(routes: Iterable[Any]) -> Iterable[tuple[str, str, str]]:
    """Return method, path and the docstring's first line of each route."""
    for route in routes:
        if isinstance(route, Route):
            method = min((route.methods or {"GET"}) - {"HEAD"})
            summary = (route.endpoint.__doc__ or "").strip().split("\n")[0]
            yield method, re.sub(r":\w+}", "}", route.path), summary


def _own_address(request: Request) -> str:
    host = request.headers.get("host", "")
    called = _HOST.match(host)
    port = host[called.end() :] if called else ""
    place = f"{called[0]}{port if re.fullmatch(r':[0-9]+', port) else ''}" if called else "127.0.0.1"
    return f"{request.scope.get('scheme', 'http')}://{place}"


def _page(routes: list[tuple[str, str, str]], chat: str | None, address: str) -> str:
    def line(method: str, path: str, summary: str) -> str:
        shown = html.escape(path)
        if method == "GET" and "{" not in path:
            shown = f'<a href="{shown}">{shown}</a>'
        said = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(summary))
        return f"<li><code><b>{method}</b>{shown}</code><span>{said}</span></li>"

    items = "".join(line(*route) for route in routes if route[1] != "/")
    talk = f'<p>To talk with the model: <a href="{html.escape(chat)}">{html.escape(chat)}</a></p>' if chat else ""
    curl = (
        f"curl {address}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        '  -d \'{"messages": [{"role": "user", "content": "What is a KV cache?"}]}\''
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>InferEngine</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>InferEngine {html.escape(__version__)}</h1>"
        "<p>An OpenAI-compatible server. This port is for programs.</p>"
        f"{talk}<pre><code>{html.escape(curl, quote=False)}</code></pre><h2>Routes</h2><ul>{items}</ul></html>"
    )


# -- /docs and /redoc --------------------------------------------------------------------------------------------------


FOLDER = Path(__file__).resolve().parents[1] / "static"
VENDOR = FOLDER / "vendor"
PREFIX = "/docs/"  # of the files' paths
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".txt": "text/plain"}
# Both bundles set styles from scripts and hold their images as data; Redoc's search runs in a worker made of a blob.
DOCS_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src data:; connect-src 'self'; worker-src blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def _versioned() -> dict[str, str]:
    """Return the path of each vendored file with the version of its library, so that browsers may keep it."""
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
    """Show the API's reference as a page on which each route can be tried (Swagger UI)."""
    return Response(_SWAGGER, media_type="text/html; charset=utf-8", headers=DOCS_HEADERS)


async def redoc(request: Request) -> Response:
    """Show the API's reference as a page to read (Redoc)."""
    return Response(_REDOC, media_type="text/html; charset=utf-8", headers=DOCS_HEADERS)


async def file(request: Request) -> Response:
    """Return one file of these pages by its name."""
    path = _FILES.get(request.path_params["file"])
    if path is None:
        return PlainTextResponse("There is no such file.", 404, headers=DOCS_HEADERS)
    age = "max-age=31536000, immutable" if path.name in VENDORED and request.url.query else "no-cache"
    return FileResponse(path, media_type=_TYPES[path.suffix], headers={**DOCS_HEADERS, "cache-control": age})
