"""Completions and chat completions as documents and as streamed chunks, with their log-probabilities.

Nearly every chunk differs from the last one of its choice in the text alone, so head and tail are encoded once per
choice: 0.15 us a chunk instead of 3 for json.dumps. Chunks that carry more are encoded as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from frontends.common.chat import OutputParser, finish_reason
from frontends.common.errors import error_object
from frontends.common.generation import (
    CONTEXT_TOKENS,
    Choice,
    Generation,
    Output,
    Piece,
    Usage,
    draft_token_counts,
    finite_logprob,
    token_text,
)
from frontends.common.json import DONE, dumps, event, quote
from frontends.http.bodies import ExtraFields, StreamingFields
from inferengine.client import TokenLogprobs
from inferengine.errors import InferEngineError
from inferengine.text import Tokenizer
from inferengine.text.detokenizer import make_detokenizer
from inferengine.text.output_parser import MessageReader
from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Reasoning


class TextOffsets:
    """Where the text of each token begins, in characters of the text that the client gets. The tokens of one character
    that takes several of them all begin where it does."""

    def __init__(
        self, tokenizer: Tokenizer, begin: int, *, skip_special_tokens: bool, context_ids: Sequence[int] = ()
    ) -> None:
        """`begin`: characters before the first token."""
        self._detokenizer = make_detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, context_ids=context_ids
        )
        self._place = begin

    def push(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._place)
            self._place += len(self._detokenizer.push(token_id))
        return offsets


def as_completion(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    rows: Sequence[TokenLogprobs],
    offsets: Sequence[int],
    as_ids: bool,
) -> dict[str, Any]:
    """The parallel lists of /v1/completions. `offsets`: where each token begins in the text."""
    shown: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token_id, row, offset in zip(token_ids, rows, offsets, strict=False):
        text = _shown_token(tokenizer, token_id, as_ids)
        top = {text: finite_logprob(row.logprob)}
        for other, logprob in zip(row.top_ids, row.top_logprobs, strict=True):
            top.setdefault(_shown_token(tokenizer, other, as_ids), finite_logprob(logprob))
        shown["text_offset"].append(offset)
        shown["token_logprobs"].append(finite_logprob(row.logprob))
        shown["tokens"].append(text)
        shown["top_logprobs"].append(top)
    return shown


def as_prompt(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], rows: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """vLLM's list with an entry for each prompt token: nothing for the first, which nothing precedes, then the token
    itself and the likeliest others by their ids."""
    shown: list[dict[str, Any] | None] = [None]
    for token_id, row in zip(prompt_ids[1:], rows, strict=False):
        entry: dict[str, Any] = {}
        others = zip(row.top_ids[:num_top], range(1, num_top + 1), row.top_logprobs, strict=False)
        for one, rank, logprob in ((token_id, row.rank, row.logprob), *others):
            text = token_text(tokenizer, one)
            entry.setdefault(str(one), {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": text})
        shown.append(entry)
    return shown


def of_prompt(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    rows: Sequence[TokenLogprobs],
    num_top: int,
    as_ids: bool,
    echo: str,
) -> dict[str, list[Any]]:
    """The lists of /v1/completions for the prompt's tokens, which in an echo come before those of the output."""
    first = _shown_token(tokenizer, prompt_ids[0], as_ids)
    rows = [row._replace(top_ids=row.top_ids[:num_top], top_logprobs=row.top_logprobs[:num_top]) for row in rows]
    offsets = _offsets_in_echo(tokenizer, prompt_ids, echo)
    prompt = as_completion(tokenizer, prompt_ids[1:], rows, offsets[1:], as_ids)
    begin = {"text_offset": offsets[:1], "token_logprobs": [None], "tokens": [first], "top_logprobs": [None]}
    return {name: begin[name] + prompt[name] for name in begin}


def _offsets_in_echo(tokenizer: Tokenizer, prompt_ids: Sequence[int], echo: str) -> list[int]:
    """Where each token of a prompt begins in its echo. It shows the special tokens that the text spells out, and none
    that the tokenizer has added."""
    spelled = len(tokenizer.decode(prompt_ids, False)) == len(echo)
    offsets = TextOffsets(tokenizer, 0, skip_special_tokens=not spelled).push(prompt_ids)
    return [min(offset, len(echo)) for offset in offsets]


