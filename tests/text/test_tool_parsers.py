"""Tool calls and reasoning as models write them, read whole and cut at every place: the parts are the same."""

from __future__ import annotations

import json
import random
import time

import pytest

from inferengine.text.output_parser import (
    FORMATS,
    REASONING,
    MessageReader,
    ParsedOutput,
    ReasoningReader,
    detect,
    reasoning_format,
)
from inferengine.text.tool_parsers.base import CallDelta, Content, Part
from inferengine.text.tool_parsers.cohere import CohereParser

W, S = '{"city": "Paris"}', '{"a": [1, {"b": "}\\"{"}], "c": "né 🎉"}'

STRINGS = {"weather": ["city"], "write": ["text"]}  # by function: the parameters that are strings
SUM = '{"a": [1, {"b": "x"}], "ok": true, "n": null}'
DS = "<｜tool▁call▁begin｜>"
KIMI, KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"

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
    ("harmony", "Just text.", "Just text.", []),
    ("harmony", "<|channel|>final<|message|>Hi <b>.<|return|>", "Hi <b>.", []),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
        f"<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{W}<|call|>",
        "One moment.",
        [("weather", W)],
    ),
    ("harmony", f" to=functions.sum<|channel|>commentary json<|message|>{S}", "", [("sum", S)]),
    ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", "", [("now", "{}")]),
    ("harmony", "<|channel|>analysis to=browser.search<|message|>{}<|call|>", "", []),  # no function of the client
    ("harmony", "<|channel|>fin", "", []),
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
    (
        "qwen3_coder",
        "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
        '\n<tool_call>\n<function=sum>\n<parameter=a>\n[1, {"b": "x"}]\n</parameter>\n<parameter=ok>\nTrue\n'
        "</parameter>\n<parameter=n>\nnull\n</parameter>\n</function>\n</tool_call>\nDone.",
        "Let me see.Done.",
        [("weather", W), ("sum", SUM)],
    ),
    (
        "qwen3_coder",  # without the mark before; a value of several lines with marks of others
        '<function=write>\n<parameter=text>\n\n<p a="b">\n</p>\n</parameter>\n</function>\n</tool_call>',
        "",
        [("write", r'{"text": "\n<p a=\"b\">\n</p>"}')],
    ),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", "{}")]),
    ("qwen3_coder", "<function=f><parameter=x>12</parameter>", "", [("f", '{"x": 12}')]),  # the end is missing
    ("qwen3_coder", "<function=f><parameter=x>1</parameter><parameter=y>2", "", [("f", '{"x": 1')]),  # was cut
    ("qwen3_coder", "<function=weather><parameter=city>7</parameter></function>", "", [("weather", '{"city": "7"}')]),
    ("qwen3_coder", "<function=f><parameter=x>NaN</parameter></function>", "", [("f", '{"x": "NaN"}')]),
    ("qwen3_coder", "<tool_call>\nnone</tool_call>, see", "<tool_call>\nnone</tool_call>, see", []),
    ("qwen3_coder", "a <function b", "a <function b", []),
    ("qwen3_coder", "<function=two words>x", "<function=two words>x", []),
    (
        "glm45",
        "Sure.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n"
        '<tool_call>sum\n<arg_key>a</arg_key>\n<arg_value>[1, {"b": "x"}]</arg_value>\n<arg_key>ok</arg_key>\n'
        "<arg_value>true</arg_value>\n<arg_key>n</arg_key>\n<arg_value>null</arg_value>\n</tool_call>",
        "Sure.",
        [("weather", W), ("sum", SUM)],
    ),
    ("glm45", "<tool_call>now</tool_call>", "", [("now", "{}")]),
    ("glm45", "<tool_call>now", "", [("now", "{}")]),
    ("glm45", "<tool_call>not a name</tool_call>", "<tool_call>not a name</tool_call>", []),
    (
        "deepseek_v3",
        f"Sure.<｜tool▁calls▁begin｜>{DS}function<｜tool▁sep｜>weather\n```json\n{W}\n```<｜tool▁call▁end｜>\n"
        f"{DS}function<｜tool▁sep｜>sum\n```json\n{S}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Sure.",
        [("weather", W), ("sum", S)],
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜>{DS}weather<｜tool▁sep｜>{W}<｜tool▁call▁end｜>{DS}sum<｜tool▁sep｜>{S}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
        [("weather", W), ("sum", S)],
    ),
    ("deepseek_v31", f"{DS}now<｜tool▁sep｜><｜tool▁call▁end｜>", "", [("now", "{}")]),
    ("deepseek_v31", f"{DS}f<｜tool▁sep｜>{W}", "", [("f", W)]),  # the end was cut
    ("deepseek_v31", f"{DS}no name here{W}<｜tool▁call▁end｜>", f"{DS}no name here{W}", []),
    ("deepseek_v31", "a <｜tool", "a <｜tool", []),
    (
        "kimi_k2",
        f"Let me see. \n<|tool_calls_section_begin|>{KIMI}functions.weather:0{KIMI_ARGUMENTS}{W}<|tool_call_end|>"
        f"{KIMI}functions.sum:1{KIMI_ARGUMENTS}{S}<|tool_call_end|><|tool_calls_section_end|>\nThere you go.",
        "Let me see.There you go.",
        [("weather", W), ("sum", S)],
    ),
    (
        "kimi_k2",  # with the line breaks that its guidance allows, a number beyond 9 and a name with dots
        f"<|tool_calls_section_begin|>\n{KIMI}\nfunctions.my.tool:12\n{KIMI_ARGUMENTS}\n{W}\n<|tool_call_end|>\n"
        "<|tool_calls_section_end|>",
        "",
        [("my.tool", W)],
    ),
    ("kimi_k2", f"{KIMI}weather{KIMI_ARGUMENTS}{W}<|tool_call_end|>", "", [("weather", W)]),
    ("kimi_k2", f"{KIMI}functions.now:0{KIMI_ARGUMENTS}<|tool_call_end|>", "", [("now", "{}")]),
    ("kimi_k2", f"{KIMI}functions.f:0{KIMI_ARGUMENTS}{W}", "", [("f", W)]),  # the end was cut
    ("kimi_k2", f"{KIMI}no name here{W}<|tool_call_end|>", f"{KIMI}no name here{W}", []),
    ("kimi_k2", "a <|tool_call", "a <|tool_call", []),
    (
        "phi4_mini",
        f'Yes. <|tool_call|>[{{"name": "weather", "arguments": {W}}}, {{"name": "sum", "arguments": {S}}}]'
        "<|/tool_call|>",
        "Yes.",
        [("weather", W), ("sum", S)],
    ),
    ("phi4_mini", f'functools[{{"name": "weather", "arguments": {W}}}]', "", [("weather", W)]),
    ("phi4_mini", "functools[0] is partial", "functools[0] is partial", []),
    ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {W}}}]', "", [("weather", W)]),
    ("granite", f'<tool_call>{{"name": "weather", "arguments": {W}}}</tool_call>ok', "ok", [("weather", W)]),
    ("granite", '<|tool_call|>[{"name": 7}]', '<|tool_call|>[{"name": 7}]', []),
    ("granite", "<|tool_call|> none", "<|tool_call|> none", []),
    (
        "seed_oss",
        "Let me see.\n<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n"
        '</seed:tool_call>\n<seed:tool_call>\n<function=sum>\n<parameter=a>[1, {"b": "x"}]</parameter>\n<parameter=ok>'
        "true</parameter>\n<parameter=n>null</parameter>\n</function>\n</seed:tool_call>",
        "Let me see.",
        [("weather", W), ("sum", SUM)],
    ),
    ("seed_oss", "a <seed:tool", "a <seed:tool", []),
    (
        "minimax_m2",
        'One moment.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
        '</invoke>\n<invoke name="sum">\n<parameter name="a">[1, {"b": "x"}]</parameter>\n<parameter name="ok">true'
        '</parameter>\n<parameter name="n">null</parameter>\n</invoke>\n</minimax:tool_call>',
        "One moment.",
        [("weather", W), ("sum", SUM)],
    ),
    ("minimax_m2", '<minimax:tool_call><invoke name="now"></invoke></minimax:tool_call>', "", [("now", "{}")]),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
        f'{W}}},\n    {{"tool_call_id": "1", "tool_name": "sum", "parameters": {S}}}\n]<|END_ACTION|>',
        "",
        [("weather", W), ("sum", S)],
    ),
    ("cohere", "<|START_RESPONSE|>It is sunny.<|END_RESPONSE|>", "It is sunny.", []),
    ("cohere", "<|START_TEXT|>Sunny <b>.<|END_TEXT|>", "Sunny <b>.", []),
    ("cohere", "Plain.", "Plain.", []),
    ("cohere", "<|START_ACTION|>[] none", "<|START_ACTION|>[] none", []),
    (
        "gemma4",
        'Yes.\n<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>',
        "Yes.",
        [("weather", '{"city":"Paris"}')],
    ),
    (
        "gemma4",  # a text with the signs of others, nested values, two calls
        '<|tool_call>call:f{a:[1,{b:<|"|>x, "y": {z}<|"|>}],ok:true,n:null}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "",
        [("f", r'{"a":[1,{"b":"x, \"y\": {z}"}],"ok":true,"n":null}'), ("now", "{}")],
    ),
    ("gemma4", '<|tool_call>call:f{"a": {"b": "x,y:z"}}<tool_call|>', "", [("f", '{"a": {"b": "x,y:z"}}')]),
    ("gemma4", "<|tool_call>call:f{a:[1}<tool_call|>", "<|tool_call>call:f{a:[1}<tool_call|>", []),
    ("gemma4", "<|tool_call>call:f{a:NaN}<tool_call|>", "<|tool_call>call:f{a:NaN}<tool_call|>", []),
    ("gemma4", "<|tool_call>call:f{a:1", "<|tool_call>call:f{a:1", []),  # was cut
    ("pythonic", '[weather(city="Paris")]', "", [("weather", W)]),
    (
        "pythonic",
        "<|python_start|>[weather(city='Paris'), sum(a=[1, {\"b\": 'x'}], ok=True, n=None)]<|python_end|>",
        "",
        [("weather", W), ("sum", SUM)],
    ),
    ("pythonic", "[now()]", "", [("now", "{}")]),
    ("pythonic", '[f(x="a)]", y=-1.5)]', "", [("f", '{"x": "a)]", "y": -1.5}')]),
    ("pythonic", "[see](http://x)", "[see](http://x)", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[f(x)]", "[f(x)]", []),
    ("pythonic", "[f(x=open('a'))]", "[f(x=open('a'))]", []),
    ("pythonic", "[f(x=1", "[f(x=1", []),
    ("pythonic", "Hello", "Hello", []),
    ("pythonic", "[f(x=1)] and more", "and more", [("f", '{"x": 1}')]),
    (
        "pythonic",  # no names of Python, and signs of names inside texts
        "[mail(from=\"a, b=c\", class=None, my-key = [1, {'is-x': ', in=2'}], $ref.to=2, 2d=true), now()]",
        "",
        [
            (
                "mail",
                '{"from": "a, b=c", "class": null, "my-key": [1, {"is-x": ", in=2"}], "$ref.to": 2, "2d": true}',
            ),
            ("now", "{}"),
        ],
    ),
    (
        "pythonic",
        """[f(first name='x', **{"it's": 1, "a=b": [2]}, ﬁ=3)]""",
        "",
        [("f", """{"first name": "x", "it's": 1, "a=b": [2], "ﬁ": 3}""")],
    ),
    (
        "pythonic",  # names of functions that OpenAI allows and Python does not
        "[2d-plot(x=1), -f(), 3(x=2)]",
        "",
        [("2d-plot", '{"x": 1}'), ("-f", "{}"), ("3", '{"x": 2}')],
    ),
    ("pythonic", "[2 (see below)]", "[2 (see below)]", []),
    ("pythonic", "[2024-01-01 (Monday), 2]", "[2024-01-01 (Monday), 2]", []),
    ("pythonic", "[f(my-key=1, my-key=2)]", "[f(my-key=1, my-key=2)]", []),
    ("pythonic", '[f(x=1, **{"x": 2})]', '[f(x=1, **{"x": 2})]', []),
    ("pythonic", "[f(**g)]", "[f(**g)]", []),
    ("pythonic", "[f(x>=1, y!=2, z==3)]", "[f(x>=1, y!=2, z==3)]", []),
    ("pythonic", "[f(from)]", "[f(from)]", []),
]


