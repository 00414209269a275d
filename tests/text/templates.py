"""Chat templates written for these tests in the styles of families of models, and conversations to render with them."""

from __future__ import annotations

from typing import Any

QWEN3_CODER = """{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{% set tool = tool.function if tool.function is defined else tool %}
{{- '\\n<function>\\n<name>' ~ tool.name ~ '</name>' }}
{%- if tool.parameters is mapping %}{% for key, field in (tool.parameters.properties or {}) | items %}
{{- '\\n<parameter>' ~ key ~ ': ' ~ (field.type | default('any')) ~ '</parameter>' }}{% endfor %}{% endif %}
{{- '\\n</function>' }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}{% if message.content is string %}{{ message.content | trim }}{% endif %}
{%- for call in message.tool_calls or [] %}{% set call = call.function %}
{{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
{%- for key, value in call.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}{{ value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
HARMONY = """<|start|>system<|message|>You are ChatGPT.

Reasoning: {{ reasoning_effort | default('medium') }}

# Valid channels: analysis, commentary, final.<|end|>
{%- if tools %}<|start|>developer<|message|># Tools

namespace functions {
{% for tool in tools %}type {{ tool.function.name }} = (_: any) => any;
{% endfor %}}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<|start|>assistant to=functions.' + call.function.name + '<|channel|>commentary json<|message|>' }}
{{- call.function.arguments | tojson }}<|call|>{% endfor %}
{%- if message.content %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
GLM45 = """[gMASK]<sop>{% if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{% endif %}{% set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>' }}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content is string and loop.index0 > ns.last %}{{ '<think>' + m.reasoning_content + '</think>' }}
{%- else %}{{ '<think></think>' }}{% endif %}{{ '\\n' + (m.content or '') }}
{%- for tc in m.tool_calls or [] %}{% set tc = tc.function or tc %}{{ '\\n<tool_call>' + tc.name }}
{% for k, v in tc.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}</tool_call>{% endfor %}
{%- else %}{{ '\\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}
<think></think>{% endif %}{% endif %}"""
DEEPSEEK = """{{ bos_token }}{% for m in messages %}
{%- if m['role'] == 'system' %}{{ m['content'] }}{% endif %}{% endfor %}
{%- for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}
{%- elif m['role'] == 'assistant' %}{{ '<｜Assistant｜>' + ((m['content'] or '').split('</think>')[-1]) }}
{%- for tool in m['tool_calls'] or [] %}{% if loop.first %}{{ '<｜tool▁calls▁begin｜>' }}{% endif %}
{{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' }}
{{- tool['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
{%- if loop.last %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}{% endfor %}{{ '<｜end▁of▁sentence｜>' }}
{%- elif m['role'] == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""
PHI4 = """{% for message in messages %}{% if message['role'] == 'system' and tools %}
{{- '<|system|>' + message['content'] + '<|tool|>' + (tools | tojson) + '<|/tool|><|end|>' }}{% else %}
{{- '<|' + message['role'] + '|>' + message['content'] }}{% if message.tool_calls %}
{{- '<|tool_call|>[' }}{% for c in message.tool_calls %}{{ c.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}
{{- ']<|/tool_call|>' }}{% endif %}{{ '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""
GRANITE = """{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- else %}{% set system = 'You are Granite of ' + strftime_now('%Y') + '.' %}{% set rest = messages %}{% endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- if tools %}{{ '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) }}{% endif %}
{%- if documents %}{% for d in documents %}{{ 'Document ' + loop.index | string + '\\n' + d['text'] + '\\n' }}
{%- endfor %}{% endif %}
{%- for m in rest %}{{ '<|start_of_role|>' + m['role'] + '<|end_of_role|>' }}
{%- if m.tool_calls %}{{ '<|tool_call|>' + (m.tool_calls | map(attribute='function') | list | tojson) }}{% endif %}
{{- (m['content'] or '') + '<|end_of_text|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""
PYTHONIC = """{{- bos_token }}{% if tools %}{{ '<|header_start|>system<|header_end|>[func_name1(name=value)]\\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) + '\\n' }}{% endfor %}{{ '<|eot|>' }}{% endif %}
{%- for m in messages %}{{ '<|header_start|>' + m.role + '<|header_end|>\\n\\n' }}
{%- if m.tool_calls %}{{ '[' }}{% for c in m.tool_calls %}{{ c.function.name + '(' }}
{%- for k in c.function.arguments %}{{ k + '=' ~ (c.function.arguments[k] | tojson) }}{{ ', ' if not loop.last }}
{%- endfor %}{{ ')' + (', ' if not loop.last else '') }}{% endfor %}{{ ']' }}{% else %}
{%- if m.content is string %}{{ m.content | trim }}{% else %}
{%- for part in m.content %}{{ part.text | trim if part.type == 'text' }}{% endfor %}{% endif %}{% endif %}
{{- '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}{% endif %}"""
PARTS = """<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}
{%- if message['content'] and message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}
{%- for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}
{%- elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
STYLES = {
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "deepseek": DEEPSEEK,
    "phi4": PHI4,
    "granite": GRANITE,
    "pythonic": PYTHONIC,
    "parts": PARTS,
}

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "wo <é>"}, "n": {}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": 'It\'s "fine"', "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object"}}},
]


def user(text: str = "Hi & <b>hello</b> 🎉") -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str = "Well, ünïcode.", **values: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **values}


def system(text: str = "Be brief. ") -> dict[str, Any]:
    return {"role": "system", "content": text}


def result(text: str = '{"sun": true}') -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "abcdefghi", "content": text}


def call(name: str = "weather", **arguments: Any) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}


def asks(*calls: dict[str, Any], text: str = "") -> dict[str, Any]:
    return answer(text, tool_calls=list(calls))


PARIS = call(city="Paris", n=2)
ODD = call(city='né "x" <\n>', n=[1, {"a": None, "b": True}], x=1.5)
# messages, and the options of each
CONVERSATIONS: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([user()], {}),
    ([user("")], {}),
    ([user("  spaces  \n")], {}),
    ([user("{{ bos_token }} {% raw %}")], {}),
    ([system(), user()], {}),
    ([system(), user(), answer(), user("More?")], {}),
    ([user(), answer(), user(), answer(), user()], {}),
    ([user(), answer("<think>hm</think>Yes."), user("And?")], {}),
    ([user(), answer("Yes.", reasoning_content="hm"), user("And?")], {}),
    ([user(), answer("Yes.", reasoning_content="hm")], {"add_generation_prompt": False}),
    ([user()], {"add_generation_prompt": False}),
    ([user()], {"enable_thinking": False}),
    ([user()], {"tools": TOOLS}),
    ([system(), user()], {"tools": TOOLS}),
    ([user()], {"tools": []}),
    ([system(), user(), asks(PARIS), result()], {"tools": TOOLS}),
    ([system(), user(), asks(PARIS, call("now")), result(), result("12:00"), answer(), user()], {"tools": TOOLS}),
    ([user(), asks(ODD, text="Let me see."), result("né\n<b>")], {"tools": TOOLS}),
    ([user(), asks(call("now")), result("")], {"tools": TOOLS}),
    ([user(), asks(PARIS), result(), answer("Sunny."), user("And now?")], {}),
    ([user()], {"documents": [{"title": "t", "text": "a text"}]}),
    ([user(), answer("It is")], {"continue_final_message": True, "add_generation_prompt": False}),
    ([user(), answer("It is \n")], {"continue_final_message": True, "add_generation_prompt": False}),
    ([system(), user("Hi"), answer("a"), user("Tell me")], {"continue_final_message": True,
                                                            "add_generation_prompt": False}),
    ([user("x" * 3000), answer("y" * 3000), user("z")], {}),
]  # fmt: skip