def as_chat(
    tokenizer: Tokenizer, token_ids: Sequence[int], rows: Sequence[TokenLogprobs], num_top: int, as_ids: bool
) -> dict[str, Any]:
    """The list of objects of /v1/chat/completions."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = _shown_token(tokenizer, token_id, as_ids)
        return {"token": text, "logprob": finite_logprob(logprob), "bytes": list(tokenizer.token_bytes(token_id))}

    content = []
    for token_id, row in zip(token_ids, rows, strict=False):
        alternatives = list(zip(row.top_ids, row.top_logprobs, strict=True))[:num_top]
        content.append({**entry(token_id, row.logprob), "top_logprobs": [entry(*item) for item in alternatives]})
    return {"content": content, "refusal": None}


def _shown_token(tokenizer: Tokenizer, token_id: int, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else token_text(tokenizer, token_id)


class AnswerMetadata(NamedTuple):
    """What all chunks of one answer have in common. `logprobs`: alternatives asked for, None for no logprobs."""

    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    streaming: StreamingFields
    extras: ExtraFields
    logprobs: int | None
    prompt_logprobs: int | None = None


class Format(Protocol):
    """How a route writes a generation: as a stream of events, or as one document."""

    def events(self, generation: Generation, choice: Choice, pieces: Sequence[Piece]) -> bytes:
        """The events of these pieces, one for each that has something to say."""

    def plain(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """What stands before and after a text in the event of one piece, once pieces that do not end the choice differ
        in nothing else; None where they do."""

    def end(self, generation: Generation) -> bytes:
        """What follows the last piece of the last choice."""

    def failure(self, error: InferEngineError) -> bytes:
        """What ends a stream that cannot go on."""

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """The whole answer in one."""


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return usage as OpenAI writes it, with the numbers of accepted and rejected draft tokens if there were any."""
    draft_tokens = draft_token_counts(usage)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **({"completion_tokens_details": draft_tokens} if draft_tokens else {}),
    }


