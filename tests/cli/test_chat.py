"""`inferengine chat`: turns, slash commands and complaints, on a real engine that says one text."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest

from inferengine.cli.chat import TerminalChat
from inferengine.client import Client
from inferengine.config import LimitsConfig
from inferengine.errors import ExitCode
from tests.engine.builders import address_of
from tests.engine.test_tokenization import run_script

TEXT = "the quick brown fox "


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with run_script(TEXT * 5) as engine, Client(address_of(engine)) as client:
        client.wait_ready(20)
        yield client


def talk(client: Client, *lines: str) -> tuple[int, list[str], TerminalChat]:
    """Return the exit code, what was printed, and the chat afterwards."""
    typed, output = iter(lines), io.StringIO()
    chat = TerminalChat(client, LimitsConfig(), lambda: next(typed, None), output)
    return chat.run(), output.getvalue().splitlines(), chat


def test_turns_are_kept_until_they_are_reset(client: Client) -> None:
    code, printed, chat = talk(client, "/params max_tokens=9", "hello", "and then?")
    assert code == ExitCode.OK
    assert [line for line in printed if TEXT.startswith(line[:9])] == [printed[1], printed[3]]
    assert printed[2].startswith("9 tokens, ")
    assert [turn["role"] for turn in chat.conversation.turns] == ["user", "assistant"] * 2
    assert chat.conversation.turns[1]["content"] == printed[1]
    assert talk(client, "hello", "/reset")[2].conversation.turns == []


def test_a_system_message_leads_until_it_is_taken_back(client: Client) -> None:
    assert talk(client, "/system Be terse.")[2].conversation.messages() == [{"role": "system", "content": "Be terse."}]
    assert talk(client, "/system Be terse.", "/system")[2].conversation.messages() == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/params temperature=9", "! temperature: must lie in [0, 2]"),
        ("/params max_tokens=many", "! max_tokens: must be a whole number"),
        ("/params n=2", "! n: a conversation has one answer"),
        ("/params temprature=1", "! temprature: no such parameter; there are max_tokens, "),
        ("/nope", "! There is no /nope. /help lists the commands."),
        ("word " * 2000, "! This model's maximum context length is "),
    ],
)
def test_a_complaint_names_what_to_change_and_the_conversation_goes_on(
    client: Client, line: str, complaint: str
) -> None:
    _, printed, chat = talk(client, "/params max_tokens=5", line, "hello")
    assert printed[1].startswith(complaint)
    assert "Correct the named field" not in printed[1]
    assert chat.conversation.values["max_tokens"] == 5
    assert len(chat.conversation.turns) == 2


def test_quit_ends_it_and_help_tells_how(client: Client) -> None:
    code, printed, _ = talk(client, "/help", "/quit", "/nope")
    assert code == ExitCode.OK
    assert any("/params" in line for line in printed)
    assert not any("/nope" in line for line in printed)


def test_as_json_each_answer_and_each_error_is_a_line(client: Client) -> None:
    typed, output = iter(["/params max_tokens=9", "hello", "/params n=2"]), io.StringIO()
    chat = TerminalChat(client, LimitsConfig(), lambda: next(typed, None), output, as_json=True)
    assert chat.run() == ExitCode.CRASH
    answer, error = (json.loads(line) for line in output.getvalue().splitlines())
    assert TEXT.startswith(answer["content"][:9])
    assert (answer["finish_reason"], answer["completion_tokens"]) == ("length", 9)
    assert error["error"]["field"] == "n"
