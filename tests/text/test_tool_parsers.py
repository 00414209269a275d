"""Tool calls and reasoning as models write them, read whole and cut at every place: the parts are the same."""

from __future__ import annotations

import json
import random

import pytest

from inferengine.text.output_parser import Message, MessageReader, ReasoningReader
from inferengine.text.tool_parsers import FORMATS, detect
from inferengine.text.tool_parsers.base import CallDelta, Content, Part

W, S = '{"city": "Paris"}', '{"a": [1, {"b": "}\\"{"}], "c": "né 🎉"}'

# format, output, content, calls
GOLDEN: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text.\n", "Just text.\n", []),
    ("hermes", "", "", []),
    ("hermes", "  \n", "  \n", []),
    ("hermes", "a < b <tool b", "a < b <tool b", []),
    ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {W}}}\n</tool_call>', "", [("weather", W)]),
    (
        "hermes",
        f'Let me see. \n<tool_call>\n{{"name": "weather", "arguments": {W}}}\n</tool_call>\n'
        f'<tool_call>\n{{"arguments": {S}, "name": "sum"}}\n</tool_call>\nThere you go.\nBye.',
        "Let me see.There you go.\nBye.",
        [("weather", W), ("sum", S)],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    ("hermes", f'<tool_call>{{"id": 7, "name": "f", "arguments": {W}, "x": true}}</tool_call>', "", [("f", W)]),
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {W}}}', "", [("f", W)]),  # the end was cut
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"city": "Pa', "", [("f", '{"city": "Pa')]),
    ("hermes", "<tool_call>\nnot json\n</tool_call>", "<tool_call>\nnot json\n</tool_call>", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    ("llama3_json", "Hello {world}", "Hello {world}", []),
    ("llama3_json", "  ", "  ", []),
    ("llama3_json", f'{{"name": "weather", "parameters": {W}}}', "", [("weather", W)]),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {W}}}', "", [("weather", W)]),
    (
        "llama3_json",
        f'{{"name": "weather", "parameters": {W}}}; {{"name": "sum", "arguments": {S}}}',
        "",
        [("weather", W), ("sum", S)],
    ),
    ("llama3_json", '{"name": "Ada", "age": 36} is her', '{"name": "Ada", "age": 36} is her', []),
    ("llama3_json", '{"city": "Paris"}', '{"city": "Paris"}', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", '{"name": "f", "param', '{"name": "f", "param', []),
    ("llama3_json", f'{{"name": "f", "parameters": {W}}} and text', " and text", [("f", W)]),
    ("mistral", "Hello [TOOL", "Hello [TOOL", []),
    ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {W}}}]', "", [("weather", W)]),
    (
        "mistral",
        f'Sure. [TOOL_CALLS] [{{"name": "weather", "arguments": {W}}}, {{"name": "sum", "arguments": {S}}}]',
        "Sure. ",
        [("weather", W), ("sum", S)],
    ),
    ("mistral_args", f"[TOOL_CALLS]weather[ARGS]{W}[TOOL_CALLS]sum[ARGS]{S}", "", [("weather", W), ("sum", S)]),
    ("mistral_args", f"[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{W}", "", [("weather", W)]),
    ("mistral_args", f"[TOOL_CALLS]weather{W}", "", [("weather", W)]),
]


DEEP = "[" * 100_000 + "]" * 100_000


def cuts(text: str) -> list[list[str]]:
    """The text whole, by characters, and cut at random places."""
    draw = random.Random(text)
    ways = [[text], list(text)]
    for _ in range(8):
        places = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 6)))
        ways.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return ways


def read(reader: MessageReader, pieces: list[str]) -> tuple[Message, list[Part]]:
    parts = [part for place, piece in enumerate(pieces) for part in reader.push(piece, place == len(pieces) - 1)]
    message = Message()
    message.add(parts)
    return message, parts


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOLDEN)
def test_what_a_model_wrote(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in cuts(text):
        message, _ = read(MessageReader(None, FORMATS[name].make_parser()), pieces)
        assert (message.content, message.calls) == (content, calls), pieces


def parse(name: str, text: str) -> Message:
    return MessageReader(None, FORMATS[name].make_parser()).read(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {DEEP}}}</tool_call>'),
        ("llama3_json", f'{{"name": "f", "parameters": {DEEP}}}'),
        ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {DEEP}}}]'),
    ],
)
def test_arguments_nested_without_end_pass_as_they_are(name: str, text: str) -> None:
    assert parse(name, text).calls == [("f", DEEP)]


@pytest.mark.parametrize("value", [DEEP, r'"\ud800"'])
def test_a_name_that_is_no_text_makes_no_call(value: str) -> None:
    text = f'<tool_call>{{"name": {value}, "arguments": {{}}}}</tool_call>'
    message = parse("hermes", text)
    assert (message.content, message.calls) == (text, [])


def test_arguments_with_half_of_a_surrogate_pair_stay_escaped() -> None:
    written = r'"{\"x\": \ud800}"'
    message = parse("hermes", f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>')
    assert message.calls == [("f", written)]


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_leave_while_they_are_written(name: str) -> None:
    form = FORMATS[name]
    call = form.call.replace("{name}", '"f"').replace("{bare_name}", "f").replace("{arguments}", S)
    _, parts = read(MessageReader(None, form.make_parser()), list(form.before + call + form.after))
    deltas = [part for part in parts if isinstance(part, CallDelta)]
    assert deltas[0].name == "f"
    assert [delta.name for delta in deltas[1:]] == [None] * (len(deltas) - 1)
    assert max(len(delta.arguments) for delta in deltas) == 1
    assert json.loads("".join(delta.arguments for delta in deltas)) == json.loads(S)


def test_text_leaves_at_once_unless_it_may_begin_a_mark() -> None:
    reader = MessageReader(None, FORMATS["hermes"].make_parser())
    assert reader.push("Look: <") == [Content("Look:")]
    assert reader.push("b>") == [Content(" <b>")]


# inside at the start, output, reasoning, content
THOUGHTS = [
    (False, "Plain answer", "", "Plain answer"),
    (False, "<think>\nHm, 2+2.\n\n</think>\n\nIt is 4.", "Hm, 2+2.", "It is 4."),
    (True, "Hm, 2+2.\n</think>\nIt is 4.", "Hm, 2+2.", "It is 4."),
    (True, "never ends </thin", "never ends </thin", ""),
    (False, "<think></think>now", "", "now"),
    (False, "<th", "", "<th"),
    (False, "\n<think> a < b </think> c </think> <think>", "a < b", "c </think> <think>"),
    (False, "  leading space stays", "", "  leading space stays"),
]


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning_apart_from_the_answer(inside: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in cuts(text):
        message, _ = read(MessageReader(ReasoningReader(inside=inside), None), pieces)
        assert (message.reasoning, message.content) == (reasoning, content), pieces


def test_calls_after_reasoning_and_none_inside_it() -> None:
    call = f'<tool_call>{{"name": "f", "arguments": {W}}}</tool_call>'
    for pieces in cuts(f"<think>maybe {call}?</think>{call}"):
        reader = MessageReader(ReasoningReader(inside=False), FORMATS["hermes"].make_parser())
        message, _ = read(reader, pieces)
        assert (message.reasoning, message.content, message.calls) == (f"maybe {call}?", "", [("f", W)])
        assert reader.num_calls == 1


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral_args"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_found_by_the_template(template: str, name: str | None) -> None:
    found = detect(template)
    assert (found.name if found else None) == name
