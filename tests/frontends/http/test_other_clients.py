"""Clients that many programs use, unmodified, against the embedded model: LangChain's ChatOpenAI, LiteLLM, Ollama's.

Each runs in a process of its own: their imports take seconds, and warn. They need the extra `clients`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.frontends.http.embedded import Embedded

FOLDER = Path(__file__).parent / "clients"
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}  # no network
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a KV cache?"}]


def answers(embedded: Embedded, client: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what that client got, and what the same request gives over plain HTTP."""
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"clients: no {client}: pip install 'inferengine[clients]'")
    model = embedded.http.get("/v1/models").json()["data"][0]["id"]
    script = FOLDER / f"{client.partition('_')[0]}_client.py"
    command = [sys.executable, "-W", "ignore", str(script), f"{embedded.front.url}/v1", model]
    ran = subprocess.run(command, env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr[-3000:]
    plain = embedded.ask("/v1/chat/completions", messages=CHAT, max_tokens=24, temperature=0, seed=1)
    return json.loads(ran.stdout.splitlines()[-1]), plain


def test_langchain(embedded: Embedded) -> None:
    got, plain = answers(embedded, "langchain_openai")
    text, usage = plain["choices"][0]["message"]["content"], plain["usage"]
    assert [got["text"], got["streamed"], got["awaited"], *got["batched"]] == [text] * 5
    assert got["finish_reason"] == plain["choices"][0]["finish_reason"]
    for told in (got["usage"], got["streamed_usage"]):
        assert (told["input_tokens"], told["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    (unasked,) = got["unasked_usage"]  # default settings ask for no usage in a stream
    assert unasked["output_tokens"] > 0
    assert got["num_chunks"] > usage["completion_tokens"] // 2
    assert got["calls"] == [["weather", ["city"]]] * len(got["calls"])
    assert got["calls"]
    assert got["after_tools"]
    assert got["structured"] == {"json_schema": "Person", "function_calling": "Person"}


def test_litellm(embedded: Embedded) -> None:
    got, plain = answers(embedded, "litellm")
    text, usage = plain["choices"][0]["message"]["content"], plain["usage"]
    assert [got["text"], got["streamed"], got["awaited"], got["awaited_stream"]] == [text] * 4
    assert got["finish_reason"] == plain["choices"][0]["finish_reason"]
    assert got["usage"] == got["streamed_usage"] == [usage["prompt_tokens"], usage["completion_tokens"]]
    assert set(got["calls"]) == {"weather"}
    assert got["completed"]
    assert got["error"] == "NotFoundError"


OLLAMA = {"temperature": 0, "seed": 1}


def ran(embedded: Embedded, *command: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [*command, embedded.front.url], env={**os.environ, **environment}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def check_ollama(embedded: Embedded, got: dict[str, Any]) -> None:
    """Check that both of Ollama's clients got what plain HTTP gives."""
    plain = embedded.ask("/v1/chat/completions", messages=CHAT, max_tokens=24, **OLLAMA)
    prompt = "Once upon a time"
    continued = embedded.ask("/v1/completions", prompt=prompt, max_tokens=24, **OLLAMA)
    assert [got["text"], got["streamed"]] == [plain["choices"][0]["message"]["content"]] * 2
    assert got["done_reason"] == plain["choices"][0]["finish_reason"]
    assert got["usage"] == [plain["usage"]["prompt_tokens"], plain["usage"]["completion_tokens"]]
    assert got["generated"] == continued["choices"][0]["text"]
    assert got["running"] == [got["model"]]
    assert {"completion", "tools"} <= set(got["capabilities"])
    assert got["embeddings"][0] == got["embeddings"][1] > 0
    assert got["error"][0] == 404
    assert "llama3" in got["error"][1]
    assert got["pulled"] == ["success", "pulling manifest", "success"]
    assert {status for status, _ in got["refusals"]} == {400}
    messages = [message for _, message in got["refusals"]]
    assert ["inferengine fetch llama3" in message for message in messages[:2]] == [True, True]
    assert all("does not" in message for message in messages[:6])


def test_ollama_for_python(embedded: Embedded) -> None:
    if importlib.util.find_spec("ollama") is None:
        pytest.skip("clients: no ollama: pip install 'inferengine[clients]'")
    got = ran(embedded, sys.executable, str(FOLDER / "ollama_client.py"))
    check_ollama(embedded, got)
    assert got["pieces"] == got["generated"]
    assert len(got["refusals"]) == 7
    assert got["num_chunks"] > got["usage"][1] // 2
    assert set(got["formatted"]) == {"name", "age"}
    assert got["roles"] == ["assistant", "assistant"]
    assert got["durations"][0] >= got["durations"][3] > 0


@pytest.mark.node
def test_ollama_for_node(embedded: Embedded) -> None:
    modules = Path(__file__).resolve().parents[2] / "node" / "node_modules"
    if not (modules / "ollama").is_dir():
        pytest.skip("node: no ollama: npm install --prefix tests/node")
    node = shutil.which("node") or "node"
    got = ran(embedded, node, str(FOLDER / "ollama_client.cjs"), NODE_PATH=str(modules))
    check_ollama(embedded, got)
    assert len(got["refusals"]) == 6
