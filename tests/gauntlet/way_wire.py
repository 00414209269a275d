"""Requests over the wire: several clients share the work, some come for one request and vanish in its middle.

Every message of the engine is looked at a second time, below the client library, which would hide what comes twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from typing import Any

from inferengine.client import AsyncClient, Submission
from inferengine.errors import InferEngineError
from inferengine.sampling_params import SamplingParams
from inferengine.sampling_params import from_map as params_from_map
from inferengine.structured_output.spec import GrammarSpec
from inferengine.vectors import to_floats
from inferengine.wire import messages
from inferengine.wire.messages import Reject, Step
from tests.gauntlet.asks import Ask
from tests.gauntlet.outcomes import Choice, Outcome, Row

CONNECT_TIMEOUT_S = 30.0
NUM_SHARED = 2


class Tap:
    """Between a client's socket and its session: terminal events are counted by connection and stream."""

    def __init__(self, client: AsyncClient) -> None:
        self.problems: list[str] = []
        self._ends: Counter[int] = Counter()
        self._seen: set[tuple[bytes, int]] = set()  # (epoch, seq): sent again after a lost connection
        session = client._session
        assert session is not None
        receive = session.receive

        def tapped(frames: Any, now: float) -> None:
            self._look(frames, b"" if session.welcome is None else session.welcome.epoch)
            receive(frames, now)

        session.receive = tapped  # type: ignore[method-assign]

    def _look(self, frames: Any, epoch: bytes) -> None:
        try:
            message = messages.decode(frames)
        except messages.WireError as error:
            self.problems.append(f"the engine sent what cannot be decoded: {error}")
            return
        if isinstance(message, Reject) and message.stream is not None:
            self._ends[message.stream] += 1
        if not isinstance(message, Step) or (epoch, message.seq) in self._seen:
            return
        self._seen.add((epoch, message.seq))
        for stream in message.streams:
            if self._ends[stream]:
                self.problems.append(f"tokens came after the terminal event of stream {stream}")
        for row in message.done:
            self._ends[row.stream] += 1
            if self._ends[row.stream] > 1:
                self.problems.append(f"stream {row.stream} has {self._ends[row.stream]} terminal events")


