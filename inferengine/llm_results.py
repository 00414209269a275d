"""What LLM gives: generations with their choices, and embeddings; and how they grow while steps are computed."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from inferengine.core.plan import TokenLogprobs
from inferengine.core.stopping import Finished
from inferengine.text import TextStream


@dataclass
class Choice:
    """One output. `finish_reason` is stop, length or error; `stop` the string or token id that ended it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop: str | int | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass
class Generation:
    """A prompt with its `n` outputs."""

    prompt: str | None
    prompt_ids: list[int]
    choices: list[Choice]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's tokens after its first, where asked for

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True)
class Embedding:
    """A prompt as a vector of length 1 (L2)."""

    prompt: str | None
    prompt_ids: list[int]
    values: list[float]
    num_cached_tokens: int = 0


class GrowingChoice:
    """A choice that grows."""

    def __init__(self, result: Generation, choice: Choice, stream: TextStream) -> None:
        self._result, self._choice, self._stream = result, choice, stream

    def take_prompt(self, logprobs: list[TokenLogprobs] | None) -> None:
        if logprobs is not None:
            self._result.prompt_logprobs = logprobs

    def push(self, tokens: list[int], logprobs: list[TokenLogprobs] | None, row: Finished | None) -> bool:
        """Take tokens and perhaps the end. Returns whether a stop string ended it here."""
        choice = self._choice
        by_id = row is not None and row.reason == "stop" and not isinstance(row.detail, str)
        delta = self._stream.push(tokens, final=row is not None, stop_token=by_id and bool(tokens))
        choice.text += delta.text
        choice.token_ids = (choice.token_ids + tokens)[: delta.num_tokens]
        if choice.logprobs is not None:
            choice.logprobs = (choice.logprobs + (logprobs or []))[: delta.num_tokens]
        if delta.stop is not None:
            choice.finish_reason, choice.stop = "stop", delta.stop
        elif row is not None:
            choice.finish_reason = row.reason
            if isinstance(row.detail, tuple):
                choice.error = ": ".join(row.detail[:2])
            else:
                choice.stop = row.detail or None
        if row is not None:
            self._result.num_cached_tokens = max(self._result.num_cached_tokens, row.num_cached)
        return delta.stop is not None


class ProgressBar:
    """Progress on a terminal."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="output")
        self._tokens = 0
        self._begin = time.monotonic()

    def advance(self, num_tokens: int, *, done: bool) -> None:
        self._tokens += num_tokens
        if done:
            self._bar.set_postfix_str(f"{self._tokens / (time.monotonic() - self._begin):.0f} tokens/s", refresh=False)
            self._bar.update(1)

    def close(self) -> None:
        self._bar.close()