DEEP = "[" * 100_000 + "]" * 100_000


def cuts(text: str) -> list[list[str]]:
    """Return the text whole, by characters, and cut at random places."""
    draw = random.Random(text)
    ways = [[text], list(text)]
    for _ in range(8):
        places = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 6)))
        ways.append([text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)])
    return ways


def read(reader: MessageReader, pieces: list[str]) -> tuple[ParsedOutput, list[Part]]:
    parts = [part for place, piece in enumerate(pieces) for part in reader.push(piece, place == len(pieces) - 1)]
    message = ParsedOutput()
    message.add(parts)
    return message, parts


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOLDEN)
def test_what_a_model_wrote(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in cuts(text):
        message, _ = read(MessageReader(None, FORMATS[name].make_parser(STRINGS)), pieces)
        assert (message.content, message.calls) == (content, calls), pieces


CUT = [  # what a model wrote up to max_tokens, the text that is shown, and the calls
    ("hermes", 'So:\n<tool_call>\n{"name": "get_w', "So:", []),
    ("hermes", '<tool_call>\n{"name": "f", "argum', "", [("f", "")]),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": ', "", [("f", '{"x": ')]),
    ("hermes", "The mark <tool_call> begins", "The mark<tool_call> begins", []),
    ("mistral", '[TOOL_CALLS] [{"na', "", []),
    ("mistral_args", "[TOOL_CALLS]get_w", "", []),
    ("mistral_args", "[TOOL_CALLS]f[CALL_ID]3[ARGS]", "", [("f", "")]),
    ("llama3_json", '<|python_tag|>{"name": "get_w', "", []),
    ("llama3_json", '<|python_tag|>{"name": "f", "param', "", [("f", "")]),
    ("llama3_json", '{"name": "Bo', '{"name": "Bo', []),  # may be an answer in JSON
    ("harmony", "<|channel|>commentary to=functions.get_w", "", []),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>", "", [("f", "")]),
    ("pythonic", "<|python_start|>[get_w", "", []),
    ("pythonic", "[f(x=1), get_w", "", [("f", '{"x": 1}')]),
    ("pythonic", '[f(x="Par', "", [("f", "")]),
    ("pythonic", "[1, 2", "[1, 2", []),
    ("pythonic", "[1 (the first", "[1 (the first", []),  # a list of an answer
    ("pythonic", "[0-9 (dig", "[0-9 (dig", []),
    ("pythonic", '[2d-plot(x="Par', "", [("2d-plot", "")]),
    ("pythonic", "<|python_start|>[2d-plot(x", "", [("2d-plot", "")]),
    ("pythonic", "[f(x=1), 2d-plot(", "", [("f", '{"x": 1}'), ("2d-plot", "")]),
    ("qwen3_coder", "<tool_call>\n<function=get_w", "", []),
    ("qwen3_coder", "<tool_call>\n<func", "", []),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n", "", [("f", '{"x": 1')]),
    ("glm45", "<tool_call>get_w", "", []),
    ("glm45", "<tool_call>f\n<arg_k", "", [("f", "")]),
    ("deepseek_v3", f"{DS}function<｜tool▁sep｜>get_w", "", []),
    ("deepseek_v3", f"{DS}function<｜tool▁sep｜>f\n``", "", [("f", "")]),
    ("deepseek_v31", f"{DS}get_w", "", []),
    ("deepseek_v31", f"{DS}f<｜tool▁sep｜>", "", [("f", "")]),
    ("kimi_k2", f"{KIMI}functions.get_w", "", []),
    ("kimi_k2", f"{KIMI}functions.f:0{KIMI_ARGUMENTS}", "", [("f", "")]),
    ("phi4_mini", '<|tool_call|>[{"name": "get_w', "", []),
    ("granite", '<|tool_call|>[{"name": "f", "arg', "", [("f", "")]),
    ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_w', "", []),
    ("gemma4", "<|tool_call>call:get_w", "", []),
    ("gemma4", "<|tool_call>call:f{a:1", "", [("f", "")]),
    # the mark itself was cut
    ("hermes", "So:\n<tool_", "So:", []),
    ("hermes", "It is a <", "It is a", []),
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {W}}}\n</tool', "", [("f", W)]),
    ("mistral", "So: [TOOL_", "So: ", []),
    ("llama3_json", "<|pyth", "", []),
    ("harmony", "<|chan", "", []),
    ("harmony", "<|channel|>final<|message|>So:<|star", "So:", []),
    ("pythonic", "<|python_st", "", []),
    ("qwen3_coder", "So:\n<func", "So:", []),
    ("seed_oss", "So:\n<seed:tool", "So:", []),
    ("deepseek_v31", "So:<｜tool▁calls▁be", "So:", []),
    ("phi4_mini", "So: <|tool", "So:", []),
    ("phi4_mini", "This is the func", "This is the func", []),  # may be a word: Phi-4-mini's mark is functools[
    ("phi4_mini", f'<|tool_call|>[{{"name": "f", "arguments": {W}}}]<|/tool', "", [("f", W)]),
    ("cohere", "So:<|START_AC", "So:", []),
    ("gemma4", "So:\n<|tool", "So:", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CUT)
