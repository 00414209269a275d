from __future__ import annotations

import copy
import json
import re
import tracemalloc
from datetime import datetime
from typing import Any

import pytest
from jinja2 import TemplateError

from inferengine.errors import InferEngineError, InvalidRequest
from inferengine.text import ChatTemplate, check_messages
from inferengine.text.chat_template import MAX_CUT_ARGUMENTS, salvage, with_tools
from inferengine.text.output_parser import detect
from tests.text import templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# Written here in the styles that checkpoints use.
CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
HEADERS = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
ALTERNATING = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""
INST = """{%- set ns = namespace(index=0, last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and loop.index0 == ns.last %}
            {{- '[TOOLS] [' }}
            {%- for tool in tools %}{{ tool.function | tojson }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}
            {{- ']' }}
        {%- endif %}
        {{- '[INST] ' + m.content + ' [/INST]' }}
    {%- elif m.role == 'assistant' %}{% generation %}
        {{- ' ' + m.content + eos_token }}
    {%- endgeneration %}{% endif %}
    {%- if loop.index0 > 20 %}{% break %}{% endif %}
{%- endfor %}
"""
MACRO = """{% macro show(message, mark='#') -%}
{{ mark }} {{ message.role | upper }}: {{ message.content.split('</think>')[-1].strip() | replace('"', "'") }}
{% endmacro %}
{% for message in messages[::-1] | reverse %}{{ show(message) }}{% endfor %}
{{ dict(a=1) | tojson }} {{ messages | map(attribute='role') | join(',') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{% if add_generation_prompt %}# ASSISTANT:{% endif %}
"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "alternating": ALTERNATING, "inst": INST, "macro": MACRO}
USER = {"role": "user", "content": 'Say "hi" & <b>wave</b> ünï 🎉\n'}
CONVERSATIONS = {
    "one": [USER],
    "turns": [USER, {"role": "assistant", "content": "<think>x</think> hi"}, {"role": "user", "content": " more "}],
    "system": [{"role": "system", "content": "  Be brief. "}, USER],
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d<é>", "parameters": {"type": "object"}}}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **kwargs: Any) -> str:
    return ChatTemplate(source, SPECIAL).render(messages or [USER], **kwargs)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"add_generation_prompt": False, "enable_thinking": False}])
def test_rendering_equals_transformers(template: str, conversation: str, options: dict[str, Any]) -> None:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source, messages = TEMPLATES[template], CONVERSATIONS[conversation]
    values: dict[str, Any] = {"tools": None, "add_generation_prompt": True, **SPECIAL, **options}
    if template == "alternating" and conversation == "system":
        with pytest.raises(InvalidRequest, match="System role not supported"):
            render(source, messages, **options)
        return
    (expected,), _ = chat_template_utils.render_jinja_template([messages], chat_template=source, **values)
    assert render(source, messages, **options) == expected


AS_TEXT, AS_PARTS = {"deepseek"}, {"parts"}  # what these styles want the arguments and the contents to be


def _as_its_user_would(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in the form that a template wants, as transformers is given it."""
    wanted = copy.deepcopy(messages)
    if name == "kimi":  # results follow in the order of the calls
        calls = [call for message in wanted for call in message.get("tool_calls", ())]
        for number, call in enumerate(calls):
            call["id"] = f"functions.{call['function']['name']}:{number}"
        for call, message in zip(calls, (one for one in wanted if one["role"] == "tool"), strict=True):
            message["tool_call_id"] = call["id"]
    for message in wanted:
        if name in AS_PARTS:
            text = message["content"]
            message["content"] = [{"type": "text", "text": text}] if text else []
        for call in message.get("tool_calls", ()) if name in AS_TEXT else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return wanted


@pytest.mark.parametrize("name", templates.STYLES)
def test_conversations_are_rendered_as_transformers_renders_them(name: str) -> None:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = templates.STYLES[name]
    template = ChatTemplate(source, SPECIAL)
    for messages, options in templates.CONVERSATIONS:
        sent = copy.deepcopy(messages)
        for call in (call for message in sent for call in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])  # as OpenAI's clients send them
        theirs = {"tools": None, "add_generation_prompt": True, **options} | {"tools": options.get("tools") or None}
        try:
            (expected,), _ = chat_template_utils.render_jinja_template(
                [_as_its_user_would(name, messages)], chat_template=source, **{**SPECIAL, **theirs}
            )
        except TemplateError as error:
            with pytest.raises(InvalidRequest, match=re.escape(error.message or "")):
                template.render(check_messages(sent), **options)
            continue
        assert template.render(check_messages(sent), **options) == expected


