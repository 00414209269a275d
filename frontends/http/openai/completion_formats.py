"""Write completions and chat completions as OpenAI's API has them: documents, streamed chunks, log-probabilities.

Most chunks of a choice differ in their text alone. What stands before and after the text is therefore encoded once
for each choice (EventTemplate): a chunk takes 0.15 us instead of 3 us of json.dumps. Other chunks are encoded whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from frontends.common.chat import OutputParser, finish_reason
from frontends.common.errors import error_object
from frontends.common.generation import (
    ChoiceOutput,
    Output,
    Piece,
    RequestOutput,
    Usage,
    draft_token_counts,
    finite_logprob,
    token_text,
)
from frontends.common.json import DONE, dumps, event
from frontends.common.model import ServedModel
from frontends.http.bodies import ExtraFields, StreamingFields
from frontends.http.respond import EventTemplate
from inferengine.client import TokenLogprobs
from inferengine.errors import InferEngineError
from inferengine.text import CONTEXT_TOKENS, Tokenizer
from inferengine.text.output_parser import MessageReader
from inferengine.text.tokenizer import make_detokenizer
from inferengine.text.tool_parsers.base import CallDelta, Content, Part, Reasoning

# -- log-probabilities -------------------------------------------------------------------------------------------------


class TextOffsets:
    """Computes where the text of each token begins, in characters of the text that the client receives.

    If one character takes several tokens, all of them have its offset.
    """

    def __init__(
        self, tokenizer: Tokenizer, begin: int, *, skip_special_tokens: bool, context_ids: Sequence[int] = ()
    ) -> None:
        """`begin`: the number of characters before the first token."""
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


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    rows: Sequence[TokenLogprobs],
    offsets: Sequence[int],
    as_ids: bool,
) -> dict[str, Any]:
    """Return `logprobs` of /v1/completions: parallel lists. `offsets`: where each token begins in the text."""
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


def prompt_logprobs_list(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], rows: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` as vLLM has it: an entry for each prompt token, None for the first.

    An entry maps token ids, the prompt's own and the `num_top` most likely ones, to log-probability, rank and text.
    """
    shown: list[dict[str, Any] | None] = [None]
    for token_id, row in zip(prompt_ids[1:], rows, strict=False):
        entry: dict[str, Any] = {}
        others = zip(row.top_ids[:num_top], range(1, num_top + 1), row.top_logprobs, strict=False)
        for one, rank, logprob in ((token_id, row.rank, row.logprob), *others):
            text = token_text(tokenizer, one)
            entry.setdefault(str(one), {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": text})
        shown.append(entry)
    return shown


def echoed_prompt_logprobs(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    rows: Sequence[TokenLogprobs],
    num_top: int,
    as_ids: bool,
    echo: str,
) -> dict[str, list[Any]]:
    """Return the lists of `completion_logprobs` for the tokens of an echoed prompt, to put before the output's."""
    first = _shown_token(tokenizer, prompt_ids[0], as_ids)
    rows = [row._replace(top_ids=row.top_ids[:num_top], top_logprobs=row.top_logprobs[:num_top]) for row in rows]
    offsets = _offsets_in_echo(tokenizer, prompt_ids, echo)
    prompt = completion_logprobs(tokenizer, prompt_ids[1:], rows, offsets[1:], as_ids)
    begin = {"text_offset": offsets[:1], "token_logprobs": [None], "tokens": [first], "top_logprobs": [None]}
    return {name: begin[name] + prompt[name] for name in begin}


def _offsets_in_echo(tokenizer: Tokenizer, prompt_ids: Sequence[int], echo: str) -> list[int]:
    """Return where each token of a prompt begins in its echo.

    Special tokens have characters there only if the client wrote them, not if the tokenizer added them.
    """
    spelled = len(tokenizer.decode(prompt_ids, False)) == len(echo)
    offsets = TextOffsets(tokenizer, 0, skip_special_tokens=not spelled).push(prompt_ids)
    return [min(offset, len(echo)) for offset in offsets]


def chat_logprobs_object(
    tokenizer: Tokenizer, token_ids: Sequence[int], rows: Sequence[TokenLogprobs], num_top: int, as_ids: bool
) -> dict[str, Any]:
    """Return `logprobs` of /v1/chat/completions: an object for each token."""

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


# -- formats: documents and chunks -------------------------------------------------------------------------------------


class AnswerMetadata(NamedTuple):
    """What all chunks of one answer share. `logprobs`, `prompt_logprobs`: wanted alternatives, or None."""

    id: str
    created: int
    model: str
    tokenizer: Tokenizer
    streaming: StreamingFields
    extras: ExtraFields
    logprobs: int | None
    prompt_logprobs: int | None = None


def answer_metadata(
    name: str,
    body: dict[str, Any],
    served: ServedModel,
    streaming: StreamingFields,
    extras: ExtraFields,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> AnswerMetadata:
    """Make the metadata of an answer to this body. `name`: the answer's id."""
    model = body.get("model") or served.name
    now = int(time.time())
    return AnswerMetadata(name, now, model, served.tokenizer, streaming, extras, logprobs, prompt_logprobs)


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


class ChunkEncoder:
    """Encodes chunks: a choice, inside the fields that all chunks of a stream have, and usage.

    If a request has no `stream_options`, the last chunk of a stream with one choice carries the usage beside the
    choice. Clients that do not request usage read it there: LangChain with a base_url, the Vercel AI SDK's compatible
    provider.
    """

    def __init__(self, answer: AnswerMetadata, kind: str, num_choices: int) -> None:
        self._answer = answer
        self.ends_with_usage = num_choices == 1 and answer.streaming.stream_options is None
        head = dumps({"id": answer.id, "object": kind, "created": answer.created, "model": answer.model})
        self.head = b"data: " + head[:-1] + b',"choices":['
        self.tail = b'],"usage":null}\n\n' if answer.streaming.include_usage else b"]}\n\n"

    def chunk(self, generation: RequestOutput, choice: dict[str, Any], extra: dict[str, Any], num_later: int) -> bytes:
        """Encode one chunk.

        `extra`: fields beside `choices`. `num_later`: how many of the received tokens of this choice are in later
        chunks; usage does not count them yet.
        """
        if self.ends_with_usage and choice["finish_reason"] is not None:
            usage = generation.usage()
            shown = usage_object(usage._replace(completion_tokens=usage.completion_tokens - num_later))
            if generation.choices[0].finish is None:  # a stop string ended it here, and the engine did not answer
                del shown["prompt_tokens_details"]
            extra = {**extra, "usage": shown}
        return self.head + dumps(choice) + self._tail(generation, extra, num_later)

    def end(self, generation: RequestOutput, *, without_output: bool = False) -> bytes:
        """Encode the end of a stream: the usage in a chunk without choices, if requested, then `[DONE]`."""
        if not self._answer.streaming.include_usage:
            return DONE
        usage = generation.usage()
        if without_output:
            usage = usage._replace(completion_tokens=0)
        return self.head + b'],"usage":' + dumps(usage_object(usage)) + b"}\n\n" + DONE

    def _tail(self, generation: RequestOutput, extra: dict[str, Any], num_later: int) -> bytes:
        tail = self.tail
        if self._answer.streaming.continuous_usage:
            usage = generation.usage()
            usage = usage._replace(completion_tokens=usage.completion_tokens - num_later)
            tail = b'],"usage":' + dumps(usage_object(usage)) + b"}\n\n"
        return tail if not extra else b"]," + dumps(extra)[1:-1] + (tail[1:] if tail != b"]}\n\n" else b"}\n\n")


def _token_templates(
    answer: AnswerMetadata, chunks: ChunkEncoder, num_choices: int, text: bytes, end: bytes
) -> list[EventTemplate]:
    """Return the template of one-token chunks for each choice; empty if chunks carry more than text and token id.

    `text`: what stands between index and text in the JSON. `end`: what closes it after the text.
    """
    if answer.logprobs is not None or answer.streaming.continuous_usage:
        return []
    after = end + b',"logprobs":null,"finish_reason":null'
    return [
        EventTemplate(head, after + b',"token_ids":[', b"]}" + chunks.tail)
        if answer.extras.return_token_ids
        else EventTemplate(head, after + b"}" + chunks.tail)
        for head in (chunks.head + b'{"index":%d,%b' % (index, text) for index in range(num_choices))
    ]


def _fits_template(piece: Piece, template: EventTemplate) -> bool:
    """Return whether a piece can be written with a template, which has room for one token's id."""
    if piece.finish_reason is not None:
        return False
    return template.after_id is None or (len(piece.token_ids) == 1 and piece.error is None)


class CompletionFormat:
    """Writes answers of /v1/completions.

    `echo`: the text to put before each choice, by prompt; None without echo. `prompt_only`: leave the output out.
    `skip_special_tokens`: of the output.
    """

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
        self._chunks = ChunkEncoder(answer, "text_completion", num_choices)
        self._templates = (
            [] if echo is not None else _token_templates(answer, self._chunks, num_choices, b'"text":', b"")
        )
        self._begun: set[int] = set()  # choices whose first chunk, with echo and prompt ids, has been written
        self._offsets: dict[int, TextOffsets] = {}

    @property
    def ends_with_usage(self) -> bool:
        """Return what Format.ends_with_usage does."""
        return self._chunks.ends_with_usage

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the chunks of these pieces, each with `text`; pieces without text may be left out."""
        parts = []
        for piece in pieces:
            template = self.template(choice)
            if template is not None and _fits_template(piece, template):
                parts.append(template.write(piece.text, piece.token_ids[0] if piece.token_ids else 0))
            elif piece.error is None or piece.token_ids:
                shown = _without_output(piece) if self._prompt_only else piece
                parts.append(self._event(generation, choice, shown))
        return b"".join(parts)

    def template(self, choice: ChoiceOutput) -> EventTemplate | None:
        """Return the template of chunks; None with echo, if chunks carry more, and before the prompt's ids are sent."""
        if not self._templates or (self._answer.extras.return_token_ids and choice.index not in self._begun):
            return None
        return self._templates[choice.index]

    def end(self, generation: RequestOutput) -> bytes:
        """Write the usage chunk, if it was asked for, and `[DONE]`."""
        return self._chunks.end(generation, without_output=self._prompt_only)

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as an event, then `[DONE]`."""
        return event({"error": error_object(error)}) + DONE

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole `text_completion` object."""
        answer = self._answer
        choices = []
        before: dict[str, list[Any]] = {}  # the lists of a prompt are made once, for all of its choices
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
                    before = echoed_prompt_logprobs(answer.tokenizer, ids, rows, answer.logprobs or 0, as_ids, echo)
                if answer.prompt_logprobs is not None:
                    prompt_rows = prompt_logprobs_list(answer.tokenizer, ids, rows, answer.prompt_logprobs)
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

    def _event(self, generation: RequestOutput, choice: ChoiceOutput, piece: Piece) -> bytes:
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

    def _echoed(self, choice: ChoiceOutput) -> str:
        return self._echo[choice.index // self._per_prompt] if self._echo else ""

    def _logprobs(self, choice: ChoiceOutput, token_ids: Sequence[int], rows: Any) -> dict[str, Any] | None:
        """Return the log-probabilities of the next tokens of a choice; None if they were not requested."""
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
        return completion_logprobs(answer.tokenizer, token_ids, rows or (), offsets.push(token_ids), as_ids)


def _without_output(piece: Piece) -> Piece:
    return Piece("", (), None, 0, "length" if piece.is_last else None)


class ChatFormat:
    """Writes answers of /v1/chat/completions without tools or reasoning: the text is not parsed."""

    def __init__(self, answer: AnswerMetadata, num_choices: int) -> None:
        self._answer = answer
        self._chunks = ChunkEncoder(answer, "chat.completion.chunk", num_choices)
        self._templates = _token_templates(answer, self._chunks, num_choices, b'"delta":{"content":', b"}")
        self._begun: set[int] = set()
        self._prompt_shown = not answer.extras.return_token_ids

    @property
    def ends_with_usage(self) -> bool:
        """Return what Format.ends_with_usage does."""
        return self._chunks.ends_with_usage

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the chunks of these pieces; before a choice's first one, a chunk with the role."""
        parts = []
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            parts.append(self._first(generation, choice))
        template = self.template(choice)
        for piece in pieces:
            if template is not None and _fits_template(piece, template):
                parts.append(template.write(piece.text, piece.token_ids[0] if piece.token_ids else 0))
            elif piece.error is None or piece.token_ids:
                parts.append(self._event(generation, choice, piece))
        return b"".join(parts)

    def template(self, choice: ChoiceOutput) -> EventTemplate | None:
        """Return the template of chunks; None before the first chunk, or if chunks carry more."""
        return self._templates[choice.index] if self._templates and choice.index in self._begun else None

    def end(self, generation: RequestOutput) -> bytes:
        """Write the usage chunk, if it was asked for, and `[DONE]`."""
        return self._chunks.end(generation)

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as an event, then `[DONE]`."""
        return event({"error": error_object(error)}) + DONE

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole `chat.completion` object."""
        messages = [{"role": "assistant", "content": output.text, "refusal": None} for output in outputs]
        return chat_document(self._answer, outputs, messages, [output.finish_reason for output in outputs], usage)

    def _first(self, generation: RequestOutput, choice: ChoiceOutput) -> bytes:
        entry = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        extra = {} if self._prompt_shown else {"prompt_token_ids": list(choice.prompt_ids)}
        self._prompt_shown = True
        return self._chunks.chunk(generation, entry, extra, choice.num_tokens)

    def _event(self, generation: RequestOutput, choice: ChoiceOutput, piece: Piece) -> bytes:
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
    """Return `logprobs` of a chat choice; None if they were not requested."""
    if answer.logprobs is None:
        return None
    return chat_logprobs_object(
        answer.tokenizer, token_ids, rows or (), answer.logprobs, answer.extras.return_tokens_as_token_ids
    )


def chat_document(
    answer: AnswerMetadata,
    outputs: Sequence[Output],
    messages: Sequence[dict[str, Any]],
    reasons: Sequence[str | None],
    usage: Usage,
) -> dict[str, Any]:
    """Return a whole `chat.completion` object. `messages` and `reasons`: message and finish reason of each output."""
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
        document["prompt_logprobs"] = prompt_logprobs_list(
            answer.tokenizer, choice.prompt_ids, choice.prompt_logprobs or [], answer.prompt_logprobs
        )
    return document


class MessageFormat:
    """Writes answers of /v1/chat/completions whose text is parsed for tool calls and reasoning.

    `in_functions`: the request has `functions`, so the first call becomes `function_call` and others are left out.
    """

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
        self._chunks = ChunkEncoder(answer, "chat.completion.chunk", num_choices)
        self._readers: list[MessageReader | None] = [None] * num_choices

    @property
    def ends_with_usage(self) -> bool:
        """Return what Format.ends_with_usage does."""
        return self._chunks.ends_with_usage

    def events(self, generation: RequestOutput, choice: ChoiceOutput, pieces: Sequence[Piece]) -> bytes:
        """Write the chunks of these pieces: the role first, then content, reasoning and tool calls as parsed."""
        chunks: list[bytes] = []
        reader = self._readers[choice.index]
        if reader is None:
            reader = self._readers[choice.index] = self._parser.make_reader()
            extra = {"prompt_token_ids": list(choice.prompt_ids)} if self._answer.extras.return_token_ids else {}
            first = {"role": "assistant", "content": ""}
            chunks.append(self._chunk(generation, choice, first, None, extra, num_later=choice.num_tokens))
        for piece in pieces:
            deltas = [
                delta
                for part in reader.push(piece.text, piece.is_last, cut=piece.is_cut)
                if (delta := self._delta(choice, part))
            ]
            carries = piece.token_ids and (self._answer.logprobs is not None or self._answer.extras.return_token_ids)
            if not deltas and (carries or piece.finish_reason is not None):
                deltas.append({})
            for place, delta in enumerate(deltas):
                done = piece if place == len(deltas) - 1 else None
                num_later = choice.num_tokens - piece.num_tokens
                chunks.append(self._chunk(generation, choice, delta, done, {}, reader.num_calls, num_later=num_later))
        return b"".join(chunks)

    def template(self, choice: ChoiceOutput) -> None:
        """Return None: the text has to be parsed first."""
        return None

    def end(self, generation: RequestOutput) -> bytes:
        """Write the usage chunk, if it was asked for, and `[DONE]`."""
        return self._chunks.end(generation)

    def failure(self, error: InferEngineError) -> bytes:
        """Write the error as an event, then `[DONE]`."""
        return event({"error": error_object(error)}) + DONE

    def document(self, outputs: Sequence[Output], usage: Usage) -> dict[str, Any]:
        """Return the whole `chat.completion` object, with reasoning and tool calls taken out of the text."""
        messages, reasons = [], []
        for output in outputs:
            message = self._parser.make_reader().read(output.text, cut=output.is_cut)
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

    def _delta(self, choice: ChoiceOutput, part: Part) -> dict[str, Any] | None:
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
        generation: RequestOutput,
        choice: ChoiceOutput,
        delta: dict[str, Any],
        piece: Piece | None,
        extra: dict[str, Any],
        num_calls: int = 0,
        *,
        num_later: int,
    ) -> bytes:
        """Encode one chunk. `piece`: the piece that it completes, whose tokens and finish reason it carries."""
        entry: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        if piece is not None:
            entry["logprobs"] = chat_logprobs(self._answer, piece.token_ids, piece.logprobs)
            entry["finish_reason"] = self._reason(piece.finish_reason, num_calls)
            if piece.finish_reason is not None:
                entry["stop_reason"] = piece.stop_reason
            if self._answer.extras.return_token_ids:
                entry["token_ids"] = list(piece.token_ids)
        return self._chunks.chunk(generation, entry, extra, num_later)