def test_a_call_that_is_cut_off_is_never_text(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in cuts(text):
        reader = MessageReader(None, FORMATS[name].make_parser(STRINGS))
        message = ParsedOutput()
        for piece in pieces:
            message.add(reader.push(piece))
        message.add(reader.push("", final=True, cut=True))
        assert (message.content, message.calls) == (content, calls), pieces


def parse(name: str, text: str) -> ParsedOutput:
    return MessageReader(None, FORMATS[name].make_parser(STRINGS)).read(text)


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


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if "{arguments}" in form.call])
def test_arguments_leave_while_they_are_written(name: str) -> None:
    form = FORMATS[name]
    call = form.call.replace("{name}", '"f"').replace("{bare_name}", "f").replace("{number}", "0")
    call = call.replace("{arguments}", S)
    _, parts = read(MessageReader(None, form.make_parser(STRINGS)), list(form.before + call + form.after))
    deltas = [part for part in parts if isinstance(part, CallDelta)]
    assert deltas[0].name == "f"
    assert [delta.name for delta in deltas[1:]] == [None] * (len(deltas) - 1)
    assert max(len(delta.arguments) for delta in deltas) == 1
    assert json.loads("".join(delta.arguments for delta in deltas)) == json.loads(S)


def test_text_leaves_at_once_unless_it_may_begin_a_mark() -> None:
    reader = MessageReader(None, FORMATS["hermes"].make_parser(STRINGS))
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
        reader = MessageReader(ReasoningReader(inside=False), FORMATS["hermes"].make_parser(STRINGS))
        message, _ = read(reader, pieces)
        assert (message.reasoning, message.content, message.calls) == (f"maybe {call}?", "", [("f", W)])
        assert reader.num_calls == 1


