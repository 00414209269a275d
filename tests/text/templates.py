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
KIMI = """{%- if tools %}<|im_system|>tool_declare<|im_middle|># Tools
{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}{% set role = message.get('name') or message['role'] %}
{{- '<|im_' + ('user' if role == 'user' else 'assistant' if role == 'assistant' else 'system') + '|>' + role }}
{{- '<|im_middle|>' }}
{%- if message['role'] == 'tool' %}{{ '## Return of ' + message.tool_call_id + '\n' }}{% endif %}
{{- message['content'] or '' }}
{%- if message.get('tool_calls') %}<|tool_calls_section_begin|>
{%- for call in message['tool_calls'] %}{{ '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}
{%- set given = call['function']['arguments'] %}{{ given if given is string else given | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
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
QWEN3 = """{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n\\n<tools>' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '\\n</tools>\\n<tool_call>\\n{\\"name\\": <function-name>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set seen = namespace(looking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}{% set index = (messages|length - 1) - loop.index0 %}
{%- if seen.looking and message.role == 'user' and message.content is string
    and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set seen.looking = false %}{% set seen.last = index %}{% endif %}{% endfor %}
{%- for message in messages %}{% set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{% set reasoning = '' %}
{%- if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{%- if loop.index0 > seen.last and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{ '<|im_start|>assistant\\n' + content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and content) or (not loop.first) %}{{ '\\n' }}{% endif %}
{%- if call.function %}{% set call = call.function %}{% endif %}
{{- '<tool_call>\\n{\\"name\\": \\"' + call.name + '\\", \\"arguments\\": ' }}
{%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}{% endif %}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
LLAMA3 = """{{- bos_token }}{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not tools_with_user is defined %}{% set tools_with_user = true %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{ 'Environment: ipython\\n' }}{% endif %}{{ system + '<|eot_id|>' }}
{%- if tools_with_user and not tools is none %}
{%- if messages | length != 0 %}{% set first = messages[0]['content']|trim %}{% set messages = messages[1:] %}
{%- else %}{{ raise_exception('nobody asks') }}{% endif %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond with {"name": function name, ' }}
{{- '"parameters": dictionary of argument name and its value}.\\n\\n' }}
{%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}{{ first + '<|eot_id|>' }}{% endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls|length == 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{\\"name\\": \\"' + call.name + '\\", \\"parameters\\": ' }}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
{%- else %}{{ message.content }}{% endif %}{{ '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set asked = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set seen = namespace(index=0) %}
{%- for message in rest %}
{%- if not (message.role == 'tool' or message.role == 'tool_results' or (message.tool_calls is defined
    and message.tool_calls is not none)) %}
{%- if (message['role'] == 'user') != (seen.index % 2 == 0) %}{{ raise_exception('turns must alternate') }}{% endif %}
{%- set seen.index = seen.index + 1 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for message in rest %}
{%- if message['role'] == 'user' %}
{%- if tools is not none and (message == asked[-1]) %}{{ '[AVAILABLE_TOOLS] [' }}
{%- for tool in tools %}{% set tool = tool.function %}{{ '{\\"type\\": \\"function\\", \\"function\\": {' }}
{%- for key, value in tool.items() if key != 'return' %}
{%- if value is string %}{{ '\\"' + key + '\\": \\"' + value + '\\"' }}
{%- else %}{{ '\\"' + key + '\\": ' + value | tojson }}{% endif %}{% if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}
{{- '}}' }}{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' }}{% endif %}{% endfor %}{{ '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- if loop.last and system is defined %}{{ '[INST] ' + system + '\\n\\n' + message['content'] + '[/INST]' }}
{%- else %}{{ '[INST] ' + message['content'] + '[/INST]' }}{% endif %}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}{% set text = call.function | tojson %}{{ text[:-1] }}
{%- if not call.id is defined or call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- ', \\"id\\": \\"' + call.id + '\\"}' }}{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' + eos_token }}{% endif %}
{%- endfor %}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content']|trim + eos_token }}
{%- elif message['role'] == 'tool' %}
{%- set content = message.content.content if message.content is mapping else message.content %}
{{- '[TOOL_RESULTS] {\\"content\\": ' + content|string + ', ' }}
{{- '\\"call_id\\": \\"' + message.tool_call_id + '\\"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{%- if messages[0]['content'] is string %}{% set lead = messages[0]['content'] + '\\n\\n' %}
{%- else %}{% set lead = messages[0]['content'][0]['text'] + '\\n\\n' %}{% endif %}
{%- set rest = messages[1:] %}{% else %}{% set lead = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('turns must alternate') }}{% endif %}
{%- if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\\n' + (lead if loop.first else '') }}
{%- if message['content'] is string %}{{ message['content'] | trim }}
{%- elif message['content'] is iterable %}{% for item in message['content'] %}
{%- if item['type'] == 'image' %}{{ '<start_of_image>' }}{% elif item['type'] == 'text' %}{{ item['text'] | trim }}
{%- endif %}
{%- endfor %}{% else %}{{ raise_exception('unknown content') }}{% endif %}{{ '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
STYLES = {
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "harmony": HARMONY,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
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
