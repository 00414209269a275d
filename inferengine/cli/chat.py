"""`inferengine chat`: a conversation with a running engine in this terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from inferengine.cli.command import CONNECT_TIMEOUT_S, Arguments, Option, command, connect
from inferengine.client import Client, Delta, Finish
from inferengine.client.requests import error_of
from inferengine.config import LimitsConfig, engine_address, status_address
from inferengine.errors import ExitCode, InferEngineError, InvalidRequest
from inferengine.sampling_params import SamplingParams, from_map, validate
from inferengine.wire.curve import client_keys

HELP = """\
/help                 list these commands
/params               the sampling parameters; /params temperature=0.2 max_tokens=100 changes some
/system TEXT          set the system message; empty: none
/reset                clear the conversation
/quit                 leave"""
LOAD_TIMEOUT_S = 600.0


class ChatState:
    """The messages so far and the parameters of the next answer. Knows nothing of the terminal or the wire."""

    def __init__(self) -> None:
        self.system = ""
        self.turns: list[dict[str, Any]] = []
        self.values: dict[str, Any] = {"temperature": 0.7, "max_tokens": 256}

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def params(self) -> SamplingParams:
        """Return the sampling parameters of the next answer."""
        return from_map(self.values)

    def change(self, assignments: str, *, vocab_size: int, limits: LimitsConfig) -> None:
        """Take over `name=value` words; `name=` returns to the default. Raises InvalidRequest and changes nothing."""
        values = dict(self.values)
        known = SamplingParams.__struct_fields__
        for word in assignments.split():
            name, equals, text = word.partition("=")
            if not equals or name not in known:
                raise InvalidRequest(name, f"no such parameter; there are {', '.join(known)}")
            if not text:
                values.pop(name, None)
                continue
            try:
                values[name] = json.loads(text)
            except json.JSONDecodeError:
                values[name] = text
        validate(from_map(values), vocab_size=vocab_size, limits=limits)
        if from_map(values).n != 1:
            raise InvalidRequest("n", "a conversation has one answer")
        self.values = values


class TerminalChat:
    """The loop of `inferengine chat`: reads lines, streams answers and runs slash commands."""

    def __init__(
        self,
        client: Client,
        limits: LimitsConfig,
        read: Callable[[], str | None],
        output: TextIO,
        *,
        as_json: bool = False,
    ) -> None:
        """With `as_json` each answer is one JSON line, written when it is complete; so is each error."""
        self.conversation = ChatState()
        self._as_json = as_json
        self._client = client
        self._limits = limits
        self._read = read
        self._output = output

    def run(self) -> int:
        """Take turns until the input ends or /quit. Returns the exit code: 1 when a turn failed."""
        code = ExitCode.OK
        while (line := self._read()) is not None:
            line = line.strip()
            if line == "/quit":
                break
            if not line:
                continue
            try:
                self._command(line) if line.startswith("/") else self._turn(line)
            except InferEngineError as error:
                if self._as_json:
                    self._write_json({"error": {"code": error.code, "field": error.field, "message": error.message}})
                else:
                    self._say(f"! {error_line(error)}")
                code = ExitCode.CRASH
        return code

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/help":
            self._say(HELP)
        elif name == "/reset":
            self.conversation.turns.clear()
            self._say("The conversation is empty.")
        elif name == "/system":
            self.conversation.system = rest.strip()
            self._say("The system message is set." if rest.strip() else "The system message is removed.")
        elif name == "/params":
            model = self._client.welcome.model
            self.conversation.change(rest, vocab_size=model.vocab_size if model else 0, limits=self._limits)
            self._say(" ".join(f"{key}={json.dumps(value)}" for key, value in self.conversation.values.items()))
        else:
            self._say(f"! There is no {name}. /help lists the commands.")

    def _turn(self, text: str) -> None:
        conversation = self.conversation
        messages = [*conversation.messages(), {"role": "user", "content": text}]
        asked_at = time.monotonic()
        submission = self._client.submit(messages=messages, params=conversation.params(), reply="text", label="chat")
        submission.accepted()
        stream = submission.streams[0]
        parts: list[str] = []
        finish: Finish | None = None
        first_at: float | None = None
        for delta in _until_finished(stream, stream.cancel):
            if delta.text and first_at is None:
                first_at = time.monotonic()
            parts.append(delta.text)
            if not self._as_json:
                self._output.write(delta.text)
                self._output.flush()
            finish = delta.finish or finish
        answer = "".join(parts)
        if not self._as_json:
            self._output.write("\n")
        if answer:  # an answer that Ctrl-C cut short stays in the conversation
            conversation.turns += [messages[-1], {"role": "assistant", "content": answer}]
        if self._as_json and finish is not None and finish.reason != "error":
            self._write_json(
                {
                    "content": answer,
                    "finish_reason": finish.reason,
                    "completion_tokens": finish.completion_tokens,
                    "first_ms": round((first_at - asked_at) * 1e3, 1) if first_at is not None else None,
                    "total_ms": round((time.monotonic() - asked_at) * 1e3, 1),
                }
            )
        elif not self._as_json:
            self._say(summary(finish, asked_at, first_at, time.monotonic()))
        if finish is not None and finish.reason == "error":
            raise error_of(finish)

    def _write_json(self, answer: dict[str, Any]) -> None:
        self._output.write(json.dumps(answer, ensure_ascii=False) + "\n")
        self._output.flush()

    def _say(self, text: str) -> None:
        if self._as_json:
            return
        dim = self._output.isatty()
        self._output.write(f"\x1b[2m{text}\x1b[0m\n" if dim else f"{text}\n")
        self._output.flush()


def error_line(error: InferEngineError) -> str:
    """Return an error as one line: the field before a message that begins with a verb, else the message and its
    remedy."""
    if error.field is not None and error.message[:1].islower():
        return f"{error.field.removeprefix('params.')}: {error.message}"
    return f"{error.message} {error.kind.remedy}"


@command({"options": (Option("--json", "write each answer as one JSON line: content, finish_reason, tokens, times"),)})
def run(arguments: Arguments) -> int:
    """Talk to a running engine in this terminal, over ZeroMQ and without a front end.

    The conversation goes on over several turns; Ctrl-C stops an answer, Ctrl-D or /quit leaves. Lines from a pipe are
    turns too. /help lists what else can be typed: /params, /system, /reset.
    """
    config = arguments.config
    status, curve = status_address(config), client_keys(config)
    with contextlib.closing(Client(engine_address(config), status_address=status, role="chat", curve=curve)) as client:
        _wait_ready(client)
        model = client.welcome.model
        as_json = arguments.values["json"]
        interactive = sys.stdin.isatty() and not as_json
        if interactive:
            import readline  # noqa: F401  (line editing and history at the prompt)

            print(f"Talking to {model.name if model else 'the engine'}. /help lists the commands.")
        return TerminalChat(client, config.limits, lambda: _read_line(interactive), sys.stdout, as_json=as_json).run()


def summary(finish: Finish | None, asked_at: float, first_at: float | None, ended_at: float) -> str:
    """Return a summary such as `42 tokens, 55.1 tokens/s, first after 31 ms, stop`. Times in seconds; the rate is that
    after the first token."""
    if finish is None:
        return "no answer"
    words = [f"{finish.completion_tokens} tokens"]
    if first_at is not None and finish.completion_tokens > 1 and ended_at > first_at:
        words.append(f"{(finish.completion_tokens - 1) / (ended_at - first_at):.1f} tokens/s")
    if first_at is not None:
        words.append(f"first after {(first_at - asked_at) * 1000:.0f} ms")
    words.append("stopped" if finish.reason == "abort" else finish.reason)
    return ", ".join(words)


def _until_finished(stream: Iterator[Delta], cancel: Callable[[], None]) -> Iterator[Delta]:
    """Yield the stream's deltas. Ctrl-C cancels the request and the rest follows; a second Ctrl-C leaves at once."""
    cancelled = False
    while True:
        try:
            delta = next(stream)
        except StopIteration:
            return
        except KeyboardInterrupt:
            if cancelled:
                raise
            cancelled = True
            cancel()
            continue
        yield delta


def _wait_ready(client: Client) -> None:
    welcome = connect(client)
    if welcome.state == "STARTING":
        print(f"The engine is starting: {welcome.progress[0] or 'loading'} ...", file=sys.stderr)
    client.wait_ready(LOAD_TIMEOUT_S if welcome.state == "STARTING" else CONNECT_TIMEOUT_S)


def _read_line(interactive: bool) -> str | None:
    if not interactive:
        return sys.stdin.readline() or None
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)")