class Chunks:
    """The envelope around a chunk's choice. Where a request says nothing of usage, the last chunk of a stream of one
    choice has it beside the choice: clients that do not ask (LangChain with a base_url, the Vercel AI SDK's compatible
    provider) read it there."""

    def __init__(self, answer: AnswerMetadata, kind: str, num_choices: int) -> None:
        self._answer = answer
        self._usage_at_end = num_choices == 1 and answer.streaming.stream_options is None
        head = dumps({"id": answer.id, "object": kind, "created": answer.created, "model": answer.model})
        self.head = b"data: " + head[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if answer.streaming.include_usage else b"]}\n\n"

    def chunk(self, generation: Generation, choice: dict[str, Any], more: dict[str, Any], behind: int) -> bytes:
        """`behind`: how many tokens of this choice are here already that later chunks will tell."""
        if self._usage_at_end and choice["finish_reason"] is not None:
            usage = generation.usage()
            told = usage_object(usage._replace(completion_tokens=usage.completion_tokens - behind))
            if generation.choices[0].finish is None:  # a stop string ended it here: the engine has not told yet
                del told["prompt_tokens_details"]
            more = {**more, "usage": told}
        return self.head + dumps(choice) + self._tail(generation, more, behind)

    def end(self, generation: Generation, *, without_output: bool = False) -> bytes:
        """The usage in a chunk without choices, if it was asked for, and the end's mark."""
        if not self._answer.streaming.include_usage:
            return DONE
        usage = generation.usage()
        if without_output:
            usage = usage._replace(completion_tokens=0)
        return self.head + b'],"usage":' + dumps(usage_object(usage)) + b"}\n\n" + DONE

    def _tail(self, generation: Generation, more: dict[str, Any], behind: int) -> bytes:
        tail = self.tail
        if self._answer.streaming.continuous_usage:
            usage = generation.usage()
            usage = usage._replace(completion_tokens=usage.completion_tokens - behind)
            tail = b'],"usage":' + dumps(usage_object(usage)) + b"}\n\n"
        return tail if not more else b"]," + dumps(more)[1:-1] + (tail[1:] if tail != b"]}\n\n" else b"}\n\n")


def _is_plain(answer: AnswerMetadata) -> bool:
    """Whether chunks carry text and nothing else until the last one."""
    return answer.logprobs is None and not answer.extras.return_token_ids and not answer.streaming.continuous_usage


class CompletionFormat:
    """/v1/completions. `echo`: the prompt's text to put before each choice, by prompt; None without echo.
    `prompt_only`: the output, which no engine can leave out, is not told. `skip_special_tokens`: of the output."""

    def __init__(
        self,
        answer: AnswerMetadata,
        echo: Sequence[str] | None,
        num_prompts: int,
        num_choices: int,
        *,
        prompt_only: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._answer = answer
        self._echo = echo
        self._prompt_only = prompt_only
        self._skip_special_tokens = skip_special_tokens
        self._per_prompt = num_choices // num_prompts
        self._chunks = Chunks(answer, "text_completion", num_choices)
        self._plain = _is_plain(answer)
        self._heads = [self._chunks.head + b'{"index":%d,"text":' % index for index in range(num_choices)]
        self._tail = b',"logprobs":null,"finish_reason":null}' + self._chunks.tail
        self._begun: set[int] = set()  # choices whose echo has been told
        self._offsets: dict[int, TextOffsets] = {}

    def events(self, generation: Generation, choice: Choice, pieces: Sequence[Piece]) -> bytes:
        """Write the chunks of these pieces, each with `text`; pieces without text may be left out."""
        parts = []
        head, tail = self._heads[choice.index], self._tail
        for piece in pieces:
            if self._plain and piece.finish_reason is None and self._echo is None:
                if piece.text:
                    parts.append(head + quote(piece.text) + tail)
            elif piece.error is None or piece.token_ids:
                shown = _without_output(piece) if self._prompt_only else piece
                parts.append(self._event(generation, choice, shown))
        return b"".join(parts)

    def plain(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """Return the bytes around a text in its chunk; None with echo, or where a chunk carries more than text."""
        return (self._heads[choice.index], self._tail) if self._plain and self._echo is None else None

    def end(self, generation: Generation) -> bytes:
        """Write the usage chunk, if it was asked for, and `[DONE]`."""
        return self._chunks.end(generation, without_output=self._prompt_only)

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as an event, then `[DONE]`."""
        return event({"error": error_object(error)}) + DONE

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole `text_completion` object."""
        answer = self._answer
        choices = []
        before: dict[str, list[Any]] = {}  # what is told of a prompt is made once, for all of its choices
        prompt_rows: list[Any] = []
        for output in outputs:
            echo = self._echoed(output.choice)
            text, token_ids, reason, stop = output.text, output.token_ids, output.finish_reason, output.stop_reason
            if self._prompt_only:
                text, token_ids, reason, stop = "", [], "length", None
            shown = self._logprobs(output.choice, token_ids, output.logprobs)
            if output.choice.index % self._per_prompt == 0:
                ids, rows = output.choice.prompt_ids, output.choice.prompt_logprobs or []
                if shown is not None and self._echo is not None:
                    as_ids = answer.extras.return_tokens_as_token_ids
                    before = of_prompt(answer.tokenizer, ids, rows, answer.logprobs or 0, as_ids, echo)
                if answer.prompt_logprobs is not None:
                    prompt_rows = as_prompt(answer.tokenizer, ids, rows, answer.prompt_logprobs)
            if shown is not None and self._echo is not None:
                shown = {name: before[name] + shown[name] for name in before}
            entry: dict[str, Any] = {
                "index": output.choice.index,
                "text": echo + text,
                "logprobs": shown,
                "finish_reason": reason,
                "stop_reason": stop,
            }
            if answer.prompt_logprobs is not None:
                entry["prompt_logprobs"] = prompt_rows
            if answer.extras.return_token_ids:
                entry["prompt_token_ids"] = list(output.choice.prompt_ids)
                entry["token_ids"] = token_ids
            choices.append(entry)
        if self._prompt_only:
            usage = usage._replace(completion_tokens=0)
        return {
            "id": answer.id,
            "object": "text_completion",
            "created": answer.created,
            "model": answer.model,
            "choices": choices,
            "usage": usage_object(usage),
        }

    def _event(self, generation: Generation, choice: Choice, piece: Piece) -> bytes:
        begun = choice.index in self._begun
        self._begun.add(choice.index)
        text = piece.text if begun else self._echoed(choice) + piece.text
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, piece.token_ids, piece.logprobs),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            entry["stop_reason"] = piece.stop_reason
        if self._answer.extras.return_token_ids:
            if not begun:
                entry["prompt_token_ids"] = list(choice.prompt_ids)
            entry["token_ids"] = list(piece.token_ids)
        return self._chunks.chunk(generation, entry, {}, choice.num_tokens - piece.num_tokens)

    def _echoed(self, choice: Choice) -> str:
        return self._echo[choice.index // self._per_prompt] if self._echo else ""

    def _logprobs(self, choice: Choice, token_ids: Sequence[int], rows: Any) -> dict[str, Any] | None:
        """Of the next tokens of a choice."""
        answer = self._answer
        if answer.logprobs is None:
            return None
        offsets = self._offsets.get(choice.index)
        if offsets is None:
            offsets = self._offsets[choice.index] = TextOffsets(
                answer.tokenizer,
                len(self._echoed(choice)),
                skip_special_tokens=self._skip_special_tokens,
                context_ids=choice.prompt_ids[-CONTEXT_TOKENS:],
            )
        as_ids = answer.extras.return_tokens_as_token_ids
        return as_completion(answer.tokenizer, token_ids, rows or (), offsets.push(token_ids), as_ids)


def _without_output(piece: Piece) -> Piece:
    return Piece("", (), None, 0, "length" if piece.is_last else None)


class ChatFormat:
    """/v1/chat/completions."""

    def __init__(self, answer: AnswerMetadata, num_choices: int) -> None:
        self._answer = answer
        self._chunks = Chunks(answer, "chat.completion.chunk", num_choices)
        self._plain = _is_plain(answer)
        self._heads = [self._chunks.head + b'{"index":%d,"delta":{"content":' % index for index in range(num_choices)]
        self._tail = b'},"logprobs":null,"finish_reason":null}' + self._chunks.tail
        self._begun: set[int] = set()
        self._prompt_shown = not answer.extras.return_token_ids

    def events(self, generation: Generation, choice: Choice, pieces: Sequence[Piece]) -> bytes:
        """Write the chunks of these pieces; before a choice's first one, a chunk with the role."""
        parts = []
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            parts.append(self._first(generation, choice))
        head, tail = self._heads[choice.index], self._tail
        for piece in pieces:
            if self._plain and piece.finish_reason is None:
                if piece.text:
                    parts.append(head + quote(piece.text) + tail)
            elif piece.error is None or piece.token_ids:
                parts.append(self._event(generation, choice, piece))
        return b"".join(parts)

    def plain(self, choice: Choice) -> tuple[bytes, bytes] | None:
        """Return the bytes around a text in its chunk; None before the first, or where one carries more than text."""
        return (self._heads[choice.index], self._tail) if self._plain and choice.index in self._begun else None

    def end(self, generation: Generation) -> bytes:
        """Write the usage chunk, if it was asked for, and `[DONE]`."""
        return self._chunks.end(generation)

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as an event, then `[DONE]`."""
        return event({"error": error_object(error)}) + DONE

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole `chat.completion` object."""
        messages = [{"role": "assistant", "content": output.text, "refusal": None} for output in outputs]
        return chat_document(self._answer, outputs, messages, [output.finish_reason for output in outputs], usage)

    def _first(self, generation: Generation, choice: Choice) -> bytes:
        entry = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        more = {} if self._prompt_shown else {"prompt_token_ids": list(choice.prompt_ids)}
        self._prompt_shown = True
        return self._chunks.chunk(generation, entry, more, choice.num_tokens)

    def _event(self, generation: Generation, choice: Choice, piece: Piece) -> bytes:
        entry: dict[str, Any] = {
            "index": choice.index,
            "delta": {"content": piece.text} if piece.text or piece.finish_reason is None else {},
            "logprobs": chat_logprobs(self._answer, piece.token_ids, piece.logprobs),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            entry["stop_reason"] = piece.stop_reason
        if self._answer.extras.return_token_ids:
            entry["token_ids"] = list(piece.token_ids)
        return self._chunks.chunk(generation, entry, {}, choice.num_tokens - piece.num_tokens)


def chat_logprobs(answer: AnswerMetadata, token_ids: Sequence[int], rows: Any) -> dict[str, Any] | None:
    """The log-probabilities of a chat choice; None where they were not asked for."""
    if answer.logprobs is None:
        return None
    return as_chat(answer.tokenizer, token_ids, rows or (), answer.logprobs, answer.extras.return_tokens_as_token_ids)


def chat_document(
    answer: AnswerMetadata,
    outputs: Sequence[Output],
    messages: Sequence[dict[str, Any]],
    reasons: Sequence[str | None],
    usage: Usage,
) -> dict[str, Any]:
    """A whole chat completion: for each output its message, and why it ended."""
    choices = []
    for output, message, reason in zip(outputs, messages, reasons, strict=True):
        entry: dict[str, Any] = {
            "index": output.choice.index,
            "message": message,
            "logprobs": chat_logprobs(answer, output.token_ids, output.logprobs),
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }
        if answer.extras.return_token_ids:
            entry["token_ids"] = output.token_ids
        choices.append(entry)
    document = {
        "id": answer.id,
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": choices,
        "usage": usage_object(usage),
    }
    if answer.extras.return_token_ids:
        document["prompt_token_ids"] = list(outputs[0].choice.prompt_ids)
    if answer.prompt_logprobs is not None:
        choice = outputs[0].choice
        document["prompt_logprobs"] = as_prompt(
            answer.tokenizer, choice.prompt_ids, choice.prompt_logprobs or [], answer.prompt_logprobs
        )
    return document


class MessageFormat:
    """/v1/chat/completions with tools, or of a model that thinks. `in_functions`: the first call is told as
    `function_call`, for a request that has `functions`; further ones are left out."""

    def __init__(
        self,
        answer: AnswerMetadata,
        num_choices: int,
        parser: OutputParser,
        *,
        include_reasoning: bool = True,
        in_functions: bool = False,
    ) -> None:
        self._in_functions = in_functions
        self._answer = answer
        self._parser = parser
        self._include_reasoning = include_reasoning
        self._chunks = Chunks(answer, "chat.completion.chunk", num_choices)
        self._readers: list[MessageReader | None] = [None] * num_choices

    def events(self, generation: Generation, choice: Choice, pieces: Sequence[Piece]) -> bytes:
        """Write the chunks of these pieces: the role first, then content, reasoning and tool calls as parsed."""
        chunks: list[bytes] = []
        reader = self._readers[choice.index]
        if reader is None:
            reader = self._readers[choice.index] = self._parser.make_reader()
            more = {"prompt_token_ids": list(choice.prompt_ids)} if self._answer.extras.return_token_ids else {}
            first = {"role": "assistant", "content": ""}
            chunks.append(self._chunk(generation, choice, first, None, more, behind=choice.num_tokens))
        for piece in pieces:
            deltas = [delta for part in reader.push(piece.text, piece.is_last) if (delta := self._delta(choice, part))]
            carries = piece.token_ids and (self._answer.logprobs is not None or self._answer.extras.return_token_ids)
            if not deltas and (carries or piece.finish_reason is not None):
                deltas.append({})
            for place, delta in enumerate(deltas):
                done = piece if place == len(deltas) - 1 else None
                behind = choice.num_tokens - piece.num_tokens
                chunks.append(self._chunk(generation, choice, delta, done, {}, reader.num_calls, behind=behind))
        return b"".join(chunks)

    def plain(self, choice: Choice) -> None:
        """Return None: the text has to be parsed first."""
        return None

    def end(self, generation: Generation) -> bytes:
        """Write the usage chunk, if it was asked for, and `[DONE]`."""
        return self._chunks.end(generation)

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as an event, then `[DONE]`."""
        return event({"error": error_object(error)}) + DONE

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole `chat.completion` object, with reasoning and tool calls taken out of the text."""
        messages, reasons = [], []
        for output in outputs:
            message = self._parser.make_reader().read(output.text)
            shown: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
            if message.reasoning and self._include_reasoning:
                shown["reasoning_content"] = message.reasoning
            if message.calls and self._in_functions:
                name, arguments = message.calls[0]
                shown["content"] = message.content or None
                shown["function_call"] = {"name": name, "arguments": arguments}
            elif message.calls:
                shown["content"] = message.content or None
                shown["tool_calls"] = [
                    self._parser.call(self._answer.id, output.choice.index, place, name, arguments)
                    for place, (name, arguments) in enumerate(message.calls)
                ]
            messages.append(shown)
            reasons.append(self._reason(output.finish_reason, len(message.calls)))
        return chat_document(self._answer, outputs, messages, reasons, usage)

    def _delta(self, choice: Choice, part: Part) -> dict[str, Any] | None:
        match part:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text} if self._include_reasoning else None
            case CallDelta(call, name, arguments) if self._in_functions:
                if call:
                    return None
                named = {} if name is None else {"name": name}
                return {"function_call": {**named, "arguments": arguments}}
            case CallDelta():
                return {"tool_calls": [self._parser.call_entry(self._answer.id, choice.index, part)]}

    def _reason(self, reason: str | None, num_calls: int) -> str | None:
        found = finish_reason(reason, num_calls)
        return "function_call" if self._in_functions and found == "tool_calls" else found

    def _chunk(
        self,
        generation: Generation,
        choice: Choice,
        delta: dict[str, Any],
        piece: Piece | None,
        more: dict[str, Any],
        num_calls: int = 0,
        *,
        behind: int,
    ) -> bytes:
        """`piece`: the one that this chunk completes, whose tokens and end it tells."""
        entry: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if piece is not None:
            entry["logprobs"] = chat_logprobs(self._answer, piece.token_ids, piece.logprobs)
            entry["finish_reason"] = self._reason(piece.finish_reason, num_calls)
            if piece.finish_reason is not None:
                entry["stop_reason"] = piece.stop_reason
            if self._answer.extras.return_token_ids:
                entry["token_ids"] = list(piece.token_ids)
        return self._chunks.chunk(generation, entry, more, behind)