def test_calls_of_kimi_have_the_ids_that_it_was_trained_with() -> None:
    """Whatever clients, or other servers before, called them, and in whatever order results come."""

    def call(name: str, identifier: str) -> dict[str, Any]:
        return {"id": identifier, "type": "function", "function": {"name": name, "arguments": "{}"}}

    def result(identifier: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": identifier, "content": "ok"}

    sent = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call("f", "call_a"), call("g", "functions.x:7")]},
        result("functions.x:7"),
        result("call_a"),
        {"role": "assistant", "content": None, "tool_calls": [call("f", "call_a")]},
        result("call_a"),
        result("of another conversation"),
    ]
    shown = render(templates.STYLES["kimi"], check_messages(sent))
    assert re.findall(r"<\|tool_call_begin\|>(.+?)<", shown) == ["functions.f:0", "functions.g:1", "functions.f:2"]
    assert re.findall("## Return of (.+)", shown) == [
        "functions.g:1", "functions.f:0", "functions.f:2", "of another conversation",
    ]  # fmt: skip
    assert sent[1]["tool_calls"][0]["id"] == "call_a", "the client's messages stay as they are"


def several(role: str = "user", *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts or ("a", "b")]}


@pytest.mark.parametrize("name", ["parts", "gemma", "pythonic"])
def test_a_content_of_several_parts_stays_so_to_a_template_that_reads_parts(name: str) -> None:
    chat_template_utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = templates.STYLES[name]
    values = {**SPECIAL, "tools": None, "add_generation_prompt": True}
    (expected,), _ = chat_template_utils.render_jinja_template([[several()]], chat_template=source, **values)
    assert ChatTemplate(source, SPECIAL).render(check_messages([several()])) == expected


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral", "harmony", "deepseek"])
def test_several_parts_are_lines_of_one_text_to_a_template_that_reads_texts(name: str) -> None:
    template = ChatTemplate(templates.STYLES[name], SPECIAL)
    lines = template.render([{"role": "user", "content": "a\nb"}])
    assert template.render(check_messages([several()])) == lines


def test_no_part_of_a_system_message_is_lost_where_a_template_reads_the_first_alone() -> None:
    text = ChatTemplate(templates.STYLES["gemma"], SPECIAL).render(
        check_messages([several("system", "Be kind.", "Be brief."), several()])
    )
    assert "Be kind." in text
    assert "Be brief." in text


def test_the_last_of_several_parts_can_be_continued() -> None:
    messages = check_messages([several(), several("assistant", "It", "is")])
    text = render(templates.STYLES["gemma"], messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<start_of_turn>model\nIt\nis")


def test_the_template_is_found_where_checkpoints_keep_it() -> None:
    config = json.dumps({"chat_template": "config", "bos_token": "<s>"}).encode()
    by_name = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "named {{bos_token}}"}, {}, 5]
    named = json.dumps({"chat_template": by_name, "bos_token": "<s>"}).encode()
    for files, expected in (
        ({"tokenizer_config.json": config}, "config"),
        ({"tokenizer_config.json": config, "chat_template.jinja": b"file {{bos_token}}"}, "file <s>"),
        ({"tokenizer_config.json": named}, "named <s>"),
    ):
        template = ChatTemplate.from_files(files)
        assert template is not None
        assert template.render([USER]) == expected
    assert ChatTemplate.from_files({"tokenizer_config.json": b"{}"}) is None


def test_the_final_message_can_be_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "Once upon"}]
    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    with pytest.raises(InvalidRequest, match="add_generation_prompt"):
        render(CHATML, messages, continue_final_message=True)


