"""Requests over the websocket: a few sockets, many requests on each; some sockets vanish with theirs."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from tests.gauntlet.asks import Ask
from tests.gauntlet.outcomes import Choice, Outcome, Row
from tests.gauntlet.way_http import grammar_fields

DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # not the model's


class Socket:
    """One websocket and whoever waits for frames on it, by the request's id."""

    def __init__(self, port: int) -> None:
        self._url = f"ws://127.0.0.1:{port}/v1/ws"
        self._queues: dict[str, asyncio.Queue[dict[str, Any] | None]] = {}

    async def open(self) -> None:
        from websockets.asyncio.client import connect

        self._socket = await connect(self._url, max_size=1 << 26)
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        await self._socket.close()
        await asyncio.gather(self._reader, return_exceptions=True)

    def vanish(self) -> None:
        self._socket.transport.abort()

    def listen(self, name: str) -> asyncio.Queue[dict[str, Any] | None]:
        queue = self._queues[name] = asyncio.Queue()
        return queue

    async def send(self, frame: dict[str, Any]) -> None:
        await self._socket.send(json.dumps(frame))

    async def _read(self) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            async for message in self._socket:
                frame = json.loads(message)
                if (queue := self._queues.get(frame.get("id") or "")) is not None:
                    queue.put_nowait(frame)
        except ConnectionClosed:
            pass
        for queue in self._queues.values():
            queue.put_nowait(None)


class Websocket:
    """The websocket front end of one service."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._shared: Socket | None = None

    async def start(self) -> None:
        self._shared = Socket(self._port)
        await self._shared.open()

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.close()

    async def run(self, ask: Ask) -> Outcome:
        outcome = Outcome(begun_s=time.monotonic())
        act = ask.act or {}
        assert self._shared is not None
        socket = self._shared
        if act.get("kind") == "disconnect":
            socket = Socket(self._port)
            await socket.open()
        name = f"ask-{ask.name}-{time.monotonic_ns()}"
        frames = socket.listen(name)
        outcome.choices = [Choice([], "", logprobs=[] if "logprobs" in ask.params else None) for _ in range(ask.n)]
        try:
            await socket.send({"type": "generate", "id": name, **frame_of(ask)})
            timer = (
                asyncio.create_task(self._act_later(act["after_s"], socket, name, act, outcome))
                if "after_s" in act
                else None
            )
            await self._read(frames, socket, name, act, outcome)
            if timer is not None:
                await timer
        except OSError as error:
            outcome.problems.append(f"the socket broke: {error}")
        finally:
            if socket is not self._shared:
                await socket.close()
        outcome.ended_s = time.monotonic()
        return outcome

    async def _read(
        self,
        frames: asyncio.Queue[dict[str, Any] | None],
        socket: Socket,
        name: str,
        act: dict[str, Any],
        outcome: Outcome,
    ) -> None:
        last = time.monotonic()
        while not all(choice.ends for choice in outcome.choices):
            frame = await frames.get()
            if frame is None:
                if not outcome.left:
                    outcome.problems.append("the socket closed before the end")
                return
            now = time.monotonic()
            if outcome.choices[0].tokens:
                outcome.longest_gap_s = max(outcome.longest_gap_s, now - last)
            last = now
            if frame["type"] == "error":
                code, message = frame["error"]["code"], frame["error"]["message"]
                if not any(choice.tokens for choice in outcome.choices) and code not in (
                    "engine_error",
                    "engine_restarted",
                ):
                    outcome.refused, outcome.message, outcome.choices = code, message, []
                    return
                for choice in outcome.choices:
                    if not choice.ends:
                        choice.reason, choice.detail, choice.ends = "error", code, 1
                return
            if frame["type"] in ("delta", "done"):
                self._take(frame, outcome)
                wanted = act.get("after_tokens")
                if wanted is not None and not outcome.left and len(outcome.choices[0].tokens or ()) >= wanted:
                    await self._act(socket, name, act, outcome)

    def _take(self, frame: dict[str, Any], outcome: Outcome) -> None:
        choice = outcome.choices[frame["choice"]]
        assert choice.tokens is not None
        assert choice.text is not None
        if choice.ends:
            outcome.problems.append(f"choice {frame['choice']} goes on after its end")
        choice.tokens += frame.get("token_ids") or []
        choice.text += frame["text"]
        if choice.logprobs is not None:
            choice.logprobs += [
                Row(each["logprob"], each["rank"], dict(map(tuple, each["top"])))
                for each in frame.get("logprobs") or ()
            ]
        if frame["cursor"] != len(choice.tokens):
            outcome.problems.append(f"the cursor is {frame['cursor']} after {len(choice.tokens)} tokens")
        if frame["type"] == "done":
            choice.reason, choice.detail = frame["finish_reason"], frame["stop"]
            choice.ends += 1

    async def _act_later(
        self, seconds: float, socket: Socket, name: str, act: dict[str, Any], outcome: Outcome
    ) -> None:
        await asyncio.sleep(seconds)
        await self._act(socket, name, act, outcome)

    async def _act(self, socket: Socket, name: str, act: dict[str, Any], outcome: Outcome) -> None:
        outcome.left = True
        if act["kind"] == "disconnect":
            socket.vanish()
        else:
            await socket.send({"type": "cancel", "id": name})


def frame_of(ask: Ask) -> dict[str, Any]:
    """Return the generate frame without type and id."""
    frame: dict[str, Any] = {"params": {**DEFAULTS, **ask.params}, "return_token_ids": True}
    for name, field in (("priority", "priority"), ("salt", "cache_salt"), ("deadline_s", "deadline_s")):
        if name in ask.options:
            frame[field] = ask.options[name]
    prompt = ask.prompt
    if ask.grammar is not None:
        frame.update(grammar_fields(ask.grammar))
    return {
        **frame,
        **(
            {"prompt_ids": prompt["ids"]}
            if "ids" in prompt
            else {"prompt": prompt["text"]}
            if "text" in prompt
            else prompt
        ),
    }
