"""Runs one batch from the upload to the last line, and checks that each line ends once with the expected text."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx

from benchmarks.soak.asks import Asker
from benchmarks.soak.disturbances import Disturbances
from benchmarks.soak.service import Key

LINES = 12
URL = "/v1/completions"
LONGEST_S = 500.0
PATIENCE_S = 120.0
ENDED = ("completed", "failed", "expired", "cancelled")


def is_refused(number: int) -> bool:
    """Return whether this line's request is invalid. Some are, so that output and error file both have lines."""
    return number % 6 == 5


def body(number: int) -> dict[str, Any]:
    """Return the request of a line."""
    asked = {"prompt": f"Once upon a time {number}", "max_tokens": 16, "temperature": 0}
    return {**asked, "top_p": 7} if is_refused(number) else asked


async def one_batch(asker: Asker, key: Key, disturbances: Disturbances, texts: dict[int, str]) -> tuple[str, str]:
    """Run a batch. Returns `ended`, `refused` (a full disk) or `wrong`, and the detail.

    Raises TransportError if the connection fails although no fault explains it.
    """
    client = _Client(asker, key, disturbances)
    lines = "\n".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": URL, "body": body(number)})
        for number in range(LINES)
    )
    began_s = time.monotonic()

    def refused(answer: httpx.Response) -> tuple[str, str]:
        kind = "refused" if disturbances.touched("disk", began_s) else "wrong"
        return kind, f"{answer.request.url.path} {answer.status_code} {answer.text[:200]}"

    answer = await client.ask("POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("lines", lines)})
    if answer.status_code != 200:
        return refused(answer)
    uploaded = answer.json()["id"]
    asked = {"input_file_id": uploaded, "endpoint": URL, "completion_window": "24h"}
    answer = await client.ask("POST", "/v1/batches", json=asked)
    if answer.status_code != 200:
        return refused(answer)
    path = f"/v1/batches/{answer.json()['id']}"
    while answer.status_code != 200 or answer.json()["status"] not in ENDED:
        if time.monotonic() > began_s + LONGEST_S:
            return "wrong", f"not ended after {LONGEST_S:g} s: {answer.text[:400]}"
        await asyncio.sleep(2.0)
        answer = await client.ask("GET", path)
    ended = answer.json()
    problems = [] if ended["status"] == "completed" else [f"{ended['status']} {ended.get('errors')}"]
    files = [ended[name] for name in ("output_file_id", "error_file_id") if ended.get(name)]
    found: list[dict[str, Any]] = []
    for file in files:
        content = await client.ask("GET", f"/v1/files/{file}/content")
        found += [json.loads(line) for line in content.text.splitlines()]
    problems += compare(found, texts)
    for file in (uploaded, *files):
        await client.ask("DELETE", f"/v1/files/{file}")
    return ("wrong" if problems else "ended"), "; ".join(problems)[:800]


def compare(found: list[dict[str, Any]], texts: dict[int, str]) -> list[str]:
    """Return what is wrong with these results."""
    problems = []
    numbers = [int(result["custom_id"]) for result in found]
    if sorted(numbers) != list(range(LINES)):
        problems.append(f"the lines {sorted(numbers)} ended, of {LINES}")
    for number, result in zip(numbers, found, strict=True):
        response = result.get("response") or {}
        if response.get("status_code") != (400 if is_refused(number) else 200):
            problems.append(f"line {number}: {str(result)[:200]}")
        elif not is_refused(number) and response["body"]["choices"][0]["text"] != texts[number]:
            problems.append(f"line {number}: another text")
    return problems


class _Client:
    """Repeats requests while there is no front end, no engine or no room on the disk."""

    def __init__(self, asker: Asker, key: Key, disturbances: Disturbances) -> None:
        self._http, self._key, self._disturbances = asker.http, key, disturbances

    async def ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            began_s = time.monotonic()
            try:
                answer = await self._http.request(method, path, headers=self._key.headers, **content)
            except httpx.TransportError:
                if not self._disturbances.touched("kill http", began_s) or time.monotonic() > deadline:
                    raise
            else:
                passing = answer.status_code in (429, 503) or (
                    answer.status_code >= 500 and self._disturbances.touched("disk", began_s)
                )
                if not passing or time.monotonic() > deadline:
                    return answer
            await asyncio.sleep(1.0)
