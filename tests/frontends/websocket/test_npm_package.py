"""The client as an npm package: in Node.js, which before version 22 has no WebSocket of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from inferengine import __version__
from tests.frontends.websocket.builders import ANSWER, make_engine, serving

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "frontends" / "websocket" / "client"
INSTALLED = ROOT / "tests" / "node" / "node_modules"
PROGRAM = """
import { InferEngineSocket } from "inferengine-client";
const [refused, url] = process.argv.slice(2);
const engine = new InferEngineSocket(refused);
let attempts = 0;
await new Promise((resolve) => engine.addEventListener("status", ({ detail }) => {
  if (detail === "closed" && ++attempts === 1) resolve();
}));
engine.close();

const other = new InferEngineSocket(url);
const answer = other.generate({ messages: [{ role: "user", content: "Who are you?" }] });
let text = "";
for await (const delta of answer) text += delta.text;
const { choices } = await answer.result;
other.close();
console.log(JSON.stringify({ attempts, text, finishReason: choices[0].finishReason }));
"""

CLOSING = """
import { InferEngineSocket } from "./client.js";
class DeadSocket {  // whose closing handshake never ends
  readyState = 1;
  constructor() { queueMicrotask(() => this.onopen()); }
  send(text) {
    const { type, id } = JSON.parse(text);
    if (type === "generate") this.onmessage({ data: JSON.stringify({ type: "accepted", id, n: 1, context_ids: [] }) });
  }
  close() { this.readyState = 2; }
}
const engine = new InferEngineSocket("ws://nowhere", { WebSocket: DeadSocket });
await new Promise((resolve) => engine.addEventListener("status", resolve, { once: true }));
const open = [true, false].map((detached) => engine.generate({ prompt: "Once", detached }));
const reading = (async () => { for await (const delta of open[0]); })();
engine.close();
const ends = [reading, ...open.map(({ result }) => result), engine.generate({ prompt: "Twice" }).result];
const codes = Promise.all(ends.map((end) => end.then(() => "ended", ({ code }) => code)));
const late = new Promise((resolve) => setTimeout(resolve, 2000, "waits"));
console.log(JSON.stringify(await Promise.race([codes, late])));
process.exit();
"""


def test_the_npm_package_has_the_python_packages_version_and_names_existing_files() -> None:
    described = json.loads((PACKAGE / "package.json").read_text(encoding="utf-8"))
    assert described["version"] == __version__
    assert [name for name in described["files"] if not (PACKAGE / name).is_file()] == []
    assert {path.removeprefix("./") for path in described["exports"]["."].values()} == set(described["files"])


@pytest.mark.node
def test_in_node_it_streams_an_answer_and_survives_a_refused_connection(tmp_path: Path) -> None:
    modules = tmp_path / "node_modules"
    shutil.copytree(PACKAGE, modules / "inferengine-client", ignore=shutil.ignore_patterns("node_modules"))
    (modules / "ws").symlink_to(INSTALLED / "ws")
    (tmp_path / "program.mjs").write_text(PROGRAM)
    with make_engine(tmp_path) as engine, serving(engine) as server:
        url = f"ws://127.0.0.1:{server.port}/v1/ws"
        ran = subprocess.run(
            ["node", "program.mjs", "ws://127.0.0.1:9/v1/ws", url],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout) == {"attempts": 1, "text": ANSWER, "finishReason": "stop"}


@pytest.mark.node
def test_close_ends_every_generation_even_where_the_connection_is_dead(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "program.mjs").write_text(CLOSING)
    ran = subprocess.run(["node", "program.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout) == ["engine_unavailable"] * 4