@pytest.mark.parametrize("calls", [True, False])
def test_what_coheres_models_think_is_apart(calls: bool) -> None:
    text = "<|START_THINKING|> Let me see.\n<|END_THINKING|><|START_RESPONSE|>Sunny.<|END_RESPONSE|>"
    for pieces in cuts(text):
        message, _ = read(MessageReader(None, CohereParser(calls=calls)), pieces)
        assert (message.reasoning, message.content) == ("Let me see.", "Sunny."), pieces


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<thi", "", ""),
        ("<think>Hm.\n</thi", "Hm.", ""),
        ("Here is my", "", "Here is my"),  # a mark of other models, of words
        ("<", "", ""),
        ("a <", "", "a <"),
        (" ", "", " "),
    ],
)
def test_a_mark_of_reasoning_that_is_cut_off_is_no_text(text: str, reasoning: str, content: str) -> None:
    form = REASONING["granite" if text[0] == "H" else "think"]
    message = MessageReader(ReasoningReader(inside=False, format=form), None).read(text, cut=True)
    assert (message.reasoning, message.content) == (reasoning, content)
    whole = MessageReader(ReasoningReader(inside=False, format=form), None).read(text)
    assert whole.reasoning + whole.content == text.removeprefix("<think>"), "the model itself ended it"


