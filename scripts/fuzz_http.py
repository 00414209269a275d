#!/usr/bin/env python3
"""Sends mutated HTTP requests to a running server and reports every 5xx, and what the server's memory did.

usage: scripts/fuzz_http.py [--url http://127.0.0.1:8000] [--requests 6000] [--seed 1] [--pid PID] [--key KEY]

Every request is a valid one of some route, spoiled in a few ways: fields of other types, extreme numbers, long and
broken strings, deep nesting, unknown fields, cut or doubled bytes, half bodies, wrong methods and headers. A seed
stands for its requests. 503 is no fault while its code says that a queue is full. Exit code 1 where something else
was a 5xx, where the server answered nothing at all to a whole request, or was gone at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SAMPLING: dict[str, Any] = {
    "max_tokens": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "n": 1,
    "stop": ["x"],
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {"5": 1.0},
    "min_tokens": 0,
    "stop_token_ids": [3],
    "allowed_token_ids": [5, 6, 7],
    "bad_words": ["dog"],
    "stream": False,
    "priority": 0,
    "cache_salt": "s",
    "request_id": "r",
    "truncate_prompt_tokens": 4,
    "ignore_eos": False,
    "response_format": {"type": "text"},
    "stream_options": {"include_usage": True},
    "user": "u",
    "model": "",
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**SAMPLING, "prompt": "Once", "echo": False, "logprobs": 1, "prompt_logprobs": 1},
    "/v1/chat/completions": {
        **SAMPLING,
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 1,
        "chat_template_kwargs": {},
        "documents": [{"title": "t", "text": "x"}],
        "add_generation_prompt": True,
    },
    "/v1/responses": {
        "input": "Hello",
        "max_output_tokens": 2,
        "instructions": "x",
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}},
        "store": True,
        "reasoning": {"effort": "low"},
    },
    "/v1/messages": {
        "max_tokens": 2,
        "messages": MESSAGES,
        "system": "x",
        "stop_sequences": ["y"],
        "top_k": 3,
        "thinking": {"type": "disabled"},
    },
    "/v1/messages/count_tokens": {"messages": MESSAGES, "system": [{"type": "text", "text": "x"}]},
    "/v1/embeddings": {"input": ["Hello", "you"], "encoding_format": "base64", "dimensions": 8, "pooling": "mean"},
    "/v1/generate": {"prompt": "Once", "max_new_tokens": 2, "temperature": 0.0},
    "/generate": {"prompt": "Once", "max_tokens": 2},
    "/infer/v1/completions": {"prompt": "Once", "max_tokens": 2, "stream": True},
    "/tokenize": {"prompt": "Once upon", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6, 7], "skip_special_tokens": False},
    "/pause": {},
    "/resume": {},
    "/abort_requests": {},
    "/reset_prefix_cache": {},
    "/reload_keys": {},
    "/profile": {},
    "/v1/load_lora_adapter": {"lora_name": "a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
GETS = (
    "/", "/health", "/ready", "/ping", "/version", "/openapi.json", "/load", "/stats", "/metrics", "/is_paused",
    "/v1/models", "/v1/models/x%00y", "/v1/models/../..", "/v1/responses/resp_1", "/v1/streams/" + "0" * 32,
    "/v1/streams/%ff", "/nowhere", "//", "/%2e%2e/etc/passwd", "/v1/responses/" + "a" * 3000,
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE")
HEADERS = (
    "Content-Type: text/plain", "Content-Type: application/json; charset=utf-16", "Content-Encoding: gzip",
    "X-Request-Id: " + "é" * 10, "X-Stream-Id: zz", "X-Stream-Id: " + "a" * 32, "Last-Event-ID: -1",
    "Last-Event-ID: 99999999999999999999", "Traceparent: 00-" + "g" * 32 + "-1-1", "Accept: \x01", "Origin: null",
    "Expect: 100-continue", "Upgrade: websocket", "Connection: upgrade", "Cookie: " + "c" * 70_000, "X: " + "y" * 9000,
    "Transfer-Encoding: chunked", "Content-Length: 99999999999", "Content-Length: -1", "Host: evil.example",
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 1e308, -1e308, 1e-308, 5e-324, 0.5, 1e400, "",
    "x", "\x00", "\ud800", "é" * 1000, "a" * 60_000, " \n\t" * 500, "<|bos|>" * 100, "-1", "NaN", [], {}, [[]], [{}],
    [None], [1, "a"], [2**40], [-1], ["", ""], {"": ""}, {"a": None}, {"-1": 1}, {"99999999": -100},
    {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, {"type": "nope"},
    [1] * 3000, ["x"] * 300, [{"role": "user"}], [{"role": "tool", "content": 1}], {"effort": []}, [TOOL] * 3,
    float("nan"), float("inf"), float("-inf"), [[[[[[[[]]]]]]]],
)  # fmt: skip
FAULTLESS_503 = ("overloaded", "rate_limited", "draining")


@dataclass(frozen=True)
class Case:
    """One request as bytes. `is_whole`: an answer is owed."""

    name: str
    payload: bytes
    is_whole: bool


def cases(seed: int, count: int, key: str = "") -> Iterator[Case]:
    """Yield the requests of a seed."""
    draw = random.Random(seed)
    for number in range(count):
        yield _case(draw, number, f"Authorization: Bearer {key}" if key else "")


def _case(draw: random.Random, number: int, credentials: str) -> Case:
    method, path, body = "GET", draw.choice(GETS), b""
    if draw.random() < 0.85:
        method, path = (
            "POST",
            draw.choices(list(BODIES), [9 if "prompt" in b or len(b) > 2 else 2 for b in BODIES.values()])[0],
        )
        document = copy.deepcopy(BODIES[path])
        for name in [name for name in document if draw.random() < 0.6]:
            if len(document) > 2 and name not in ("prompt", "messages", "input", "max_tokens"):
                del document[name]
        for _ in range(draw.choice((0, 1, 1, 1, 2, 4))):
            document = _spoil(draw, document)
        body = _encode(draw, document)
    if draw.random() < 0.05:
        method = draw.choice(METHODS)
    if draw.random() < 0.05:
        path += draw.choice(("/", "?" + "a=b&" * 50, "?steps=-1", "?stream=%zz", "%00", "/x" * 50))
    headers = ["Host: localhost", "Connection: close", *([credentials] if credentials else ())]
    if body:
        headers.append("Content-Type: application/json")
    if draw.random() < 0.1:
        headers.append(draw.choice(HEADERS))
    is_whole = not any(header.startswith(("Transfer-Encoding", "Content-Length", "Upgrade")) for header in headers)
    cut = draw.random() < 0.03 and len(body) > 1
    length = len(body)
    if cut:
        body, is_whole = body[: draw.randrange(len(body))], False
    headers.append(f"Content-Length: {length}")
    head = f"{method} {path} HTTP/1.1\r\n" + "\r\n".join(headers) + "\r\n\r\n"
    return Case(f"#{number} {method} {path[:80]} {body[:300]!r} {headers[2:]}"[:700], head.encode() + body, is_whole)


def _spoil(draw: random.Random, document: Any) -> Any:
    """Change one thing somewhere inside."""
    if isinstance(document, dict) and document and draw.random() < 0.9:
        name = draw.choice(list(document))
        document[name] = _spoil(draw, document[name]) if draw.random() < 0.4 else copy.deepcopy(draw.choice(VALUES))
        if draw.random() < 0.15:
            field = draw.choice([*SAMPLING, "guided_json", "guided_regex", "guided_choice", "structured_outputs"])
            document[field] = copy.deepcopy(draw.choice(VALUES))
        return document
    if isinstance(document, list) and document and draw.random() < 0.8:
        place = draw.randrange(len(document))
        document[place] = _spoil(draw, document[place])
        return document
    return copy.deepcopy(draw.choice(VALUES))


def _encode(draw: random.Random, document: Any) -> bytes:
    body = json.dumps(document).encode("utf-8", "surrogatepass")
    match draw.randrange(40):
        case 0:
            return json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
        case 1:
            return json.dumps(document, ensure_ascii=False).encode("utf-16", "surrogatepass")
        case 2:
            place = draw.randrange(len(body))
            return body[:place] + bytes((draw.randrange(256),)) + body[place + 1 :]
        case 3:
            return body[: draw.randrange(len(body))]
        case 4:
            return body + body
        case 5:
            return b'{"a":' * 3000 + body + b"}" * 3000
        case 6:
            return draw.randbytes(draw.randrange(1, 300))
    return body


def send(address: tuple[str, int], case: Case, timeout_s: float = 60.0) -> tuple[int, str]:
    """Send a request. Returns status and error code of its answer; 0 where there was none."""
    try:
        with socket.create_connection(address, timeout=timeout_s) as connection:
            connection.settimeout(timeout_s if case.is_whole else 0.3)
            answer = b""
            with contextlib.suppress(OSError):  # refused before it was all read: the answer may be there
                connection.sendall(case.payload)
            with contextlib.suppress(OSError):
                while part := connection.recv(65536):
                    answer = (answer + part)[:100_000]
    except OSError:
        return 0, "no connection"
    head = re.match(rb"HTTP/1\.\d (\d{3})", answer)
    code = re.search(rb'"code":\s*"(\w+)"', answer)
    return int(head[1]) if head else 0, code[1].decode() if code else ""


def memory_mb(pid: int) -> int:
    """Return the resident memory of a process and of its children, in MB."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:
            continue
        own, parent = int(status.parent.name), re.search(r"PPid:\s+(\d+)", text)
        if own == pid or (parent and int(parent[1]) == pid):
            total += int(found[1]) if (found := re.search(r"VmRSS:\s+(\d+)", text)) else 0
    return total // 1024


