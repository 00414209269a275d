"""What a person does first: the README's own lines, the chat page, a talk in the terminal."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.service import WAIT_S, Service, events

ROOT = Path(__file__).resolve().parents[2]
CURL_LINES = re.findall(r"^curl (?:.*\\\n)*.*", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_readme_shows_both_routes_streaming_and_not() -> None:
    shown = {("chat" in line, '"stream": true' in line) for line in CURL_LINES}
    assert shown == {(False, False), (False, True), (True, False), (True, True)}


@pytest.mark.skipif(not shutil.which("curl"), reason="no curl: apt install curl")
@pytest.mark.parametrize("line", CURL_LINES, ids=range(len(CURL_LINES)))
def test_each_curl_line_of_the_readme_answers(service: Service, line: str) -> None:
    command = line.replace("http://127.0.0.1:8000", service.http).replace("curl ", "curl -sS --fail-with-body ", 1)
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=WAIT_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    if '"stream": true' in line:
        *chunks, last = events(ran.stdout)
        assert last == "[DONE]"
        text = "".join(_text(choice) for chunk in chunks for choice in chunk["choices"])
    else:
        text = _text(json.loads(ran.stdout)["choices"][0])
    assert re.search(r"[a-z]{2,} [a-z]{2,}", text), f"these are no words: {text!r}"


def _text(choice: dict[str, object]) -> str:
    if "text" in choice:
        return str(choice["text"])
    message = choice.get("message") or choice.get("delta")
    assert isinstance(message, dict)
    return str(message.get("content") or "")


def test_the_chat_page_is_served(service: Service) -> None:
    page = httpx.get(service.chat_page + "/", timeout=WAIT_S)
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")


def test_a_talk_in_the_terminal_over_a_pipe(service: Service) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "inferengine.cli", "chat", "--wire.socket", service.engine],
        input="/params temperature=0 max_tokens=24\nWhat is a KV cache?\n/nonsense\n/quit\n",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=service.environment,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "temperature=0 max_tokens=24" in ran.stdout
    assert re.search(r"\d+ tokens, ", ran.stdout)
    assert "! There is no /nonsense." in ran.stdout


def test_check_finds_the_running_service(service: Service) -> None:
    port = service.http.rpartition(":")[2]
    page = service.chat_page.rpartition(":")[2]
    flags = ["--wire.socket", service.engine, "--http.port", port, "--ws.port", page]
    ran = subprocess.run(
        [sys.executable, "-m", "inferengine.cli", "check", *flags],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=service.environment,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "is READY: inferengine-embedded" in ran.stdout
    assert ran.stdout.count("an InferEngine front end serves") == 2


def test_a_second_service_on_the_same_port_says_which_flag_to_change(service: Service) -> None:
    port = service.http.rpartition(":")[2]
    ran = subprocess.run(
        [sys.executable, "-m", "inferengine.cli", "up", "--http.port", port],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=service.environment,
    )
    assert ran.returncode == 5
    assert f"port {port} on 127.0.0.1 is in use by another program" in ran.stderr