def test_only_names_that_the_template_reads_reach_it() -> None:
    assert render("{{ colour }}{{ bos_token }}", colour="red", other="x") == "red<s>"
    with pytest.raises(InvalidRequest, match="raise_exception") as caught:
        render("x", raise_exception="mine")
    assert caught.value.field == "chat_template_kwargs"


def test_the_date_is_the_clocks() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2031, 2, 3))
    assert template.render([USER]) == "03 Feb 2031"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'system', 'content': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set x = 'a' * 1000000000 %}{{ x }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for a in range(100001) %}x{% endfor %}",
    ],
)
def test_the_sandbox_refuses(attack: str) -> None:
    with pytest.raises(InvalidRequest):
        render(attack)


@pytest.mark.parametrize(
    "greedy",
    [
        "{{ '%0900000000d' % 1 }}",
        "{{ '%*d' % (900000000, 1) }}",
        "{{ '%0900000000d'|format(1) }}",
        "{{ '{:>900000000}'.format('a') }}",
        "{{ '{:>{}}'.format('a', 900000000) }}",
        "{{ '{:>{w}}'.format('a', w=900000000) }}",
        "{{ 'a'|center(900000000) }}",
        "{{ 'a'.ljust(900000000) }}",
        "{{ 'a'.zfill(900000000) }}",
        "{{ '\t\t'.expandtabs(900000000) }}",
        "{% set x = 'a' * 4000000 %}{{ x.replace('a', x) }}",
        "{% set x = 'a' * 4000000 %}{{ x|replace('a', x) }}",
        "{% set x = 'a' * 4000000 %}{{ x.join([''] * 400000) }}",
        "{% set x = 'a' * 4000000 %}{{ ([''] * 400000)|join(x) }}",
        "{% set x = 'a' * 4000000 %}{{ range(99999)|map('string')|join(x) }}",
        "{{ ('a\n' * 1000000)|indent(100000) }}",
        "{{ [1]|batch(900000000, 'x')|list|length }}",
        "{{ [1]|slice(900000000)|list|length }}",
        "{{ [[1]]|tojson(indent=900000000) }}",
        "{% set n = namespace(s='ab') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=3) %}{% for i in range(40) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{{ lipsum(n=900000) }}",
    ],
)
def test_no_step_of_a_template_takes_much_memory(greedy: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            render(greedy)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100 << 20


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ 1 ~ none ~ 'x' ~ [1] ~ missing }}", "1Nonex[1]"),
        ("{{ 'a' + 'b' }} {{ 1 + 2.5 }} {{ [1] + [2] }} {{ 7 % 4 }} {{ '%s-%05.2f' % ('x', 1.5) }}",
         "ab 3.5 [1, 2] 3 x-01.50"),
        ("{{ '%s of %d'|format('one', 20240101123456) }} {{ '{:>5}|{}'.format('a', 20240101123456) }}",
         "one of 20240101123456     a|20240101123456"),
        ("{{ 'a,b'|replace(',', ';') }} {{ ['a', 1]|join('-') }} {{ 'a'|center(3) }} {{ 'x\ny'|indent(2) }}",
         "a;b a-1  a  x\n  y"),
        ("{% macro f(function, context) %}{{ function }}{{ context }}{% endmacro %}{{ f(context=1, function=2) }}",
         "21"),
        ("{{ [1, 2, 3]|batch(2)|list }} {{ 'aXa'.replace('X', '') }} {{ '-'.join(['a', 'b']) }}",
         "[[1, 2], [3]] aa a-b"),
    ],
)  # fmt: skip
def test_what_templates_compute_is_what_it_was(template: str, shown: str) -> None:
    assert render(template) == shown


@pytest.mark.parametrize(
    "endless",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
    ids=["loops", "macros"],
)
def test_rendering_has_a_time_limit(endless: str) -> None:
    with pytest.raises(InvalidRequest, match="takes too long"):
        ChatTemplate(endless, {}, time_limit_s=0.05).render([USER])


def test_rendering_has_an_output_limit() -> None:
    template = ChatTemplate(
        "{% for a in range(999) %}{{ messages[0].content }}{% endfor %}", {}, max_output_characters=500
    )
    with pytest.raises(InvalidRequest, match="more than 500"):
        template.render([USER])


