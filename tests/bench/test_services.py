"""bench/services.py: servers that a measurement starts are ready when it begins and gone when it ends."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from inferengine.bench.services import PeerPlace, peer_service
from inferengine.errors import InferEngineError

SERVER = """
import http.server, json, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps([os.getpid(), *sys.argv[1:-1]]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def fake_vllm(folder: Path, program: str) -> PeerPlace:
    """Return a package that is started as vLLM's command line is."""
    module = folder / "vllm" / "entrypoints" / "cli" / "main.py"
    module.parent.mkdir(parents=True)
    for package in (folder / "vllm", module.parents[1], module.parent):
        (package / "__init__.py").touch()
    module.write_text(program)
    return PeerPlace(path=str(folder))


def test_the_peer_is_served_with_its_flags_until_the_block_ends(tmp_path: Path) -> None:
    with peer_service("./model", "--dtype", "auto", peer=fake_vllm(tmp_path, SERVER)) as url:
        with urllib.request.urlopen(f"{url}/health") as answer:
            number, words = answer.read().decode().strip("[]").split(", ", 1)
        assert words == '"serve", "./model", "--dtype", "auto", "--host", "127.0.0.1", "--port"'
        assert subprocess.run(["kill", "-0", number], check=False).returncode == 0
    assert subprocess.run(["kill", "-0", number], check=False, capture_output=True).returncode != 0


def test_a_peer_that_ends_at_its_start_is_shown_with_what_it_wrote(tmp_path: Path) -> None:
    peer = PeerPlace(sys.executable, fake_vllm(tmp_path, "raise SystemExit('no such card')").path)
    with pytest.raises(InferEngineError, match="vllm serve is not ready: no such card"), peer_service("m", peer=peer):
        pass