def test_channels_of_harmony_without_tools() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm, 2+2.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>"
    )
    form = REASONING["harmony"]
    assert form.make_reader is not None
    for pieces in cuts(text):
        message, _ = read(MessageReader(form.make_reader(), None), pieces)
        assert (message.reasoning, message.content, message.calls) == ("Hm, 2+2.", "It is 4.", [])
    called = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"  # none was offered
    assert MessageReader(form.make_reader(), None).read(called).reasoning == "{}"


def test_reasoning_of_harmony_beside_calls() -> None:
    text = (
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{W}"
    )
    reader = MessageReader(None, FORMATS["harmony"].make_parser(STRINGS))
    message = reader.read(text)
    assert (message.reasoning, message.calls, reader.num_calls) == ("Hm.", [("f", W)], 1)


FRAGMENTS = {
    "xml": ("<tool_call>", "</tool_call>", "<function=", "f", ">", "</function>", "<parameter=", "</parameter>",
            "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "deepseek": ("<｜tool▁calls▁begin｜>", DS, "function", "<｜tool▁sep｜>", "\n```json\n", "\n```",
                 "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    "kimi": ("<|tool_calls_section_begin|>", KIMI, "functions.f:0", KIMI_ARGUMENTS, "<|tool_call_end|>",
             "<|tool_calls_section_end|>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "[", '{"tool_name": "f"}', "]",
               "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "gemma4": ("<|tool_call>", "call:f{", "x:", '<|"|>', "}", "<tool_call|>", "call:g{y:1}"),
    "minimax": ("<minimax:tool_call>", '<invoke name="f">', '<parameter name="x">', "</parameter>", "</invoke>",
                "</minimax:tool_call>", "<seed:tool_call>", "</seed:tool_call>"),
    "marks": ("<|tool_call|>", "<|/tool_call|>", "functools[", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "; "),
    "python": ("[", "f(", "x=", "'", ")", "]", "<|python_start|>", "<|python_end|>", "g(y=1)", "my-key=", "**{", ","),
    "harmony": ("<|start|>", "assistant", "<|channel|>", "analysis", "final", " to=functions.f", "<|message|>",
                "<|end|>", "<|call|>", "<|return|>"),
    "plain": ("{", "}", '"name": "f"', '"arguments": {', W, '{"name": "f", "arguments": {"x": 1}}', ", ", "\n", " ",
              "text", "<", "\\", '"', "12"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_any_text_is_parsed_the_same_however_it_is_cut(name: str) -> None:
    draw = random.Random(name)
    for _ in range(120):
        kind = draw.choice(list(FRAGMENTS))
        pieces = [draw.choice(FRAGMENTS[draw.choice((kind, kind, "plain"))]) for _ in range(draw.randint(1, 14))]
        text = "".join(pieces)
        whole, _ = read(MessageReader(None, FORMATS[name].make_parser(STRINGS)), [text])
        for cut in cuts(text)[1:]:
            message, _ = read(MessageReader(None, FORMATS[name].make_parser(STRINGS)), cut)
            assert (message.content, message.calls) == (whole.content, whole.calls), cut


@pytest.mark.parametrize("name", FORMATS)
def test_long_texts_take_time_in_proportion(name: str) -> None:
    """Quadratic parsing of these would take minutes."""
    fragments = [piece for kind in FRAGMENTS.values() for piece in kind]
    for begin in ("", FORMATS[name].before, "[f(x=", "<tool_call>f", "<function=f><parameter=a>", "<|tool_call|>["):
        for repeated in (" ", "[", '"', "<", "-", "}", "a" * 7, "".join(fragments)):
            text = begin + repeated * (20_000 // len(repeated))
            pieces = [text[place : place + 20] for place in range(0, len(text), 20)]
            message, _ = read(MessageReader(None, FORMATS[name].make_parser(STRINGS)), [*pieces, ""])
            assert len(message.content) <= len(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", "[THINK]Hm.[/THINK]Yes."),
        ("seed_oss", "<seed:think>Hm.</seed:think>\nYes."),
        ("granite", "Here is my thought process:\nHm.\n\nHere is my response:\nYes."),
        ("granite", "Here's my thought process: Hm. Here's my response: Yes."),
        ("kimi", "◁think▷Hm.◁/think▷Yes."),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>Yes."),
    ],
)
def test_reasoning_is_marked_differently_by_others(name: str, text: str) -> None:
    for pieces in cuts(text):
        message, _ = read(MessageReader(ReasoningReader(inside=False, format=REASONING[name]), None), pieces)
        assert (message.reasoning, message.content) == ("Hm.", "Yes."), pieces


@pytest.mark.parametrize(
    ("mode", "template", "name"),
    [
        ("auto", "{{ '</think>' }}", "think"),
        ("auto", "[THINK][/THINK]", "mistral"),
        ("auto", "Here is my thought process: ", "granite"),
        ("auto", "<|START_THINKING|><|END_THINKING|>", "cohere"),
        ("auto", "{{ '<|channel>thought\n' + text + '\n<channel|>' }}", "gemma4"),
        ("auto", "plain", None),
        ("auto", None, None),
        ("off", "</think>", None),
        ("kimi", None, "kimi"),
    ],
)
def test_the_marks_of_reasoning_are_those_of_the_template(mode: str, template: str | None, name: str | None) -> None:
    found = reasoning_format(mode, template)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n<function=' + name + '><parameter=' }}", "qwen3_coder"),
        ("{{ '<tool_call>' + name + '<arg_key>' }}", "glm45"),
        ("{{ '<｜tool▁sep｜>' + name + '```json' }}", "deepseek_v3"),
        ("{{ name + '<｜tool▁sep｜>' }}", "deepseek_v31"),
        ("<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>", "kimi_k2"),
        ("{{ '<|tool|>' + tools + '<|/tool|>' }}", "phi4_mini"),
        ("{{ '<|start_of_role|>' + '<|tool_call|>' }}", "granite"),
        ("Write [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>", "seed_oss"),
        ("{% set begin = '<minimax:tool_call>' %}<invoke name=", "minimax_m2"),
        ("<|START_THINKING|>{{ plan }}<|END_THINKING|><|START_ACTION|>[", "cohere"),
        ("{{ '<|tool_call>call:' + name + '{' }}", "gemma4"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral_args"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_found_by_the_template(template: str, name: str | None) -> None:
    found = detect(template)
    assert (found.name if found else None) == name


@pytest.mark.parametrize("written", ["a" * 100_000, '\\"' * 50_000, '"' * 100_001], ids=["word", "quotes", "texts"])
def test_a_long_call_of_gemma_4_that_is_none_holds_nobody_up(written: str) -> None:
    """Whoever asks for such an output would else stop a whole front end for minutes."""
    output = f"<|tool_call>call:f{{{written}}}<tool_call|>"
    begin = time.process_time()
    parts = FORMATS["gemma4"].make_parser({}).push(output, final=True)
    assert time.process_time() - begin < 5.0
    assert "".join(part.text for part in parts if isinstance(part, Content)) == output