class Wire:
    """All clients of one engine."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._shared: list[AsyncClient] = []
        self._taps: list[Tap] = []

    async def start(self) -> None:
        self._shared = [await self._connect() for _ in range(NUM_SHARED)]

    async def close(self) -> None:
        for client in self._shared:
            await client.close()

    @property
    def problems(self) -> list[str]:
        return [problem for tap in self._taps for problem in tap.problems]

    async def run(self, ask: Ask) -> Outcome:
        """Run one request to its end, or to what its client does before."""
        outcome = Outcome(begun_s=time.monotonic())
        act = ask.act or {}
        alone = act.get("kind") == "disconnect"
        client = await self._connect() if alone else self._shared[ask.name % NUM_SHARED]
        try:
            await client.wait_ready(CONNECT_TIMEOUT_S)
            submission = self._submit(client, ask)
        except InferEngineError as error:
            outcome.refused, outcome.message = error.code, str(error)
            return outcome
        actor = asyncio.create_task(self._act(ask, client, submission, outcome)) if act else None
        try:
            await self._read(submission, ask, outcome)
        finally:
            if actor is not None:
                await actor
            if alone:
                await client.close()
        outcome.ended_s = time.monotonic()
        return outcome

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _connect(self) -> AsyncClient:
        client = AsyncClient(self._address, status_address="", role="gauntlet")
        client.start()
        self._taps.append(Tap(client))
        await client.connect(CONNECT_TIMEOUT_S)
        return client

    def _submit(self, client: AsyncClient, ask: Ask) -> Submission:
        options: dict[str, Any] = {
            key: ask.options[key]
            for key in ("priority", "tenant", "deadline_s", "detached", "adapter", "pooling")
            if key in ask.options
        }
        if "salt" in ask.options:
            options["salt"] = ask.options["salt"].encode()
        if ask.grammar is not None:
            options["grammar"] = GrammarSpec(*ask.grammar)
        if ask.act:
            options["request_id"] = hashlib.blake2b(
                f"{id(self)} {ask.name} {time.time_ns()}".encode(), digest_size=16
            ).digest()
        params = None if ask.reply == "embedding" else params_from_map(ask.params)
        prompt = ask.prompt
        if "text" in prompt or "messages" in prompt:
            options.update(prompt)
        return client.submit(prompt.get("ids"), params or SamplingParams(), reply=ask.reply, **options)

    async def _read(self, submission: Submission, ask: Ask, outcome: Outcome) -> None:
        has_tokens, has_text = ask.reply in ("tokens", "both"), ask.reply in ("text", "both")
        wants_rows = "logprobs" in ask.params
        outcome.choices = [
            Choice([] if has_tokens else None, "" if has_text else None, logprobs=[] if wants_rows else None)
            for _ in submission.streams
        ]
        await asyncio.gather(
            *(
                self._read_choice(stream, choice, outcome)
                for stream, choice in zip(submission.streams, outcome.choices, strict=True)
            )
        )
        try:
            await submission.accepted()
        except InferEngineError as error:
            if not outcome.left or error.code not in ("cancelled", "engine_unavailable"):
                outcome.refused, outcome.message = error.code, str(error)
                outcome.choices = []

    async def _read_choice(self, stream: Any, choice: Choice, outcome: Outcome) -> None:
        last = time.monotonic()
        async for delta in stream:
            now = time.monotonic()
            if choice.tokens:  # the first token's wait is no gap
                outcome.longest_gap_s = max(outcome.longest_gap_s, now - last)
            last = now
            take(choice, delta, outcome)

    async def _act(self, ask: Ask, client: AsyncClient, submission: Submission, outcome: Outcome) -> None:
        act = ask.act or {}
        if "after_s" in act:
            await asyncio.sleep(act["after_s"])
        else:
            while not any(stream.num_tokens >= act["after_tokens"] or stream.finished for stream in submission.streams):
                await asyncio.sleep(0.002)
                if not client.connected and act["kind"] != "cancel":
                    return
        if act["kind"] == "cancel":
            outcome.left = True
            submission.cancel()
        elif act["kind"] == "disconnect":
            outcome.left = True
            vanish(client) if ask.name % 2 else await client.close()
        else:
            await self._attach(ask, submission, outcome)

    async def _attach(self, ask: Ask, submission: Submission, outcome: Outcome) -> None:
        """Attach a second reader where the first one stands: both must have read the same."""
        try:
            await submission.accepted()
        except InferEngineError:
            return
        cursors = [
            len(choice.text or "") if ask.reply == "text" else len(choice.tokens or ()) for choice in outcome.choices
        ]
        other = self._shared[(ask.name + 1) % NUM_SHARED]
        heads = [(list(choice.tokens or ()), choice.text) for choice in outcome.choices]
        second = Outcome()
        try:
            attached = other.attach(submission.id, cursors, len(cursors), ask.reply)
            await self._read(attached, ask, second)
        except InferEngineError as error:
            second.refused = error.code
        while not all(stream.finished for stream in submission.streams):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)
        if second.refused == "not_found" and outcome.choices and all(choice.reason for choice in outcome.choices):
            return  # it had ended, and was kept for no longer
        for head, first, rest in zip(heads, outcome.choices, second.choices, strict=False):
            if rest.reason in (None, "error", "abort"):
                continue
            if first.tokens is not None and head[0] + (rest.tokens or []) != first.tokens:
                outcome.problems.append(
                    f"attached from {cursors}: tokens {rest.tokens} after {head[0]} are not {first.tokens}"
                )
            if rest.reason != first.reason:
                outcome.problems.append(f"attached: ended with {rest.reason}, the first reader's with {first.reason}")


def take(choice: Choice, delta: Any, outcome: Outcome) -> None:
    """Take what is new in a choice."""
    if choice.tokens is not None:
        choice.tokens += delta.token_ids
    if choice.text is not None:
        choice.text += delta.text
    if delta.logprobs is not None and choice.logprobs is not None:
        choice.logprobs += [
            Row(row.logprob, row.rank, dict(zip(row.top_ids, row.top_logprobs, strict=True))) for row in delta.logprobs
        ]
    if delta.prompt_logprobs is not None:
        outcome.prompt_logprobs = [
            Row(row.logprob, row.rank, dict(zip(row.top_ids, row.top_logprobs, strict=True)))
            for row in delta.prompt_logprobs
        ]
    if delta.embedding is not None:
        outcome.embedding = list(to_floats(delta.embedding))
    if delta.finish is not None:
        detail = delta.finish.detail
        choice.reason = delta.finish.reason
        choice.detail = detail[0] if isinstance(detail, list | tuple) else detail
        choice.ends += 1


def vanish(client: AsyncClient) -> None:
    """Vanish without a word, as a killed process does."""
    session, client._session, client._closed = client._session, None, True
    if session is None:
        return
    if client._timer is not None:
        client._timer.cancel()
    session.on_change = lambda: None
    for source, _ in client._drains():
        client._loop.remove_reader(source)
    client._transport.close()
    session._end_all("engine_unavailable", "The client vanished.")
