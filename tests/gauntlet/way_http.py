"""Requests over HTTP, with a client of a few lines on bare sockets: it hangs up wherever it is told to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from tests.gauntlet.asks import Ask
from tests.gauntlet.outcomes import Choice, Outcome, Row

LEAST = -9999.0  # JSON's word for minus infinity


class Http:
    """The HTTP front end of one service."""

    def __init__(self, port: int, model: str = "") -> None:
        self._port = port

    async def run(self, ask: Ask) -> Outcome:
        outcome = Outcome(begun_s=time.monotonic())
        route, body = body_of(ask)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 24)
        try:
            writer.write(_request(route, body))
            work = self._read(reader, ask, outcome)
            act = ask.act or {}
            if "after_s" in act:
                try:
                    await asyncio.wait_for(work, max(act["after_s"], 1e-3))
                except TimeoutError:
                    outcome.left = True
            else:
                await work
        except _Left:
            outcome.left = True
        except (OSError, asyncio.IncompleteReadError) as error:
            outcome.problems.append(f"the connection broke: {type(error).__name__} {error}")
        finally:
            if outcome.left:
                writer.transport.abort()
            writer.close()
        outcome.ended_s = time.monotonic()
        return outcome

    async def _read(self, reader: asyncio.StreamReader, ask: Ask, outcome: Outcome) -> None:
        status, chunks = await _response(reader)
        if ask.way == "http-stream" and status == 200:
            await self._read_events(chunks, ask, outcome)
            return
        document = json.loads(b"".join([chunk async for chunk in chunks]))
        if status != 200:
            error = document.get("error", {})
            outcome.refused, outcome.message = str(error.get("code")), str(error.get("message"))
            if status >= 500 and outcome.refused == "invalid_request":
                outcome.problems.append(f"status {status} for what the client caused: {outcome.message}")
            return
        if ask.reply == "embedding":
            outcome.embedding = document["data"][0]["embedding"]
            return
        outcome.prompt_ids = document.get("prompt_token_ids")
        for entry in document["choices"]:
            message = entry.get("message")
            choice = Choice(
                tokens=list(entry["token_ids"]),
                text=entry["text"] if message is None else message.get("content") or "",
                reason=entry["finish_reason"],
                detail=entry["stop_reason"],
                tool_calls=None if message is None else message.get("tool_calls"),
                ends=1,
            )
            outcome.prompt_ids = outcome.prompt_ids or entry.get("prompt_token_ids")
            choice.logprobs = _rows(entry.get("logprobs"), choice, ask, outcome)
            shown = entry.get("prompt_logprobs") or document.get("prompt_logprobs")
            if shown is not None and outcome.prompt_ids:
                outcome.prompt_logprobs = [
                    _prompt_row(token, each) for token, each in zip(outcome.prompt_ids, shown, strict=True)
                ][1:]
            if ask.options.get("echo") and choice.text is not None and "text" in ask.prompt:
                if not choice.text.startswith(ask.prompt["text"]):
                    outcome.problems.append("the echo does not begin with the prompt")
                choice.text = choice.text[len(ask.prompt["text"]) :]
            elif ask.options.get("echo"):
                choice.text = None  # the prompt's tokens as text come first: how long that is only a tokenizer knows
            outcome.choices.append(choice)

    async def _read_events(self, chunks: AsyncIterator[bytes], ask: Ask, outcome: Outcome) -> None:
        outcome.choices = [Choice([], "", logprobs=[] if "logprobs" in ask.params else None) for _ in range(ask.n)]
        wanted = (ask.act or {}).get("after_tokens", 1 << 60)
        pending, done, last = b"", False, time.monotonic()
        async for chunk in chunks:
            pending += chunk
            *events, pending = pending.split(b"\n\n")
            for event in events:
                line = next((each for each in event.split(b"\n") if each.startswith(b"data: ")), None)
                if line is None:
                    continue
                if done:
                    outcome.problems.append("an event after [DONE]")
                if line == b"data: [DONE]":
                    done = True
                    continue
                self._take(json.loads(line[6:]), ask, outcome)
                now = time.monotonic()
                if outcome.choices and outcome.choices[0].tokens:
                    outcome.longest_gap_s = max(outcome.longest_gap_s, now - last)
                last = now
            if any(len(choice.tokens or ()) >= wanted for choice in outcome.choices):
                raise _Left
        if not done:
            outcome.problems.append("the stream ended without [DONE]")

    def _take(self, event: dict[str, Any], ask: Ask, outcome: Outcome) -> None:
        if "error" in event:
            code = event["error"]["code"]
            for choice in outcome.choices:
                if choice.reason is None:
                    choice.reason, choice.detail, choice.ends = "error", code, choice.ends + 1
            return
        outcome.prompt_ids = outcome.prompt_ids or event.get("prompt_token_ids")
        for entry in event["choices"]:
            choice = outcome.choices[entry["index"]]
            delta = entry.get("delta")
            assert choice.tokens is not None
            assert choice.text is not None
            outcome.prompt_ids = outcome.prompt_ids or entry.get("prompt_token_ids")
            new = Choice(tokens=list(entry.get("token_ids") or ()))
            if choice.ends and (new.tokens or (delta or entry).get("content") or entry.get("text")):
                outcome.problems.append(f"choice {entry['index']} goes on after its end")
            choice.tokens += new.tokens or []
            choice.text += entry["text"] if delta is None else delta.get("content") or ""
            if delta and delta.get("tool_calls"):
                choice.tool_calls = _merged(choice.tool_calls or [], delta["tool_calls"])
            if choice.logprobs is not None and entry.get("logprobs"):
                choice.logprobs += _rows(entry["logprobs"], new, ask, outcome) or []
            if entry.get("finish_reason") is not None:
                choice.reason, choice.detail = entry["finish_reason"], entry.get("stop_reason")
                choice.ends += 1


class _Left(Exception):
    """The client hangs up."""


def body_of(ask: Ask) -> tuple[str, dict[str, Any]]:
    """Route and body."""
    options = ask.options
    body: dict[str, Any] = {}
    for name, field in (
        ("priority", "priority"),
        ("salt", "cache_salt"),
        ("adapter", "model"),
        ("detached", "detached"),
    ):
        if name in options:
            body[field] = options[name]
    if ask.reply == "embedding":
        prompt = ask.prompt.get("ids") or ask.prompt.get("text")
        return "/v1/embeddings", {**body, "input": prompt, "pooling": options["pooling"], "encoding_format": "float"}
    body.update(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)  # not the model's own
    body.update(ask.params)
    if "logit_bias" in body:
        body["logit_bias"] = {str(token): value for token, value in body["logit_bias"]}
    if ask.grammar is not None:
        body.update(grammar_fields(ask.grammar))
    body.update(return_token_ids=True, stream=ask.way == "http-stream")
    if "messages" in ask.prompt:
        body.update({key: options[key] for key in ("tools", "tool_choice") if key in options})
        if "logprobs" in body:
            body["top_logprobs"], body["logprobs"] = body["logprobs"], True
            body["return_tokens_as_token_ids"] = True
        return "/v1/chat/completions", {**body, "messages": ask.prompt["messages"]}
    body["return_tokens_as_token_ids"] = True
    if options.get("echo"):
        body["echo"] = True
    return "/v1/completions", {**body, "prompt": ask.prompt.get("ids") or ask.prompt["text"]}


def grammar_fields(grammar: list[Any]) -> dict[str, Any]:
    """Return a grammar of the wire in vLLM's words."""
    kind, source, whitespace = grammar
    name = {"json_schema": "json", "lark": "grammar"}.get(kind, kind)
    value: Any = True if kind == "json_object" else source
    if kind in ("json_schema", "choice", "structural_tag"):
        value = json.loads(source)
    more = {"disable_any_whitespace": True} if whitespace == "" else {}
    return {"structured_outputs": {name: value, **more}}


