"""A conversation with a model that writes Harmony: its prompt, what ends the output, and what the output becomes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from frontends.common.chat import ChatPrompt, parser_from_map, parser_to_map, read_chat_prompt
from frontends.common.model import ServedModel
from inferengine.client import ModelInfo
from inferengine.config import load
from inferengine.sampling_params import SamplingParams
from inferengine.structured_output.spec import GrammarSpec
from inferengine.text import ChatTemplate, Tokenizer
from inferengine.text.tool_parsers.harmony import MARKS
from tests.text.templates import HARMONY

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def served() -> ServedModel:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE({letter: rank for rank, letter in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(list(MARKS))
    tokenizer = Tokenizer.from_files({"tokenizer.json": fast.to_str().encode(), "tokenizer_config.json": b"{}"})
    info = ModelInfo(name="m", fingerprint="f", vocab_size=300, max_model_len=4096)
    return ServedModel(info, tokenizer, ChatTemplate(HARMONY, {}))


def ask(served: ServedModel, grammar: GrammarSpec | None = None, **body: Any) -> tuple[ChatPrompt, str]:
    body = {"messages": [{"role": "user", "content": "Hi"}], **body}
    prompt = asyncio.run(read_chat_prompt(body, served, load(environment={}), grammar))
    return prompt, served.tokenizer.decode(prompt.prompt_ids, skip_special_tokens=False)


def test_the_effort_of_reasoning_reaches_the_template(served):
    assert "Reasoning: medium\n" in ask(served)[1]
    prompt, text = ask(served, reasoning_effort="high")
    assert "Reasoning: high\n" in text
    assert text.endswith("<|start|>assistant")
    assert prompt.prompt_ids[-10] == served.tokenizer.token_to_id("<|start|>"), "marks are special tokens"


def test_a_call_and_the_end_stop_the_output(served):
    prompt, _ = ask(served)
    params = prompt.adjusted(SamplingParams(stop_token_ids=(7,)))
    stops = {served.tokenizer.token_to_id(mark) for mark in ("<|call|>", "<|return|>")}
    assert set(params.stop_token_ids) == {7, *stops}
    assert not params.skip_special_tokens, "the marks are what channels are told by"
    assert prompt.adjusted(SamplingParams(ignore_eos=True)).stop_token_ids == ()


def test_channels_become_reasoning_content_and_calls(served):
    prompt, text = ask(served, tools=[WEATHER])
    assert "type weather" in text
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
    for parser in (prompt.parser, parser_from_map(json.loads(json.dumps(parser_to_map(prompt.parser))))):
        message = parser.make_reader().read(THOUGHT + call)
        assert (message.reasoning, message.content, message.calls) == ("Hm.", "", [("weather", '{"city": "Paris"}')])
    plain, _ = ask(served)
    message = plain.parser.make_reader().read(f"{THOUGHT}<|channel|>final<|message|>Hello.")
    assert (message.reasoning, message.content, message.calls) == ("Hm.", "Hello.", [])


def test_an_answer_under_a_grammar_begins_in_the_final_channel(served):
    prompt, text = ask(served, GrammarSpec("json_object", ""))
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>")
    assert prompt.parser.make_reader().read('{"a": 1}').content == '{"a": 1}'


def test_a_call_that_is_asked_for_is_written_in_special_tokens(served):
    prompt, text = ask(served, tools=[WEATHER], tool_choice="required")
    assert text.endswith("<|start|>assistant")
    assert prompt.grammar is not None
    channel = served.tokenizer.token_to_id("<|channel|>")
    assert f'<[{channel}]> "commentary to=functions.weather "' in prompt.grammar.source
