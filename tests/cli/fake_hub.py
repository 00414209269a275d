"""A stand-in for the Hugging Face hub: one repository, over HTTP on this machine, with what its library asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(repository: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve `files` as the main revision of `repository`. Yields its address, and the list of paths asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            paths.append(f"{self.command} {path}")
            if path in (
                f"/api/models/{repository}",
                *(f"/api/models/{repository}/revision/{r}" for r in ("main", COMMIT)),
            ):
                self._send(
                    json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings(files)}).encode(), {}, body
                )
            elif path.startswith(f"/api/models/{repository}/tree/"):
                self._send(json.dumps(tree(files)).encode(), {}, body)
            elif (name := path.rpartition("/")[2]) in files and f"/{repository}/resolve/" in path:
                self._send(files[name], {"ETag": f'"{blob(files[name])}"', "X-Repo-Commit": COMMIT}, body)
            else:
                self._send(b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, body, 404)

        def _send(self, data: bytes, headers: Mapping[str, str], body: bool, status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", paths
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def blob(data: bytes) -> str:
    """Return the id of a file, as git has it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def siblings(files: Mapping[str, bytes]) -> list[dict[str, object]]:
    return [{"rfilename": name, "size": len(data), "blobId": blob(data)} for name, data in files.items()]


def tree(files: Mapping[str, bytes]) -> list[dict[str, object]]:
    return [{"type": "file", "path": name, "size": len(data), "oid": blob(data)} for name, data in files.items()]