def test_a_template_that_does_not_compile_is_the_models_fault() -> None:
    with pytest.raises(InferEngineError, match="does not compile") as caught:
        ChatTemplate("{% if %}", {})
    assert caught.value.code == "engine_error"


def test_typed_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


def called_with(arguments: Any) -> list[dict[str, Any]]:
    """Return an assistant's message that calls a tool with these arguments."""
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


def test_arguments_of_calls_become_objects() -> None:
    (message,) = check_messages(called_with(r'{"smile": "\ud83d\ude00"}'))
    assert message["tool_calls"][0]["function"]["arguments"] == {"smile": "😀"}


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ('{"city": "Par', {"city": "Par"}),
        ('{"city": "Paris", "days": [1, 2', {"city": "Paris", "days": [1, 2]}),
        ('{"city": "Paris", "da', {"city": "Paris"}),
        ('{"city": "Paris", "days": ', {"city": "Paris"}),
        ('{"at": {"lat": 1.5, "lon": -', {"at": {"lat": 1.5}}),
        ('{"text": "a\\', {"text": "a"}),
        ('{"text": "a\\ud83', {"text": "a"}),
        ('{"text": "a, b", "smile": "\\ud83d', {"text": "a, b"}),
        ('{"city', {}),
        ('{"a": "He said "hello" and left"}', {}),
        ("[1]", {}),
        ('"text"', {}),
        ("}", {}),
        ("{bad", {}),
        ("[" * 100_000, {}),
        ('{"a": ' * 100_000, {}),
        ('{"a": "' + "x" * 100_000, {"a": "x" * 100_000}),
    ],
)
def test_arguments_that_were_cut_reach_a_template_as_what_is_left_of_them(cut: str, kept: dict[str, Any]) -> None:
    (message,) = check_messages(called_with(cut))
    asked = [{"role": "user", "content": "?"}, message]
    for_objects = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}",
        {},
    )
    assert json.loads(for_objects.render(asked)) == kept
    for_texts = ChatTemplate(
        "{% for m in messages %}{% for c in m.tool_calls %}{{ '' + c.function.arguments }}{% endfor %}{% endfor %}", {}
    )
    assert for_texts.render(asked) == cut
    assert json.dumps(kept, ensure_ascii=False) in with_tools(asked, [])[1]["content"]


@pytest.mark.parametrize(
    ("messages", "field", "code"),
    [
        ("hello", "messages", "invalid_request"),
        ([], "messages", "invalid_request"),
        (["hi"], "messages[0]", "invalid_request"),
        ([{"content": "x"}], "messages[0].role", "invalid_request"),
        ([{"role": "user"}], "messages[0].content", "invalid_request"),
        ([USER, {"role": "user", "content": 3}], "messages[1].content", "invalid_request"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "invalid_request"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "http://x"}]}],
            "messages[0].content[0]",
            "unsupported",
        ),
        (called_with(7), "messages[0].tool_calls[0].function.arguments", "invalid_request"),
        (called_with(r'{"city": "\ud800"}'), "messages[0].tool_calls[0].function.arguments", "invalid_request"),
    ],
)
def test_messages_of_a_wrong_shape_name_their_place(messages: Any, field: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_messages(messages)
    assert (caught.value.field, caught.value.code) == (field, code)


def test_the_format_of_calls_is_read_off_each_style() -> None:
    found = {name: detect(source) for name, source in templates.STYLES.items()}
    assert {name: format.name for name, format in found.items() if format is not None} == {
        "qwen3": "hermes",
        "llama3": "llama3_json",
        "mistral": "mistral",
        "harmony": "harmony",
        "qwen3_coder": "qwen3_coder",
        "glm45": "glm45",
        "deepseek": "deepseek_v3",
        "kimi": "kimi_k2",
        "phi4": "phi4_mini",
        "granite": "granite",
        "pythonic": "pythonic",
    }


def test_cut_arguments_are_read_up_to_a_length() -> None:
    text = '{"a": "'
    assert salvage(text + "x" * (MAX_CUT_ARGUMENTS - len(text))).keys() == {"a"}
    assert salvage(text + "x" * MAX_CUT_ARGUMENTS) == {}