def run(url: str, seed: int, count: int, *, key: str = "", threads: int = 4) -> tuple[Counter[str], list[str]]:
    """Run. Returns the statuses, and the requests that were the server's fault."""
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    statuses: Counter[str] = Counter()
    faults: list[str] = []
    with ThreadPoolExecutor(threads) as pool:
        sent = list(cases(seed, count, key))
        for case, (status, code) in zip(sent, pool.map(lambda case: send(address, case), sent), strict=True):
            statuses[f"{status} {code}".strip()] += 1
            unanswered = status == 0 and case.is_whole and len(case.payload) < 60_000
            if unanswered or (status >= 500 and not (status == 503 and code in FAULTLESS_503)):
                faults.append(f"{status} {code}: {case.name}")
    health = Case("health", b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", True)
    if (last := send(address, health)[0]) != 200:
        faults.append(f"/health is {last} at the end")
    return statuses, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pid", type=int, default=0, help="of the server, whose memory is told")
    parser.add_argument("--key", default="", help="API key, where the server asks for one")
    wanted = parser.parse_args()
    before = memory_mb(wanted.pid) if wanted.pid else 0
    statuses, faults = run(wanted.url, wanted.seed, wanted.requests, key=wanted.key)
    for status, number in statuses.most_common():
        print(f"{number:6d}  {status}")
    for fault in faults:
        print(fault)
    if wanted.pid:
        print(f"memory of the server: {before} MB before, {memory_mb(wanted.pid)} MB after")
    print(f"{wanted.requests} requests of seed {wanted.seed}: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