def _request(route: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def _response(reader: asyncio.StreamReader) -> tuple[int, AsyncIterator[bytes]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = int(head.split(" ", 2)[1])
    return status, _chunked(reader) if "transfer-encoding: chunked" in head else _until_closed(reader)


async def _chunked(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _until_closed(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(65536):
        yield data


def _finite(value: float | None) -> float:
    return float("-inf") if value is None or value <= LEAST else value


def _rows(shown: Any, choice: Choice, ask: Ask, outcome: Outcome) -> list[Row] | None:
    if not shown:
        return None
    if "content" in shown:  # chat
        return [
            Row(
                _finite(each["logprob"]),
                None,
                {_id(top["token"]): _finite(top["logprob"]) for top in each["top_logprobs"]},
            )
            for each in shown["content"]
        ]
    count = len(choice.tokens or ())
    behind = len(shown["tokens"]) - count  # those of an echo
    ids = [_id(token) for token in shown["tokens"]]
    if ids[behind:] != list(choice.tokens or ()):
        outcome.problems.append(f"logprobs are told for {ids[behind:]}, the tokens are {choice.tokens}")
    rows = []
    for value, top in zip(shown["token_logprobs"][behind:], shown["top_logprobs"][behind:], strict=True):
        rows.append(Row(_finite(value), None, {_id(token): _finite(each) for token, each in top.items()}))
    if behind and "prompt_logprobs" not in ask.params:
        outcome.prompt_logprobs = [
            Row(_finite(value), None, {_id(token): _finite(each) for token, each in top.items()})
            for value, top in zip(shown["token_logprobs"][1:behind], shown["top_logprobs"][1:behind], strict=True)
        ]
    return rows


def _prompt_row(token: int, shown: dict[str, Any] | None) -> Row | None:
    if shown is None:
        return None
    own = shown[str(token)]
    return Row(
        _finite(own["logprob"]), own["rank"], {int(key): _finite(each["logprob"]) for key, each in shown.items()}
    )


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def _merged(calls: list[dict[str, Any]], deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for delta in deltas:
        if delta["index"] == len(calls):
            calls.append({"function": {"name": delta["function"]["name"], "arguments": ""}})
        calls[delta["index"]]["function"]["arguments"] += delta["function"].get("arguments", "")
    return calls
